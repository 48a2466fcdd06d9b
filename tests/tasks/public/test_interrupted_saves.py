"""A save that failed after its upload, and is repeated by the same flow run."""

from __future__ import annotations

import pytest

import prefect_tune as pt
from prefect_tune.core.errors import StoreUnavailable
from tests.fakes.checkpoints import files_in
from tests.fakes.stores.dying_store import Crash, DyingStore, Way
from tests.tasks.public.conftest import Caller

CREATES = frozenset({"create"})


def failed_save(caller: Caller, step: int, content: str = "") -> None:
    """Save a step; the write of the journal entry after the manifest fails."""
    bucket = caller.bucket
    caller.on(DyingStore(bucket, 2, Way.UNAVAILABLE, only=CREATES))
    with pytest.raises(StoreUnavailable):
        caller.save(step, content)
    caller.on(bucket)
    assert sum(f"/{step:010d}-" in path and "manifest" in path for path in bucket.objects) == 1


@pytest.mark.parametrize("content", ["", "other bytes"])
def test_a_save_whose_entry_was_not_written_is_saved_again(caller: Caller, content: str) -> None:
    caller.save(1)
    failed_save(caller, 2)
    saved = caller.save(2, content)
    trial = caller.state().trial("trial")
    assert ([each.step for each in trial.checkpoints], trial.step, trial.attempt) == ([1, 2], 2, 1)
    assert saved.uri.endswith(f"{2:010d}-{trial.checkpoints[-1].sequence:010d}")
    caller.begin("later")
    pt.restore_experiment_state.fn(target=caller.target, experiment="e")
    restored = caller.restore()
    assert restored is not None
    assert (restored.step, files_in(restored.directory)) == (2, files_in(caller.directory(2, content)))
    caller.save(3)  # a new attempt deletes the leftovers of the failed save
    assert sum("manifest" in path for path in caller.bucket.objects) == 3


def test_a_failed_save_is_still_adopted_if_the_run_ends_there(caller: Caller) -> None:
    caller.save(1)
    failed_save(caller, 2)
    caller.begin("later")
    opened = pt.restore_experiment_state.fn(target=caller.target, experiment="e")
    assert opened.trials["trial"].checkpoint_steps == (1, 2)


def test_a_failed_save_that_is_saved_again_is_not_adopted_instead(caller: Caller) -> None:
    """The run is killed after it retired the failed save, which has other bytes than the repeated one."""
    bucket = caller.bucket
    caller.save(1)
    failed_save(caller, 2)
    caller.on(DyingStore(bucket, 3, Way.CRASH_BEFORE, only=CREATES))  # after manifest and retirement
    with pytest.raises(Crash):
        caller.save(2, "other bytes")
    caller.on(bucket).begin("later")
    opened = pt.restore_experiment_state.fn(target=caller.target, experiment="e")
    assert opened.trials["trial"].checkpoint_steps == (1,)
