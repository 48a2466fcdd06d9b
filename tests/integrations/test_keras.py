"""Keras on PyTorch: exact after kills."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.examples import Example
from tests.integrations.states import flat

pytestmark = pytest.mark.integrations
os.environ.setdefault("KERAS_BACKEND", "torch")  # before anything imports Keras
pytest.importorskip("keras")
_INTERVAL = 2


def learned(directory: Path) -> Mapping[str, Any]:
    """Return weights, moments, seeds, and the generators of the data's order."""
    with np.load(directory / "variables.npz", allow_pickle=False) as saved:
        variables = {name: flat(saved[name]) for name in saved.files}
    return {**variables, "place": json.loads((directory / "place.json").read_text())}


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(example: Callable[[str, str], Example]) -> None:
    digits = example("keras", "train")
    struck = digits.struck(kills=3, seed=1, reach=3)
    assert struck.kills == 3
    assert all(0 <= lost <= _INTERVAL for lost in struck.steps_lost), struck.witness
    for trial, truth in digits.undisturbed(struck.results).items():
        assert learned(Path(struck.results.checkpoint(trial).to_directory())) == learned(truth)
    assert {each.step for each in struck.results.trials.values()} == {3, 9}
