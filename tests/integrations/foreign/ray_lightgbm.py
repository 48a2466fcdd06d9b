"""`ray/tune/examples/lightgbm_example.py` of ray 2.55.0 (Apache-2.0), with the lines of docs/integrations.md.

Changed: the callback, and `**remaining_rounds(100)`; 100 rounds are the default of `lgb.train`.
"""

from __future__ import annotations

import lightgbm as lgb
import numpy as np
import sklearn.datasets
from sklearn.model_selection import train_test_split

from prefect_tune.integrations.lightgbm import TuneReportCheckpointCallback, remaining_rounds


def train_breast_cancer(config: dict[str, object]):
    # This is a simple training function to be passed into Tune

    # Load dataset
    data, target = sklearn.datasets.load_breast_cancer(return_X_y=True)

    # Split into train and test set
    train_x, test_x, train_y, test_y = train_test_split(data, target, test_size=0.25)

    # Build input Datasets for LightGBM
    train_set = lgb.Dataset(train_x, label=train_y)
    test_set = lgb.Dataset(test_x, label=test_y)

    # Train the classifier, using the Tune callback
    lgb.train(
        config,
        train_set,
        valid_sets=[test_set],
        valid_names=["eval"],
        callbacks=[
            TuneReportCheckpointCallback(
                {
                    "binary_error": "eval-binary_error",
                    "binary_logloss": "eval-binary_logloss",
                }
            )
        ],
        **remaining_rounds(100),
    )


def train_with_seed(config: dict[str, object]):
    np.random.seed(0)  # noqa: NPY002 - the generator that the example draws from
    train_breast_cancer(config)
