"""LightGBM: the very trees of an undisturbed training after kills, whatever the rounds draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.integrations.examples import Example

pytest.importorskip("lightgbm")
pytestmark = pytest.mark.integrations
_INTERVAL = 5
Record = Callable[[str, object], None]


def learned(directory: Path) -> Mapping[str, bytes]:
    return {"model": (directory / "model.txt").read_bytes()}


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_trees_of_an_undisturbed_one(
    example: Callable[[str, str], Example], record_property: Record
) -> None:
    digits = example("lightgbm", "train")
    struck = digits.struck(kills=3, seed=1, reach=7)
    assert struck.kills == 3
    assert all(0 <= lost <= _INTERVAL for lost in struck.steps_lost), struck.witness
    for trial, truth in digits.undisturbed(struck.results).items():
        assert learned(Path(struck.results.checkpoint(trial).to_directory())) == learned(truth)
    assert {each.step for each in struck.results.trials.values()} == {9, 27}
    record_property("figure: kills of examples", struck.kills)
