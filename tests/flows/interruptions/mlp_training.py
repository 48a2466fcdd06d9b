"""A training that tests interrupt and resume, and its end, which no interruption changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.trial_transitions import Status, newest_checkpoint
from tests.fakes.trial_processes import wait_until
from tests.flows.driver import Driver, Drivers
from tests.flows.training import (
    TRIAL,
    digest_of_checkpoint,
    experiment_at,
    find_violations,
    reference_training,
    trial_at,
)
from tests.trainables.witness import acts_of


class MlpTraining:
    """One experiment that trains an MLP and saves every 5 steps."""

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
        """Hold every attempt before `step` until the file `gate` exists."""
        self.config |= {"gate": str(self.gate), "gate_step": step}

    def start(self) -> Driver:
        options = {"target": self.target, "experiment": self.name, "stop": {"step": self.steps}, **self.options}
        return self.drivers.start(self.trainable, self.config, **options)

    def steps_of(self, act: str) -> Sequence[int]:
        """Return the steps of all acts of this kind."""
        return [event.step for event in acts_of(self.witness) if event.act == act]

    def wait_until(self, condition: Callable[[], object], *, seconds: float = 90) -> None:
        driver = self.drivers.last
        wait_until(condition, seconds=seconds, what=lambda: f"{self.newest_step()} committed\n{driver.log[-3000:]}")

    def newest_step(self) -> int:
        trial = experiment_at(self.target, self.name).trials.get(TRIAL)
        newest = newest_checkpoint(trial) if trial else None
        return newest.step if newest else 0

    def require_identical_end(
        self, outcome: Mapping[str, Any] | None = None, target: StorageTarget | None = None
    ) -> None:
        """Compare the end with that of an undisturbed training; `target` is another way to read the experiment."""
        reference, target = reference_training(self.steps), target or self.target
        assert outcome is None or outcome.get("status") == "completed", outcome
        trial = trial_at(target, self.name)
        assert (trial.status, trial.metrics["state"]) == (Status.COMPLETED, reference.state[self.steps])
        assert find_violations(target, self.name, reference) == []
        last = trial.checkpoints[-1]
        assert digest_of_checkpoint(target, self.name, last.step, last.sequence) == reference.files[self.steps]
