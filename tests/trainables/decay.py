"""A trainable and a callback that the experiments in `tests/data/written_by_*` name: they must stay here."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.models import StepReport


class Decay(pt.Trainable):
    """A loss that decays at `config["rate"]`; each step adds a line to `notes.txt` in the trial's directory.

    Step `config["fails_at"]` raises. In the first attempt each step takes `config["first_attempt_step_seconds"]`.
    """

    def setup(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.count = 0

    def step(self) -> Mapping[str, Any]:
        trial = pt.get_trial()
        if trial.attempt == 1:
            time.sleep(float(self.config.get("first_attempt_step_seconds", 0)))
        self.count += 1
        if self.count == self.config.get("fails_at"):
            raise ValueError(f"step {self.count} fails")
        with (trial.directory / "notes.txt").open("a") as notes:
            notes.write(f"step {self.count}\n")
        return {"loss": math.exp(-float(self.config["rate"]) * self.count), "count": self.count}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "count").write_text(str(self.count))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.count = int(Path(checkpoint_dir, "count").read_text())


class StepCounter(pt.Callback):
    """Counts all steps of a search."""

    def __init__(self) -> None:
        self.count = 0

    def on_trial_result(self, trial: Trial, report: StepReport) -> None:
        del trial, report
        self.count += 1

    def get_state(self) -> Mapping[str, object]:
        return {"count": self.count}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
