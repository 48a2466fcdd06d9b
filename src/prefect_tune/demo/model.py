"""The demo's trainable: a NumPy network on scikit-learn's digits, whose checkpoint has its complete state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from prefect_tune.demo.training_process import WEIGHTS_FILE
from prefect_tune.runtime.trainable import Trainable

Floats = NDArray[np.float32]
_PIXELS, _CLASSES, _TEST_IMAGES = 64, 10, 360
_DECAY, _DECAY_OF_SQUARES = np.float32(0.9), np.float32(0.999)
_BLOCK = 1 << 16  # weights updated at a time: what a core's cache holds


class Digits(Trainable):
    """Two hidden layers of `width` units under Adam; a step is one batch.

    What the next step depends on is the weights, Adam's two averages, the number of the step and the
    state of the generator that draws batches. All of it is saved.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self.config: dict[str, Any] = dict(config)
        self.random = np.random.default_rng(self.config["seed"])
        images, self.labels = load_digits(return_X_y=True)
        self.images: Floats = (images / 16).astype(np.float32)
        order = self.random.permutation(len(self.images))
        self.test, self.train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
        self.steps = 0
        width = self.config["width"]
        self.shapes = [(_PIXELS, width), (width,), (width, width), (width,), (width, _CLASSES), (_CLASSES,)]
        self.weights: Floats = np.concatenate([self._drawn(shape).ravel() for shape in self.shapes])
        self.mean, self.squares = np.zeros_like(self.weights), np.zeros_like(self.weights)

    def step(self) -> Mapping[str, object]:
        batch = self.random.choice(self.train, self.config["batch"], replace=False)
        loss, gradient = self._loss_and_gradient(self.images[batch], self.labels[batch])
        self._descend(gradient)
        accuracy = self._accuracy()
        print(f"step {self.steps}: loss {loss:.4f}, accuracy {accuracy:.4f}")  # noqa: T201 - shows in the run's log
        return {"loss": loss, "accuracy": accuracy}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        directory = Path(checkpoint_dir)
        np.save(directory / WEIGHTS_FILE, self.weights)
        np.save(directory / "mean.npy", self.mean)
        np.save(directory / "squares.npy", self.squares)
        state = {"steps": self.steps, "random": self.random.bit_generator.state}
        (directory / "state.json").write_text(json.dumps(state))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        directory = Path(checkpoint_dir)
        self.weights = np.load(directory / WEIGHTS_FILE)
        self.mean = np.load(directory / "mean.npy")
        self.squares = np.load(directory / "squares.npy")
        state = json.loads((directory / "state.json").read_text())
        self.steps, self.random.bit_generator.state = state["steps"], state["random"]

    def _drawn(self, shape: tuple[int, ...]) -> Floats:
        if len(shape) == 1:
            return np.zeros(shape, np.float32)
        return self.random.standard_normal(shape, np.float32) * np.float32((2 / shape[0]) ** 0.5)

    def _layers(self, flat: Floats) -> list[Floats]:
        """Views into `flat`: weights and biases, layer by layer."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends), self.shapes, strict=True)]

    def _activations(self, images: Floats) -> tuple[Floats, Floats, Floats]:
        w1, b1, w2, b2, w3, b3 = self._layers(self.weights)
        first: Floats = np.maximum(images @ w1 + b1, 0)
        second: Floats = np.maximum(first @ w2 + b2, 0)
        return first, second, second @ w3 + b3

    def _accuracy(self) -> float:
        scores = self._activations(self.images[self.test])[2]
        return float((scores.argmax(axis=1) == self.labels[self.test]).mean())

    def _loss_and_gradient(self, images: Floats, labels: NDArray[np.int64]) -> tuple[float, Floats]:
        first, second, scores = self._activations(images)
        rows = np.arange(len(images))
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        error = odds / odds.sum(axis=1, keepdims=True)
        loss = float(-np.log(error[rows, labels]).mean())
        error[rows, labels] -= 1
        error /= len(images)
        gradient = np.empty_like(self.weights)
        parts, (_, _, w2, _, w3, _) = self._layers(gradient), self._layers(self.weights)
        for layer, inputs, weights in ((4, second, w3), (2, first, w2), (0, images, None)):
            parts[layer][...] = inputs.T @ error
            parts[layer + 1][...] = error.sum(axis=0)
            if weights is not None:
                error = (error @ weights.T) * (inputs > 0)
        return loss, gradient

    def _descend(self, gradient: Floats) -> None:
        """Take one step of Adam, block by block."""
        self.steps += 1
        rate = np.float32(self.config["rate"] / (1 - float(_DECAY) ** self.steps))
        scale = np.float32(1 / (1 - float(_DECAY_OF_SQUARES) ** self.steps))
        for start in range(0, len(gradient), _BLOCK):
            block = slice(start, start + _BLOCK)
            slope, mean, squares = gradient[block], self.mean[block], self.squares[block]
            mean += (1 - _DECAY) * (slope - mean)
            squares += (1 - _DECAY_OF_SQUARES) * (slope * slope - squares)
            self.weights[block] -= rate * mean / (np.sqrt(squares * scale) + np.float32(1e-8))
