"""Causes of an attempt's end, the checkpoints that it may quarantine, and writes after the journal is gone."""

from __future__ import annotations

import pytest

from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.failure_policy import FailurePolicy, GiveUp, Quarantine, TryAgain, Verdict, verdict
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, after, newest_checkpoint
from prefect_tune.core.journal import journal
from prefect_tune.core.journal_events import (
    Adopted,
    AttemptEnded,
    Cause,
    CheckpointRef,
    Committed,
    Owner,
    Quarantined,
    Started,
    TrialAdded,
)
from prefect_tune.core.reasons import code_of
from prefect_tune.core.values import Stamp
from tests.core.driver import JOURNAL
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_store import MemoryStore

POLICY = FailurePolicy(max_failures=99)


def saved(*steps: int) -> Trial:
    checkpoints = tuple(CheckpointRef(step=step, sequence=step) for step in steps)
    return Trial(trial="t", config={}, attempt=1, step=steps[-1], checkpoints=checkpoints)


def died(trial: Trial, *, cause: Cause, at_start: bool) -> tuple[Trial, Verdict]:
    """Restore the newest checkpoint, end the attempt with `cause`, and apply the verdict."""
    newest = newest_checkpoint(trial)
    assert newest is not None
    number = trial.attempt * 10 + 100
    begun = Started(trial="t", attempt=trial.attempt + 1, from_step=newest.step, from_sequence=newest.sequence)
    trial = after(trial, begun, number)
    trial = after(trial, AttemptEnded(trial="t", cause=cause, reason="boom", at_start=at_start), number)
    found = verdict(trial, cause, POLICY)
    if isinstance(found, Quarantine):
        aside = Quarantined(trial="t", sequence=found.sequence, reason=found.reason, kills=True)
        trial = after(trial, aside, number)
    return trial, found


def until_given_up(trial: Trial, *, cause: Cause, at_start: bool) -> tuple[Trial, GiveUp]:
    for _ in range(99):
        trial, found = died(trial, cause=cause, at_start=at_start)
        if isinstance(found, GiveUp):
            return trial, found
    raise AssertionError("the policy never gave up")


def test_deaths_of_machines_spend_their_budget_and_put_no_checkpoint_aside() -> None:
    trial, found = until_given_up(saved(10, 20, 30, 40), cause=Cause.MACHINE, at_start=False)
    assert code_of(found.reason) == "max-machine-failures"
    assert [each.step for each in trial.checkpoints] == [10, 20, 30, 40]
    assert trial.quarantined == ()


def test_one_checkpoint_at_most_is_put_aside_for_killing_the_trainable() -> None:
    trial, found = until_given_up(saved(10, 20, 30, 40), cause=Cause.USER, at_start=True)
    assert code_of(found.reason) == "died-at-each-start"
    assert [each.step for each in trial.checkpoints] == [10, 20, 30]


def test_a_commit_clears_the_checkpoint_that_was_put_aside_before_it() -> None:
    trial = saved(10, 20).model_copy(update={"blamed_checkpoints": 1, "phase": Phase.RUNNING})
    trial = after(trial, Committed(trial="t", checkpoint=CheckpointRef(step=30, sequence=30)), 100)
    trial = trial.model_copy(update={"phase": Phase.PENDING})
    verdicts = []
    for _ in range(POLICY.quarantine_after):
        trial, found = died(trial, cause=Cause.USER, at_start=True)
        verdicts.append(type(found))
    assert verdicts == [TryAgain, TryAgain, Quarantine]


def test_a_damaged_checkpoint_is_blamed_for_no_death() -> None:
    """The damage was found before the checkpoint was loaded."""
    trial = after(saved(10, 20), Quarantined(trial="t", sequence=20, reason="damaged"), 100)
    assert (trial.blamed_checkpoints, trial.lost_checkpoints) == (0, 1)


def test_a_damaged_manifest_that_was_never_a_commit_is_no_lost_checkpoint() -> None:
    trial = Trial(trial="t", config={}, attempt=1, step=3, phase=Phase.RUNNING)
    trial = after(trial, Quarantined(trial="t", sequence=7, reason="torn manifest"), 100)
    assert (trial.quarantined, trial.lost_checkpoints) == ((7,), 0)


# -------------------------------------------------------------------------------------- a missing journal


def running(store: MemoryStore) -> Experiment:
    owner = Owner(name="me", host="here", pid=1)
    state = journal.take_over(store, first_generation("e"), owner, Stamp(write_id="w0", at="now"), side_by_side=map)
    begun = [Adopted(), TrialAdded(trial="t", config={}), Started(trial="t", attempt=1, from_step=0)]
    return journal.append(store, state, begun, Stamp(write_id="w1", at="now"))


def commit_after(store: MemoryStore, state: Experiment) -> Experiment:
    commit = Committed(trial="t", checkpoint=CheckpointRef(step=5, sequence=state.number))
    return journal.append(store, state, [commit], Stamp(write_id="w2", at="now"))


def test_nothing_is_written_after_an_entry_that_is_gone() -> None:
    """An unmounted target shows the empty folder below its mount point, which accepts every write."""
    store = MemoryStore()
    state = running(store)
    mounted, store.objects = store.objects, {}
    with pytest.raises(StoreUnavailable, match="still mounted"):
        commit_after(store, state)
    assert store.objects == {}
    store.objects = mounted
    assert commit_after(store, state).trial("t").checkpoints[-1].step == 5


def test_a_first_entry_needs_none_before_it_and_is_needed_by_the_second() -> None:
    store = MemoryStore()
    owner = Owner(name="me", host="here", pid=1)
    opened = journal.take_over(store, first_generation("e"), owner, Stamp(write_id="w0", at="now"), side_by_side=map)
    del store.objects[JOURNAL.entry_path(1)]
    with pytest.raises(StoreUnavailable):
        journal.append(store, opened, [Adopted()], Stamp(write_id="w1", at="now"))
