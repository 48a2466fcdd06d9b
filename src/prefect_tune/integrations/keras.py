"""A Keras 3 callback that reports each epoch, and saves and restores the state of the training."""

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
from prefect_tune.core.renamed import make_module_getattr
from prefect_tune.integrations.common import (
    MetricNames,
    find_sibling_callbacks,
    get_checkpoint_directory,
    make_trial_path,
    missing_extra_error,
    select_metrics,
    try_report_step,
)
from prefect_tune.runtime.trainable import save_last_step

try:
    import keras
    import numpy as np
except ModuleNotFoundError as error:
    raise missing_extra_error(error, "keras", "keras", "numpy") from error

__getattr__ = make_module_getattr(__name__, {"restored_epoch": "get_initial_epoch"})

__all__ = ["TuneReportCheckpointCallback", "get_initial_epoch", "load_variables"]

_VARIABLES_FILE, _POSITION_FILE = "variables.npz", "place.json"
_PATH_ATTRIBUTES = {
    keras.callbacks.BackupAndRestore: "backup_dir",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
}
"""For each class of callbacks, the attribute with its output path. Other attributes may have paths below that path."""


def get_initial_epoch() -> int:
    """Return the `initial_epoch` of a resumed trial, which is the number of trained epochs; 0 on a fresh start."""
    directory = get_checkpoint_directory()
    return int(json.loads((directory / _POSITION_FILE).read_text())["epochs"]) if directory else 0


def load_variables(directory: str | Path, model: Any) -> None:
    """Load weights, optimizer state and seeds into a built and compiled model, without running code.

    Raises:
        InvalidInput: the variables of the model and of the saved model differ.
    """
    variables = _collect_variables(model)
    with np.load(Path(directory, _VARIABLES_FILE), allow_pickle=False) as saved:
        shapes, expected = [saved[name].shape for name in saved.files], [tuple(it.shape) for it in variables]
        if shapes != expected:
            raise InvalidInput(f"{directory}: expected variables of shapes {expected}, found {shapes}")
        for variable, name in zip(variables, saved.files, strict=True):
            variable.assign(saved[name])


class TuneReportCheckpointCallback(keras.callbacks.Callback):
    """Report each epoch, save at the flow's `checkpoint` interval and at the end, and resume from the last save.

    ```python
    model.fit(images, labels, epochs=20, initial_epoch=get_initial_epoch(), callbacks=[TuneReportCheckpointCallback()])
    ```

    A resume restores weights, the optimizer's state, the seeds of layers, and the global generators of Python, NumPy
    and PyTorch, from which `fit` draws the order of the data. The model must be compiled; `fit` builds it if necessary.
    Other callbacks (`EarlyStopping`, `ReduceLROnPlateau`) lose their state on a resume; use `pt.Plateau` to stop early.
    The position within an epoch is not saved, so the smallest interval between saves is one epoch.

    The paths of `ModelCheckpoint`, `CSVLogger`, `TensorBoard` and `BackupAndRestore` are moved below the trial's
    directory, so that trials do not overwrite each other's files. A path that contains the trial's ID is not moved.
    A backup of an earlier attempt is removed, because the trial resumes from its checkpoint.

    Args:
        metrics: the metrics to report; `{"loss": "val_loss"}` renames one. Default: all.
    """

    def __init__(self, metrics: MetricNames = None) -> None:
        super().__init__()
        self._metrics = metrics
        self._restored_random_state: Mapping[str, Any] | None = None
        self._epochs = 0

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        for callback in find_sibling_callbacks(self):
            for kind, attribute in _PATH_ATTRIBUTES.items():
                if isinstance(callback, kind):
                    _move_path(callback, kind, attribute)

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        self._epochs = get_initial_epoch()
        directory = get_checkpoint_directory()
        if directory is not None:
            load_variables(directory, self.model)
            self._restored_random_state = json.loads((directory / _POSITION_FILE).read_text())["random"]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        if epoch != self._epochs:
            raise InvalidInput(f"initial_epoch: expected {self._epochs}, found {epoch}; pass get_initial_epoch()")
        if (state := self._restored_random_state) is not None:  # restored here, after `fit` drew numbers for the model
            version, internal, gauss = state["python"]
            random.setstate((version, tuple(internal), gauss))
            name, keys, *rest = state["numpy"]
            np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002  libraries draw from it
            if state["torch"] is not None and (torch := sys.modules.get("torch")):
                torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
            self._restored_random_state = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        self._epochs = epoch + 1
        if not try_report_step(select_metrics(logs or {}, self._metrics), self._save_state):
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        save_last_step(self._save_state)

    def _save_state(self, directory: str) -> None:
        arrays = [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in _collect_variables(self.model)]
        np.savez(Path(directory, _VARIABLES_FILE), *arrays)
        name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  libraries draw from the global generator
        numpy_state, torch = [name, np.asarray(keys).tolist(), *rest], sys.modules.get("torch")
        torch_state = torch.get_rng_state().tolist() if torch else None
        random_state = {"python": random.getstate(), "numpy": numpy_state, "torch": torch_state}
        Path(directory, _POSITION_FILE).write_text(json.dumps({"epochs": self._epochs, "random": random_state}))


def _move_path(callback: object, kind: type, attribute: str) -> None:
    original = os.fspath(getattr(callback, attribute))
    path = make_trial_path(original, f"{kind.__name__}({attribute})")
    if path != original:
        if kind is keras.callbacks.BackupAndRestore:
            shutil.rmtree(path, ignore_errors=True)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        for name, value in vars(callback).items():
            if name == attribute or (isinstance(value, str) and value.startswith(original)):
                setattr(callback, name, path + os.fspath(value).removeprefix(original))


def _collect_variables(model: Any) -> Sequence[Any]:
    """Return the weights, seeds and optimizer variables, each once; omit metrics, because each epoch resets them."""
    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    weights = {id(weight) for weight in model.weights}
    seeds = [variable for variable in model.non_trainable_variables if id(variable) not in weights]
    return [*model.weights, *seeds, *optimizer.variables]
