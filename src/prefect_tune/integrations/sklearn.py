"""Train scikit-learn estimators with `partial_fit`, batch by batch, and save them without pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from prefect_tune.core.errors import InvalidInput
from prefect_tune.integrations.common import missing_extra_error
from prefect_tune.runtime.trainable import Trainable

try:
    import numpy as np
    import skops.io
    from sklearn.base import is_classifier
except ModuleNotFoundError as error:
    raise missing_extra_error(error, "sklearn", "numpy", "sklearn", "skops") from error

__all__ = ["PartialFitTrainable", "load_estimator"]

_ESTIMATOR_FILE, _POSITION_FILE = "estimator.skops", "place.json"
# Classes of scikit-learn that only hold data, but that skops does not know yet.
_TRUSTED_TYPES = frozenset(f"sklearn.neural_network._stochastic_optimizers.{name}Optimizer" for name in ("Adam", "SGD"))


def load_estimator(directory: str | Path, *, trusted_types: frozenset[str] = frozenset()) -> Any:
    """Return the estimator of a checkpoint without unpickling; only objects of known or trusted types are created.

    Args:
        directory: the checkpoint's directory, for example `results.checkpoint(trial).to_directory()`.
        trusted_types: other allowed types, such as `my_package.MyEstimator`. Creating such objects may run their code.

    Raises:
        InvalidInput: the file contains a type that is neither known to skops nor trusted.
    """
    path = Path(directory, _ESTIMATOR_FILE)
    types = set(skops.io.get_untrusted_types(file=path))
    if unknown := types - _TRUSTED_TYPES - trusted_types:
        raise InvalidInput(f"{path}: contains {sorted(unknown)}; name them in trusted_types if you trust them")
    return skops.io.load(path, trusted=sorted(types))


class PartialFitTrainable(Trainable):
    """Trains an estimator that has `partial_fit`. Override `make_estimator`, `make_data` and `evaluate`.

    A step is `batches_per_step` batches. Each pass over the data is shuffled, in an order that depends only on `seed`
    and the number of the pass. A resumed trial ends with exactly the weights of an uninterrupted trial. If an
    estimator's `random_state` is None, it is set to `seed`, so that scikit-learn does not use NumPy's global state.
    If population-based training changes the configuration, the restored estimator gets the new parameters.
    """

    batch_size: ClassVar[int] = 32
    batches_per_step: ClassVar[int] = 1
    seed: ClassVar[int] = 0
    trusted_types: ClassVar[frozenset[str]] = frozenset()
    """Types that a loaded estimator may contain although skops does not know them; see `load_estimator`."""

    def make_estimator(self, config: dict[str, Any]) -> Any:
        """Return a new estimator with the configuration's parameters."""
        raise NotImplementedError(f"{type(self).__name__}.make_estimator: return an estimator with partial_fit")

    def make_data(self, config: dict[str, Any]) -> tuple[Any, Any]:
        """Return an array of training examples, and an array of their labels (None if there are no labels)."""
        raise NotImplementedError(f"{type(self).__name__}.make_data: return examples and labels")

    def evaluate(self, estimator: Any) -> Mapping[str, object]:
        """Return the metrics of a step."""
        raise NotImplementedError(f"{type(self).__name__}.evaluate: return the metrics")

    def setup(self, config: dict[str, Any]) -> None:
        self.inputs, self.labels = self.make_data(config)
        estimator = self.make_estimator(config)
        unseeded = [name for name, value in estimator.get_params().items() if name == "random_state" and value is None]
        self.estimator = estimator.set_params(**dict.fromkeys(unseeded, self.seed))
        self._batches_done = 0

    def step(self) -> Mapping[str, object]:
        batches_per_pass = -(-len(self.inputs) // self.batch_size)
        for _ in range(self.batches_per_step):
            pass_number, batch_number = divmod(self._batches_done, batches_per_pass)
            order = np.random.default_rng((self.seed, pass_number)).permutation(len(self.inputs))
            batch = order[batch_number * self.batch_size : (batch_number + 1) * self.batch_size]
            needs_classes = self._batches_done == 0 and is_classifier(self.estimator)
            classes = {"classes": np.unique(self.labels)} if needs_classes else {}
            labels = None if self.labels is None else self.labels[batch]
            self.estimator.partial_fit(self.inputs[batch], labels, **classes)
            self._batches_done += 1
        return self.evaluate(self.estimator)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        skops.io.dump(self.estimator, Path(checkpoint_dir, _ESTIMATOR_FILE))
        Path(checkpoint_dir, _POSITION_FILE).write_text(json.dumps({"batches_done": self._batches_done}))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        parameters = self.estimator.get_params()
        self.estimator = load_estimator(checkpoint_dir, trusted_types=self.trusted_types).set_params(**parameters)
        self._batches_done = json.loads(Path(checkpoint_dir, _POSITION_FILE).read_text())["batches_done"]
