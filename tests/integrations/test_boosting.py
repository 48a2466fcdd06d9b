"""XGBoost and LightGBM: the same trees as an undisturbed training after kills, for all sampling options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.integrations.examples import Example

pytestmark = pytest.mark.integrations
Record = Callable[[str, object], None]


@pytest.mark.timeout(2000)
@pytest.mark.parametrize(("library", "file"), [("xgboost", "model.ubj"), ("lightgbm", "model.txt")])
def test_the_example_ends_with_the_trees_of_an_undisturbed_one(
    example: Callable[[str, str], Example], library: str, file: str, record_property: Record
) -> None:
    def learned(directory: Path) -> Mapping[str, bytes]:
        return {"model": (directory / file).read_bytes()}

    pytest.importorskip(library)
    kills = example(library, "train").ends_as_undisturbed(learned, reach=7, interval=5, steps={9, 27})
    record_property("figure: kills of examples", kills)
