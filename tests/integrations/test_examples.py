"""Each example whose trials are killed ends with the state of an undisturbed training, bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.examples import Example
from tests.integrations.states import to_plain

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(2000)]
os.environ.setdefault("KERAS_BACKEND", "torch")  # before anything imports Keras


def read_keras_state(directory: Path) -> Mapping[str, Any]:
    """Return weights, moments, seeds, and the generators for the order of the data."""
    with np.load(directory / "variables.npz", allow_pickle=False) as saved:
        variables = {name: to_plain(saved[name]) for name in saved.files}
    return {**variables, "place": json.loads((directory / "place.json").read_text())}


def read_sklearn_state(directory: Path) -> Mapping[str, Any]:
    from sklearn.datasets import load_digits

    from prefect_tune.integrations.sklearn import load_estimator

    estimator = load_estimator(directory)
    attributes = {name: value.tolist() for name, value in vars(estimator).items() if isinstance(value, np.ndarray)}
    return {**attributes, "scores": estimator.decision_function(load_digits().data).tolist()}


def read_tree_state(directory: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("model.*")}


@pytest.mark.parametrize(
    ("framework", "package", "trainable", "read_state", "reach", "interval", "steps"),
    [
        ("keras", "keras", "train", read_keras_state, 3, 2, {3, 9}),
        ("sklearn", "skops", "Digits", read_sklearn_state, 7, 5, {9, 27}),
        ("xgboost", "xgboost", "train", read_tree_state, 7, 5, {9, 27}),
        ("lightgbm", "lightgbm", "train", read_tree_state, 7, 5, {9, 27}),
    ],
)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(
    framework: str,
    package: str,
    trainable: str,
    read_state: Callable[[Path], Mapping[str, Any]],
    reach: int,
    interval: int,
    steps: set[int],
    example: Callable[[str, str], Example],
    record_property: Callable[[str, object], None],
) -> None:
    pytest.importorskip(package)
    kills = example(framework, trainable).require_undisturbed_end(
        read_state, reach=reach, interval=interval, steps=steps
    )
    record_property("figure: kills of examples", kills)
