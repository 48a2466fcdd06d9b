"""Relative paths are resolved where they are passed; checkpoint entries that cannot be saved are refused."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.artifact_sync import TargetSyncer
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import get_absolute_sys_path
from prefect_tune.blocks import FsspecTarget
from prefect_tune.callbacks import SearchInfo
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.messages.process_messages import CheckpointSaved, TrainableLoaded
from prefect_tune.loggers import FileLogger
from prefect_tune.runtime.load_named import load_object
from tests.fakes.outcomes import require_failure
from tests.fakes.trial_processes import LogRecorder, make_log, make_start, receive_messages
from tests.long_cases import long_after
from tests.trainables.processes import reporters
from tests.trainables.unreadable import Unreadable, report_unreadable

LOG = make_log(LogRecorder())


@pytest.mark.parametrize("path", long_after(2, ["checkpoint", "../here/checkpoint", "latest"]))
@pytest.mark.parametrize("async_commit", [True, False])
def test_a_checkpoints_relative_path_is_handed_over_as_the_real_one(
    pool: TrialProcessPool, tmp_path: Path, path: str, async_commit: bool
) -> None:
    working_dir = tmp_path / "here"
    (working_dir / "checkpoint").mkdir(parents=True)
    (working_dir / "checkpoint" / "weights").write_text("these")
    (working_dir / "latest").symlink_to("checkpoint")
    staging = tmp_path / "staging"
    staging.mkdir()
    config = {"seen_from": str(working_dir), "path": path}
    start = make_start(reporters.report_directory, tmp_path, config, async_commit=async_commit, staging=str(staging))
    with pool.open_process(start, LOG) as channel:
        assert isinstance(channel.receive(timedelta(seconds=60)), TrainableLoaded)
        step = channel.receive(timedelta(seconds=60))
        channel.send(CheckpointSaved(step=1))
        channel.receive(timedelta(seconds=60))
    directory = Path(step.checkpoint or "")
    assert (directory.parent == staging) if async_commit else (directory == working_dir / "checkpoint")
    assert (directory / "weights").read_text() == "these"


def test_a_relative_path_that_is_no_directory_is_refused_with_the_directory_it_is_seen_from(
    pool: TrialProcessPool, tmp_path: Path
) -> None:
    config = {"seen_from": str(tmp_path), "path": "nothing"}
    with pool.open_process(make_start(reporters.report_directory, tmp_path, config), LOG) as channel:
        failure = require_failure(receive_messages(channel)[-1])
    assert f"expected a local directory in the working directory {tmp_path}" in str(failure.reason)


def test_a_checkpoint_on_a_target_is_not_mistaken_for_a_directory_of_the_same_name(
    pool: TrialProcessPool, tmp_path: Path
) -> None:
    (tmp_path / "bucket" / "checkpoint").mkdir(parents=True)
    config = {"seen_from": str(tmp_path)}
    with pool.open_process(make_start(reporters.report_remote_checkpoint, tmp_path, config), LOG) as channel:
        failure = require_failure(receive_messages(channel)[-1])
    assert "do not report a checkpoint that is already on a target" in str(failure.reason)


def test_a_trial_imports_from_where_its_supervisor_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "code", "__editable__.finder", "/usr/lib/nothing", "absent"])
    unchanged = ("__editable__.finder", "/usr/lib/nothing", "absent")
    assert get_absolute_sys_path() == (str(tmp_path), str(tmp_path / "code"), *unchanged)


def test_a_removed_working_directory_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", "code"])
    assert get_absolute_sys_path() == ("", "code")
    with pytest.raises(InvalidInput, match=r"No module named 'no_such_module'.*directory <removed>"):
        load_object("no_such_module:train")


def test_a_syncer_sends_the_directory_that_was_meant_when_it_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("meant", "other"):
        (tmp_path / name / "artifacts").mkdir(parents=True)
        (tmp_path / name / "artifacts" / "log").write_text(name)
    syncer = TargetSyncer()
    run = TargetSyncer._run_command

    def run_elsewhere(self: TargetSyncer, command: Any) -> None:
        os.chdir(tmp_path / "other")
        run(self, command)

    monkeypatch.chdir(tmp_path / "meant")
    monkeypatch.setattr(TargetSyncer, "_run_command", run_elsewhere)
    syncer.sync_up("artifacts", str(tmp_path / "remote"))
    syncer.wait()
    syncer.sync_down(str(tmp_path / "remote"), "back")  # now resolved in "other"
    syncer.wait()
    assert (tmp_path / "other" / "back" / "log").read_text() == "meant"
    syncer.close()


def test_a_logger_goes_on_writing_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger = FileLogger("logs")
    logger.setup(SearchInfo("e", "file:///target", None))
    monkeypatch.chdir("/")
    assert logger.make_trial_folder("t") == tmp_path / "logs" / "e" / "t"


@pytest.mark.parametrize("location", ["local://runs", "file://runs/x", "local://./runs"])
def test_a_target_on_this_machine_has_an_absolute_path(location: str) -> None:
    with pytest.raises(ValueError, match="expected an absolute path"):
        FsspecTarget(location=location)


# An entry of a checkpoint that cannot be saved is an error of the trainable, at its first save.


KINDS = ["a link to itself", "a long path", "many levels", "a name that is not UTF-8", "a pipe", "a device"]


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize("kind", long_after(1, KINDS))
@pytest.mark.parametrize("trainable", [Unreadable, report_unreadable])
def test_an_entry_that_cannot_be_saved_fails_the_first_attempt_with_its_path(
    trainable: Any, kind: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"stop": {"step": 2}, "checkpoint": pt.Cadence(every_steps=1)}
    with pytest.raises(pt.TrialFailed, match=r"failure 1 of the trainable.*/bad"):
        pt.durable_trainable(trainable, {"kind": kind}, target=str(tmp_path), experiment="e", **options)
    [trial] = pt.load_results(str(tmp_path), "e").trials.values()
    assert trial.attempt == 1
