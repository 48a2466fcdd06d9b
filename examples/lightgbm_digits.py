"""LightGBM: search for the best trees for handwritten digits; each round draws rows and columns.

Kill it whenever you like and run it again: no trial loses more than five rounds, and the rest of a segment.
"""

import sys
from typing import Any

import lightgbm as lgb
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import prefect_tune as pt
from prefect_tune.integrations.lightgbm import train as train_in_segments


def train(config: dict[str, Any]) -> None:
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images, labels, random_state=0)
    data = lgb.Dataset(images, labels, free_raw_data=False)
    drawing = {"bagging_freq": 1, "bagging_fraction": 0.7, "feature_fraction": 0.5}
    fixed = {"objective": "multiclass", "num_class": 10, "num_threads": 2, "deterministic": True, "verbose": -1}
    train_in_segments(
        {**fixed, **drawing, **config},
        data,
        num_boost_round=27,
        segment_rounds=5,
        metrics={"loss": "test-multi_logloss"},
        valid_sets=[lgb.Dataset(test_images, test_labels, reference=data, free_raw_data=False)],
        valid_names=["test"],
    )


if __name__ == "__main__":
    results = pt.tune(
        train,
        {"learning_rate": pt.loguniform(0.03, 0.5), "num_leaves": pt.randint(4, 16)},
        target=sys.argv[1] if len(sys.argv) > 1 else "./runs",
        experiment="lightgbm-digits",
        metric="loss",
        num_samples=3,
        scheduler=pt.ASHA(max_t=27, grace_period=9),
        checkpoint=pt.Cadence(every_steps=5),
    )
    print(results.best.config, results.best.metrics)
