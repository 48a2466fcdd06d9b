"""A trainable that reports the configuration that it got."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt


class Echo(pt.Trainable):
    """Reports its configuration, and the `repr` of it, which shows the types of the values."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def step(self) -> Mapping[str, Any]:
        return {"loss": 1.0, "config": self.config, "text": repr(self.config)}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "saved").touch()

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        assert Path(checkpoint_dir, "saved").exists()
