"""A search as its driver writes it, with the same files for the same step in every experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from prefect_tune.core.checkpoints.commit import Reusable, commit
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention, retired
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, newest_checkpoint
from prefect_tune.core.journal.journal import append, load, take_over
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointRef,
    Committed,
    Configured,
    Decided,
    Event,
    Finished,
    Owner,
    Pinned,
    Reported,
    Started,
    TrialAdded,
)
from prefect_tune.core.operations.trial_gc import collect
from prefect_tune.core.restore import adopt, read_manifest
from prefect_tune.core.schedulers.base import Continue
from prefect_tune.core.storage.generations import current_journal
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp, StepReport
from tests.core.driver import retried
from tests.fakes.stores.memory_files import MemoryFiles, restored

_STAMPS = count()


def _stamp() -> Stamp:
    return Stamp(write_id=f"small-{next(_STAMPS)}", at="2026-11-21T08:00:00Z")


def content(trial: str, step: int) -> Mapping[str, bytes]:
    """The files of a step's checkpoint, in every experiment."""
    return {"backbone": b"shared " * 20, "head": f"{trial} {step}".encode() * 9}


@dataclass
class SmallSearch:
    """The owner of an experiment."""

    store: ObjectStore
    name: str = "old"
    retention: Retention = field(default_factory=lambda: Retention(last=2))
    state: Experiment = field(init=False)

    def __post_init__(self) -> None:
        key, stamp, owner = current_journal(self.store, self.name), _stamp(), Owner(name=self.name, host="here", pid=1)
        self.state = retried(lambda: take_over(self.store, key, owner, stamp, side_by_side=map))
        self.write(*retried(lambda: adopt(self.store, self.state)))

    def describe(self, **settings: object) -> None:
        self.write(Configured(settings=settings))

    def add(self, trial: str) -> None:
        self.write(TrialAdded(trial=trial, config={"name": trial}, of_search=True))

    def begin(self, trial: str) -> None:
        """Start an attempt from the newest checkpoint, and check its bytes; an attempt that runs is ended."""
        if self.state.trial(trial).phase is Phase.RUNNING:
            self.write(AttemptEnded(trial=trial, cause=Cause.PREEMPTED, reason="x"))
        state = self.state.trial(trial)
        newest = newest_checkpoint(state)
        if newest is not None:
            key = self.key(trial).checkpoint_key(newest)
            assert restored(self.store, retried(lambda: read_manifest(self.store, key))) == content(trial, newest.step)
        step, sequence = (newest.step, newest.sequence) if newest else (0, None)
        self.write(Started(trial=trial, attempt=state.attempt + 1, from_step=step, from_sequence=sequence))

    def step(self, trial: str, *, saves: bool = True) -> None:
        """Train and save a step; delete the checkpoints that this retires."""
        state = self.state.trial(trial)
        step = state.step + 1
        report = StepReport(step=step, metrics={"loss": 1 / step}, trained_seconds=float(step))
        if not saves:
            self.write(Reported(trial=trial, report=report))
            return
        key, stamp = CheckpointKey(trial=self.key(trial), step=step, sequence=state.next_sequence), _stamp()
        about = About(
            attempt=state.attempt,
            term=self.state.term,
            write_id=stamp.write_id,
            created_at=stamp.at,
            metrics=report.metrics,
        )
        files = MemoryFiles(content(trial, step))
        retried(lambda: commit(self.store, key, files, about, reuse=Reusable(), side_by_side=map))
        ref = CheckpointRef(step=step, sequence=key.sequence, metrics=report.metrics)
        live = (*state.checkpoints, ref)
        going = retired(live, self.retention)
        self.write(Reported(trial=trial, report=report), Committed(trial=trial, checkpoint=ref, retires=going))
        keys = [self.key(trial).checkpoint_key(old) for old in live if old.sequence in going]
        retried(lambda: collect(self.store, self.key(trial), self.state.trial(trial), keys, side_by_side=map))

    def pin(self, trial: str, *, step: int) -> None:
        ref = next(ref for ref in self.state.trial(trial).checkpoints if ref.step == step)
        self.write(Pinned(trial=trial, sequence=ref.sequence))

    def decide(self, trial: str) -> None:
        known = self.state.trial(trial)
        report = StepReport(step=known.step, metrics=known.metrics)
        self.write(Decided(trial=trial, report=report, decision=Continue()))

    def finish(self, trial: str) -> None:
        self.write(Finished(trial=trial, reason="enough"))

    def write(self, *events: Event) -> None:
        stamp = _stamp()
        self.state = retried(lambda: append(self.store, self.state, events, stamp))

    def key(self, trial: str) -> TrialKey:
        return self.state.trial_key(trial)


def search_of_three(store: ObjectStore) -> SmallSearch:
    """One ended trial, one running trial with a step that is not saved, and one that has not begun."""
    search = SmallSearch(store)
    search.describe(num_samples=3)
    search.add("a")
    search.begin("a")
    for _ in range(3):
        search.step("a")
    search.finish("a")
    search.add("b")
    search.begin("b")
    search.step("b")
    search.step("b")
    search.decide("b")
    search.add("c")
    search.step("b", saves=False)
    return search


def unreadable(store: ObjectStore, experiment: str, trials: Mapping[str, Trial]) -> list[str]:
    """Return the live checkpoints of these trials of `experiment` that are damaged or have other bytes."""
    found = []
    for trial in trials.values():
        folder = current_journal(store, experiment).trial_key(trial.trial)
        for key in (folder.checkpoint_key(ref) for ref in trial.checkpoints):
            try:
                if restored(store, read_manifest(store, key)) != content(key.trial.trial, key.step):
                    found.append(f"{key.folder} holds other bytes")
            except TuneError as error:
                found.append(f"{key.folder}: {error}")
    return found


def own_state(store: ObjectStore, experiment: str, trial: str) -> Trial:
    """The trial's state in the journal."""
    return load(store, current_journal(store, experiment), side_by_side=map).trial(trial)
