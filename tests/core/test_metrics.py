"""Metrics that can be stored, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_tune.core.errors import BadMetric
from prefect_tune.core.metrics import mean_of, storable


def nested(levels: int) -> dict[str, Any]:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"x": value}
    return {"x": value}


def test_metrics_may_be_nested_as_deep_as_readers_of_json_can_follow() -> None:
    assert storable(nested(99), "metrics") == nested(99)
    for levels in (100, 240, 5_000):
        with pytest.raises(BadMetric, match="at most 100 levels"):
            storable(nested(levels), "metrics")


@pytest.mark.parametrize("metrics", [{"name": "\udcff"}, {"\udcff": 1}, {"names": ["a", "\ud800"]}])
def test_a_text_that_is_not_unicode_is_refused_by_name(metrics: dict[str, Any]) -> None:
    with pytest.raises(BadMetric, match=r"metrics of step 3: .*expected Unicode text, found '\\ud"):
        storable(metrics, "metrics of step 3")


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([1, 2], 1.5),
        ([3, 3], 3),
        ([1e308, 1.5e308], 1.25e308),
        ([True, False], True),
        (["a", 1], "a"),
        ([1.0, None], 1.0),
        ([1.0, "b"], 1.0),
        ([{"x": 1.0, "y": 2.0}, {"x": 2.0}], {"x": 1.5, "y": 2.0}),
        ([{"x": 1.0}, 2.0], {"x": 1.0}),
        ([2.0, {"x": 1.0}], 2.0),
        ([[1.0], [2.0]], [1.0]),
    ],
)
def test_the_mean_is_over_numbers_that_every_rank_has_and_anything_else_is_that_of_the_first(
    values: list[object], mean: object
) -> None:
    assert mean_of([{"m": each} for each in values]) == {"m": mean}


def test_a_name_that_the_first_rank_lacks_is_left_out() -> None:
    assert mean_of([{"a": 1.0}, {"a": 3.0, "b": 2.0}, {"a": 5.0, "b": 2.0}]) == {"a": 3.0}
