"""Kill a training at seeded random moments until it completes, and count the steps that were lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Cadence, Retention
from tests.flows.driver import Driver, Drivers
from tests.flows.training import Undisturbed, bytes_of_checkpoint, trial_at, undisturbed, violations
from tests.trainables.witness import Act, acts_of

Victim = Literal["flow", "trial", "machine"]
STEPS, INTERVAL = 60, 5
_KILLS_PER_TRAINING = 5
_ENOUGH_VIOLATIONS = 5


@dataclass
class Campaign:
    """Trains again and again, killing `victim`, until `kills` kills have struck."""

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
        self.truth: Undisturbed = undisturbed(STEPS)

    def run(self, kills: int) -> str:
        """Strike `kills` times; return the figures as one line."""
        started = time.monotonic()
        while self.kills < kills and len(self.violations) < _ENOUGH_VIOLATIONS:
            self._train(min(_KILLS_PER_TRAINING, kills - self.kills))
        lost = self.steps_lost or [0]
        return (
            f"kill -9 of the {self.victim} on {self.target.uri.partition('://')[0]}, commit={self.commit!r}: "
            f"{self.kills} kills in {self.trainings} trainings of {STEPS} steps, saved every {INTERVAL}: "
            f"{len(self.violations)} violations; steps lost a kill: median {median(lost):g}, max {max(lost)}; "
            f"{(time.monotonic() - started) / max(self.kills, 1):.1f} s a kill"
        )

    def _train(self, kills: int) -> None:
        """Run one training to its end, killing it on the way."""
        name = f"{self.victim}-{self.trainings}"
        self.trainings += 1
        witness = self.folder / f"{name}.witness"
        struck = 0
        while True:
            driver = self._start(name, witness)
            while struck < kills and self._strike(driver, witness):
                struck += 1
                self.kills += 1
                if self.victim != "trial":
                    break
            if driver.process.exitcode != -signal.SIGKILL:
                break
            driver.require_no_leftovers()
            self._note(name, violations(self.target, name, self.truth))
        self._note(name, self._judged(name, driver))
        lost, wrong = redone(acts_of(witness), uncertain=0 if self.commit == "sync" else 1)
        self.steps_lost += lost
        self._note(name, wrong)
        self._note(name, [f"{each} steps lost" for each in lost if each > self._allowed])

    @property
    def _allowed(self) -> int:
        return INTERVAL if self.commit == "sync" else 2 * INTERVAL

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

    def _strike(self, driver: Driver, witness: Path) -> bool:
        """Wait for a random moment and kill; False when it ended before."""
        aim = self.random.choices([self._any_time, self._in_training, self._in_a_commit], [1, 2, 3])[0]
        if not aim(driver, witness):
            return False
        if self.victim == "trial":
            return _killed_trial(driver)
        if self.victim == "flow":
            driver.kill()
        else:
            driver.kill_everything()
        return driver.process.exitcode == -signal.SIGKILL

    def _any_time(self, driver: Driver, witness: Path) -> bool:
        del witness
        return _lived(driver, self.random.uniform(0, 3))

    def _in_training(self, driver: Driver, witness: Path) -> bool:
        return _wait_for_act(driver, witness, "begin", 1) and _lived(driver, self.random.uniform(0, 1))

    def _in_a_commit(self, driver: Driver, witness: Path) -> bool:
        nth = self.random.randint(1, 4)
        return _wait_for_act(driver, witness, "saving", nth) and _lived(driver, self.random.uniform(0, 0.12))

    def _judged(self, name: str, driver: Driver) -> Sequence[str]:
        """Return what is wrong with the end of a training."""
        outcome = driver.wait()
        if outcome.get("status") != "completed":
            return [f"it ended as {outcome}:\n{driver.log[-3000:]}"]
        found = list(violations(self.target, name, self.truth))
        if outcome["metrics"]["state"] != self.truth.state[STEPS]:
            found.append("the final state differs from the undisturbed training's")
        last = trial_at(self.target, name).checkpoints[-1]
        if bytes_of_checkpoint(self.target, name, last.step, last.sequence) != self.truth.files[STEPS]:
            found.append("the final checkpoint differs from the undisturbed training's")
        driver.require_no_leftovers()
        return found

    def _note(self, name: str, found: Sequence[str]) -> None:
        self.violations += [f"{name} (seed {self.seed}): {each}" for each in found]


def _killed_trial(driver: Driver) -> bool:
    for pid in driver.trials():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _lived(driver: Driver, seconds: float) -> bool:
    """Wait for these seconds; False as soon as the driver has ended."""
    driver.process.join(seconds)
    return driver.is_alive()


def _wait_for_act(driver: Driver, witness: Path, act: str, nth: int) -> bool:
    """Wait until the witness has `nth` more entries of `act`; False if the driver ends before."""
    before = _count(witness, act)
    return _until(driver, lambda: _count(witness, act) >= before + nth)


def _until(driver: Driver, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition():
        if not driver.is_alive() or time.monotonic() > end:
            return False
        time.sleep(0.003)
    return True


def _count(witness: Path, act: str) -> int:
    return sum(each.act == act for each in acts_of(witness))


def redone(acts: Sequence[Act], *, uncertain: int) -> tuple[Sequence[int], Sequence[str]]:
    """Return the steps that each restart lost, and each acknowledged commit from which no restart continued.

    A save is known to be acknowledged when the process that made it trains on; with uploads that overlap
    training, the `uncertain` last ones are not.
    """
    lost: list[int] = []
    wrong: list[str] = []
    acknowledged = trained = 0
    saved: list[int] = []
    pid: Any = None
    for each in acts:
        if each.pid != pid and each.act in ("loaded", "begin"):
            at = each.step if each.act == "loaded" else each.step - 1
            if pid is not None:
                lost.append(trained - at)
            if at < acknowledged:
                wrong.append(f"resumed from step {at}, and step {acknowledged} was acknowledged")
            pid, saved, trained = each.pid, [], at
        if each.act == "saving":
            saved.append(each.step)
        if each.act == "begin" and len(saved) > uncertain:
            acknowledged = max(acknowledged, saved[-1 - uncertain])
        if each.act == "trained":
            trained = each.step
    return lost, wrong
