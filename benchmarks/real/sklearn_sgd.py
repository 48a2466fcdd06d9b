"""A linear classifier of scikit-learn on its breast cancer data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

from benchmarks.real.reporting import begin, report


def train(config: Mapping[str, Any]) -> None:
    """Train `config["epochs"]` epochs."""
    begin(config)
    x, y = load_breast_cancer(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    model = SGDClassifier(loss="log_loss", alpha=config["lr"], random_state=0)
    for _ in range(config["epochs"]):
        model.partial_fit(x, y, classes=[0, 1])
        report(float(log_loss(y, model.predict_proba(x))))
