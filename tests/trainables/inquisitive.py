"""A trainable that asks the user a question during training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt
from tests.trainables.witness import record_act


class Inquisitive(pt.Trainable):
    """Counts by one; before step `config["asks_at"]` it asks by how much from then on."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.steps, self.count, self.by = 0, 0, 1

    def step(self) -> Mapping[str, Any]:
        time.sleep(float(self.config.get("step_seconds", 0)))
        if self.steps + 1 == self.config.get("asks_at"):
            answer = pt.ask("By how much?", {"by": 1, "why": ["so", "or so"]}, save=self.save_checkpoint)
            self.by = int(answer["by"])
        self.steps += 1
        self.count += self.by
        record_act(self.config.get("witness"), "trained", self.steps)
        return {"count": self.count}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "state").write_text(f"{self.steps} {self.count} {self.by}")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.steps, self.count, self.by = map(int, Path(checkpoint_dir, "state").read_text().split())
        record_act(self.config.get("witness"), "loaded", self.steps)
