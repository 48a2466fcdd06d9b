"""A small network, trained by SGD with momentum on shuffled batches; each step depends on all earlier steps."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import prefect_tune as pt
from tests.trainables.witness import hold, record_act

Array = NDArray[np.float64]
_INPUTS, _HIDDEN, _CLASSES, _EXAMPLES, _BATCH = 16, 64, 5, 192, 32


class Mlp:
    """The model, its optimizer, the random state and the place in the shuffled data: all that a step depends on."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        generator = np.random.default_rng(config.get("data_seed", 7))
        self.inputs = generator.normal(size=(_EXAMPLES, _INPUTS))
        self.labels = generator.integers(0, _CLASSES, size=_EXAMPLES)
        self.random = np.random.default_rng(config.get("seed", 0))
        shapes = ((_INPUTS, _HIDDEN), (_HIDDEN,), (_HIDDEN, _CLASSES), (_CLASSES,))
        self.weights = [self.random.normal(scale=0.2, size=shape) for shape in shapes]
        self.velocity = [np.zeros(shape) for shape in shapes]
        self.order = self.random.permutation(_EXAMPLES)
        self.place = 0
        self.step = 0

    def train_step(self) -> dict[str, Any]:
        """Train on the next batch; return the loss and a digest of the whole state."""
        time.sleep(float(self.config.get("step_seconds", 0)))
        batch = self._next_batch()
        noise = self.random.normal(scale=0.05, size=(len(batch), _INPUTS))
        loss, gradients = self._gradients(self.inputs[batch] + noise, self.labels[batch])
        for index, gradient in enumerate(gradients):
            self.velocity[index] = 0.9 * self.velocity[index] - 0.05 * gradient
            self.weights[index] = self.weights[index] + self.velocity[index]
        self.step += 1
        return {"loss": loss, "state": self.digest()}

    def digest(self) -> str:
        """Return a hash of the whole state."""
        hashed = hashlib.sha256()
        for array in (*self.weights, *self.velocity, self.order):
            hashed.update(np.ascontiguousarray(array).tobytes())
        hashed.update(self._rest().encode())
        return hashed.hexdigest()

    def save(self, directory: str) -> None:
        folder = Path(directory)
        for index, (weight, velocity) in enumerate(zip(self.weights, self.velocity, strict=True)):
            np.save(folder / f"weight-{index}.npy", weight)
            np.save(folder / f"velocity-{index}.npy", velocity)
        np.save(folder / "order.npy", self.order)
        (folder / "rest.json").write_text(self._rest())

    def load(self, directory: str) -> None:
        folder = Path(directory)
        self.weights = [np.load(folder / f"weight-{index}.npy") for index in range(len(self.weights))]
        self.velocity = [np.load(folder / f"velocity-{index}.npy") for index in range(len(self.velocity))]
        self.order = np.load(folder / "order.npy")
        rest = json.loads((folder / "rest.json").read_text())
        self.random.bit_generator.state = rest["random"]
        self.place, self.step = rest["place"], rest["step"]

    def _rest(self) -> str:
        rest = {"random": self.random.bit_generator.state, "place": self.place, "step": self.step}
        return json.dumps(rest, sort_keys=True)

    def _next_batch(self) -> NDArray[np.int64]:
        if self.place + _BATCH > _EXAMPLES:
            self.order, self.place = self.random.permutation(_EXAMPLES), 0
        batch = self.order[self.place : self.place + _BATCH]
        self.place += _BATCH
        return batch

    def _gradients(self, inputs: Array, labels: NDArray[np.int64]) -> tuple[float, list[Array]]:
        first, bias, second, offset = self.weights
        hidden = np.tanh(inputs @ first + bias)
        scores = hidden @ second + offset
        scores -= scores.max(axis=1, keepdims=True)
        probabilities = np.exp(scores)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        loss = float(-np.log(probabilities[np.arange(len(labels)), labels]).mean())
        probabilities[np.arange(len(labels)), labels] -= 1
        probabilities /= len(labels)
        back = (probabilities @ second.T) * (1 - hidden**2)
        return loss, [inputs.T @ back, back.sum(axis=0), hidden.T @ probabilities, probabilities.sum(axis=0)]


class NumpyMlp(pt.Trainable):
    """The class API: records acts in `config["witness"]`, waits at `config["gate_step"]` for `config["gate"]`."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.model = Mlp(config)

    def step(self) -> Mapping[str, Any]:
        if self.model.step + 1 == self.config.get("gate_step"):
            hold(self.config["gate"])
        record_act(self.config.get("witness"), "begin", self.model.step + 1)
        metrics = self.model.train_step()
        record_act(self.config.get("witness"), "trained", self.model.step)
        return metrics

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        record_act(self.config.get("witness"), "saving", self.model.step)
        if self.model.step >= self.config.get("slow_from_step", 0):
            time.sleep(float(self.config.get("save_seconds", 0)))
        self.model.save(checkpoint_dir)
        record_act(self.config.get("witness"), "saved", self.model.step)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.model.load(checkpoint_dir)
        record_act(self.config.get("witness"), "loaded", self.model.step)


class Forgetful(NumpyMlp):
    """Does not load the random state."""

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        random = self.model.random
        super().load_checkpoint(checkpoint_dir)
        self.model.random = random
        random.bit_generator.state = np.random.default_rng(1).bit_generator.state


def train(config: Mapping[str, Any]) -> None:
    """The function API: the same training, with a checkpoint every `config["interval"]` steps."""
    model = Mlp(config)
    if checkpoint := pt.get_checkpoint():
        with checkpoint.as_directory() as directory:
            model.load(directory)
        record_act(config.get("witness"), "loaded", model.step)
    while True:
        record_act(config.get("witness"), "begin", model.step + 1)
        metrics = model.train_step()
        record_act(config.get("witness"), "trained", model.step)
        if model.step % config.get("interval", 5) == 0 or pt.get_trial().should_checkpoint:
            _report_with_checkpoint(model, metrics)
        else:
            pt.report(metrics)


def _report_with_checkpoint(model: Mlp, metrics: Mapping[str, Any]) -> None:
    directory = tempfile.mkdtemp()
    try:
        record_act(model.config.get("witness"), "saving", model.step)
        model.save(directory)
        pt.report(metrics, checkpoint=pt.Checkpoint.from_directory(directory))
    finally:
        shutil.rmtree(directory)


def digest_of_directory(directory: Path) -> str:
    """Return a sha256 of the names and bytes of all files."""
    hashed = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        hashed.update(f"{path.relative_to(directory)}\0{path.stat().st_size}\0".encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()
