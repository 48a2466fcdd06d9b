"""Metrics that can be stored, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_tune.core.errors import BadMetric
from prefect_tune.core.metrics import storable


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
