"""`ray/tune/examples/tune_mnist_keras.py` of ray 2.55.0 (Apache-2.0), with the lines of docs/integrations.md.

Changed: the callback and `initial_epoch`; scikit-learn's digits in place of MNIST, which is a download. Keras 3 is in
place of `tf.keras`; it calls the learning rate `learning_rate`.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import sklearn.datasets

from prefect_tune.integrations.keras import TuneReportCheckpointCallback, get_initial_epoch


def train_mnist(config):
    batch_size = 128
    num_classes = 10
    epochs = 12

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = np.pad(images.reshape(-1, 8, 8), ((0, 0), (10, 10), (10, 10)))
    (x_train, y_train), (x_test, y_test) = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
    x_train, x_test = x_train / 16.0, x_test / 16.0
    model = keras.models.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(config["hidden"], activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(num_classes, activation="softmax"),
        ]
    )

    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.SGD(learning_rate=config["lr"], momentum=config["momentum"]),
        metrics=["accuracy"],
    )

    model.fit(
        x_train,
        y_train,
        batch_size=batch_size,
        epochs=epochs,
        initial_epoch=get_initial_epoch(),
        verbose=0,
        validation_data=(x_test, y_test),
        callbacks=[TuneReportCheckpointCallback({"mean_accuracy": "accuracy"})],
    )


def train_with_seed(config):
    keras.utils.set_random_seed(0)
    train_mnist(config)
