"""`ray/tune/examples/xgboost_example.py` of ray 2.55.0 (Apache-2.0), with the lines of docs/integrations.md.

Changed: the callback, and `**remaining_rounds(10)`; 10 rounds are the default of `xgb.train`.
"""

from __future__ import annotations

import numpy as np
import sklearn.datasets
import xgboost as xgb
from sklearn.model_selection import train_test_split

from prefect_tune.integrations.xgboost import TuneReportCheckpointCallback, remaining_rounds


def train_breast_cancer(config: dict[str, object]):
    # This is a simple training function to be passed into Tune

    # Load dataset
    data, labels = sklearn.datasets.load_breast_cancer(return_X_y=True)

    # Split into train and test set
    train_x, test_x, train_y, test_y = train_test_split(data, labels, test_size=0.25)
    # Build input matrices for XGBoost
    train_set = xgb.DMatrix(train_x, label=train_y)
    test_set = xgb.DMatrix(test_x, label=test_y)

    # Train the classifier, using the Tune callback
    xgb.train(
        config,
        train_set,
        evals=[(test_set, "test")],
        verbose_eval=False,
        callbacks=[TuneReportCheckpointCallback()],
        **remaining_rounds(10),
    )


def train_with_seed(config: dict[str, object]):
    np.random.seed(0)  # noqa: NPY002 - the generator that the example draws from
    train_breast_cancer(config)
