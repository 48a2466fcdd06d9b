"""A search as its driver and its trials' supervisors write it: each trial has its own journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from prefect_tune.core.adoption import adopt
from prefect_tune.core.checkpoints.commit import Reusable, commit
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention, retired
from prefect_tune.core.experiment.trial_transitions import Trial, newest_checkpoint
from prefect_tune.core.journal.journal import append, entries_beyond, load, take_over
from prefect_tune.core.journal_events import (
    Absorbed,
    Adopted,
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
from prefect_tune.core.operations.clone import clear
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.schedulers.base import Continue
from prefect_tune.core.storage.generations import current_journal
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
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
    """The owner of an experiment and of every trial's journal."""

    store: ObjectStore
    name: str = "old"
    retention: Retention = field(default_factory=lambda: Retention(last=2))
    state: Experiment = field(init=False)
    trials: dict[str, Experiment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = self._opened(current_journal(self.store, self.name))

    def describe(self, **settings: object) -> None:
        self.write(Configured(settings=settings))

    def add(self, trial: str) -> None:
        self.write(TrialAdded(trial=trial, config={"name": trial}, own_journal=True))

    def begin(self, trial: str) -> None:
        """Start an attempt from the newest checkpoint, and check its bytes."""
        self._open(trial)
        state = self.trials[trial].trial(trial)
        newest = newest_checkpoint(state)
        if newest is not None:
            key = CheckpointKey(trial=self.key(trial), step=newest.step, sequence=newest.sequence)
            assert restored(self.store, retried(lambda: read_manifest(self.store, key))) == content(trial, newest.step)
        step, sequence = (newest.step, newest.sequence) if newest else (0, None)
        self._tell(trial, Started(trial=trial, attempt=state.attempt + 1, from_step=step, from_sequence=sequence))

    def step(self, trial: str, *, saves: bool = True) -> None:
        """Train and save a step; delete the checkpoints that this retires."""
        state = self.trials[trial]
        step = state.trial(trial).step + 1
        report = StepReport(step=step, metrics={"loss": 1 / step}, trained_seconds=float(step))
        if not saves:
            self._tell(trial, Reported(trial=trial, report=report))
            return
        key = CheckpointKey(trial=self.key(trial), step=step, sequence=state.number)
        stamp = _stamp()
        about = About(
            attempt=state.trial(trial).attempt,
            term=state.term,
            write_id=stamp.write_id,
            created_at=stamp.at,
            metrics=report.metrics,
        )
        retried(
            lambda: commit(
                self.store, key, MemoryFiles(content(trial, step)), about, reuse=Reusable(), side_by_side=map
            )
        )
        ref = CheckpointRef(step=step, sequence=key.sequence, metrics=report.metrics)
        live = (*state.trial(trial).checkpoints, ref)
        going = retired(live, self.retention)
        self._tell(trial, Reported(trial=trial, report=report), Committed(trial=trial, checkpoint=ref, retires=going))
        doomed = [each for each in live if each.sequence in going]
        self.clear(trial, doomed)

    def clear(self, trial: str, doomed: Sequence[CheckpointRef]) -> None:
        keys = [CheckpointKey(trial=self.key(trial), step=each.step, sequence=each.sequence) for each in doomed]
        stamp = _stamp()
        found = self.trials[trial].trial(trial)
        retried(lambda: clear(self.store, self.key(trial), found, keys, stamp, side_by_side=map))

    def pin(self, trial: str, *, step: int) -> None:
        ref = next(each for each in self.trials[trial].trial(trial).checkpoints if each.step == step)
        self._tell(trial, Pinned(trial=trial, sequence=ref.sequence))

    def decide(self, trial: str) -> None:
        known = self.state.trial(trial)
        report = StepReport(step=known.step, metrics=known.metrics)
        self.write(Decided(trial=trial, report=report, decision=Continue()))

    def finish(self, trial: str) -> None:
        self._tell(trial, Finished(trial=trial, reason="enough"))
        self.absorb(trial)

    def absorb(self, trial: str) -> None:
        """Absorb new entries of the trial's own journal."""
        known = self.state.trial(trial).absorbed
        key = self.state.key.of_trial(trial)
        for entry in retried(lambda: entries_beyond(self.store, key, known, side_by_side=map)):
            self.write(Absorbed(trial=trial, number=entry.number, events=entry.events))

    def write(self, *events: Event) -> None:
        stamp = _stamp()
        self.state = retried(lambda: append(self.store, self.state, events, stamp))

    def key(self, trial: str) -> TrialKey:
        return self.state.trial_key(trial)

    def _open(self, trial: str) -> None:
        key = self.state.key.of_trial(trial)
        config = self.state.trial(trial).config
        self.trials[trial] = self._opened(key, Adopted(), TrialAdded(trial=trial, config=config))

    def _opened(self, key: JournalKey, *first: Event) -> Experiment:
        stamp, owner = _stamp(), Owner(name=self.name, host="here", pid=1)
        opened = retried(
            lambda: take_over(
                self.store, key, owner, stamp, side_by_side=map, also=lambda found: () if found.number else first
            )
        )
        if first and opened.settled_from == opened.opened_at:
            return opened
        adopted, second = retried(lambda: adopt(self.store, opened)), _stamp()
        return retried(lambda: append(self.store, opened, adopted, second))

    def _tell(self, trial: str, *events: Event) -> None:
        stamp = _stamp()
        self.trials[trial] = retried(lambda: append(self.store, self.trials[trial], events, stamp))


def search_of_three(store: ObjectStore) -> SmallSearch:
    """One ended trial, one running trial with entries that are not absorbed, and one that has not begun."""
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
    search.absorb("b")
    search.decide("b")
    search.add("c")
    search.step("b", saves=False)
    return search


def unreadable(store: ObjectStore, experiment: str, trials: Mapping[str, Trial]) -> list[str]:
    """Return the live checkpoints of these trials of `experiment` that are damaged or have other bytes."""
    found = []
    for trial in trials.values():
        folder = current_journal(store, experiment).trial_key(trial.trial)
        for each in trial.checkpoints:
            key = CheckpointKey(trial=folder, step=each.step, sequence=each.sequence)
            try:
                if restored(store, read_manifest(store, key)) != content(trial.trial, each.step):
                    found.append(f"{key.folder} holds other bytes")
            except TuneError as error:
                found.append(f"{key.folder}: {error}")
    return found


def own_state(store: ObjectStore, experiment: str, trial: str) -> Trial:
    """The trial's state in its own journal."""
    return load(store, current_journal(store, experiment).of_trial(trial), side_by_side=map).trial(trial)
