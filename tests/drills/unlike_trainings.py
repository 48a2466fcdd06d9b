"""Trainings for drills: some differ inconspicuously after a resume; some are exact despite many differences."""

from __future__ import annotations

import gzip
import json
import math
import pickle
import random
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt
from tests.drills.class_as_function import make_function

State = dict[str, Any]


def _train(
    step: Callable[[State], Mapping[str, object]], start: State, *, saves: Callable[[State], bool] = lambda _: True
) -> None:
    """Train forever from `start`, or from the checkpoint; save the state after each second step."""
    state = start
    if (checkpoint := pt.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = start | json.loads(Path(folder, "state.json").read_text())
    while True:
        state["step"] = state.get("step", 0) + 1
        metrics = step(state)
        if state["step"] % 2 or not saves(state):
            pt.report(metrics)
            continue
        checkpoint_dir = pt.get_trial().new_checkpoint_dir()
        Path(checkpoint_dir, "state.json").write_text(json.dumps(state))
        pt.report(metrics, checkpoint=pt.Checkpoint.from_directory(checkpoint_dir))


def draw_without_seed(config: Mapping[str, Any]) -> None:
    """Save only a count; with `hidden`, draw from a generator that the drill cannot see."""
    draw = secrets.SystemRandom().random if config.get("hidden") else random.random
    _train(lambda state: {"loss": draw(), "epoch": state["step"], "rate": 0.9 ** state["step"]}, {})


def weigh_without_seed(_: Mapping[str, Any]) -> None:
    """Save a weight as a number, and the time of the save."""

    def step(state: State) -> Mapping[str, object]:
        state["weight"] += random.random()
        state["saved_at"] = time.time()
        return {"loss": 1 / state["weight"], "rate": 0.9 ** state["step"]}

    _train(step, {"weight": 0.5})


def stop_saving_after_resume(_: Mapping[str, Any]) -> None:
    resumed = pt.get_checkpoint() is not None
    _train(lambda state: {"loss": math.sin(state["step"])}, {}, saves=lambda _: not resumed)


def leave_weights_in_directory(_: Mapping[str, Any]) -> None:
    file = Path("weights.json")
    weights = json.loads(file.read_text()) if pt.get_checkpoint() and file.exists() else 0.0

    def step(state: State) -> Mapping[str, object]:
        nonlocal weights
        weights = 0.9 * weights + math.cos(state["step"])
        file.write_text(json.dumps(weights))
        return {"loss": weights}

    _train(step, {})


def report_otherwise_after_resume(config: Mapping[str, Any]) -> None:
    resumed = pt.get_checkpoint() is not None
    after = {"nested": {"eval": {"loss": 0.0}}, "minus": {"eval/loss": -0.0}, "whole": {"eval/loss": 0}}
    loss = after[config["metric"]] if resumed else {"eval/loss": 0.0}
    _train(lambda state: {"loss": math.sin(state["step"]), **loss}, {})


def keep_books(_: Mapping[str, Any]) -> None:
    """Differ only in times and identifiers, in the checkpoint and in a metric: the training is exact."""

    def step(state: State) -> Mapping[str, object]:
        begin = time.perf_counter()
        state["weight"] += math.cos(state["step"])
        state |= {"saved_at": time.time(), "save": str(uuid.uuid4()), "took": time.perf_counter() - begin}
        return {"loss": state["weight"], "seconds": time.perf_counter() - begin}

    _train(step, {"weight": 0.5})


def pack_checkpoint(_: Mapping[str, Any]) -> None:
    """Differ only in the time in the header of gzip: the training is exact."""
    weight, step = 0.5, 0
    if (checkpoint := pt.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            step, weight = pickle.loads(gzip.decompress(Path(folder, "state.pkl.gz").read_bytes()))
    while True:
        step, weight = step + 1, weight + math.cos(step)
        checkpoint_dir = pt.get_trial().new_checkpoint_dir()
        with gzip.open(Path(checkpoint_dir, "state.pkl.gz"), "wb") as file:
            pickle.dump((step, weight), file)
        pt.report({"loss": weight}, checkpoint=pt.Checkpoint.from_directory(checkpoint_dir))


class OwnGenerators(pt.Trainable):
    """Adds a random number in each step, on each rank; the rank `forgets` does not save its generator."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.rank, self.forgets = pt.get_trial().rank, config["forgets"]
        self.random, self.total = random.Random(self.rank), 0.0

    def step(self) -> Mapping[str, object]:
        self.total += self.random.random()
        return {"total": self.total}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = None if self.rank == self.forgets else self.random.getstate()
        Path(checkpoint_dir, f"rank-{self.rank}.json").write_text(json.dumps([self.total, state]))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.total, state = json.loads(Path(checkpoint_dir, f"rank-{self.rank}.json").read_text())
        if state is not None:
            version, numbers, gauss = state
            self.random.setstate((version, tuple(numbers), gauss))


own_generators = make_function(OwnGenerators)
