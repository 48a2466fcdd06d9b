"""The regret of TPE after a hundred trials."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest

from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.integrations.optuna import OptunaSearch
from tests.fakes.searches.functions import BRANIN, HARTMANN, Problem, regret


@pytest.mark.long
def test_tpe_comes_closer_than_chance() -> None:
    learned = median(regret(OptunaSearch(None, 100), BRANIN, seed).value for seed in range(5))
    drawn = median(regret(RandomSearch(100), BRANIN, seed).value for seed in range(5))
    assert learned < 0.1 < drawn


@pytest.mark.deep
@pytest.mark.parametrize(("problem", "limit"), [(BRANIN, 0.05), (HARTMANN, 0.30)], ids=lambda value: str(value)[:16])
def test_the_median_regret_of_twenty_seeds_is_small(
    problem: Problem, limit: float, record_property: Callable[[str, object], None]
) -> None:
    found = median(regret(OptunaSearch(None, 100), problem, seed).value for seed in range(20))
    record_property(f"figure: median regret of TPE after 100 trials, {problem.name}", round(found, 4))
    assert found <= limit
