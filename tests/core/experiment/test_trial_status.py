"""The words for a trial's status, each from a journal in which it comes to be said."""

from __future__ import annotations

import json

import pytest

from prefect_tune.core.experiment.trial_status import Phase, Status, status_label
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events.experiment_events import (
    AttemptEnded,
    Cause,
    Finished,
    GaveUp,
    Paused,
    Requeued,
    Resumed,
    StopAsked,
)
from prefect_tune.core.schedulers.base import Continue, Pause, Stop
from tests.fakes.told_searches import Telling

T = "00000"


def telling(steps: int = 3) -> Telling:
    """Tell of one trial that has trained so many steps; of none: it waits for its first slot."""
    told = Telling()
    told.adds(T, {"x": 1})
    if steps:
        told.starts(T)
    for step in range(1, steps + 1):
        told.trains(T, step, {"loss": 1 / step})
    return told


def said(told: Telling) -> tuple[str, str]:
    trial = told.state.trial(T)
    return str(trial.status), status_label(trial.status, trial.step)


def test_a_trial_that_waits_is_pending_and_one_that_trains_is_running() -> None:
    assert said(telling(0)) == ("pending", "pending")
    assert said(telling(3)) == ("running", "running")


def test_a_trial_that_met_its_criterion_or_returned_is_completed() -> None:
    for returned in (False, True):
        told = telling()
        told.tell(Finished(trial=T, reason="step = 3 reached 3", returned=returned))
        assert said(told) == ("completed", "completed")


def test_a_trial_that_trained_all_of_the_schedulers_steps_is_completed() -> None:
    told = telling()
    told.decides(T, Stop(reason="step 3 of 3", early=False))
    told.tell(Finished(trial=T, reason="step 3 of 3", left=True))
    assert said(told) == ("completed", "completed")


def test_a_trial_that_its_scheduler_ended_is_pruned() -> None:
    told = telling()
    told.decides(T, Stop(reason="loss 0.33 at step 3"))
    told.tell(Finished(trial=T, reason="loss 0.33 at step 3", left=True))
    assert said(told) == ("pruned", "pruned @3")


def test_a_trial_that_was_paused_and_never_promoted_is_pruned() -> None:
    told = telling()
    told.decides(T, Pause(reason="rung 3"))
    told.tell(Paused(trial=T, reason="rung 3"))
    assert said(told) == ("paused", "paused @3")
    told.tell(Finished(trial=T, reason="4 of 12 at step 3", left=True))
    assert said(told) == ("pruned", "pruned @3")


def test_a_trial_that_a_person_stopped_is_interrupted_whatever_its_scheduler_thought() -> None:
    for decision in (Continue(), Pause(reason="rung 3")):
        told = telling()
        told.decides(T, decision)
        told.tell(StopAsked(trial=T, reason="stopped by ada"))
        told.tell(Finished(trial=T, reason="stopped by ada", left=True))
        assert said(told) == ("interrupted", "interrupted @3")


@pytest.mark.parametrize("cause", Cause)
def test_a_trial_whose_attempt_ended_before_it_was_done_is_interrupted(cause: Cause) -> None:
    told = telling()
    told.tell(AttemptEnded(trial=T, cause=cause, message="the run was stopped"))
    assert said(told) == ("interrupted", "interrupted @3")
    told.starts(T)
    assert said(told) == ("running", "running")


def test_before_its_first_step_it_is_interrupted_at_no_step() -> None:
    told = telling(0)
    told.starts(T)
    told.tell(AttemptEnded(trial=T, cause=Cause.PREEMPTED, message="the run was stopped"))
    assert said(told) == ("interrupted", "interrupted")


def test_a_trial_that_is_to_continue_is_pending_and_no_longer_interrupted() -> None:
    told = telling()
    told.tell(AttemptEnded(trial=T, cause=Cause.MACHINE, message="killed"))
    told.starts(T)
    told.trains(T, 4, {"loss": 0.2})
    told.tell(Paused(trial=T, reason="rung 4"), Resumed(trial=T))
    assert said(told) == ("pending", "pending")
    told.tell(Finished(trial=T, reason="enough"), Requeued(trial=T, reason="more steps"))
    assert said(told) == ("pending", "pending")


def test_a_trial_that_failed_for_good_is_errored() -> None:
    told = telling()
    told.tell(AttemptEnded(trial=T, cause=Cause.USER, message="ValueError"))
    told.tell(GaveUp(trial=T, cause=Cause.USER, message="ValueError"))
    assert said(told) == ("errored", "errored")


def test_the_end_that_only_the_trials_own_journal_has_is_said_with_the_same_word() -> None:
    """The experiment's journal has the decision, and not yet the end."""
    told = telling()
    told.decides(T, Stop(reason="loss 0.33 at step 3"))
    ended = told.state.trial(T).model_copy(update={"phase": Phase.FINISHED, "left": True})
    assert ended.status is Status.PRUNED


def test_a_target_holds_the_phases_that_earlier_releases_wrote() -> None:
    """These literals are on targets for ever."""
    assert [str(each) for each in Phase] == ["pending", "running", "paused", "finished", "errored"]
    written = Trial(trial=T, config={}, status=Phase.FINISHED).model_dump_json(by_alias=True)
    assert json.loads(written)["status"] == "finished"
    assert "phase" not in json.loads(written)
    assert Trial.model_validate_json(written).status is Status.COMPLETED


def test_every_phase_has_a_status_and_every_status_a_word_of_its_own() -> None:
    assert [str(each) for each in Status] == [
        *("completed", "pruned", "interrupted", "errored", "running", "paused", "pending")
    ]
    assert {Trial(trial=T, config={}, status=phase).status for phase in Phase} <= set(Status)
