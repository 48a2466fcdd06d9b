"""An experiment on a target, written entry by entry without Prefect: some steps, some checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prefect_tune.core.experiment.experiment import Experiment, apply_event
from prefect_tune.core.journal.journal import acquire_ownership, append_events
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointCommitted,
    CheckpointQuarantined,
    CheckpointRef,
    Event,
    ExperimentConfigured,
    Owner,
    StepReported,
    TrialAdded,
    TrialErrored,
    TrialFinished,
)
from prefect_tune.core.storage.generations import find_current_journal
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.values import StepReport, WriteStamp
from prefect_tune.stores.posix_store import PosixStore, make_root
from tests.fakes.checkpoints import commit_files, write_files

_STAMPS = (WriteStamp(write_id=f"w{number}", at="2026-11-21T08:00:00+00:00") for number in count())


class _Journal:
    """The journal of a new experiment below a folder."""

    def __init__(self, root: Path, name: str) -> None:
        make_root(root)
        self.store = PosixStore(root)
        owner = Owner(name="a test", host="here", pid=1)
        self.state = acquire_ownership(self.store, find_current_journal(self.store, name), owner, next(_STAMPS))

    def append(self, *events: Event) -> None:
        self.state = append_events(self.store, self.state, events, next(_STAMPS))

    def start_trial(self, trial: str, config: Mapping[str, object]) -> None:
        self.append(TrialAdded(trial=trial, config=config))
        self.append(AttemptStarted(trial=trial, attempt=1, from_step=0))

    def save_checkpoint(self, step: int, staged: Path, size: int, more: Mapping[str, bytes]) -> None:
        key = CheckpointKey(trial=self.state.trial_key("trial"), step=step, sequence=self.state.entry_count)
        metrics = {"loss": 1 / step}
        files = {"model/weights.bin": bytes([step]) * size, "state.json": b"%d" % step, **more}
        commit_files(self.store, write_files(staged, files), key, metrics=metrics)
        event = StepReported(trial="trial", report=StepReport(step=step, metrics=metrics))
        ref = CheckpointRef(step=step, sequence=key.sequence, metrics=metrics)
        self.append(event, CheckpointCommitted(trial="trial", checkpoint=ref))


def write_experiment(
    root: Path,
    name: str,
    steps: list[int],
    *,
    quarantined: tuple[int, ...] = (),
    size: int = 5_000_000,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a finished experiment with a checkpoint at each of `steps`, each with weights of this size and `files`."""
    journal = _Journal(root, name)
    journal.start_trial("trial", {"rate": 0.5})
    for step in steps:
        journal.save_checkpoint(step, root.parent / f"staged-{name}-{step}", size, files)
    for checkpoint in journal.state.trial("trial").checkpoints:
        if checkpoint.step in quarantined:
            journal.append(CheckpointQuarantined(trial="trial", sequence=checkpoint.sequence, reason="bad"))
    journal.append(TrialFinished(trial="trial", reason="had enough"))


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
    """Write a search whose trials have all ended after a step; the values of `parameters` have 20 characters."""
    journal = _Journal(root, name)
    journal.append(ExperimentConfigured(settings=settings))
    for trial, loss in losses.items():
        journal.start_trial(trial, {"rate": loss, **{key: f"{key} of {trial}".rjust(20, ".") for key in parameters}})
        journal.append(StepReported(trial=trial, report=StepReport(step=1, metrics={"loss": loss})))
        if trial == errored:
            journal.append(AttemptEnded(trial=trial, cause=Cause.TRAINABLE, reason="ValueError: bad"))
            journal.append(TrialErrored(trial=trial, cause=Cause.TRAINABLE, reason="ValueError: bad"))
        else:
            journal.append(TrialFinished(trial=trial, reason="had enough"))


def write_curves(root: Path, name: str, curves: Sequence[Sequence[Mapping[str, Any]]], metrics: Sequence[str]) -> None:
    """Write a search by `metrics`, whose trials have made these reports and ended."""
    journal = _Journal(root, name)
    journal.append(ExperimentConfigured(settings={"metric": [*metrics]}))
    for number, reports in enumerate(curves):
        trial = f"{number:05}"
        journal.start_trial(trial, {})
        for step, values in enumerate(reports, 1):
            journal.append(StepReported(trial=trial, report=StepReport(step=step, metrics=values)))
        journal.append(TrialFinished(trial=trial, reason="had enough"))


def apply_events(state: Experiment, events: Sequence[Event]) -> Experiment:
    """Return the experiment after these events, each an entry of its own."""
    for event in events:
        state = apply_event(state, event, state.entry_count + 1)
    return state
