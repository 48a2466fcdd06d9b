"""Trees of XGBoost on scikit-learn's breast cancer data, a round for each epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xgboost
from sklearn.datasets import load_breast_cancer

from benchmarks.real.reporting import begin, report


class _Reports(xgboost.callback.TrainingCallback):  # type: ignore[misc]  # of no known type
    def after_iteration(self, _model: Any, _epoch: int, evals_log: Any) -> bool:
        report(evals_log["train"]["logloss"][-1])
        return False


def train(config: Mapping[str, Any]) -> None:
    """Train `config["epochs"]` rounds."""
    begin(config)
    x, y = load_breast_cancer(return_X_y=True)
    data = xgboost.DMatrix(x, y)
    parameters = {"eta": config["lr"], "objective": "binary:logistic", "eval_metric": "logloss", "nthread": 1}
    xgboost.train(
        parameters, data, config["epochs"], evals=[(data, "train")], callbacks=[_Reports()], verbose_eval=False
    )
