"""The trials of a script or notebook have its definitions in `__main__`, its arguments and its flags."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_tune.runtime.load_named import pickle_to_hex
from tests.fakes.outcomes import require_failure, require_reason
from tests.fakes.trial_processes import (
    LogRecorder,
    make_log,
    make_start,
    receive_messages,
    receive_metrics,
    supervised_process,
)

ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "/usr/bin:/bin"}
SCRIPT = """
import json, logging, multiprocessing, pathlib, pickle, sys
import prefect_tune as pt

class Layer:
    value = 2

class Model:
    def __init__(self, x):
        self.x, self.layer = x, Layer()

def squared(x):
    return Model(x * x)

def train(config):
    copies = pickle.loads(pickle.dumps({"model": Model(1), "train": train, "layer": Layer}))
    assert copies["train"] is train
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            pt.report({method: sum(model.x for model in pool.map(squared, [1, 2, 3]))})
    return {"x": config["x"]}

class Base(pt.Trainable):
    def setup(self, config):
        self.model = Model(config["x"])

    def save_checkpoint(self, directory):
        pathlib.Path(directory, "model").write_bytes(pickle.dumps([self.model, type(self), Base]))

class Digits(Base):
    def step(self):
        return {"x": self.model.x}

if __name__ == "__main__":
    from datetime import timedelta
    from prefect_tune.core.experiment.retention import Cadence
    from prefect_tune.core.messages.process_messages import CheckpointSaved
    from prefect_tune.attempt.processes.process_pool import TrialProcessPool
    from tests.fakes.trial_processes import make_start

    reuse, folder = sys.argv[1:]
    with TrialProcessPool(slots=1, reuse=reuse) as pool:
        for x in (1, 2):
            of_class = make_start(Digits, folder, {"x": x}, steps=1, cadence=Cadence())
            for start in (make_start(train, folder, {"x": x}), of_class):
                with pool.open_process(start, logging.getLogger()) as channel:
                    messages = [channel.receive(timedelta(seconds=60))]
                    while messages[-1] is None or messages[-1].type != "trial-ended":
                        messages.append(channel.receive(timedelta(seconds=60)))
                        if getattr(messages[-1], "checkpoint", None):
                            channel.send(CheckpointSaved(step=1))
                steps = [message for message in messages if message and message.type == "step-done"]
                error = messages[-1].raised and str(messages[-1].outcome.reason)
                print(json.dumps([error, *(dict(step.report.metrics) for step in steps)]))
"""


@pytest.mark.long
@pytest.mark.parametrize("is_notebook", [False, True], ids=["script", "notebook"])
@pytest.mark.parametrize("reuse", ["auto", "never"])
def test_a_trial_pickles_and_spawns_what_its_script_defines(tmp_path: Path, reuse: str, is_notebook: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    source, text = ("-", SCRIPT) if is_notebook else (str(script), "")  # from stdin, `__main__` has no file
    command = [sys.executable, source, reuse, str(tmp_path)]
    process = subprocess.run(command, env=ENVIRONMENT, input=text, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    pools = [{"fork": 14}, {"spawn": 14}, {"forkserver": 14}]
    assert lines == [line for x in (1, 2) for line in ([False, *pools, {"x": x}], [False, {"x": x}])]


def _spawn_process(config: dict[str, str]) -> dict[str, int | None]:
    """Train with a file that an earlier trial, another Python or a full disk may have left."""
    os.environ["PREFECT_TUNE_TRAINABLE"] = config["file"]
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    process.start()
    process.join()
    return {"code": process.exitcode}


_TRUNCATED = pickle_to_hex(_spawn_process)[:100]


class _NotInstalled:
    def __reduce__(self) -> tuple[object, ...]:
        return importlib.import_module, ("not_installed_here",)


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("no pickle", "its pickle cannot be loaded by Python 3.*ValueError: non-hexadecimal"),
        (_TRUNCATED, "its pickle cannot be loaded by Python 3.*UnpicklingError: pickle data was truncated"),
        (pickle_to_hex(_NotInstalled()), "ModuleNotFoundError: No module named 'not_installed_here'. Make the module"),
        (pickle_to_hex("a text"), "expected a function of the configuration, .* found str"),
        ("é", "'ascii' codec can't decode"),
    ],
    ids=["gone", "a text", "cut", "of a module that is not here", "of something else", "not even ASCII"],
)
def test_a_spawned_process_that_cannot_read_what_the_script_defines_says_so_and_goes_on(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    file, recorder = tmp_path / "left.trainable", LogRecorder()
    if text is not None:
        file.write_text(text)
    start = make_start(_spawn_process, tmp_path, {"file": str(file)}, steps=1)
    with supervised_process(start, make_log(recorder)) as channel:
        assert receive_metrics(channel) == {"code": 0}
    (line,) = recorder.reasons
    assert re.match(f"prefect-tune: a spawned process lacks the definitions of its trial's script: .*{reason}", line)


def _fail_unpickling(_config: object) -> None:
    raise AttributeError("Can't get attribute 'Model' on <module '__main__' (built-in)>")


def _call_breakpoint(_config: object) -> None:
    breakpoint()  # noqa: T100 - a user may forget one


@pytest.mark.long
@pytest.mark.parametrize(
    ("train", "advice"), [(_fail_unpickling, "advice-main-module"), (_call_breakpoint, "advice-no-terminal")]
)
def test_an_error_that_is_due_to_the_process_says_what_to_do(tmp_path: Path, train: object, advice: str) -> None:
    with supervised_process(make_start(train, tmp_path), make_log(LogRecorder())) as channel:
        failure = require_failure(receive_messages(channel)[-1])
    assert require_reason(failure).arguments["advice"]["code"] == advice


ARGUMENTS_SCRIPT = """
import argparse, json, logging, multiprocessing, os, subprocess, sys, tempfile

def child(_):
    return [sys.argv, sys.flags.optimize]

def train(config):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        child_flags = pool.map(child, [0])
    return {
        "lr": options.lr, "argv": sys.argv, "child": child_flags, "optimize": sys.flags.optimize, "debug": __debug__,
        "warnings": sys.warnoptions, "options": sys._xoptions["own"], "utf8": sys.flags.utf8_mode,
        "hash": os.environ["PYTHONHASHSEED"],
    }

if __name__ == "__main__":
    from prefect_tune.attempt.processes.process_pool import TrialProcessPool
    from tests.fakes.trial_processes import receive_messages, make_start

    for reuse in ("auto", "never"):
        with tempfile.TemporaryDirectory() as folder, TrialProcessPool(slots=1, reuse=reuse) as pool:
            with pool.open_process(make_start(train, folder), logging.getLogger()) as channel:
                *messages, end = receive_messages(channel)
        metrics = [dict(message.report.metrics) for message in messages if message.type == "step-done"]
        print(json.dumps([getattr(end, "message", ""), metrics]))
"""


def test_a_trial_has_the_arguments_and_the_flags_of_its_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ARGUMENTS_SCRIPT)
    arguments = [str(script), "--lr", "0.5", "-5", "a b", "é"]
    command = [sys.executable, "-OO", "-W", "ignore::UserWarning", "-X", "own=value", "-X", "utf8", *arguments]
    environment = {**ENVIRONMENT, "PYTHONHASHSEED": "7"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
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
    assert [json.loads(line) for line in process.stdout.splitlines()] == [["", [expected]]] * 2


@pytest.mark.parametrize("program", ["prefect.engine", "prefect_tune.drills.training"])
def test_the_arguments_of_a_program_that_is_not_the_users_are_not_for_its_trials(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from prefect_tune.attempt.processes.process_channel import make_program_command

    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=program))
    monkeypatch.setattr(sys, "argv", ["/site/program.py", "not", "for trials"])
    assert make_program_command("a.module", 5)[-5:] == ["-m", "a.module", "5", str(os.getpid()), "/site/program.py"]
