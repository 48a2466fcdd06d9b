"""Parameter importance."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from prefect_tune.reporting.param_importance import FEWEST, importances


def trials(count: int, seed: int = 0) -> dict[str, list[object]]:
    draw = random.Random(seed)
    return {
        "lr": [10 ** draw.uniform(-5, 0) for _ in range(count)],
        "act": [draw.choice(["relu", "gelu", "tanh"]) for _ in range(count)],
        "noise": [draw.random() for _ in range(count)],
        "seed": [draw.randint(0, 10_000) for _ in range(count)],
    }


def of(loss: Callable[[float, str], float], count: int = 200) -> dict[str, float]:
    found = trials(count)
    return dict(importances(found, [loss(lr, act) for lr, act in zip(found["lr"], found["act"], strict=True)]))


@pytest.mark.parametrize("shape", [math.log10, lambda lr: -lr, lambda lr: abs(math.log10(lr) + 2.5)])
def test_the_one_that_decides_is_first_whatever_the_shape(shape: Callable[[float], float]) -> None:
    shares = of(lambda lr, _: shape(lr))
    assert next(iter(shares)) == "lr"
    assert shares["lr"] > 0.85
    assert max(shares["noise"], shares["seed"], shares["act"]) < 0.06


def test_text_matters_as_numbers_do() -> None:
    shares = of(lambda _, act: {"relu": 3.0, "gelu": 1.0, "tanh": 2.0}[act])
    assert shares["act"] == pytest.approx(1.0)
    assert shares["lr"] < 0.06


def test_what_does_not_matter_has_no_share_however_many_kinds_there_are() -> None:
    draw = random.Random(1)
    found = {"kind": [f"k{index}" for index in range(40)], "noise": [draw.random() for _ in range(40)]}
    losses = [draw.random() for _ in range(40)]
    assert importances(found, losses)["kind"] == 0.0
    assert importances(found, losses)["noise"] < 0.2


def test_an_outlier_changes_little() -> None:
    found = trials(100)
    losses = [abs(math.log10(lr) + 2.5) for lr in found["lr"]]
    spoiled = [1e30, *losses[1:]]
    assert importances(found, spoiled)["lr"] == pytest.approx(importances(found, losses)["lr"], abs=0.05)


def test_a_parameter_that_only_some_have_counts_by_whether_they_have_it() -> None:
    values = [None if index % 2 else float(index) for index in range(40)]
    assert importances({"depth": values}, [float(index % 2) for index in range(40)])["depth"] == pytest.approx(1.0)


def test_of_few_trials_and_of_equal_ones_nothing_is_said() -> None:
    assert importances({"x": list(range(FEWEST - 1))}, [1.0 * each for each in range(FEWEST - 1)]) == {}
    assert importances({"x": list(range(20))}, [1.0] * 20) == {"x": 0.0}
