"""The parts of several ranks become one checkpoint, or none."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.attempt.commit_worker import merge_rank_directories
from prefect_tune.attempt.supervisor import MetricsCollector, PartCollector
from prefect_tune.core.errors import InvalidInput, StagedFilesChanged
from prefect_tune.core.messages.process_messages import CheckpointPart, MeanMetrics, RankMetrics, StepDone
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.values import StepReport


def make_step(step: int, directory: str = "/nowhere/0") -> StepDone:
    return StepDone(report=StepReport(step=step, metrics={}), checkpoint=directory, is_owned_by_supervisor=True)


def make_part(step: int, directory: str | None) -> CheckpointPart:
    return CheckpointPart(step=step, directory=directory)


def make_rank_directories(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "0", tmp_path / "1"
    first.mkdir()
    second.mkdir()
    return first, second


def test_a_checkpoint_is_whole_with_its_last_part_whichever_that_is() -> None:
    saves = PartCollector(3)
    assert saves.add_part(2, make_part(4, "/nowhere/2")) is None
    assert saves.add_rank_0_part(make_step(4)) is None
    group_save = saves.add_part(1, make_part(4, None))
    assert (group_save.done.report.step, dict(group_save.parts)) == (4, {2: Path("/nowhere/2")})

    assert saves.add_part(1, make_part(6, "/nowhere/1")) is None
    assert saves.add_part(2, make_part(6, None)) is None
    group_save = saves.add_rank_0_part(make_step(6))
    assert dict(group_save.parts) == {1: Path("/nowhere/1")}


def test_a_part_without_a_checkpoint_of_rank_0_is_dropped_if_it_is_empty_and_refused_if_it_is_not() -> None:
    saves = PartCollector(2)
    saves.add_part(1, make_part(1, None))
    saves.close_steps(1)
    assert saves.add_part(1, make_part(1, None)) is None
    with pytest.raises(InvalidInput, match="rank 1 reported a checkpoint at step 1, but rank 0 did not"):
        saves.add_part(1, make_part(1, "/nowhere/1"))
    saves.add_part(1, make_part(2, "/nowhere/1"))
    with pytest.raises(InvalidInput, match="rank 1 reported a checkpoint at step 2, but rank 0 did not"):
        saves.close_steps(2)


def test_a_late_part_fails_its_checkpoint_alone_and_its_files_are_removed(tmp_path: Path) -> None:
    first, second = make_rank_directories(tmp_path)
    saves = PartCollector(3, timeout=timedelta(0))
    saves.add_rank_0_part(make_step(2, str(first)))
    saves.add_part(1, make_part(2, str(second)))
    failed = saves.fail_overdue_save()
    assert (failed.step, failed.reason) == (2, make_reason("part-late", ranks=[2], seconds=0.0))
    assert not first.exists()
    assert not second.exists()
    assert saves.fail_overdue_save() is None
    saves.close_steps(2)
    assert saves.add_part(2, make_part(2, str(tmp_path / "2"))) is None, "it comes too late, and is no error"


def test_a_checkpoint_without_the_part_of_a_rank_that_has_ended_can_never_be_complete() -> None:
    saves = PartCollector(3)
    saves.add_part(1, make_part(2, None))
    assert not saves.ended_rank_reason({1, 2}), "rank 0 has not reported a checkpoint"
    saves.add_rank_0_part(make_step(2))
    assert not saves.ended_rank_reason({1}), "its part is there"
    assert saves.ended_rank_reason({1, 2}) == make_reason("ranks-left-save", ranks=[2], step=2)


def test_directories_are_merged_and_equal_files_are_one(tmp_path: Path) -> None:
    for rank in range(3):
        folder = tmp_path / str(rank) / "model"
        folder.mkdir(parents=True)
        (folder / f"shard-{rank}").write_text(str(rank))
        (folder / "config").write_text("the same")
    (tmp_path / "2" / "empty").mkdir()
    merge_rank_directories(tmp_path / "0", {1: tmp_path / "1", 2: tmp_path / "2"})
    paths = sorted(str(path.relative_to(tmp_path / "0")) for path in (tmp_path / "0").rglob("*"))
    assert paths == ["empty", "model", "model/config", "model/shard-0", "model/shard-1", "model/shard-2"]
    assert not (tmp_path / "1").exists()
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize(
    ("first", "second"), [("a", "b"), ("a", None), (None, "b")], ids=["files", "file and folder", "folder and file"]
)
def test_a_name_with_other_bytes_names_both_ranks(tmp_path: Path, first: str | None, second: str | None) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    for rank, content in ((1, first), (2, second)):
        path = tmp_path / str(rank) / "weights"
        if content is None:
            path.mkdir()
        else:
            path.write_text(content)
    with pytest.raises(InvalidInput, match="weights: ranks 1 and 2 saved different files of this name"):
        merge_rank_directories(tmp_path / "0", {1: tmp_path / "1", 2: tmp_path / "2"})


def test_a_link_in_a_part_stays_a_link_so_that_its_target_is_not_lost_unseen(tmp_path: Path) -> None:
    first, second = make_rank_directories(tmp_path)
    (tmp_path / "model").mkdir()
    (second / "model").symlink_to(tmp_path / "model")
    merge_rank_directories(first, {1: second})
    assert (first / "model").is_symlink()


def test_a_part_that_is_gone_is_an_error(tmp_path: Path) -> None:
    first, second = make_rank_directories(tmp_path)
    second.rmdir()
    with pytest.raises(StagedFilesChanged, match="the part of a rank cannot be read"):
        merge_rank_directories(first, {1: second})


def test_ranks_may_write_into_one_directory(tmp_path: Path) -> None:
    first, _ = make_rank_directories(tmp_path)
    (first / "shard-0").touch()
    (first / "shard-1").touch()
    merge_rank_directories(first, {1: first, 2: first})
    assert {path.name for path in first.iterdir()} == {"shard-0", "shard-1"}


def test_a_step_that_is_over_can_be_saved_afterwards_whichever_rank_is_first() -> None:
    saves = PartCollector(2)
    saves.close_steps(3)
    saves.reopen_step(3)
    assert saves.add_part(1, make_part(3, "/nowhere/1")) is None
    assert saves.add_rank_0_part(make_step(3)) is not None


def test_the_part_of_a_rank_that_does_not_exist_makes_no_checkpoint_whole() -> None:
    saves = PartCollector(3)
    saves.add_rank_0_part(make_step(1))
    saves.add_part(5, make_part(1, None))
    assert saves.add_part(1, make_part(1, None)) is None
    assert saves.add_part(2, make_part(1, None)) is not None


def make_rank_metrics(step: int, loss: float) -> RankMetrics:
    return RankMetrics(step=step, metrics={"loss": loss})


def test_the_mean_of_a_step_is_there_with_the_metrics_of_the_last_rank() -> None:
    metrics = MetricsCollector(3)
    assert metrics.add_metrics(1, make_rank_metrics(1, 2.0)) is None
    assert not metrics.missing_ranks, "rank 0 does not wait"
    assert metrics.add_metrics(0, make_rank_metrics(1, 1.0)) is None
    assert metrics.missing_ranks == [2]
    assert metrics.add_metrics(1, make_rank_metrics(2, 0.0)) is None, "rank 1 is a step ahead"
    assert metrics.add_metrics(2, make_rank_metrics(1, 6.0)) == MeanMetrics(step=1, metrics={"loss": 3.0})
    assert not metrics.missing_ranks


def test_metrics_that_cannot_come_or_come_too_late_name_their_rank_and_step() -> None:
    metrics = MetricsCollector(3, timeout=timedelta(0))
    metrics.add_metrics(0, make_rank_metrics(4, 1.0))
    metrics.add_metrics(2, make_rank_metrics(4, 1.0))
    assert not metrics.ended_rank_reason({2})
    assert metrics.ended_rank_reason({1, 2}) == make_reason("ranks-left-mean", ranks=[1], step=4)
    assert metrics.overdue_reason() == make_reason("metrics-late", ranks=[1], step=4, seconds=0.0)
    patient = MetricsCollector(2, timeout=timedelta(hours=1))
    patient.add_metrics(0, make_rank_metrics(4, 1.0))
    assert not patient.overdue_reason()


def test_a_rank_that_waits_for_rank_0_although_it_has_ended_is_named_with_its_step() -> None:
    metrics = MetricsCollector(3)
    for rank in (1, 0, 2):
        metrics.add_metrics(rank, make_rank_metrics(4, 1.0))
    metrics.record_commanded_step(4)
    assert not metrics.surplus_reason()
    metrics.add_metrics(1, make_rank_metrics(5, 1.0).model_copy(update={"returned": True}))
    assert not metrics.surplus_reason(), "it ends too"
    metrics.add_metrics(2, make_rank_metrics(5, 1.0))
    assert metrics.surplus_reason() == make_reason("surplus-report", rank=2, step=5)


def test_the_time_for_the_metrics_of_a_step_begins_with_those_of_rank_0() -> None:
    metrics = MetricsCollector(2, timeout=timedelta(seconds=0.2))
    time.sleep(0.3)
    metrics.add_metrics(0, make_rank_metrics(1, 1.0))
    assert not metrics.overdue_reason()
