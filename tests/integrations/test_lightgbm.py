"""LightGBM: the same trees as an undisturbed training after kills, for all sampling options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.integrations.examples import Example

pytest.importorskip("lightgbm")
pytestmark = pytest.mark.integrations
Record = Callable[[str, object], None]


def learned(directory: Path) -> Mapping[str, bytes]:
    return {"model": (directory / "model.txt").read_bytes()}


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_trees_of_an_undisturbed_one(
    example: Callable[[str, str], Example], record_property: Record
) -> None:
    kills = example("lightgbm", "train").ends_as_undisturbed(learned, reach=7, interval=5, steps={9, 27})
    record_property("figure: kills of examples", kills)
