"""Trainables with code that keeps running: a fork that exits, a thread that reports, an endless cleanup."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt
from tests.trainables.witness import hold, record_act

Config = Mapping[str, Any]
Metrics = Mapping[str, Any]


class _Stateless(pt.Trainable):
    def setup(self, config: Config) -> None:
        self.config = config

    def reset_config(self, config: Config) -> bool:
        self.setup(config)
        return True

    def step(self) -> Metrics:
        return {"loss": 1.0}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "state").touch()

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        del checkpoint_dir


class ForksInAStep(_Stateless):
    """Forks a child in each step, which exits by `sys.exit`; cleanup records its process."""

    def reset_config(self, config: Config) -> bool:
        del config
        return False

    def step(self) -> Metrics:
        if (child := os.fork()) == 0:
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        return {"code": os.waitstatus_to_exitcode(status), "pid": os.getpid()}

    def cleanup(self) -> None:
        record_act(self.config["witness"], "cleanup", os.getpid())


class LateThread(_Stateless):
    """The first trial starts a thread that reports in the step of the second; the second reports its result."""

    def setup(self, config: Config) -> None:
        self.config = config
        self.go, self.became = threading.Event(), ""
        self.thread = threading.Thread(target=self._report, daemon=True)
        self.thread.start()

    def reset_config(self, config: Config) -> bool:
        self.config = config
        self.go.set()
        self.thread.join()
        return True

    def step(self) -> Metrics:
        return {"loss": 1.0, "became": self.became}

    def _report(self) -> None:
        self.go.wait()
        try:
            pt.report({"loss": 666.0})
        except Exception as error:  # noqa: BLE001  any error is reported to the test
            self.became = f"{type(error).__name__}: {error}"


class NeverCleansUp(_Stateless):
    """Its cleanup waits for a file that nobody makes."""

    def cleanup(self) -> None:
        hold(self.config["gate"], seconds=600)
