"""A superseded search that has not noticed it yet takes no trial back from the new owner."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import StoreUnavailable, Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal.journal import append_as_guest, history, load
from prefect_tune.core.journal_events import (
    Adopted,
    Opened,
    Quarantined,
    Reported,
    Started,
    TrialAdded,
)
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import StepReport
from prefect_tune.executors.trial_executor import AttemptExited
from prefect_tune.journal_access import (
    JournalWriter,
    Opening,
    current_owner,
    new_write_id,
    open_journal,
    write_directly,
)
from prefect_tune.monitoring.search_observer import ObserverGroup
from prefect_tune.tuner.driver import TrialJournalMerger
from prefect_tune.tuner.pending_entry import PendingEntry
from tests.fakes.searches.pending_entries import random_policy
from tests.flows.simulated_search import NAME, SimulatedSearch, StoppableExecutor

TRIAL = "00000"
SEARCH, OWN = JournalKey(experiment=NAME, generation=1), JournalKey(experiment=NAME, generation=1, trial=TRIAL)
_MINUTE = timedelta(minutes=1)


@pytest.fixture
def target(tmp_path: Path) -> LocalTarget:
    return LocalTarget(path=str(tmp_path / "target"))


class Search:
    """One owner of the experiment, with what it knows of its trial."""

    def __init__(self, target: LocalTarget) -> None:
        self.target = target
        state = open_journal(target, SEARCH, Opening(current_owner(), new_write_id()))
        self.journal_writer = JournalWriter(target, state, write_directly, lambda _events, _state: None)
        if TRIAL not in state.trials:
            self.journal_writer.write([TrialAdded(trial=TRIAL, config={}, own_journal=True)])
        policy = random_policy()
        self.page = PendingEntry(self.journal_writer, policy, ObserverGroup(), timedelta(seconds=300))
        self.merger = TrialJournalMerger(self.page, policy, self.journal_writer)

    def starts_attempt(self, number: int) -> Experiment:
        """Start an attempt, as this search's executor would."""

        def first(found: Experiment) -> list[Adopted | TrialAdded]:
            return [] if found.trials else [Adopted(), TrialAdded(trial=TRIAL, config={})]

        owner = current_owner(search_term=self.journal_writer.experiment.term, attempt=number)
        state = open_journal(self.target, OWN, Opening(owner, new_write_id(), first))
        state = write_directly(self.target, state, [Started(trial=TRIAL, attempt=number, from_step=0)])
        self.merger.catch_up(TRIAL)
        self.page.write(may_wait=False)
        return state


def openings(target: LocalTarget, key: JournalKey) -> int:
    with target.open(timeout=_MINUTE) as store:
        entries = history(store, key, side_by_side=map)
    return sum(isinstance(event, Opened) for entry in entries for event in entry.events)


def test_an_attempt_of_the_new_owner_goes_on_whatever_the_old_one_takes_its_own_for(target: LocalTarget) -> None:
    """The old owner's supervisor was superseded; the old owner, which writes seldom, is about to clean up after it."""
    old = Search(target)
    old.starts_attempt(1)
    new = Search(target)
    new.merger.catch_up(TRIAL)
    new.merger.settle(TRIAL)
    attempt = new.starts_attempt(2)
    with pytest.raises(Superseded, match="a newer request replaced this one"):
        old.merger.settle(TRIAL)
    report = Reported(trial=TRIAL, report=StepReport(step=1, metrics={}))
    assert write_directly(target, attempt, [report]).trial(TRIAL).step == 1


def test_an_owner_settles_what_earlier_owners_left(target: LocalTarget) -> None:
    Search(target).starts_attempt(1)
    new = Search(target)
    new.merger.catch_up(TRIAL)
    new.merger.settle(TRIAL)
    assert new.page.state.trial(TRIAL).phase is Phase.PENDING


class TakenOver(StoppableExecutor):
    """An executor whose attempts are lost: with the first one, another owner opens the experiment."""

    def __init__(self, target: LocalTarget) -> None:
        super().__init__(9)
        self._target = target

    def start(self, spec: TrialSpec, orders: AttemptRequest, attempt: int, absorbed: int) -> None:
        super().start(spec, orders, attempt, absorbed)
        if self.start_count == 1:
            with self._target.open(timeout=_MINUTE) as store:  # another process writes as a guest, without taking over
                gone = [Quarantined(trial=TRIAL, sequence=1)]
                append_as_guest(store, SEARCH, lambda _: gone, new_write_id(), side_by_side=map)
            open_journal(self._target, SEARCH, Opening(current_owner(), new_write_id()))
        self._inbox.clear()
        self._inbox.append(AttemptExited(spec.trial.trial, StoreUnavailable("its process is gone")))


def test_a_search_that_was_taken_over_ends_with_the_first_attempt_it_loses_and_starts_none(target: LocalTarget) -> None:
    acted = SimulatedSearch(target, executor=TakenOver(target), samples=1)
    with pytest.raises(Superseded, match="took over"):
        acted.run()
    assert acted.executor.start_count == 1


class Unlucky(StoppableExecutor):
    """An executor whose first attempt is superseded by a run of the trial alone."""

    def start(self, spec: TrialSpec, orders: AttemptRequest, attempt: int, absorbed: int) -> None:
        super().start(spec, orders, attempt, absorbed)
        if self.start_count == 1:
            self._inbox.clear()
            self._saved.clear()
            self._inbox.append(AttemptExited(spec.trial.trial, Superseded("another owner has opened the journal")))


def test_a_search_that_was_not_taken_over_starts_again_what_it_has_lost(target: LocalTarget) -> None:
    acted = SimulatedSearch(target, executor=Unlucky(9), samples=1)
    acted.run()
    assert acted.executor.start_count == 2
    assert openings(target, SEARCH) == 1
    with target.open(timeout=_MINUTE) as store:
        assert load(store, SEARCH, side_by_side=map).trial(TRIAL).phase is Phase.FINISHED


def test_an_attempt_is_ordered_by_its_number_and_the_epoch_of_who_orders_it(target: LocalTarget) -> None:
    given: list[tuple[int, int]] = []

    class Listening(StoppableExecutor):
        def start(self, spec: TrialSpec, orders: AttemptRequest, attempt: int, absorbed: int) -> None:
            given.append((orders.search_term, orders.attempt))
            super().start(spec, orders, attempt, absorbed)

    open_journal(target, SEARCH, Opening(current_owner(), new_write_id()))
    SimulatedSearch(target, executor=Listening(9), samples=1).run()
    assert given == [(2, 1)]
