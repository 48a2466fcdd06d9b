"""Trainables that fail as `config["fails"]` says, at step `config["at"]`; the file `config["ledger"]` counts."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import prefect_tune as pt
from tests.trainables.witness import record_act


def _raise() -> NoReturn:
    raise RuntimeError("the user's own trouble")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segfault() -> None:
    ctypes.string_at(0)


def _hang() -> None:
    time.sleep(1000)


def _exit() -> NoReturn:
    sys.exit(3)


def _exit_at_once() -> NoReturn:
    os._exit(0)


def _run_out_of_memory() -> NoReturn:
    raise MemoryError("no more of it")


_FAILURES: Mapping[str, Callable[[], None]] = {
    "raise": _raise,
    "kill": _kill,
    "segfault": _segfault,
    "hang": _hang,
    "exit": _exit,
    "leave": _exit_at_once,
    "exhaust": _run_out_of_memory,
}


class Counter(pt.Trainable):
    """Counts; fails `config["times"]` times in `config["place"]`: "step", "setup", "save", "load" or "cleanup"."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.count = self.loaded = 0
        self._maybe_fail("setup")

    def step(self) -> Mapping[str, Any]:
        record_act(self.config.get("witness"), "begin", self.count + 1)
        self._maybe_fail_after_restore()
        self.count += 1
        time.sleep(float(self.config.get("step_seconds", 0)))
        self._maybe_fail("step")
        for number in range(int(self.config.get("prints", 0))):
            print(f"line {number} of step {self.count} ", "x" * 100)
        return self._metrics()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "count.json").write_text(json.dumps(self.count))
        self._maybe_fail("save")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.count = json.loads(Path(checkpoint_dir, "count.json").read_text())
        self.loaded = self.count
        record_act(self.config.get("witness"), "loaded", self.count)
        self._maybe_fail("load")

    def cleanup(self) -> None:
        record_act(self.config.get("witness"), "cleanup", self.count)
        self._maybe_fail("cleanup")

    def _metrics(self) -> Mapping[str, Any]:
        done = {"done": True} if self.config.get("done_at") == self.count else {}
        if "not_a_number_at" in self.config:
            import numpy as np  # here: all other trials save the 0.2 s of CPU time that it takes

            loss = np.float32("nan" if self.config["not_a_number_at"] == self.count else 1 / self.count)
            return {"count": np.int64(self.count), "loss": loss, **done}
        return {"count": self.count, "loss": 1 / self.count, **done}

    def _maybe_fail_after_restore(self) -> None:
        """Fail after a restore of the step that the file `config["poison"]` names, as the file says."""
        poison = Path(self.config.get("poison", ""))
        if poison.is_file():
            step, failure = poison.read_text().split()
            if self.loaded == self.count == int(step):
                _FAILURES[failure]()

    def _maybe_fail(self, method: str) -> None:
        config = self.config
        if config.get("place", "step") == method and config.get("at") in (self.count, "always"):
            failures = Path(config["ledger"])
            count = len(failures.read_text()) if failures.exists() else 0
            if count < config.get("times", 1):
                failures.write_text("x" * (count + 1))
                _FAILURES[config["fails"]]()


def count(config: Mapping[str, Any]) -> None:
    """Report five steps an epoch, the last with a checkpoint."""
    step = 0
    if checkpoint := pt.get_checkpoint():
        with checkpoint.as_directory() as directory:
            step = json.loads(Path(directory, "count.json").read_text())
        record_act(config.get("witness"), "loaded", step)
    while True:
        step += 1
        record_act(config.get("witness"), "begin", step)
        if step % 5:
            pt.report({"count": step})
            continue
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "count.json").write_text(json.dumps(step))
            pt.report({"count": step}, checkpoint=pt.Checkpoint.from_directory(directory))


def count_and_return(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metrics without a report."""
    trial = pt.get_trial()
    assert trial.config == config
    assert trial.directory.is_dir()
    return {"score": config["score"] * 2, "attempt": trial.attempt}
