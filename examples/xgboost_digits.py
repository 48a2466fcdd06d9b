"""XGBoost: search for the best trees for handwritten digits; each round draws rows and columns.

Kill it whenever you like and run it again: no trial loses more than five rounds, and the rest of a segment.
"""

import sys
from typing import Any

import xgboost as xgb
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import prefect_tune as pt
from prefect_tune.integrations.xgboost import train as train_in_segments


def train(config: dict[str, Any]) -> None:
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images, labels, random_state=0)
    drawing = {"subsample": 0.7, "colsample_bynode": 0.5}
    train_in_segments(
        {"objective": "multi:softprob", "num_class": 10, "nthread": 2, **drawing, **config},
        xgb.DMatrix(images, labels),
        num_boost_round=27,
        segment_rounds=5,
        metrics={"loss": "test-mlogloss"},
        evals=[(xgb.DMatrix(test_images, test_labels), "test")],
        verbose_eval=False,
    )


if __name__ == "__main__":
    results = pt.tune(
        train,
        {"eta": pt.loguniform(0.03, 0.5), "max_depth": pt.randint(2, 6)},
        target=sys.argv[1] if len(sys.argv) > 1 else "./runs",
        experiment="xgboost-digits",
        metric="loss",
        num_samples=3,
        scheduler=pt.ASHA(max_t=27, grace_period=9),
        checkpoint=pt.Cadence(every_steps=5),
    )
    print(results.best.config, results.best.metrics)
