"""scikit-learn with `partial_fit`: bitwise identical after kills, and no checkpoint is unpickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.integrations.examples import Example

pytestmark = pytest.mark.integrations
pytest.importorskip("skops")
Record = Callable[[str, object], None]


def learned(directory: Path) -> Mapping[str, object]:
    from prefect_tune.integrations.sklearn import load_estimator

    estimator = load_estimator(directory)
    attributes = {name: value.tolist() for name, value in vars(estimator).items() if isinstance(value, np.ndarray)}
    return {**attributes, "scores": estimator.decision_function(load_digits().data).tolist()}


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_weights_of_an_undisturbed_one(
    example: Callable[[str, str], Example], record_property: Record
) -> None:
    kills = example("sklearn", "Digits").ends_as_undisturbed(learned, reach=7, interval=5, steps={9, 27})
    record_property("figure: kills of examples", kills)
