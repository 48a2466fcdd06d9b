"""A trial sees the command line of its script; its process is started with the flags of the script's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import argparse, json, logging, multiprocessing, os, subprocess, sys, tempfile

def child(_):
    return [sys.argv, sys.flags.optimize]

def train(config):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("rest", nargs="*")
    found = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        of_child = pool.map(child, [0])
    return {
        "lr": found.lr, "argv": sys.argv, "child": of_child, "optimize": sys.flags.optimize, "debug": __debug__,
        "warnings": sys.warnoptions, "options": sys._xoptions["own"], "utf8": sys.flags.utf8_mode,
        "hash": os.environ["PYTHONHASHSEED"],
    }

if __name__ == "__main__":
    from prefect_tune.attempt.processes.process_pool import TrialProcessPool
    from tests.fakes.trial_processes import messages_of, start_of

    for reuse in ("auto", "never"):
        with tempfile.TemporaryDirectory() as folder, TrialProcessPool(slots=1, reuse=reuse) as pool:
            with pool.process(start_of(train, folder), logging.getLogger()) as channel:
                *reports, end = messages_of(channel)
        metrics = [dict(each.report.metrics) for each in reports if each.type == "step-done"]
        print(json.dumps([getattr(end, "message", ""), metrics]))
"""


def test_a_trial_has_the_arguments_and_the_flags_of_its_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    flags = ["-OO", "-W", "ignore::UserWarning", "-X", "own=value", "-X", "utf8"]
    arguments = [str(script), "--lr", "0.5", "-5", "a b", "é"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "7"}
    ran = subprocess.run(
        [sys.executable, *flags, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    expected = {
        "lr": 0.5,
        "argv": arguments,
        "child": [[arguments, 2]],
        "optimize": 2,
        "debug": False,
        "warnings": ["ignore::UserWarning"],
        "options": "value",
        "utf8": 1,
        "hash": "7",
    }
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [["", [expected]]] * 2


@pytest.mark.parametrize("program", ["prefect.engine", "prefect_tune.drills.training"])
def test_the_arguments_of_a_program_that_is_not_the_users_are_not_for_its_trials(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from prefect_tune.attempt.processes.process_channel import command_of_trials

    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=program))
    monkeypatch.setattr(sys, "argv", ["/site/program.py", "not", "for trials"])
    assert command_of_trials("a.module", 5, 7)[-5:] == ["-m", "a.module", "5", "7", "/site/program.py"]
