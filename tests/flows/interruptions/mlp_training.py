"""A training that is interrupted: drivers that call it again and again, and its end, which no interruption changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.trial_transitions import Status, newest_checkpoint
from tests.fakes.trial_processes import wait_until
from tests.flows.driver import Driver, Drivers
from tests.flows.training import TRIAL, bytes_of_checkpoint, experiment_at, trial_at, undisturbed, violations
from tests.trainables.witness import acts_of


class MlpTraining:
    """One experiment of a training that saves every 5 steps."""

    def __init__(
        self, drivers: Drivers, target: StorageTarget, folder: Path, name: str, steps: int, **options: Any
    ) -> None:
        self.drivers = drivers
        self.target = target
        self.name = name
        self.steps = steps
        self.witness = folder / "witness"
        self.gate = folder / "gate"
        self.trainable = "tests.trainables.numpy_mlp:NumpyMlp"
        self.config: dict[str, Any] = {"witness": str(self.witness), "step_seconds": 0.02}
        self.options: dict[str, Any] = {"checkpoint": Cadence(every_steps=5), **options}

    def hold_at(self, step: int) -> None:
        """Have every attempt wait before `step` until the gate is opened."""
        self.config |= {"gate": str(self.gate), "gate_step": step}

    def start(self) -> Driver:
        where = {"target": self.target, "experiment": self.name, "stop": {"step": self.steps}}
        return self.drivers.start(self.trainable, self.config, **where, **self.options)

    def acts(self, act: str) -> Sequence[int]:
        """Return the steps at which an attempt has done this."""
        return [each.step for each in acts_of(self.witness) if each.act == act]

    def wait_until(self, condition: Callable[[], object], *, seconds: float = 90) -> None:
        log = self.drivers.last
        wait_until(condition, seconds=seconds, what=lambda: f"{self.committed()} committed\n{log.log[-3000:]}")

    def committed(self) -> int:
        """Return the step of the newest checkpoint."""
        trial = experiment_at(self.target, self.name).trials.get(TRIAL)
        newest = newest_checkpoint(trial) if trial else None
        return newest.step if newest else 0

    def require_identical_end(self, outcome: Mapping[str, Any] | None = None, at: StorageTarget | None = None) -> None:
        """Fail if the training has not ended as one that was not interrupted; `at` reads the target in another way."""
        truth, target = undisturbed(self.steps), at or self.target
        assert outcome is None or outcome.get("status") == "completed", outcome
        trial = trial_at(target, self.name)
        assert (trial.status, trial.metrics["state"]) == (Status.COMPLETED, truth.state[self.steps])
        assert violations(target, self.name, truth) == []
        last = trial.checkpoints[-1]
        assert bytes_of_checkpoint(target, self.name, last.step, last.sequence) == truth.files[self.steps]
