"""Keras 3 on PyTorch: search for the best network for handwritten digits, with dropout and shuffled batches.

Kill it whenever you like and run it again: no trial loses more than two epochs.
"""

import os
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from sklearn.datasets import load_digits

import prefect_tune as pt
from prefect_tune.integrations.keras import TuneReportCheckpointCallback, get_initial_epoch


def train(config: dict[str, Any]) -> None:
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(config["width"], activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(config["lr"]), loss, metrics=["accuracy"])
    model.fit(
        images / 16,
        labels,
        batch_size=128,
        epochs=9,
        initial_epoch=get_initial_epoch(),
        callbacks=[TuneReportCheckpointCallback()],
        verbose=0,
    )


if __name__ == "__main__":
    results = pt.tune(
        train,
        {"lr": pt.loguniform(0.001, 0.1), "width": pt.choice([16, 32, 64])},
        target=sys.argv[1] if len(sys.argv) > 1 else "./runs",
        experiment="keras-digits",
        metric="loss",
        num_samples=3,
        scheduler=pt.ASHA(max_t=9, grace_period=3),
        checkpoint=pt.Cadence(every_steps=2),
    )
    print(results.best.config, results.best.metrics)
