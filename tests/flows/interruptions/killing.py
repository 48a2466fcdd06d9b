"""Kill a training at seeded random moments until it completes, and count the lost steps."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Cadence, Retention
from tests.flows.driver import Driver, Drivers
from tests.flows.training import ReferenceTraining, digest_of_checkpoint, find_violations, reference_training, trial_at
from tests.trainables.witness import Act, acts_of

Victim = Literal["flow", "trial", "machine"]
STEPS, INTERVAL = 60, 5
_KILLS_PER_TRAINING = 5
_MAX_VIOLATIONS = 5


@dataclass
class Campaign:
    """Trainings whose `victim` is killed at random moments."""

    drivers: Drivers
    target: StorageTarget
    folder: Path
    victim: Victim
    seed: int
    commit: Literal["sync", "async"] = "sync"
    trainable: str = "tests.trainables.numpy_mlp:NumpyMlp"
    kills: int = 0
    trainings: int = 0
    violations: list[str] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.reference: ReferenceTraining = reference_training(STEPS)

    def run(self, kills: int) -> str:
        """Kill `kills` times; return the figures as one line."""
        start = time.monotonic()
        while self.kills < kills and len(self.violations) < _MAX_VIOLATIONS:
            self._train(min(_KILLS_PER_TRAINING, kills - self.kills))
        lost = self.steps_lost or [0]
        return (
            f"kill -9 of the {self.victim} on {self.target.uri.partition('://')[0]}, commit={self.commit!r}: "
            f"{self.kills} kills in {self.trainings} trainings of {STEPS} steps, saved every {INTERVAL}: "
            f"{len(self.violations)} violations; steps lost a kill: median {median(lost):g}, max {max(lost)}; "
            f"{(time.monotonic() - start) / max(self.kills, 1):.1f} s a kill"
        )

    def _train(self, kills: int) -> None:
        """Run one training to its end, and kill it on the way."""
        name = f"{self.victim}-{self.trainings}"
        self.trainings += 1
        witness = self.folder / f"{name}.witness"
        kill_count = 0
        while True:
            driver = self._start(name, witness)
            while kill_count < kills and self._kill_at_random_moment(driver, witness):
                kill_count += 1
                self.kills += 1
                if self.victim != "trial":
                    break
            if driver.process.exitcode != -signal.SIGKILL:
                break
            driver.require_no_leftovers()
            self._add_violations(name, find_violations(self.target, name, self.reference))
        self._add_violations(name, self._check_end(name, driver))
        uncertain = 0 if self.commit == "sync" else 1
        lost, errors = find_lost_steps(acts_of(witness), uncertain=uncertain)
        self.steps_lost += lost
        max_lost = (1 + uncertain) * INTERVAL
        self._add_violations(name, [*errors, *(f"{count} steps lost" for count in lost if count > max_lost)])

    def _start(self, name: str, witness: Path) -> Driver:
        return self.drivers.start(
            self.trainable,
            {"witness": str(witness), "step_seconds": 0.004, "interval": INTERVAL},
            target=self.target,
            experiment=name,
            stop={"step": STEPS},
            checkpoint=Cadence(every_steps=INTERVAL),
            retention=Retention(last=2),
            sync=SyncConfig(commit=self.commit, sync_period_seconds=0.02),
            failures=FailurePolicy(max_machine_failures=1000, quarantine_after=1000),
        )

    def _kill_at_random_moment(self, driver: Driver, witness: Path) -> bool:
        """Wait for a random moment and kill; return False if the driver ended before."""
        moment = self.random.choices(["any", "begin", "saving"], [1, 2, 3])[0]
        count = self.random.randint(1, 4) if moment == "saving" else 1
        if moment != "any" and not _wait_for_acts(driver, witness, moment, count):
            return False
        driver.process.join(self.random.uniform(0, {"any": 3, "begin": 1, "saving": 0.12}[moment]))
        if not driver.is_alive():
            return False
        if self.victim == "trial":
            return _kill_trial(driver)
        if self.victim == "flow":
            driver.kill()
        else:
            driver.kill_everything()
        return driver.process.exitcode == -signal.SIGKILL

    def _check_end(self, name: str, driver: Driver) -> Sequence[str]:
        """Compare the end of a training with an undisturbed one."""
        outcome = driver.wait()
        if outcome.get("status") != "completed":
            return [f"it ended as {outcome}:\n{driver.log[-3000:]}"]
        errors = list(find_violations(self.target, name, self.reference))
        if outcome["metrics"]["state"] != self.reference.state[STEPS]:
            errors.append("the final state differs from the undisturbed training's")
        last = trial_at(self.target, name).checkpoints[-1]
        if digest_of_checkpoint(self.target, name, last.step, last.sequence) != self.reference.files[STEPS]:
            errors.append("the final checkpoint differs from the undisturbed training's")
        driver.require_no_leftovers()
        return errors

    def _add_violations(self, name: str, errors: Sequence[str]) -> None:
        self.violations += [f"{name} (seed {self.seed}): {error}" for error in errors]


def _kill_trial(driver: Driver) -> bool:
    for pid in driver.find_trial_pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _wait_for_acts(driver: Driver, witness: Path, act: str, count: int) -> bool:
    """Wait until the witness has `count` more acts of this kind; return False if the driver ends before."""
    end, before = time.monotonic() + 60, _count_acts(witness, act)
    while _count_acts(witness, act) < before + count:
        if not driver.is_alive() or time.monotonic() > end:
            return False
        time.sleep(0.003)
    return True


def _count_acts(witness: Path, act: str) -> int:
    return sum(event.act == act for event in acts_of(witness))


def find_lost_steps(acts: Sequence[Act], *, uncertain: int) -> tuple[Sequence[int], Sequence[str]]:
    """Return the steps that each restart lost, and an error for each restart before an acknowledged commit.

    A save is acknowledged once its process trains on, except for the last `uncertain` saves.
    """
    lost, errors, saved = list[int](), list[str](), list[int]()
    acknowledged = trained = 0
    pid: Any = None
    for act in acts:
        if act.pid != pid and act.act in ("loaded", "begin"):
            step = act.step if act.act == "loaded" else act.step - 1
            if pid is not None:
                lost.append(trained - step)
            if step < acknowledged:
                errors.append(f"resumed from step {step}, and step {acknowledged} was acknowledged")
            pid, saved, trained = act.pid, [], step
        if act.act == "saving":
            saved.append(act.step)
        if act.act == "begin" and len(saved) > uncertain:
            acknowledged = max(acknowledged, saved[-1 - uncertain])
        if act.act == "trained":
            trained = act.step
    return lost, errors
