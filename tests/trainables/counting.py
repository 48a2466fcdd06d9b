"""The base of trainables that count their steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt


class Counting(pt.Trainable):
    """Saves and restores `count`, the number of steps; `step` has to count."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.count = 0

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "count").write_text(str(self.count))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.count = int(Path(checkpoint_dir, "count").read_text())
