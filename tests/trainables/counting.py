"""Trainables that count their steps, and save and restore the count."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt
from tests.trainables.witness import hold, record_act


class Counting(pt.Trainable):
    """Saves and restores `count`, the number of steps; subclasses define `step`."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.count = 0

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "count").write_text(str(self.count))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.count = int(Path(checkpoint_dir, "count").read_text())


class Scripted(Counting):
    """Reports `config["losses"]`, one per step, and is done after the last; raises if there is none."""

    def step(self) -> Mapping[str, Any]:
        losses = self.config["losses"]
        if not losses:
            raise ValueError("no losses")
        self.count += 1
        return {"loss": losses[self.count - 1], "eval": {"size": self.count}, "done": self.count == len(losses)}


class Patient(Counting):
    """Waits before its third step until the file `config["until"]` exists; makes a file beside it first."""

    def step(self) -> Mapping[str, Any]:
        if self.count == 2:
            Path(f"{self.config['until']}.waits-{os.getpid()}").touch()
        while self.count == 2 and not Path(self.config["until"]).exists():
            time.sleep(0.02)
        self.count += 1
        return {"loss": 1 / self.count}


class Fragile(Counting):
    """Its loss is `config["x"]`. Raises at step 2 if `config["breaks"]`; step 3 waits for the file `config["gate"]`."""

    def step(self) -> Mapping[str, Any]:
        self.count += 1
        time.sleep(float(self.config.get("step_seconds", 0)))
        if self.count == 2 and self.config.get("breaks"):
            raise ArithmeticError(f"x is too large: {self.config['x']}")
        record_act(self.config.get("witness"), "trained", self.count)
        if self.count == 3:
            hold(self.config.get("gate"))
        return {"loss": float(self.config["x"])}


class Descent(Counting):
    """A falling loss: fastest where `rate` is 0.1; the larger `width`, the lower its end.

    From step `config["lingers_at"]` on each step takes five seconds, until the file `config["hurry"]` exists. If `rate`
    is above `config["breaks_above"]`, step 2 raises until the file `config["mended"]` exists.
    """

    def step(self) -> Mapping[str, Any]:
        if self.count + 1 >= self.config.get("lingers_at", math.inf):
            hold(self.config["hurry"], seconds=5)
        self.count += 1
        self._maybe_break()
        return {"loss": self._floor + math.exp(-self._speed * self.count)}

    def _maybe_break(self) -> None:
        too_fast = float(self.config["rate"]) > float(self.config.get("breaks_above", math.inf))
        if too_fast and self.count == 2 and not Path(self.config["mended"]).exists():
            raise ArithmeticError(f"diverged: rate {self.config['rate']} is too large")

    @property
    def _speed(self) -> float:
        return 0.05 / (1 + math.log10(float(self.config["rate"]) / 0.1) ** 2)

    @property
    def _floor(self) -> float:
        return 1 / (8 + float(self.config.get("width", 16)))
