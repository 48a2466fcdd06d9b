"""Trainables that fail in every way a user's code can. `config["fails"]` says how, `config["at"]` at which step.

`config["ledger"]` is a file that counts the failures, so that the one that follows the last can go well.
"""

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


def _leave() -> NoReturn:
    os._exit(0)


def _exhaust() -> NoReturn:
    raise MemoryError("no more of it")


_WAYS: Mapping[str, Callable[[], None]] = {
    "raise": _raise,
    "kill": _kill,
    "segfault": _segfault,
    "hang": _hang,
    "exit": _exit,
    "leave": _leave,
    "exhaust": _exhaust,
}


class Counter(pt.Trainable):
    """Counts. Fails `config["times"]` times in `config["place"]` at step `config["at"]`.

    A place is "step", "setup", "save", "load" or "cleanup".
    """

    def setup(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.count = self.loaded = 0
        self._maybe_fail("setup")

    def step(self) -> Mapping[str, Any]:
        record_act(self.config.get("witness"), "begin", self.count + 1)
        self._maybe_die_of_poison()
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

    def _maybe_die_of_poison(self) -> None:
        """The file `config["poison"]` holds the step whose checkpoint is poison, and what it does."""
        poison = Path(self.config.get("poison", ""))
        if poison.is_file():
            step, way = poison.read_text().split()
            if self.loaded == self.count == int(step):
                _WAYS[way]()

    def _maybe_fail(self, place: str) -> None:
        config = self.config
        if config.get("place", "step") == place and config.get("at") in (self.count, "always"):
            failures = Path(config["ledger"])
            so_far = len(failures.read_text()) if failures.exists() else 0
            if so_far < config.get("times", 1):
                failures.write_text("x" * (so_far + 1))
                _WAYS[config["fails"]]()


def count(config: Mapping[str, Any]) -> None:
    """The function API: reports five steps an epoch, a checkpoint with the last."""
    at = 0
    if checkpoint := pt.get_checkpoint():
        with checkpoint.as_directory() as directory:
            at = json.loads(Path(directory, "count.json").read_text())
        record_act(config.get("witness"), "loaded", at)
    while True:
        at += 1
        record_act(config.get("witness"), "begin", at)
        if at % 5:
            pt.report({"count": at})
            continue
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "count.json").write_text(json.dumps(at))
            pt.report({"count": at}, checkpoint=pt.Checkpoint.from_directory(directory))


def count_and_return(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reports nothing, and returns its metrics."""
    trial = pt.get_trial()
    assert trial.config == config
    assert trial.directory.is_dir()
    return {"score": config["score"] * 2, "attempt": trial.attempt}
