"""A trainable of several ranks: each has a generator and a file of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt
from tests.drills.class_as_function import as_function


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


own_generators = as_function(OwnGenerators)
