"""An experiment on a target, written entry by entry without Prefect: some steps, some checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import MappingProxyType

from prefect_tune.core.experiment.experiment import Experiment, after_event
from prefect_tune.core.journal.journal import append, take_over
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointRef,
    Committed,
    Configured,
    Event,
    Finished,
    GaveUp,
    Owner,
    Quarantined,
    Reported,
    Started,
    TrialAdded,
)
from prefect_tune.core.storage.generations import current_journal
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp, StepReport
from prefect_tune.stores.posix_store import PosixStore, make_root
from tests.fakes.checkpoints import committed, write

_STAMPS = (Stamp(write_id=f"w{number}", at="2026-11-21T08:00:00+00:00") for number in count())


def write_experiment(
    root: Path,
    name: str,
    steps: list[int],
    *,
    quarantined: tuple[int, ...] = (),
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a finished experiment with a checkpoint at each of `steps`.

    Args:
        root: the target's folder.
        name: of the experiment.
        steps: of the checkpoints.
        quarantined: those that are in quarantine.
        files: more files of each checkpoint.
    """
    make_root(root)
    store = PosixStore(root)
    owner = Owner(name="a test", host="here", pid=1)
    state = take_over(store, current_journal(store, name), owner, next(_STAMPS), side_by_side=map)
    state = _write(store, state, TrialAdded(trial="trial", config={"rate": 0.5}))
    state = _write(store, state, Started(trial="trial", attempt=1, from_step=0))
    for step in steps:
        state = _save(store, state, step, root.parent / f"staged-{name}-{step}", files)
    for each in state.trial("trial").checkpoints:
        if each.step in quarantined:
            state = _write(store, state, Quarantined(trial="trial", sequence=each.sequence, reason="bad"))
    _write(store, state, Finished(trial="trial", reason="had enough"))


_SETTINGS = {"metric": "loss", "mode": "min"}


def write_search(
    root: Path,
    name: str,
    losses: Mapping[str, float],
    *,
    errored: str = "",
    settings: Mapping[str, object] = _SETTINGS,
    parameters: Sequence[str] = (),
) -> None:
    """Write a search for the smallest loss, whose trials have all ended after a step, without a checkpoint.

    Each of `parameters` has a value of 20 characters that ends with the trial's name.
    """
    make_root(root)
    store = PosixStore(root)
    owner = Owner(name="a test", host="here", pid=1)
    state = take_over(store, current_journal(store, name), owner, next(_STAMPS), side_by_side=map)
    state = _write(store, state, Configured(settings=settings))
    for trial, loss in losses.items():
        state = _write(store, state, TrialAdded(trial=trial, config=config_of(trial, loss, parameters)))
        state = _write(store, state, Started(trial=trial, attempt=1, from_step=0))
        state = _write(store, state, Reported(trial=trial, report=StepReport(step=1, metrics={"loss": loss})))
        if trial == errored:
            state = _write(store, state, AttemptEnded(trial=trial, cause=Cause.USER, reason="ValueError: bad"))
            state = _write(store, state, GaveUp(trial=trial, cause=Cause.USER, reason="ValueError: bad"))
        else:
            state = _write(store, state, Finished(trial=trial, reason="had enough"))


def write_curves(
    root: Path, name: str, curves: Sequence[Sequence[Mapping[str, object]]], metrics: Sequence[str]
) -> None:
    """Write a search by `metrics`, whose trials have made these reports and ended."""
    make_root(root)
    store, owner = PosixStore(root), Owner(name="a test", host="here", pid=1)
    state = take_over(store, current_journal(store, name), owner, next(_STAMPS), side_by_side=map)
    state = _write(store, state, Configured(settings={"metric": [*metrics]}))
    for number, reports in enumerate(curves):
        trial = f"{number:05}"
        state = _write(store, state, TrialAdded(trial=trial, config={}))
        state = _write(store, state, Started(trial=trial, attempt=1, from_step=0))
        for step, each in enumerate(reports, 1):
            state = _write(store, state, Reported(trial=trial, report=StepReport(step=step, metrics=each)))
        state = _write(store, state, Finished(trial=trial, reason="had enough"))


def config_of(trial: str, rate: float, parameters: Sequence[str]) -> Mapping[str, object]:
    return {"rate": rate, **{name: f"{name} of {trial}".rjust(20, ".") for name in parameters}}


def _save(store: ObjectStore, state: Experiment, step: int, staged: Path, more: Mapping[str, bytes]) -> Experiment:
    key = CheckpointKey(trial=state.trial_key("trial"), step=step, sequence=state.number)
    metrics = {"loss": 1 / step}
    files = {"model/weights.bin": bytes([step]) * 5_000_000, "state.json": b"%d" % step, **more}
    committed(store, write(staged, files), key, metrics=metrics)
    reported = Reported(trial="trial", report=StepReport(step=step, metrics=metrics))
    ref = CheckpointRef(step=step, sequence=key.sequence, metrics=metrics)
    return _write(store, state, reported, Committed(trial="trial", checkpoint=ref))


def _write(store: ObjectStore, state: Experiment, *events: Event) -> Experiment:
    return append(store, state, events, next(_STAMPS))


def after(state: Experiment, events: Sequence[Event]) -> Experiment:
    """Return the experiment after these events, each an entry of its own."""
    for event in events:
        state = after_event(state, event, state.number + 1)
    return state
