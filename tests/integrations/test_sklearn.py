"""scikit-learn by `partial_fit`: exact after kills, and nothing is unpickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from tests.integrations.examples import Example

pytestmark = pytest.mark.integrations
pytest.importorskip("skops")
_INTERVAL = 5
Record = Callable[[str, object], None]


def learned(directory: Path) -> Mapping[str, NDArray[np.float64]]:
    from prefect_tune.integrations.sklearn import load_estimator

    estimator = load_estimator(directory)
    attributes = {name: value for name, value in vars(estimator).items() if isinstance(value, np.ndarray)}
    return {**attributes, "scores": estimator.decision_function(load_digits().data)}


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_weights_of_an_undisturbed_one(
    example: Callable[[str, str], Example], record_property: Record
) -> None:
    digits = example("sklearn", "Digits")
    struck = digits.struck(kills=3, seed=1, reach=7)
    assert struck.kills == 3
    assert all(0 <= lost <= _INTERVAL for lost in struck.steps_lost), struck.witness
    for trial, truth in digits.undisturbed(struck.results).items():
        found = learned(Path(struck.results.checkpoint(trial).to_directory()))
        assert found.keys() == learned(truth).keys()
        assert all(np.array_equal(found[name], value) for name, value in learned(truth).items())
    assert {each.step for each in struck.results.trials.values()} == {9, 27}
    record_property("figure: kills of examples", struck.kills)
