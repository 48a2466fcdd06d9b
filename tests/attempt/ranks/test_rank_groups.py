"""Trials that two processes train together: a crash of one of them does not change the result."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.attempt import usage_meter
from prefect_tune.attempt.supervisor import PartCollector
from prefect_tune.linux import find_children
from tests.attempt.nodes.cluster import STEPS, final_states, read_rank_states
from tests.fakes.trial_processes import read_proc, wait_until
from tests.long_cases import long_after
from tests.trainables.grouped import (
    Different,
    RestartsItsProgram,
    Sharded,
    SlowSetup,
    launch_ranks,
    lose_launcher,
    raise_late,
    report_different,
    report_on_rank_0,
    restart_and_return,
    restart_late,
    restart_program,
    restart_without_rank,
    run_as_mpich,
    run_as_open_mpi,
    run_mpirun,
    run_one_rank,
    run_programs,
    run_with_workers,
    start_late,
    train_elastic,
    train_sharded,
    train_with_two,
    wait_at_step,
)

supervisor = importlib.import_module("prefect_tune.attempt.supervisor")

pytestmark = pytest.mark.usefixtures("no_prefect_server")


def train(target: Path, trainable: Any, config: dict[str, Any] | None = None, **options: Any) -> pt.TrialResult:
    defaults = {"stop": {"step": STEPS}, "checkpoint": pt.Cadence(every_steps=2), "processes_per_trial": 2}
    return pt.durable_trainable(trainable, config, target=str(target), experiment="e", **{**defaults, **options})


def read_states(result: pt.TrialResult) -> dict[str, list[float]]:
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        return read_rank_states(Path(directory))


def test_each_rank_trains_and_the_checkpoint_holds_the_files_of_all_with_the_metrics_of_rank_0(tmp_path: Path) -> None:
    result = train(tmp_path, train_sharded)
    assert (result.status, result.step, result.attempts, result.metrics["world_size"]) == ("completed", STEPS, 1, 2)
    assert read_states(result) == final_states(2)
    assert result.metrics["number"] == final_states(2)["rank-0.json"][1]


@pytest.mark.parametrize(
    ("trainable", "rank"), long_after(1, [(t, r) for t in (Sharded, train_sharded) for r in (0, 1)])
)
def test_after_the_death_of_a_rank_all_continue_from_the_last_commit(
    trainable: Any, rank: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = train(tmp_path, trainable, {"rank": rank, "at": 5, "does": "die"})
    assert (result.status, result.step, result.attempts) == ("completed", STEPS, 2)
    assert read_states(result) == final_states(2)
    assert f"rank {rank}: the trial's process ended by SIGKILL" in caplog.text


@pytest.mark.parametrize(("before", "after"), long_after(1, [(1, 2), (2, 1), (1, 9)]))
def test_each_attempt_has_as_many_ranks_as_there_are_devices(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    devices = iter([before, after])
    monkeypatch.setattr(usage_meter, "count_available_cpus", lambda: next(devices))
    monkeypatch.setattr(usage_meter, "list_gpus", lambda _: ())
    with caplog.at_level(logging.INFO):
        result = train(tmp_path, train_elastic, {"dies_at": 5}, processes_per_trial=(1, 3))
    assert (result.status, result.step, result.attempts) == ("completed", STEPS, 2)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        assert json.loads((Path(directory) / "sizes.json").read_text()) == [before] * 4 + [min(after, 3)] * 2
    assert f"this attempt trains with {before} process" in caplog.text


def test_the_error_of_a_rank_ends_the_trial_for_all_within_seconds(tmp_path: Path) -> None:
    with pytest.raises(pt.TrialFailed, match="rank 1: ValueError: this rank raises"):
        train(tmp_path, Sharded, {"rank": 1, "at": 3, "does": "raise", "others": "hang"})
    wait_until(lambda: not any(b"trial" in read_proc(pid, "comm") for pid in find_children(os.getpid())))


def test_the_error_of_a_rank_counts_where_rank_0_has_trained_its_last_step_before(tmp_path: Path) -> None:
    with pytest.raises(pt.TrialFailed, match="rank 1: ValueError: this rank raises late"):
        train(tmp_path, raise_late, {"step": 2}, stop={"step": 3}, checkpoint=None)


def test_an_error_of_a_rank_after_its_end_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = train(tmp_path, raise_late, {"step": 9}, stop={"step": 3}, checkpoint=None)
    assert (result.status, result.step) == ("completed", 3)
    assert "after the end of the trial: rank 1: ValueError: it raises as it leaves" in caplog.text


def test_a_rank_that_returns_while_rank_0_trains_on_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = train(tmp_path, report_on_rank_0, stop={"step": 3}, checkpoint=None)
    assert (result.status, result.step) == ("completed", 3)
    assert caplog.text.count("rank 1 has returned, but rank 0 reported another step") == 1


def test_a_checkpoint_that_one_rank_saves_alone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(pt.TrialFailed, match="rank 1 reported a checkpoint at step 2, but rank 0 did not"):
        train(tmp_path, train_sharded, {"rank": 0, "does": "withhold"})


@pytest.mark.long
def test_a_slow_rank_fails_its_save_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "PartCollector", lambda size: PartCollector(size, timedelta(seconds=0.5)))
    with caplog.at_level(logging.INFO):
        result = train(tmp_path, wait_at_step, {"rank": 1, "step": 2, "until": str(tmp_path / "go-on")})
    assert (result.status, result.attempts) == ("completed", 1)
    assert "step 2 is not committed: rank 1 did not add a part within 0.5 s; training continues" in caplog.text
    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata() is not None
    assert read_states(result).keys() == {"rank-0.json", "rank-1.json"}
    assert result.step == STEPS


def test_a_group_that_is_asked_to_stop_saves_one_step_and_continues_from_it(tmp_path: Path) -> None:
    patient = "tests.trainables.grouped:save_on_request"
    options: dict[str, Any] = {"target": str(tmp_path), "num_samples": 1, "metric": "loss", "processes_per_trial": 2}
    first = pt.tune(patient, experiment="e", stop={"step": 200}, time_budget_seconds=4, **options)
    [trial] = first.trials.values()
    assert trial.status == "interrupted"
    assert 0 < trial.step < 200
    result = pt.tune(patient, experiment="e", stop={"step": trial.step + 3}, **options)
    [resumed] = result.trials.values()
    assert (resumed.status, resumed.step, resumed.recomputed_steps) == ("completed", trial.step + 3, 0)


def test_ranks_obey_a_scheduler_that_pauses_and_stops(tmp_path: Path) -> None:
    results = pt.tune(
        Sharded,
        {"x": pt.grid_search([1, 2])},
        target=str(tmp_path),
        experiment="e",
        metric="loss",
        mode="min",
        scheduler=pt.ASHA(max_t=2, grace_period=1, reduction_factor=2, variant="promotion"),
        max_concurrent_trials=1,
        processes_per_trial=2,
    )
    assert sorted((trial.status, trial.step) for trial in results.trials.values()) == [("completed", 2), ("pruned", 1)]


def test_ranks_need_processes() -> None:
    with pytest.raises(pt.InvalidInput, match="processes_per_trial=2: expected isolation='process'"):
        pt.durable_trainable(Sharded, target="./runs", isolation="thread", processes_per_trial=2)
    with pytest.raises(pt.InvalidInput, match="processes_per_trial"):
        pt.durable_trainable(Sharded, target="./runs", processes_per_trial=0)


def train_launched(target: Path, trainable: Any, config: dict[str, Any]) -> pt.TrialResult:
    return pt.durable_trainable(trainable, config, target=str(target), experiment="e", stop={"step": STEPS})


@pytest.mark.parametrize(
    ("trainable", "config"),
    long_after(
        1,
        [
            (launch_ranks, {"by": "spawn"}),
            (launch_ranks, {"by": "fork"}),
            (launch_ranks, {"by": "fork", "rank": 0, "does": "join late"}),
            (launch_ranks, {"by": "fork", "rank": 1, "does": "join late"}),
            (run_programs, {}),
            (run_as_open_mpi, {}),
            (run_as_mpich, {}),
            pytest.param(run_mpirun, {}, marks=pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun")),
        ],
    ),
    ids=["spawned", "forked", "rank 0 comes last", "rank 1 comes last", "programs", "Open MPI", "MPICH", "mpirun"],
)
def test_ranks_of_a_launcher_join_the_trial_and_have_one_checkpoint(
    trainable: Any, config: dict[str, Any], tmp_path: Path
) -> None:
    result = train_launched(tmp_path, trainable, config)
    assert (result.status, result.step, result.attempts) == ("completed", STEPS, 1)
    assert read_states(result) == final_states(2)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_copy_of_the_trials_program_is_a_rank(rank: int, tmp_path: Path) -> None:
    result = train_launched(tmp_path, restart_program, {"rank": rank, "at": 5, "does": "die"})
    assert (result.status, result.step, result.attempts) == ("completed", STEPS, 2)
    assert read_states(result) == final_states(2)


def test_a_class_may_start_a_second_copy_too(tmp_path: Path) -> None:
    result = train_launched(tmp_path, RestartsItsProgram, {})
    assert (result.status, result.step, result.attempts) == ("completed", STEPS, 1)
    assert read_states(result) == final_states(2)


def test_what_a_function_with_a_second_copy_returns_is_its_last_step_and_every_save_is_committed(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"target": str(tmp_path), "experiment": "e", "sync": pt.SyncConfig(commit="async")}
    result = pt.durable_trainable(restart_and_return, {"steps": STEPS}, **options)
    assert (result.status, result.step, result.attempts) == ("completed", STEPS, 1)
    assert result.metrics["loss"] == 0.0
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        last = {path.name: path.read_text() for path in Path(directory).glob("rank-*")}
    assert last == {"rank-0": str(STEPS - 1), "rank-1": str(STEPS - 1)}
    [attempt] = pt.load_results(str(tmp_path), "e").cost.attempts
    assert attempt.rank_ends == ()


def test_a_framework_with_another_number_of_processes_than_the_trial_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pt.TrialFailed, match="Trainer: expected 1 process, like the trial, found 2"):
        train_launched(tmp_path, train_with_two, {})


def test_a_second_copy_after_a_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pt.TrialFailed, match=r"expected a launch of the ranks before the first pt\.report"):
        train_launched(tmp_path, restart_late, {})


def test_a_second_copy_of_the_trials_program_without_a_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pt.TrialFailed, match=r"found a copy of the trial's own program .* processes_per_trial=N"):
        train_launched(tmp_path, restart_without_rank, {})


@pytest.mark.parametrize("rank", long_after(1, [0, 1]))
def test_after_the_death_of_a_launched_rank_all_continue_from_the_last_commit(rank: int, tmp_path: Path) -> None:
    result = train_launched(tmp_path, launch_ranks, {"by": "fork", "rank": rank, "at": 5, "does": "die"})
    assert (result.status, result.step, result.attempts) == ("completed", STEPS, 2)
    assert read_states(result) == final_states(2)


@pytest.mark.parametrize(
    "launcher",
    long_after(
        1,
        [
            {"signal": signal.SIGKILL},
            {"signal": signal.SIGKILL, "check": True},
            {"signal": signal.SIGTERM},
            {"signal": signal.SIGTERM, "exits": 0},
            {"signal": signal.SIGTERM, "exits": 0, "check": True},
            {"signal": signal.SIGTERM, "exits": 3},
        ],
    ),
    ids=str,
)
def test_the_end_of_a_launcher_completes_no_trial_whose_rank_0_has_not_ended(
    launcher: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_RANK_EXIT_TIMEOUT", timedelta(seconds=1))
    result = train_launched(tmp_path, lose_launcher, launcher)
    assert (result.status, result.step, result.attempts) == ("completed", STEPS, 2)
    assert read_states(result) == final_states(2)


def test_a_second_process_of_a_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pt.TrialFailed, match="rank 0 of 2: this trial already has that rank"):
        train_launched(tmp_path, "tests.trainables.grouped:join_twice", {})


@pytest.mark.long
def test_a_rank_that_holds_more_messages_than_its_pipe_blocks_no_other(tmp_path: Path) -> None:
    result = train(tmp_path, start_late, {"rank": 1, "steps": 3000}, stop=None, checkpoint=None)
    assert (result.status, result.step, result.attempts) == ("completed", 3000, 1)


@pytest.mark.long
@pytest.mark.parametrize("trainable", long_after(1, [run_with_workers, run_one_rank]))
def test_a_worker_of_a_rank_is_no_rank_and_one_rank_is_one(trainable: Any, tmp_path: Path) -> None:
    result = train_launched(tmp_path, trainable, {})
    assert (result.status, result.step, result.attempts) == ("completed", STEPS, 1)


def train_with_mean(target: Path, trainable: Any, config: dict[str, Any], **options: Any) -> pt.TrialResult:
    return train(target, trainable, config, metrics_from="mean", **{"stop": None, **options})


def test_the_metrics_of_a_step_are_the_mean_over_all_ranks_of_each_number_that_all_report(tmp_path: Path) -> None:
    result = train_with_mean(tmp_path, report_different, {"steps": 3})
    assert (result.status, result.step) == ("completed", 4)
    assert result.metrics == {"loss": 3.0, "last": True}
    third = pt.load_results(str(tmp_path), "e").curve("trial")[2]
    assert third.metrics == {"loss": 8.0, "eval": {"loss": 8.0}, "epoch": 3, "name": "rank 0", "first": 7}


def test_the_stop_criterion_and_the_checkpoint_have_the_mean(tmp_path: Path) -> None:
    result = train_with_mean(tmp_path, Different, {}, stop={"score": 6})
    assert (result.step, result.metrics["score"]) == (5, 6.0), "rank 0 alone reaches it at step 6"
    [*_, last] = pt.load_results(str(tmp_path), "e").trials["trial"].checkpoints
    assert (last.step, last.metrics["score"]) == (5, 6.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "step", "message"),
    [
        (1, 2, "rank 1 reported step 4 after rank 0 had ended"),
        (1, 3, "rank 1 reported step 4 after rank 0 had ended"),
        (0, 1, "rank 1 ended before step 5, for which rank 0 reported metrics"),
    ],
)
def test_a_rank_that_reports_once_more_than_the_others_fails_the_mean_and_is_named(
    rank: int, step: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(pt.TrialFailed, match=message):
        train_with_mean(tmp_path, report_different, {"steps": 3, "rank": rank, "at": step})


@pytest.mark.parametrize("trainable", long_after(1, [restart_program, launch_ranks, run_programs]))
def test_the_error_of_a_launched_rank_is_the_cause_of_the_trials_end(trainable: Any, tmp_path: Path) -> None:
    with pytest.raises(pt.TrialFailed, match="rank 1: ValueError: this rank raises"):
        train_launched(tmp_path, trainable, {"by": "fork", "rank": 1, "at": 3, "does": "raise"})


@pytest.mark.long
def test_silence_counts_only_once_all_ranks_have_loaded(tmp_path: Path) -> None:
    result = train(tmp_path, SlowSetup, silence_timeout_seconds=2)
    assert (result.status, result.attempts) == ("completed", 1)


@pytest.mark.long
def test_launched_ranks_have_a_mean_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"target": str(tmp_path), "experiment": "e", "stop": {"step": STEPS}}
    result = pt.durable_trainable(launch_ranks, {"by": "fork"}, metrics_from="mean", **options)
    numbers = [number for _, number in final_states(2).values()]
    assert result.metrics["number"] == pytest.approx(sum(numbers) / 2)
