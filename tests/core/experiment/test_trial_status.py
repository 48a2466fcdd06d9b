"""The words for a trial's status, each derived from journal events."""

from __future__ import annotations

import json

import pytest

from prefect_tune.core.experiment.summary import status_label
from prefect_tune.core.experiment.trial_transitions import Phase, Status, Trial
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Finished,
    FinishKind,
    GaveUp,
    Paused,
    Requeued,
    Resumed,
    StopAsked,
)
from prefect_tune.core.schedulers.base import Continue, Pause, Stop
from tests.fakes.searches.journal_builder import JournalBuilder

T = "00000"


def search_with(steps: int = 3) -> JournalBuilder:
    """A search with one trial that has trained `steps` steps; with 0 it waits for its first slot."""
    search = JournalBuilder()
    search.adds(T, {"x": 1})
    if steps:
        search.starts(T)
    for step in range(1, steps + 1):
        search.trains(T, step, {"loss": 1 / step})
    return search


def said(search: JournalBuilder) -> tuple[str, str]:
    trial = search.state.trial(T)
    return str(trial.status), status_label(trial.status, trial.step)


def test_a_trial_that_waits_is_pending_and_one_that_trains_is_running() -> None:
    assert said(search_with(0)) == ("pending", "pending")
    assert said(search_with(3)) == ("running", "running")


def test_a_trial_that_met_its_criterion_or_returned_is_completed() -> None:
    for kind in (FinishKind.CRITERION, FinishKind.RETURNED):
        search = search_with()
        search.record(Finished(trial=T, reason="enough", kind=kind))
        assert said(search) == ("completed", "completed")


def test_a_trial_that_trained_all_of_the_schedulers_steps_is_completed() -> None:
    search = search_with()
    search.decides(T, Stop(reason="step 3 of 3", early=False))
    search.record(Finished(trial=T, reason="step 3 of 3", kind=FinishKind.ALL_STEPS))
    assert said(search) == ("completed", "completed")


def test_a_trial_that_its_scheduler_ended_is_pruned() -> None:
    search = search_with()
    search.decides(T, Stop(reason="loss 0.33 at step 3"))
    search.record(Finished(trial=T, reason="loss 0.33 at step 3", kind=FinishKind.PRUNED))
    assert said(search) == ("pruned", "pruned @3")


def test_a_trial_that_was_paused_and_never_promoted_is_pruned() -> None:
    search = search_with()
    search.decides(T, Pause(reason="rung 3"))
    search.record(Paused(trial=T, reason="rung 3"))
    assert said(search) == ("paused", "paused @3")
    search.record(Finished(trial=T, reason="4 of 12 at step 3", kind=FinishKind.PRUNED))
    assert said(search) == ("pruned", "pruned @3")


def test_a_trial_that_a_person_stopped_is_interrupted_whatever_its_scheduler_thought() -> None:
    for decision in (Continue(), Pause(reason="rung 3")):
        search = search_with()
        search.decides(T, decision)
        search.record(StopAsked(trial=T, reason="stopped by ada"))
        search.record(Finished(trial=T, reason="stopped by ada", kind=FinishKind.STOPPED))
        assert said(search) == ("interrupted", "interrupted @3")


@pytest.mark.parametrize("cause", Cause)
def test_a_trial_whose_attempt_ended_before_it_was_done_is_interrupted(cause: Cause) -> None:
    search = search_with()
    search.record(AttemptEnded(trial=T, cause=cause, reason="the run was stopped"))
    assert said(search) == ("interrupted", "interrupted @3")
    search.starts(T)
    assert said(search) == ("running", "running")


def test_before_its_first_step_it_is_interrupted_at_no_step() -> None:
    search = search_with(0)
    search.starts(T)
    search.record(AttemptEnded(trial=T, cause=Cause.PREEMPTED, reason="the run was stopped"))
    assert said(search) == ("interrupted", "interrupted")


def test_a_trial_that_is_to_continue_is_pending_and_no_longer_interrupted() -> None:
    search = search_with()
    search.record(AttemptEnded(trial=T, cause=Cause.MACHINE, reason="killed"))
    search.starts(T)
    search.trains(T, 4, {"loss": 0.2})
    search.record(Paused(trial=T, reason="rung 4"), Resumed(trial=T))
    assert said(search) == ("pending", "pending")
    search.record(Finished(trial=T, reason="enough"), Requeued(trial=T, reason="more steps"))
    assert said(search) == ("pending", "pending")


def test_a_trial_that_failed_for_good_is_errored() -> None:
    search = search_with()
    search.record(AttemptEnded(trial=T, cause=Cause.USER, reason="ValueError"))
    search.record(GaveUp(trial=T, cause=Cause.USER, reason="ValueError"))
    assert said(search) == ("errored", "errored")


def test_a_target_holds_the_phases_that_earlier_releases_wrote() -> None:
    """These literals are stored on targets and never change."""
    assert [str(each) for each in Phase] == ["pending", "running", "paused", "finished", "errored"]
    written = Trial(trial=T, config={}, phase=Phase.FINISHED).model_dump_json()
    assert json.loads(written)["phase"] == "finished"
    assert Trial.model_validate_json(written).status is Status.COMPLETED


def test_every_phase_has_a_status_and_every_status_a_word_of_its_own() -> None:
    assert [str(each) for each in Status] == [
        *("completed", "pruned", "interrupted", "errored", "running", "paused", "pending")
    ]
    assert {Trial(trial=T, config={}, phase=phase).status for phase in Phase} <= set(Status)
