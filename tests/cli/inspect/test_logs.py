"""What a trial printed last is in its journal, is shown when it fails, and is printed by `logs`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from tests.fakes.command_line import Run
from tests.fakes.untrusted import require_visible

pytestmark = pytest.mark.usefixtures("no_prefect_server")


def prints(config: dict[str, Any]) -> None:
    how = config["how"]
    if how == "silent":
        raise ValueError("no word")
    for number in range(30):
        print(f"line {number} of {how}")
    sys.stderr.write(f"\rbar 0%\rbar 50% of {how}")
    pt.report({"loss": 1.0})
    match how:
        case "raise":
            raise ValueError("no data")
        case "exit":
            os._exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hostile":
            os.write(1, b"\n\x1b]0;title\x07 \xff\xfe " + "\u202e".encode() + b"y" * 2**20)
            raise ValueError("hostile")


class BreaksInSetup(pt.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        print("opening the data")
        raise OSError(f"no data for {config['how']}")

    def step(self) -> dict[str, float]:
        return {"loss": 1.0}


def test_the_last_output_is_shown_where_a_trial_fails_and_logs_prints_that_of_each_attempt(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    target = str(tmp_path / "target")
    space = {"how": pt.grid_search(["work", "raise", "exit", "killed", "silent", "hostile"])}
    policy = pt.FailurePolicy(max_failures=0, max_machine_failures=0)
    pt.tune(prints, space, target=target, experiment="e", metric="loss", failures=policy, fail_fast=False)
    failed = [record.getMessage() for record in caplog.records if " failed: " in record.getMessage()]
    for trial, how in (("1", "raise"), ("2", "exit"), ("3", "killed")):
        (message,) = [text for text in failed if f" of {how}" in text]
        assert message.count(f"last output:\nline 11 of {how}\nline 12 of {how}\n") == 1
        assert message.endswith(f"line 29 of {how}\nbar 50% of {how}")
        for shown in (run("show", target, "e", "--trial", trial).out, run("logs", target, "e", trial).out):
            assert shown.count(f"\nline 29 of {how}\nbar 50% of {how}\n") == 1
            assert "line 10" not in shown
    assert "line 29" not in run("show", target, "e", "--trial", "0").out
    assert "line 29" not in run("show", target, "e").out
    done = run("logs", target, "e", "00000").out
    assert done.startswith("attempt 1: the trainable returned\nlast output:\nline 11 of work\n")
    assert done.endswith("bar 50% of work\n")
    silent = run("logs", target, "e", "4").out
    assert silent.startswith("attempt 1: ValueError: no word\nTraceback")
    assert silent.endswith("\nlast output:\n(none is stored)\n")
    assert "last output" not in run("show", target, "e", "--trial", "4").out
    for shown in (run("show", target, "e", "--trial", "5").out, run("logs", target, "e", "5").out):
        require_visible(shown)
        assert "y" * 8_000 in shown
        assert "y" * 8_193 not in shown
    (attempt,) = json.loads(run("logs", target, "e", "1", "--json").out)
    assert attempt["attempt"] == 1
    assert "ValueError: no data" in attempt["reason"]
    assert attempt["last_output"].splitlines()[-1] == "bar 50% of raise"
    assert json.loads(run("show", target, "e", "--trial", "1", "--json").out)["last_output"] == attempt["last_output"]
    for arguments, problem in ((["e"], "name one"), (["e", "9"], "no trial '9'"), (["x", "1"], "no experiment 'x'")):
        refused = run("logs", target, *arguments)
        assert (refused.code, problem in refused.err) == (2, True)


@pytest.mark.long
def test_the_output_of_ranks_has_their_names_and_a_single_training_needs_no_name_of_a_trial(
    tmp_path: Path, run: Run
) -> None:
    target = str(tmp_path / "target")
    pt.durable_trainable(prints, {"how": "work"}, target=target, experiment="t", processes_per_trial=2)
    printed = run("logs", target, "t").out
    assert "rank 0:\nline 11 of work\n" in printed
    assert "rank 1:\nline 11 of work\n" in printed


@pytest.mark.long
def test_each_attempt_of_a_class_that_fails_in_its_setup_has_its_output(tmp_path: Path, run: Run) -> None:
    target = str(tmp_path / "target")
    space = {"how": pt.grid_search(["a"])}
    saves_nothing = pt.Cadence(every_seconds=None, at_end=False)
    policy = pt.FailurePolicy(max_failures=1)
    with pytest.raises(pt.SearchFailed, match="no data for a"):
        pt.tune(
            BreaksInSetup,
            space,
            target=target,
            experiment="e",
            metric="loss",
            checkpoint=saves_nothing,
            failures=policy,
        )
    printed = run("logs", target, "e", "0").out
    for attempt in (1, 2):
        assert printed.count(f"attempt {attempt}: OSError: no data for a\n") == 1
    assert printed.count("OSError: no data for a\nlast output:\nopening the data\n") == 2
    assert "last output:\nopening the data\n" in run("show", target, "e", "--trial", "0").out
