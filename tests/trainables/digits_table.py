"""A replayed training: each step reads the next epoch of a recorded learning curve."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import prefect_tune as pt
from tests.trainables.witness import record_act

ROWS, EPOCHS = 160, 27
_TABLE = Path(__file__).parents[1] / "data" / "digits_mlp_table.json.gz"


@lru_cache
def curves() -> list[list[float]]:
    """Return the validation errors of each configuration, epoch by epoch."""
    return [entry["err"] for entry in json.loads(gzip.decompress(_TABLE.read_bytes()))]


class DigitsTable(pt.Trainable):
    """Replays the learning curve of row `config["row"]`."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.epoch = 0

    def step(self) -> Mapping[str, Any]:
        time.sleep(float(self.config.get("step_seconds", 0)))
        error = curves()[int(self.config["row"])][self.epoch]
        self.epoch += 1
        record_act(self.config.get("witness"), "trained", self.epoch)
        return {"error": error, "row": self.config["row"]}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "epoch").write_text(str(self.epoch))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.epoch = int(Path(checkpoint_dir, "epoch").read_text())
        record_act(self.config.get("witness"), "loaded", self.epoch)
