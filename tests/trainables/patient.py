"""A trainable that continues when a file is there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt


class Patient(pt.Trainable):
    """Waits before its third step until `config["until"]` is there."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.until = Path(config["until"])
        self.count = 0

    def step(self) -> Mapping[str, Any]:
        while self.count == 2 and not self.until.exists():
            time.sleep(0.02)
        self.count += 1
        return {"loss": 1 / self.count}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "count").write_text(str(self.count))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.count = int(Path(checkpoint_dir, "count").read_text())
