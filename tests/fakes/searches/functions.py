"""Two test functions for comparing searches, and the distance of a search's best value from their minimum."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prefect_tune.core.search.base import Proposed, Search
from prefect_tune.core.search.domains import Float, uniform
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport

Config = Mapping[str, Any]
_LOSS = Objective(metrics=("loss",), modes=("min",))


@dataclass(frozen=True, slots=True)
class Problem:
    """A function to minimize, and its minimum."""

    name: str
    space: Mapping[str, Float]
    function: Callable[[Config], float]
    minimum: float

    def bounds(self, name: str) -> tuple[float, float]:
        return self.space[name].low, self.space[name].high


@dataclass(frozen=True, slots=True)
class Regret:
    """The distance of the best of so many trials from the minimum, and the cost of proposing them."""

    value: float
    cpu_seconds: float


def measure_regret(search: Search, problem: Problem, seed: int, trials: int = 100) -> Regret:
    """Run trials one after another; only the search is timed."""
    best, seconds, start = math.inf, 0.0, time.process_time()
    proposals = search.begin(problem.space, _LOSS, seed)
    for number in range(trials):
        proposed = proposals.suggest(number)
        assert isinstance(proposed, Proposed)
        seconds += time.process_time() - start
        loss = problem.function(proposed.config)
        best, start = min(best, loss), time.process_time()
        proposals.on_trial_ended(number, StepReport(step=1, metrics={"loss": loss}), failed=False)
    return Regret(best - problem.minimum, seconds + time.process_time() - start)


def _branin(config: Config) -> float:
    """Dixon and Szegö 1978."""
    x, y = config["x"], config["y"]
    a = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return float(a**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10)


_ALPHA = (1.0, 1.2, 3.0, 3.2)
_A = (
    (10, 3, 17, 3.5, 1.7, 8),
    (0.05, 10, 17, 0.1, 8, 14),
    (3, 3.5, 1.7, 10, 17, 8),
    (17, 8, 0.05, 10, 0.1, 14),
)
_P = (
    (0.1312, 0.1696, 0.5569, 0.0124, 0.8283, 0.5886),
    (0.2329, 0.4135, 0.8307, 0.3736, 0.1004, 0.9991),
    (0.2348, 0.1451, 0.3522, 0.2883, 0.3047, 0.6650),
    (0.4047, 0.8828, 0.8732, 0.5743, 0.1091, 0.0381),
)


def _hartmann(config: Config) -> float:
    """Hartman 1973, in six dimensions."""
    point = [config[f"x{index}"] for index in range(6)]
    return -sum(
        alpha * math.exp(-sum(a * (x - p) ** 2 for a, x, p in zip(slopes, point, centre, strict=True)))
        for alpha, slopes, centre in zip(_ALPHA, _A, _P, strict=True)
    )


BRANIN = Problem("Branin", {"x": uniform(-5, 10), "y": uniform(0, 15)}, _branin, 0.397887)
HARTMANN = Problem("Hartmann6", {f"x{index}": uniform(0, 1) for index in range(6)}, _hartmann, -3.32237)
