"""A Keras 3 callback that reports each epoch, and saves and restores the state that the next epoch depends on."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect_tune.core.errors import InvalidInput
from prefect_tune.integrations.common import (
    MetricNames,
    callbacks_beside,
    chosen,
    goes_on_after,
    missing,
    path_of_trial,
    restored_directory,
)
from prefect_tune.runtime.trainable import save_last_step

try:
    import keras
    import numpy as np
except ModuleNotFoundError as error:
    raise missing(error, "keras", "keras", "numpy") from error

__all__ = ["TuneReportCheckpointCallback", "load_variables", "restored_epoch"]

_VARIABLES, _PLACE = "variables.npz", "place.json"
_PATHS = {
    keras.callbacks.BackupAndRestore: "backup_dir",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
}
"""The attribute that holds the path to which a callback writes; paths that begin with it are in others."""


def restored_epoch() -> int:
    """Return the `initial_epoch` of a resumed trial: the number of epochs trained; 0 on a fresh start."""
    directory = restored_directory()
    return int(json.loads((directory / _PLACE).read_text())["epochs"]) if directory else 0


def load_variables(directory: str | Path, model: Any) -> None:
    """Load weights, optimizer state and seeds into a built and compiled model, without running code.

    Raises:
        InvalidInput: the model has other variables than the saved one.
    """
    variables = _variables_of(model)
    with np.load(Path(directory, _VARIABLES), allow_pickle=False) as saved:
        shapes, expected = [saved[name].shape for name in saved.files], [tuple(each.shape) for each in variables]
        if shapes != expected:
            raise InvalidInput(f"{directory}: expected variables of shapes {expected}, found {shapes}")
        for variable, name in zip(variables, saved.files, strict=True):
            variable.assign(saved[name])


class TuneReportCheckpointCallback(keras.callbacks.Callback):
    """Report each epoch, save when the flow's `checkpoint` says so and at the end, and resume from there.

    ```python
    model.fit(images, labels, epochs=20, initial_epoch=restored_epoch(), callbacks=[TuneReportCheckpointCallback()])
    ```

    Restores weights, the optimizer's state, the seeds of layers, and the global generators of Python, NumPy and
    PyTorch, from which `fit` draws the order of the data. The model has to be compiled, and built by its first `fit`.
    Other callbacks (`EarlyStopping`, `ReduceLROnPlateau`) lose their state on a resume: use `pt.Plateau`.
    The position within an epoch is not saved: an interval is at least one epoch.

    The paths of `ModelCheckpoint`, `CSVLogger`, `TensorBoard` and `BackupAndRestore` become paths below the trial's
    directory, unless they contain the trial's ID: trials would overwrite each other's files. A backup of an earlier
    attempt is removed, since the trial resumes from its checkpoint.

    Args:
        metrics: which to report; `{"loss": "val_loss"}` renames. Default: all.
    """

    def __init__(self, metrics: MetricNames = None) -> None:
        super().__init__()
        self._metrics = metrics
        self._random: Mapping[str, Any] | None = None
        self._epochs = 0

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        for callback in callbacks_beside(self):
            _move_paths(callback)

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        self._epochs = restored_epoch()
        directory = restored_directory()
        if directory is not None:
            load_variables(directory, self.model)
            self._random = json.loads((directory / _PLACE).read_text())["random"]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        if epoch != self._epochs:
            raise InvalidInput(f"model.fit: pass initial_epoch=restored_epoch(), {self._epochs} here; found {epoch}")
        if self._random is not None:  # building the model has advanced the generators: set them back
            _set_random_state(self._random)
            self._random = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        self._epochs = epoch + 1
        if not goes_on_after(chosen(logs or {}, self._metrics), self._save):
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        save_last_step(self._save)

    def _save(self, directory: str) -> None:
        arrays = [np.asarray(keras.ops.convert_to_numpy(each)) for each in _variables_of(self.model)]
        np.savez(Path(directory, _VARIABLES), *arrays)
        place = {"epochs": self._epochs, "random": _random_state()}
        Path(directory, _PLACE).write_text(json.dumps(place))


def _move_paths(callback: object) -> None:
    for kind, attribute in _PATHS.items():
        if isinstance(callback, kind):
            before = os.fspath(getattr(callback, attribute))
            path = path_of_trial(before, f"{kind.__name__}({attribute})")
            if path == before:
                continue
            if kind is keras.callbacks.BackupAndRestore:
                shutil.rmtree(path, ignore_errors=True)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            for name, value in vars(callback).items():
                if name == attribute or (isinstance(value, str) and value.startswith(before)):
                    setattr(callback, name, path + os.fspath(value).removeprefix(before))


def _variables_of(model: Any) -> Sequence[Any]:
    """Return weights, seeds and the optimizer's variables, each once; metrics are reset with each epoch."""
    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    seeds = [each for each in model.non_trainable_variables if id(each) not in {id(weight) for weight in model.weights}]
    return [*model.weights, *seeds, *optimizer.variables]


def _random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  the global generator is what libraries draw from
    torch = sys.modules.get("torch")
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist() if torch else None,
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002  as above
    if state["torch"] is not None and (torch := sys.modules.get("torch")):
        torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
