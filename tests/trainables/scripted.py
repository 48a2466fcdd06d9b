"""A trainable whose losses are in its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt


class Scripted(pt.Trainable):
    """Reports `config["losses"]`, one a step, and is done after the last; where there is none it raises."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.losses = config["losses"]
        self.count = 0

    def step(self) -> Mapping[str, Any]:
        if not self.losses:
            raise ValueError("no losses")
        self.count += 1
        loss = self.losses[self.count - 1]
        return {"loss": loss, "eval": {"size": self.count}, "done": self.count == len(self.losses)}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "count").write_text(str(self.count))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.count = int(Path(checkpoint_dir, "count").read_text())
