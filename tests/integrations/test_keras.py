"""Keras on PyTorch: bitwise identical after kills."""

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


def learned(directory: Path) -> Mapping[str, Any]:
    """Return weights, moments, seeds, and the generators of the data's order."""
    with np.load(directory / "variables.npz", allow_pickle=False) as saved:
        variables = {name: flat(saved[name]) for name in saved.files}
    return {**variables, "place": json.loads((directory / "place.json").read_text())}


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(example: Callable[[str, str], Example]) -> None:
    example("keras", "train").ends_as_undisturbed(learned, reach=3, interval=2, steps={3, 9})
