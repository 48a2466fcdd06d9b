"""Trainables that fail on demand, for searches."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt


class Moody(pt.Trainable):
    """Counts steps; `config["fails"]` says how, at step 2, and while the file `config["until"]` is missing."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.count = 0

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

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "count").write_text(str(self.count))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.count = int(Path(checkpoint_dir, "count").read_text())


def train(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the result at once."""
    return {"loss": float(config["x"])}


def silent(_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Report something else than what is asked for."""
    return {"accuracy": 1.0}
