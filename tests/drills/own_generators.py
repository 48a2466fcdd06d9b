"""A trainable of several ranks: each has a generator and a file of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt


class OwnGenerators(pt.Trainable):
    """Adds a drawn number in each step, on each rank; `forgets` is a rank that does not save its generator, or None."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.rank, self.forgets = pt.get_trial().rank, config["forgets"]
        self.random, self.total = random.Random(self.rank), 0.0

    def step(self) -> Mapping[str, object]:
        self.total += self.random.random()
        return {"total": self.total}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = None if self.rank == self.forgets else self.random.getstate()
        Path(checkpoint_dir, f"rank-{self.rank}.json").write_text(json.dumps([self.total, state]))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.total, state = json.loads(Path(checkpoint_dir, f"rank-{self.rank}.json").read_text())
        if state is not None:
            version, numbers, gauss = state
            self.random.setstate((version, tuple(numbers), gauss))


def own_generators(config: Mapping[str, Any]) -> None:
    """Train the same as a function."""
    trained = OwnGenerators()
    trained.setup(config)
    if checkpoint := pt.get_checkpoint():
        with checkpoint.as_directory() as directory:
            trained.load_checkpoint(directory)
    while True:
        metrics = trained.step()
        new = pt.get_trial().new_checkpoint_dir()
        trained.save_checkpoint(str(new))
        pt.report(metrics, checkpoint=pt.Checkpoint.from_directory(new))
