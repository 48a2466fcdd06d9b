"""Trainables that fail on demand, for searches."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.trainables.counting import Counting


class Moody(Counting):
    """Counts steps; fails at step 2 as `config["fails"]` says, while the file `config["until"]` is missing."""

    def step(self) -> Mapping[str, Any]:
        self.count += 1
        if self.count == 2 and not Path(str(self.config.get("until", ""))).is_file():
            self._fail()
        return {"loss": 1.0 / self.count + float(self.config.get("x", 0))}

    def _fail(self) -> None:
        match self.config.get("fails"):
            case "raise":
                raise ValueError("in a mood")
            case "import":
                raise ImportError("in a mood for another package")
            case "kill":
                Path(str(self.config["until"])).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                pass


def train(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"loss": float(config["x"])}


def report_accuracy(_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lack the metric of the search."""
    return {"accuracy": 1.0}
