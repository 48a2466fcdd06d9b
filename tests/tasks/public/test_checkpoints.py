"""Saves and deletions of checkpoints by a user's flow, also interrupted ones."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.core.errors import StoreUnavailable, TuneError
from prefect_tune.core.experiment.summary import LearningCurves
from prefect_tune.core.experiment.trial_transitions import Status, Trial
from prefect_tune.core.journal.journal import read_entries
from tests.fakes.checkpoints import first_generation, read_files, write_files
from tests.fakes.stores.dying_store import Crash, DyingStore, Failure
from tests.long_cases import long_after
from tests.tasks.public.conftest import Caller


def get_trial(caller: Caller) -> Trial:
    return caller.load_state().trial("trial")


def get_steps(caller: Caller) -> list[int]:
    return [checkpoint.step for checkpoint in get_trial(caller).checkpoints]


def get_quarantined_steps(caller: Caller) -> list[int]:
    return [quarantined.checkpoint.step for quarantined in get_trial(caller).quarantined_checkpoints]


def test_what_is_saved_is_restored(caller: Caller, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        assert caller.save_checkpoint(step).step == step
    newest, second = caller.restore_checkpoint(), caller.restore_checkpoint(2, directory=tmp_path / "second")
    assert newest is not None
    assert second is not None
    assert (newest.step, newest.metrics) == (3, {"loss": 1 / 3})
    assert read_files(newest.directory) == read_files(caller.write_directory(3))
    assert second.directory == tmp_path / "second"
    assert read_files(second.directory) == read_files(caller.write_directory(2))
    assert Path(second, "weights").is_file()


def test_a_trial_without_a_checkpoint_restores_nothing(caller: Caller) -> None:
    assert caller.restore_checkpoint() is None
    caller.sync(config={"lr": 1})
    assert caller.restore_checkpoint() is None
    with pytest.raises(pt.CheckpointNotFound, match=r"no checkpoint of step 4 is committed; committed steps: none"):
        caller.restore_checkpoint(4)


def test_saving_a_step_again_with_the_same_files_changes_nothing(caller: Caller) -> None:
    first = caller.save_checkpoint(1)
    before = dict(caller.bucket.objects)
    again = caller.save_checkpoint(1)
    assert again == first.model_copy(update={"sent_bytes": None})
    assert caller.bucket.objects == before
    caller.start_run("a later run").sync(status="completed")
    assert caller.save_checkpoint(1).uri == first.uri
    assert get_trial(caller).status is Status.COMPLETED


@pytest.mark.parametrize("content", ["other bytes", "same size"])
def test_saving_a_step_again_with_other_files_is_refused(caller: Caller, content: str) -> None:
    caller.save_checkpoint(2, "some  size" if content == "same size" else "")
    with pytest.raises(pt.AlreadyCommitted, match=r"step 2 of trial 'trial'.*: it is committed with other files"):
        caller.save_checkpoint(2, "same  size" if content == "same size" else content)
    assert get_steps(caller) == [2]


def test_a_step_before_the_newest_checkpoint_is_refused(caller: Caller) -> None:
    caller.save_checkpoint(5)
    with pytest.raises(pt.AlreadyCommitted, match=r"step 3 .*: the newest checkpoint is of step 5"):
        caller.save_checkpoint(3)


def test_retention_keeps_what_it_says_and_deletes_the_bytes(caller: Caller) -> None:
    for step in (1, 2, 3, 4):
        caller.save_checkpoint(step, retention=pt.Retention(last=2))
    assert get_steps(caller) == [3, 4]
    assert sum("manifest" in path for path in caller.bucket.objects) == 2
    assert sum("/blobs/" in path for path in caller.bucket.objects) == 2


def damage_checkpoint(caller: Caller, step: int) -> None:
    """Damage the bytes of a step's checkpoint on the target."""
    sequence = next(checkpoint.sequence for checkpoint in get_trial(caller).checkpoints if checkpoint.step == step)
    for path, data in caller.bucket.objects.items():
        if "/blobs/" in path and path.endswith(f"-{sequence:010d}"):
            caller.bucket.objects[path] = bytes(len(data))


def damage_manifest(caller: Caller, step: int) -> None:
    (path,) = (path for path in caller.bucket.objects if path.endswith("/manifest.json") and f"/{step:010d}-" in path)
    caller.bucket.objects[path] = b"{"


@pytest.mark.parametrize("damage", [damage_checkpoint, damage_manifest])
def test_a_quarantined_checkpoint_is_deleted_with_its_bytes_and_cannot_be_released(
    caller: Caller, damage: Callable[[Caller, int], None]
) -> None:
    for step in (1, 2):
        caller.save_checkpoint(step)
    damage(caller, 2)
    assert caller.restore_checkpoint() is not None
    assert get_quarantined_steps(caller) == [2]
    assert caller.delete_checkpoints(2) > 0
    trial = get_trial(caller)
    assert (trial.quarantined_checkpoints, trial.quarantined_sequences, get_steps(caller)) == ((), (), [1])
    assert sum("manifest" in path for path in caller.bucket.objects) == 1
    assert caller.delete_checkpoints(2) == 0
    caller.start_run("later").save_checkpoint(2, "otherwise")
    again = caller.restore_checkpoint()
    assert again is not None
    assert read_files(again.directory) == read_files(caller.write_directory(2, "otherwise"))


def test_a_damaged_checkpoint_is_quarantined_and_the_one_before_it_restored(caller: Caller) -> None:
    for step in (1, 2, 3):
        caller.save_checkpoint(step)
    damage_checkpoint(caller, 3)
    newest = caller.restore_checkpoint()
    assert newest is not None
    assert newest.step == 2
    assert get_quarantined_steps(caller) == [3]
    caller.start_run("a later run").save_checkpoint(3)  # reuses no bytes of the damaged checkpoint
    again = caller.restore_checkpoint()
    assert again is not None
    assert (again.step, read_files(again.directory)) == (3, read_files(caller.write_directory(3)))


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(caller: Caller) -> None:
    caller.save_checkpoint(1)
    damage_checkpoint(caller, 1)
    with pytest.raises(pt.CheckpointCorrupt):
        caller.restore_checkpoint(1)
    with pytest.raises(pt.ResumeFailed, match=r"checkpoints are damaged\. Nothing was restarted from zero"):
        caller.restore_checkpoint()


def test_results_survive_json_and_pickle(caller: Caller, tmp_path: Path) -> None:
    saved = caller.save_checkpoint(1, metadata={"by": "me"})
    restored = caller.restore_checkpoint(directory=tmp_path / "restored")
    state = caller.sync(status="paused", reason="for today")
    for result in (saved, restored, state, state.trials["trial"]):
        assert result is not None
        assert type(result).model_validate_json(result.model_dump_json()) == result
        assert pickle.loads(pickle.dumps(result)) == result
        assert json.loads(result.model_dump_json())["experiment"] == "e"
    assert state.trials["trial"].checkpoint == saved.model_copy(update={"sent_bytes": None})


@pytest.mark.parametrize("step", [0, -1, True, 1.5, "1"])
def test_a_step_that_is_no_count_is_refused_before_anything_is_written(caller: Caller, step: object) -> None:
    with pytest.raises(pt.InvalidInput, match="step: expected an integer of at least 1"):
        pt.save_checkpoint.fn(caller.write_directory(1), target=caller.target, experiment="e", step=step)  # type: ignore[arg-type]  # the test's point
    assert not caller.bucket.objects


def test_what_cannot_be_saved_is_refused_before_anything_is_written(caller: Caller, tmp_path: Path) -> None:
    options = {"target": caller.target, "experiment": "e", "step": 1}
    with pytest.raises(pt.InvalidInput, match="expected a directory, found none"):
        pt.save_checkpoint.fn(tmp_path / "absent", **options)
    with pytest.raises(pt.BadMetric, match="metrics: 'loss'"):
        pt.save_checkpoint.fn(caller.write_directory(1), metrics={"loss": float("nan")}, **options)
    assert not caller.bucket.objects


def test_a_uri_names_the_target_and_its_checkpoint(caller: Caller, tmp_path: Path) -> None:
    target = str(tmp_path / "runs")
    saved = pt.save_checkpoint.fn(
        caller.write_directory(1), target=target, experiment="e", step=1, metadata={"by": "me"}
    )
    assert saved.uri.startswith(Path(target).as_uri())
    with pt.Checkpoint(saved.uri).as_directory() as directory:
        assert read_files(directory) == {**read_files(caller.write_directory(1)), ".metadata.json": b'{"by": "me"}'}
    assert pt.Checkpoint(saved.uri).get_metadata() == {"by": "me"}


def test_saving_a_step_again_from_its_copy_changes_nothing(caller: Caller) -> None:
    first = caller.save_checkpoint(1, metadata={"by": "me"})
    restored = caller.restore_checkpoint()
    assert restored is not None
    options = {"target": caller.target, "experiment": "e", "step": 1}
    assert pt.save_checkpoint.fn(restored.directory, **options).uri == first.uri
    (restored.directory / ".metadata.json").write_text('{"by": "you"}')
    with pytest.raises(pt.AlreadyCommitted, match="it is committed with other files"):
        pt.save_checkpoint.fn(restored.directory, **options)


def test_a_directory_with_other_content_is_not_touched(caller: Caller, tmp_path: Path) -> None:
    caller.save_checkpoint(1)
    mine = write_files(tmp_path / "mine", {"precious": b"1"})
    with pytest.raises(pt.InvalidInput, match="not empty and not this checkpoint"):
        caller.restore_checkpoint(directory=mine)
    assert read_files(mine) == {"precious": b"1"}


# A trial that restarts from an older checkpoint, and the reports of the steps that it repeats.


def read_losses(caller: Caller) -> dict[int, object]:
    """Return the learning curve that results and the report use."""
    reports = LearningCurves(read_entries(caller.bucket, first_generation("e"))).get_curve("trial")
    return {report.step: report.metrics["loss"] for report in reports}


def test_a_running_trial_whose_newest_checkpoints_are_deleted_is_at_the_one_before(caller: Caller) -> None:
    for step in range(1, 6):
        caller.save_checkpoint(step)
    assert caller.delete_checkpoints(5) == caller.delete_checkpoints(4) == 2
    trial, restored = get_trial(caller), caller.restore_checkpoint()
    assert restored is not None
    assert restored.step == 3
    assert (trial.step, trial.metrics, trial.status) == (3, {"loss": 1 / 3}, Status.RUNNING)
    assert (trial.attempt, trial.recomputed_steps) == (3, 2)
    caller.save_checkpoint(5, "otherwise", metrics={"loss": 9.0})  # the trial continues and saves every second step
    trial = get_trial(caller)
    assert (trial.step, trial.metrics) == (5, {"loss": 9.0})
    assert get_steps(caller) == [1, 2, 3, 5]
    assert read_losses(caller) == {1: 1.0, 2: 0.5, 3: 1 / 3, 5: 9.0}


def test_a_trial_that_does_not_run_or_keeps_its_newest_checkpoint_stays_where_it_is(caller: Caller) -> None:
    for step in (1, 2, 3):
        caller.save_checkpoint(step)
    caller.delete_checkpoints(2)
    assert (get_trial(caller).step, get_trial(caller).attempt) == (3, 1)
    caller.sync(status="completed")
    caller.delete_checkpoints(3)
    assert (get_trial(caller).step, get_trial(caller).status) == (3, Status.COMPLETED)


def test_a_deletion_that_the_target_interrupted_is_finished_by_the_next_call(caller: Caller) -> None:
    bucket = caller.bucket
    caller.save_checkpoint(1)
    caller.save_checkpoint(2)
    caller.use_store(DyingStore(bucket, 1, Failure.UNAVAILABLE, only=frozenset({"delete"})))
    with pytest.raises(StoreUnavailable):
        caller.delete_checkpoints(2)
    caller.use_store(bucket)
    assert get_steps(caller) == [1]
    assert caller.delete_checkpoints(2) == 2
    assert caller.delete_checkpoints(2) == 0
    restored = caller.restore_checkpoint()
    assert restored is not None
    assert read_files(restored.directory) == read_files(caller.write_directory(1))


def test_reports_of_steps_that_a_later_run_trains_again_are_journaled(caller: Caller) -> None:
    caller.save_checkpoint(1)
    caller.sync(reports={2: {"loss": 0.5}, 3: {"loss": 0.4}})
    caller.start_run("later")
    pt.restore_experiment_state.fn(target=caller.target, experiment="e")
    caller.sync(reports={2: {"loss": 0.3}})
    trial = get_trial(caller)
    assert (trial.step, trial.metrics, trial.attempt, trial.recomputed_steps) == (2, {"loss": 0.3}, 2, 2)
    assert read_losses(caller) == {1: 1.0, 2: 0.3}


def test_steps_that_this_attempt_has_reported_are_left_out(caller: Caller) -> None:
    caller.sync(reports={1: {"loss": 1.0}, 2: {"loss": 0.5}})
    caller.sync(reports={2: {"loss": 9.0}, 3: {"loss": 0.25}})
    assert (get_trial(caller).step, get_trial(caller).attempt) == (3, 1)
    assert read_losses(caller) == {1: 1.0, 2: 0.5, 3: 0.25}


@pytest.mark.parametrize("status", ["completed", "paused", "errored"])
def test_reports_after_an_end_begin_an_attempt_at_the_newest_checkpoint(caller: Caller, status: str) -> None:
    caller.save_checkpoint(1)
    caller.sync(reports={2: {"loss": 0.5}, 3: {"loss": 0.4}}, status=status)
    caller.start_run("later").sync(reports={2: {"loss": 0.3}})
    trial = get_trial(caller)
    assert (trial.status, trial.step, trial.metrics, trial.attempt) == (Status.RUNNING, 2, {"loss": 0.3}, 2)


@pytest.mark.parametrize("status", [None, "completed", "paused", "errored"])
def test_the_same_reports_and_the_same_end_are_written_once(caller: Caller, status: str | None) -> None:
    arguments = {"reports": {1: {"loss": 0.5}, 2: {"loss": [0.25, 1]}}, "status": status, "config": {"rate": 0.5}}
    caller.sync(**arguments)
    before = dict(caller.bucket.objects)
    caller.sync(**arguments)
    assert caller.bucket.objects == before


# A save that failed after its upload, and is repeated by the same flow run.


CREATES = frozenset({"create"})


def fail_save(caller: Caller, step: int, content: str = "") -> None:
    """Save a step; the write of the journal entry after the manifest fails."""
    bucket = caller.bucket
    caller.use_store(DyingStore(bucket, 2, Failure.UNAVAILABLE, only=CREATES))
    with pytest.raises(StoreUnavailable):
        caller.save_checkpoint(step, content)
    caller.use_store(bucket)
    assert sum(f"/{step:010d}-" in path and "manifest" in path for path in bucket.objects) == 1


@pytest.mark.parametrize("content", ["", "other bytes"])
def test_a_save_whose_entry_was_not_written_is_saved_again(caller: Caller, content: str) -> None:
    caller.save_checkpoint(1)
    fail_save(caller, 2)
    saved = caller.save_checkpoint(2, content)
    trial = get_trial(caller)
    assert (get_steps(caller), trial.step, trial.attempt) == ([1, 2], 2, 1)
    assert saved.uri.endswith(f"{2:010d}-{trial.checkpoints[-1].sequence:010d}")
    caller.start_run("later")
    pt.restore_experiment_state.fn(target=caller.target, experiment="e")
    restored = caller.restore_checkpoint()
    assert restored is not None
    assert (restored.step, read_files(restored.directory)) == (2, read_files(caller.write_directory(2, content)))
    caller.save_checkpoint(3)  # a new attempt deletes the leftovers of the failed save
    assert sum("manifest" in path for path in caller.bucket.objects) == 3


def test_a_failed_save_is_still_adopted_if_the_run_ends_there(caller: Caller) -> None:
    caller.save_checkpoint(1)
    fail_save(caller, 2)
    caller.start_run("later")
    state = pt.restore_experiment_state.fn(target=caller.target, experiment="e")
    assert state.trials["trial"].checkpoint_steps == (1, 2)


def test_a_failed_save_that_is_saved_again_is_not_adopted_instead(caller: Caller) -> None:
    """The run is killed after it retired the failed save; the repeated save has other bytes."""
    bucket = caller.bucket
    caller.save_checkpoint(1)
    fail_save(caller, 2)
    caller.use_store(DyingStore(bucket, 3, Failure.CRASH_BEFORE, only=CREATES))  # after manifest and retirement
    with pytest.raises(Crash):
        caller.save_checkpoint(2, "other bytes")
    caller.use_store(bucket).start_run("later")
    state = pt.restore_experiment_state.fn(target=caller.target, experiment="e")
    assert state.trials["trial"].checkpoint_steps == (1,)


# Deleting a quarantined checkpoint: killed at each operation, then repeated by a later run.


@pytest.mark.parametrize("failure", long_after(2, Failure))
def test_a_killed_deletion_of_a_quarantined_checkpoint_loses_no_other_and_is_completed_by_the_next(
    caller: Caller, failure: Failure
) -> None:
    for step in (1, 2, 3):
        caller.save_checkpoint(step)
    damage_checkpoint(caller, 2)
    with pytest.raises(TuneError):
        caller.restore_checkpoint(2)
    assert get_quarantined_steps(caller) == [2]
    bucket, before = caller.bucket, dict(caller.bucket.objects)
    nth, expected_blobs = 0, set[str]()
    while True:
        bucket.objects = dict(before)
        nth += 1
        caller.start_run("first").use_store(store := DyingStore(bucket, nth, failure))
        with suppress(Crash, TuneError):
            caller.delete_checkpoints(2)
        caller.use_store(bucket).start_run("later")
        caller.delete_checkpoints(2)
        blobs = {path for path in bucket.objects if "/blobs/" in path}
        expected_blobs = expected_blobs or blobs
        assert blobs == expected_blobs, f"at operation {nth}: {store.failed_at}"
        assert sum("manifest" in path for path in bucket.objects) == 2
        for step in (1, 3):
            restored = caller.restore_checkpoint(step)
            assert restored is not None
            assert read_files(restored.directory) == read_files(caller.write_directory(step))
        if store.failed_at is None:
            break
    assert nth > 5
