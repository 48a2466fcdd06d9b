"""scikit-learn: search for the best linear classifier of handwritten digits, batch by batch.

Kill it whenever you like and run it again: no trial loses more than five steps.
"""

import sys
from typing import Any

from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split

import prefect_tune as pt
from prefect_tune.integrations.sklearn import PartialFitTrainable


class Digits(PartialFitTrainable):
    batches_per_step = 10

    def make_data(self, config: dict[str, Any]) -> tuple[Any, Any]:
        images, labels = load_digits(return_X_y=True)
        images, self.test_images, labels, self.test_labels = train_test_split(images, labels, random_state=0)
        return images, labels

    def make_estimator(self, config: dict[str, Any]) -> SGDClassifier:
        return SGDClassifier(loss=config["loss"], alpha=config["alpha"])

    def evaluate(self, estimator: SGDClassifier) -> dict[str, float]:
        return {"accuracy": estimator.score(self.test_images, self.test_labels)}


if __name__ == "__main__":
    results = pt.tune(
        Digits,
        {"loss": pt.choice(["hinge", "log_loss"]), "alpha": pt.loguniform(1e-6, 1)},
        target=sys.argv[1] if len(sys.argv) > 1 else "./runs",
        experiment="sklearn-digits",
        metric="accuracy",
        mode="max",
        num_samples=4,
        scheduler=pt.ASHA(max_t=27, grace_period=9),
        checkpoint=pt.Cadence(every_steps=5),
    )
    print(results.best.config, results.best.metrics)
