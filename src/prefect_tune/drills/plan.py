"""The plan of a drill: what is trained, and where it is killed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.resources import MOST_PROCESSES
from prefect_tune.drills.probe import Victim
from prefect_tune.parameters.argument_checks import storable_config

_VICTIMS: tuple[Victim, ...] = ("upload", "trial", "search")
_OF_SEVERAL_RANKS: tuple[Victim, ...] = ("rank", *_VICTIMS)


@dataclass(frozen=True, slots=True)
class DrillPlan:
    """What a drill trains, and where it kills."""

    trainable: str
    """`package.module:Name`."""
    config: Mapping[str, object] = field(default_factory=dict)
    steps: int = 12
    save_every: int = 3
    """In steps, for a class; a function saves when it reports a checkpoint."""
    kills: tuple[tuple[int, Victim], ...] = ((4, "upload"), (7, "trial"), (10, "search"))
    hours_between_failures: float = 24.0
    processes: int = 1
    """How many train the trial together."""


def kills_of(
    steps: int, count: int, at: Sequence[int], seed: int, processes: int = 1, *, first_save: int = 0
) -> tuple[tuple[int, Victim], ...]:
    """Return after which step a drill kills, and what: at these steps, or at `count` steps drawn by `seed`.

    They are drawn after the first save, if there are enough steps: a resume from the beginning shows little.

    Raises:
        InvalidInput: a step is not between 1 and the last one but one, or there are too few steps.
    """
    drawn = random.Random(seed)  # noqa: S311 - no secret
    if not at and not 0 < count < steps:
        raise InvalidInput(f"kills: expected a number from 1 to {steps - 1}, one less than steps, found {count}")
    if wrong := [each for each in at if not 0 < each < steps]:
        raise InvalidInput(
            f"at: expected steps from 1 to {steps - 1}, since a run of {steps} steps ends then, found {wrong[0]}"
        )
    chosen = sorted(set(at)) or sorted(drawn.sample(range(1, steps), count))
    while not at and chosen[0] <= first_save and count < steps - first_save:
        chosen = sorted(drawn.sample(range(1, steps), count))
    kinds = _VICTIMS if processes == 1 else _OF_SEVERAL_RANKS
    victims = [kinds[index % len(kinds)] for index in range(len(chosen))]
    drawn.shuffle(victims)
    return tuple(zip(chosen, victims, strict=True))


def drill_plan(
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
        InvalidInput: the trainable has no import path, or a number is out of its range.
    """
    if ":" not in trainable:
        raise InvalidInput(f"trainable {trainable!r}: expected 'package.module:Name', which a new process can import")
    if steps < 2:
        raise InvalidInput(f"steps: expected 2 or more, of which a kill is after one, found {steps}")
    if save_every is not None and not 0 < save_every <= steps:
        raise InvalidInput(f"save_every: expected a number of steps from 1 to {steps}, found {save_every}")
    if not 0 < hours_between_failures < math.inf:
        raise InvalidInput(
            f"hours_between_failures: expected a positive number of hours, found {hours_between_failures}"
        )
    if not 1 <= processes <= MOST_PROCESSES:
        raise InvalidInput(f"processes_per_trial: expected a number from 1 to {MOST_PROCESSES}, found {processes}")
    every = save_every or max(1, steps // 4)
    chosen = kills_of(steps, kills, at, seed, processes, first_save=every)
    return DrillPlan(trainable, storable_config(config), steps, every, chosen, hours_between_failures, processes)
