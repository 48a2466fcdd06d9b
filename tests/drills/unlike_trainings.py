"""Trainings for drills: some differ after a resume, though little shows it, and some are exact, though much differs."""

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
from tests.drills.class_as_function import as_function

State = dict[str, Any]


def _train(
    step: Callable[[State], Mapping[str, object]], start: State, *, saves: Callable[[State], bool] = lambda _: True
) -> None:
    """Train for ever; `start` is what a checkpoint holds, one after each second step."""
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
        made = pt.get_trial().new_checkpoint_dir()
        Path(made, "state.json").write_text(json.dumps(state))
        pt.report(metrics, checkpoint=pt.Checkpoint.from_directory(made))


def draws_without_a_seed(config: Mapping[str, Any]) -> None:
    """The checkpoint holds a count only; `hidden` draws from no generator that the drill can see."""
    draw = secrets.SystemRandom().random if config.get("hidden") else random.random
    _train(lambda state: {"loss": draw(), "epoch": state["step"], "rate": 0.9 ** state["step"]}, {})


def weighs_without_a_seed(_: Mapping[str, Any]) -> None:
    """A weight is a number in the checkpoint, beside the time of the save."""

    def step(state: State) -> Mapping[str, object]:
        state["weight"] += random.random()
        state["saved_at"] = time.time()
        return {"loss": 1 / state["weight"], "rate": 0.9 ** state["step"]}

    _train(step, {"weight": 0.5})


def saves_no_more_after_a_resume(_: Mapping[str, Any]) -> None:
    resumed = pt.get_checkpoint() is not None
    _train(lambda state: {"loss": math.sin(state["step"])}, {}, saves=lambda _: not resumed)


def leaves_weights_in_its_directory(_: Mapping[str, Any]) -> None:
    file = Path("weights.json")
    weights = json.loads(file.read_text()) if pt.get_checkpoint() and file.exists() else 0.0

    def step(state: State) -> Mapping[str, object]:
        nonlocal weights
        weights = 0.9 * weights + math.cos(state["step"])
        file.write_text(json.dumps(weights))
        return {"loss": weights}

    _train(step, {})


def reports_otherwise_after_a_resume(config: Mapping[str, Any]) -> None:
    resumed = pt.get_checkpoint() is not None
    after = {"nested": {"eval": {"loss": 0.0}}, "minus": {"eval/loss": -0.0}, "whole": {"eval/loss": 0}}[
        config["metric"]
    ]
    before = {"eval/loss": 0.0}
    _train(lambda state: {"loss": math.sin(state["step"]), **(after if resumed else before)}, {})


def keeps_books(_: Mapping[str, Any]) -> None:
    """Exact: what differs are times and identifiers, in the checkpoint, in a header and in a metric."""

    def step(state: State) -> Mapping[str, object]:
        begin = time.perf_counter()
        state["weight"] += math.cos(state["step"])
        state |= {"saved_at": time.time(), "save": str(uuid.uuid4()), "took": time.perf_counter() - begin}
        return {"loss": state["weight"], "seconds": time.perf_counter() - begin}

    _train(step, {"weight": 0.5})


def packs_its_checkpoint(_: Mapping[str, Any]) -> None:
    """Exact: the header of gzip has a time."""
    weight, step = 0.5, 0
    if (checkpoint := pt.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            step, weight = pickle.loads(gzip.decompress(Path(folder, "state.pkl.gz").read_bytes()))
    while True:
        step, weight = step + 1, weight + math.cos(step)
        made = pt.get_trial().new_checkpoint_dir()
        with gzip.open(Path(made, "state.pkl.gz"), "wb") as file:
            pickle.dump((step, weight), file)
        pt.report({"loss": weight}, checkpoint=pt.Checkpoint.from_directory(made))


class OwnGenerators(pt.Trainable):
    """Adds a drawn number in each step, on each rank; `forgets` is a rank that does not save its generator, or None."""

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


own_generators = as_function(OwnGenerators)
