"""The plan of a drill: its trainable, and its kills."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.resources import MAX_PROCESSES
from prefect_tune.drills.probe import Victim
from prefect_tune.parameters.argument_checks import config_to_json

_VICTIMS: tuple[Victim, ...] = ("upload", "trial", "search")
_VICTIMS_WITH_RANKS: tuple[Victim, ...] = ("rank", *_VICTIMS)


@dataclass(frozen=True, slots=True)
class DrillPlan:
    """The trainable of a drill, and the kills: for each kill, the step after which it is made, and the victim."""

    trainable: str
    """`package.module:Name`."""
    config: Mapping[str, object] = field(default_factory=dict)
    steps: int = 12
    save_every: int = 3
    """A class trainable saves every `save_every` steps; a function trainable saves when it reports a checkpoint."""
    kills: tuple[tuple[int, Victim], ...] = ((4, "upload"), (7, "trial"), (10, "search"))
    hours_between_failures: float = 24.0
    processes: int = 1
    """The number of processes that train the trial together."""


def plan_kills(
    steps: int, count: int, at: Sequence[int], seed: int, processes: int = 1, *, first_save: int = 0
) -> tuple[tuple[int, Victim], ...]:
    """Return the steps after which a drill kills, with the victims: `at` or, if `at` is empty, `count` random steps.

    If enough steps follow step `first_save`, all random steps are later, because a resume from step 0 shows little.

    Raises:
        InvalidInput: a step in `at` is not from 1 to `steps - 1`; or `at` is empty, and `count` is not in this range.
    """
    generator = random.Random(seed)  # noqa: S311 - no secret
    if not at and not 0 < count < steps:
        raise InvalidInput(f"kills: expected a number from 1 to {steps - 1}, one less than steps, found {count}")
    if invalid := [step for step in at if not 0 < step < steps]:
        raise InvalidInput(f"at: expected steps from 1 to {steps - 1}, one less than steps, found {invalid[0]}")
    kill_steps = sorted(set(at)) or sorted(generator.sample(range(1, steps), count))
    while not at and kill_steps[0] <= first_save and count < steps - first_save:
        kill_steps = sorted(generator.sample(range(1, steps), count))
    kinds = _VICTIMS if processes == 1 else _VICTIMS_WITH_RANKS
    victims = [kinds[index % len(kinds)] for index in range(len(kill_steps))]
    generator.shuffle(victims)
    return tuple(zip(kill_steps, victims, strict=True))


def make_drill_plan(
    trainable: str,
    config: object,
    steps: int,
    save_every: int | None,
    *,
    kills: int = 3,
    at: Sequence[int] = (),
    seed: int = 0,
    hours_between_failures: float = 24.0,
    processes: int = 1,
) -> DrillPlan:
    """Return the plan of a drill.

    Raises:
        InvalidInput: `trainable` is not an import path, or a number is out of its range.
    """
    if ":" not in trainable:
        raise InvalidInput(f"trainable {trainable!r}: expected 'package.module:Name', since a new process imports it")
    if steps < 2:
        raise InvalidInput(f"steps: expected at least 2, for a kill between two steps, found {steps}")
    if save_every is not None and not 0 < save_every <= steps:
        raise InvalidInput(f"save_every: expected a number of steps from 1 to {steps}, found {save_every}")
    if not 0 < hours_between_failures < math.inf:
        raise InvalidInput(f"hours_between_failures: expected a positive number, found {hours_between_failures}")
    if not 1 <= processes <= MAX_PROCESSES:
        raise InvalidInput(f"processes_per_trial: expected a number from 1 to {MAX_PROCESSES}, found {processes}")
    interval = save_every or max(1, steps // 4)
    schedule = plan_kills(steps, kills, at, seed, processes, first_save=interval)
    return DrillPlan(trainable, config_to_json(config), steps, interval, schedule, hours_between_failures, processes)
