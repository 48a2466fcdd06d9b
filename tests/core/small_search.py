"""A search as its driver writes it, with the same files for the same step in every experiment."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.journal_events import AttemptStarted, DecisionMade, ExperimentConfigured, TrialFinished
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.schedulers.base import Continue
from prefect_tune.core.storage.generations import find_current_journal
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport
from tests.core.driver import Files
from tests.core.protocol.population import Attempt, Chronicle, Search
from tests.fakes.stores.memory_files import load_files

KEEP_TWO = Retention(last=2)
_CHRONICLE = Chronicle()
"""Of all searches, so that each of their writes has another id."""


def make_step_files(trial: str, step: int) -> Files:
    """Return the files of a step's checkpoint, the same in every experiment."""
    return {"backbone": b"shared " * 20, "head": f"{trial} {step}".encode() * 9}


class SmallAttempt(Attempt):
    """Saves the files of `make_step_files`."""

    def files(self, step: int) -> Files:
        return make_step_files(self.trial.id, step)

    def start(self) -> AttemptStarted:
        started = super().start()
        assert not started.from_step or self.head == make_step_files(self.trial.id, started.from_step)["head"]
        return started


class SmallSearch(Search):
    """The owner of an experiment, which it opens."""

    attempt_class = SmallAttempt

    def __init__(self, store: ObjectStore, name: str = "old", retention: Retention = KEEP_TWO) -> None:
        super().__init__(store, _CHRONICLE, find_current_journal(store, name), name, retention)
        self.name = name
        self.open()

    def start_attempt(self, trial: str) -> None:
        """Start an attempt from the newest checkpoint, and check its bytes; an attempt that runs is ended."""
        if self.trial(trial).phase is Phase.RUNNING:
            self.end(trial)
        self.start(trial)

    def train_step(self, trial: str, *, saves: bool = True) -> None:
        """Train and save a step; delete the checkpoints that this retires."""
        if saves:
            self.save(trial)
            return
        attempt = self.attempts[trial]
        attempt.trial = self.trial(trial)
        self.append(attempt.train())

    def decide(self, trial: str) -> None:
        state = self.trial(trial)
        report = StepReport(step=state.step, metrics=state.metrics)
        self.append(DecisionMade(trial=trial, report=report, decision=Continue()))

    def finish_trial(self, trial: str) -> None:
        self.append(TrialFinished(trial=trial, reason="enough"))


def make_search(store: ObjectStore) -> SmallSearch:
    """Return a search with an ended trial, a running trial with an unsaved step, and one that has not started."""
    search = SmallSearch(store)
    search.append(ExperimentConfigured(settings={"num_samples": 3}))
    search.add("a")
    search.start_attempt("a")
    for _ in range(3):
        search.train_step("a")
    search.finish_trial("a")
    search.add("b")
    search.start_attempt("b")
    search.train_step("b")
    search.train_step("b")
    search.decide("b")
    search.add("c")
    search.train_step("b", saves=False)
    return search


def find_unreadable(store: ObjectStore, experiment: str, trials: Mapping[str, Trial]) -> list[str]:
    """Return the live checkpoints of these trials of `experiment` that are damaged or have other bytes."""
    problems = []
    for trial in trials.values():
        folder = find_current_journal(store, experiment).trial_key(trial.id)
        for key in (folder.checkpoint_key(ref) for ref in trial.checkpoints):
            try:
                if load_files(store, read_manifest(store, key)) != make_step_files(key.trial.trial, key.step):
                    problems.append(f"{key.folder} holds other bytes")
            except TuneError as error:
                problems.append(f"{key.folder}: {error}")
    return problems


def load_trial(store: ObjectStore, experiment: str, trial: str) -> Trial:
    """Load the trial's state from the journal."""
    return load_experiment(store, find_current_journal(store, experiment)).trial(trial)
