"""The demo's trainable, a NumPy network on scikit-learn's digits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import prefect_tune as pt


class Digits(pt.Trainable):
    """One hidden layer of `width` units, trained by gradient descent with momentum, with one batch in each step.

    A step depends on the arrays and on the random generator that draws the batch, so a checkpoint contains both.
    """

    def setup(self, config: Mapping[str, Any]) -> None:
        images, self.labels = load_digits(return_X_y=True)
        self.images = (images / 16).astype(np.float32)
        self.random, self.steps, width = np.random.default_rng(7), 0, config["width"]
        self.order, self.rate = self.random.permutation(len(images)), np.float32(30 / width)
        self.arrays = {
            "weights": self.random.standard_normal((64, width), np.float32) / np.float32(8),
            "scores": self.random.standard_normal((width, 10), np.float32) / np.float32(width**0.5),
        }
        self.arrays |= {f"{name}-momentum": np.zeros_like(array) for name, array in self.arrays.items()}

    def step(self) -> Mapping[str, object]:
        batch, test = self.random.choice(self.order[360:], 128, replace=False), self.order[:360]
        hidden, scores = self._forward(batch)
        error = np.exp(scores - scores.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error -= np.eye(10, dtype=np.float32)[self.labels[batch]]
        hidden_error = (error @ self.arrays["scores"].T) * (hidden > 0)
        for name, slope in (("scores", hidden.T @ error), ("weights", self.images[batch].T @ hidden_error)):
            momentum = self.arrays[f"{name}-momentum"]
            momentum *= np.float32(0.9)
            momentum -= self.rate * slope / np.float32(len(batch))
            self.arrays[name] += momentum
        self.steps += 1
        accuracy = float((self._forward(test)[1].argmax(axis=1) == self.labels[test]).mean())
        return {"accuracy": accuracy}

    def _forward(self, rows: Any) -> tuple[Any, Any]:
        hidden = np.maximum(self.images[rows] @ self.arrays["weights"], 0)
        return hidden, hidden @ self.arrays["scores"]

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        for name, array in self.arrays.items():
            np.save(Path(checkpoint_dir, f"{name}.npy"), array)
        state = {"steps": self.steps, "random": self.random.bit_generator.state}
        Path(checkpoint_dir, "state.json").write_text(json.dumps(state))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.arrays = {name: np.load(Path(checkpoint_dir, f"{name}.npy")) for name in self.arrays}
        state = json.loads(Path(checkpoint_dir, "state.json").read_text())
        self.steps, self.random.bit_generator.state = state["steps"], state["random"]
