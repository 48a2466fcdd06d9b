"""A trial that restarts from an older checkpoint, and the reports of the steps that it repeats."""

from __future__ import annotations

import pytest

import prefect_tune as pt
from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.experiment.summary import curve
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.journal.journal import history
from tests.fakes.checkpoints import files_in, first_generation
from tests.fakes.stores.dying_store import DyingStore, Way
from tests.tasks.public.conftest import Caller


def trial_of(caller: Caller) -> Trial:
    return caller.state().trial("trial")


def losses(caller: Caller) -> dict[int, object]:
    """Return the learning curve that results and the report use."""
    reports = curve(history(caller.bucket, first_generation("e"), side_by_side=map), "trial")
    return {each.step: each.metrics["loss"] for each in reports}


def test_a_running_trial_whose_newest_checkpoints_are_deleted_is_at_the_one_before(caller: Caller) -> None:
    for step in range(1, 6):
        caller.save(step)
    assert caller.delete(5) == caller.delete(4) == 2
    gone_back, restored = trial_of(caller), caller.restore()
    assert restored is not None
    assert restored.step == 3
    assert (gone_back.step, gone_back.metrics, gone_back.status) == (3, {"loss": 1 / 3}, Status.RUNNING)
    assert (gone_back.attempt, gone_back.wasted_steps) == (3, 2)
    caller.save(5, "otherwise", metrics={"loss": 9.0})  # the trial continues and saves every second step
    trained_on = trial_of(caller)
    assert (trained_on.step, trained_on.metrics) == (5, {"loss": 9.0})
    assert [each.step for each in trained_on.checkpoints] == [1, 2, 3, 5]
    assert losses(caller) == {1: 1.0, 2: 0.5, 3: 1 / 3, 5: 9.0}


def test_a_trial_goes_back_to_nothing_with_its_only_checkpoint(caller: Caller) -> None:
    caller.save(1)
    caller.delete(1)
    assert (trial_of(caller).step, trial_of(caller).metrics, caller.restore()) == (0, {}, None)
    caller.save(1, "otherwise")
    assert losses(caller) == {1: 1.0}


def test_a_trial_that_does_not_run_or_keeps_its_newest_checkpoint_stays_where_it_is(caller: Caller) -> None:
    for step in (1, 2, 3):
        caller.save(step)
    caller.delete(2)
    assert (trial_of(caller).step, trial_of(caller).attempt) == (3, 1)
    caller.sync(status="completed")
    caller.delete(3)
    assert (trial_of(caller).step, trial_of(caller).status) == (3, Status.COMPLETED)


def test_a_deletion_that_the_target_interrupted_is_finished_by_the_next_call(caller: Caller) -> None:
    bucket = caller.bucket
    caller.save(1)
    caller.save(2)
    caller.on(DyingStore(bucket, 1, Way.UNAVAILABLE, only=frozenset({"delete"})))
    with pytest.raises(StoreUnavailable):
        caller.delete(2)
    caller.on(bucket)
    assert [each.step for each in trial_of(caller).checkpoints] == [1]
    assert caller.delete(2) == 2
    assert caller.delete(2) == 0
    restored = caller.restore()
    assert restored is not None
    assert files_in(restored.directory) == files_in(caller.directory(1))


def test_reports_of_steps_that_a_later_run_trains_again_are_journaled(caller: Caller) -> None:
    caller.save(1)
    caller.sync(reports={2: {"loss": 0.5}, 3: {"loss": 0.4}})
    caller.begin("later")
    pt.restore_experiment_state.fn(target=caller.target, experiment="e")
    caller.sync(reports={2: {"loss": 0.3}})
    trial = trial_of(caller)
    assert (trial.step, trial.metrics, trial.attempt, trial.wasted_steps) == (2, {"loss": 0.3}, 2, 2)
    assert losses(caller) == {1: 1.0, 2: 0.3}


def test_steps_that_this_attempt_has_reported_are_left_out(caller: Caller) -> None:
    caller.sync(reports={1: {"loss": 1.0}, 2: {"loss": 0.5}})
    caller.sync(reports={2: {"loss": 9.0}, 3: {"loss": 0.25}})
    assert (trial_of(caller).step, trial_of(caller).attempt) == (3, 1)
    assert losses(caller) == {1: 1.0, 2: 0.5, 3: 0.25}


@pytest.mark.parametrize("status", ["completed", "paused", "errored"])
def test_reports_after_an_end_begin_an_attempt_at_the_newest_checkpoint(caller: Caller, status: str) -> None:
    caller.save(1)
    caller.sync(reports={2: {"loss": 0.5}, 3: {"loss": 0.4}}, status=status)
    caller.begin("later").sync(reports={2: {"loss": 0.3}})
    trial = trial_of(caller)
    assert (trial.status, trial.step, trial.metrics, trial.attempt) == (Status.RUNNING, 2, {"loss": 0.3}, 2)


@pytest.mark.parametrize("status", [None, "completed", "paused", "errored"])
def test_the_same_reports_and_the_same_end_are_written_once(caller: Caller, status: str | None) -> None:
    said = {"reports": {1: {"loss": 0.5}, 2: {"loss": [0.25, 1]}}, "status": status, "config": {"rate": 0.5}}
    caller.sync(**said)
    before = dict(caller.bucket.objects)
    caller.sync(**said)
    assert caller.bucket.objects == before
