"""Failures of attempts: their cause, the number of retries, and the state that a resume finds."""

from __future__ import annotations

import pytest

from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.trial_transitions import Status
from tests.flows.interruptions.trouble import Trouble
from tests.long_cases import long_after
from tests.trainables.witness import acts_of

# ------------------------------------------------------------------------------------------- causes of failures


@pytest.mark.parametrize("phase", long_after(1, ["step", "setup", "save"]))
def test_a_failure_of_the_users_code_is_tried_again_within_its_budget(trouble: Trouble, phase: str) -> None:
    step = 0 if phase == "setup" else 10
    trouble.config |= {"fails": "raise", "place": phase, "at": step, "times": 2}
    result = trouble.run(failures=FailurePolicy(max_failures=2))
    assert (result.status, result.step, result.attempts) == (Status.COMPLETED, 20, 3)
    assert trouble.steps_of("loaded") == ([] if phase == "setup" else [5, 5])
    assert "the user's own trouble" in trouble.warning_text()


def test_beyond_its_budget_it_fails_and_a_later_run_goes_on_from_the_last_commit(trouble: Trouble) -> None:
    trouble.config |= {"fails": "raise", "at": 13, "times": 2}
    with pytest.raises(TrialFailed, match=r"max_failures=1.*the user's own trouble"):
        trouble.run(failures=FailurePolicy(max_failures=1), isolation="thread")
    assert trouble.trial.status is Status.ERRORED
    result = trouble.run(isolation="thread")
    assert (result.status, result.step, result.attempts) == (Status.COMPLETED, 20, 3)
    assert trouble.steps_of("loaded") == [10, 10]


def test_what_was_reported_before_a_failure_is_on_record_with_it(trouble: Trouble) -> None:
    trouble.config |= {"fails": "raise", "at": 8}
    with pytest.raises(TrialFailed):
        trouble.run(isolation="thread")
    assert (trouble.trial.step, trouble.trial.metrics["count"]) == (7, 7)


def test_a_killed_trial_is_the_machines_failure_and_has_a_budget_of_its_own(trouble: Trouble) -> None:
    trouble.config |= {"fails": "kill", "at": 7, "times": 2}
    result = trouble.run(failures=FailurePolicy(max_failures=0, max_machine_failures=2))
    assert (result.step, result.attempts) == (20, 3)


# --------------------------------------------------------------------------------------------------- silence


def test_a_trial_that_falls_silent_is_ended_and_started_again(trouble: Trouble) -> None:
    trouble.config |= {"fails": "hang", "at": 7}
    result = trouble.run(silence_timeout_seconds=4)
    assert (result.step, result.attempts) == (20, 2)
    assert trouble.steps_of("loaded") == [5]
    assert "presumed hung" in trouble.warning_text()


# --------------------------------------------------------------------------------------------------- cleanup


@pytest.mark.long
def test_cleanup_is_called_when_a_trial_ends_in_order_and_when_it_raises(trouble: Trouble) -> None:
    trouble.config |= {"fails": "raise", "at": 7}
    trouble.run(failures=FailurePolicy(max_failures=1))
    assert trouble.steps_of("cleanup") == [7, 20]


@pytest.mark.long
@pytest.mark.parametrize("way", ["raise", "kill"])
def test_a_trial_that_is_done_and_committed_stays_so_whatever_its_cleanup_does(trouble: Trouble, way: str) -> None:
    trouble.config |= {"place": "cleanup", "fails": way, "at": 20}
    assert trouble.run().step == 20
    assert (trouble.trial.status, trouble.trial.attempt) == (Status.COMPLETED, 1)
    assert "error after the trial finished and committed its last checkpoint" in trouble.warning_text()


# ----------------------------------------------------------------------------------------------- calling again


def test_a_finished_experiment_that_is_called_again_trains_nothing(trouble: Trouble) -> None:
    first = trouble.run(isolation="thread")
    acts = acts_of(trouble.witness)
    again = trouble.run(isolation="thread")
    assert acts_of(trouble.witness) == acts
    assert (again.step, again.attempts, again.metrics) == (first.step, first.attempts, first.metrics)
