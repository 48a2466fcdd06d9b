"""The problems: recorded trainings of a network, and functions whose bias and noise fall with the steps.

- `digits`: the 160 recorded trainings of `tests/data/README.md`; a configuration trains as the nearest recorded one, as
  Syne Tune makes a surrogate of a table (Salinas et al. 2022, `KNeighborsRegressor(n_neighbors=1)`).
- `hartmann3`, `hartmann6`: the multi-fidelity Hartmann functions of `mf-prior-bench` (Mallik et al. 2023, "PriorBand",
  after Kandasamy et al. 2017, "Multi-fidelity Bayesian Optimisation with Continuous Approximations"), with the bias and
  the noise that it calls "good", 2.5 and 2.
- `branin`: the multi-fidelity Branin function of Kandasamy et al. 2017, with one fidelity for its three.
- `lcbench`: the surrogate of YAHPO Gym (Pfisterer et al. 2022) for networks on a data set of OpenML.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Config", "Curve", "Parameter", "Problem", "functions_and_digits", "lcbench"]

Config: TypeAlias = Mapping[str, Any]
_RECORDED = Path(__file__).resolve().parents[2] / "tests" / "data" / "digits_mlp_table.json.gz"
_STRAGGLING = 0.5
_STEPS = 27


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number between two others, both included, or one of some options."""

    low: float = 0.0
    high: float = 1.0
    scale: str = "linear"
    is_whole: bool = False
    options: Sequence[str] = ()

    def position(self, value: Any) -> float:
        """Return the place of a number between its ends, from 0 to 1."""
        if self.scale == "log":
            return math.log(value / self.low) / math.log(self.high / self.low)
        return float(value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Curve:
    """A training: its loss after each step, and what each step takes."""

    losses: Sequence[float]
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Problem:
    """The objective of a search: the loss after the last step, which is without noise."""

    name: str
    title: str
    parameters: Mapping[str, Parameter]
    max_t: int
    train: Callable[[Config, int], Curve]
    """Of a configuration and a seed for the noise."""
    full_seconds: float
    """Average seconds of a complete training."""
    least: float | None
    """The least final loss; None where it is not known."""


def functions_and_digits() -> Sequence[Problem]:
    """Return the problems that need no data of others."""
    slowness = 1 + _STRAGGLING * math.sqrt(2 / math.pi)
    unit = Parameter()
    return (
        _digits(),
        *(
            Problem(
                f"hartmann{size}",
                f"Hartmann, {size} dimensions",
                {f"x{index}": unit for index in range(size)},
                _STEPS,
                _make_train(hartmann),
                _STEPS * slowness,
                least,
            )
            for size, hartmann, least in ((3, _hartmann3, -3.86278), (6, _hartmann6, -3.32237))
        ),
        Problem(
            "branin",
            "Branin, 2 dimensions",
            {"x": Parameter(-5, 10), "y": Parameter(0, 15)},
            _STEPS,
            _make_train(_branin),
            _STEPS * slowness,
            0.397887,
        ),
    )


# -------------------------------------------------------------------------------------------- recorded


_DIGITS = {
    "lr": Parameter(3e-5, 0.32, "log"),
    "width": Parameter(4, 128, "log", is_whole=True),
    "depth": Parameter(1, 3, is_whole=True),
    "alpha": Parameter(1e-6, 1, "log"),
    "batch": Parameter(16, 256, "log", is_whole=True),
    "act": Parameter(options=("relu", "tanh", "logistic")),
    "solver": Parameter(options=("adam", "sgd")),
}


def _digits() -> Problem:
    recorded = json.loads(gzip.decompress(_RECORDED.read_bytes()))
    points = [_coordinates_of(row["cfg"]) for row in recorded]

    def train(config: Config, seed: int) -> Curve:
        del seed
        point = _coordinates_of(config)
        nearest = min(range(len(points)), key=lambda row: math.dist(points[row], point))
        return Curve(recorded[nearest]["err"], recorded[nearest]["sec"] / _STEPS)

    seconds = sum(row["sec"] for row in recorded) / len(recorded)
    least = min(row["err"][-1] for row in recorded)
    return Problem("digits", "Digits, recorded trainings", _DIGITS, _STEPS, train, seconds, least)


def _coordinates_of(config: Config) -> Sequence[float]:
    """Return the numbers from 0 to 1, and one number for each option, 1 for the one that is taken."""
    numbers = [parameter.position(config[name]) for name, parameter in _DIGITS.items() if not parameter.options]
    options = [(name, option) for name, parameter in _DIGITS.items() for option in parameter.options]
    return numbers + [float(config[name] == option) for name, option in options]


# -------------------------------------------------------------------------------------------- functions

_Point: TypeAlias = Sequence[float]
_ALPHA = (1.0, 1.2, 3.0, 3.2)
_A3 = ((3.0, 10, 30), (0.1, 10, 35), (3.0, 10, 30), (0.1, 10, 35))
_P3 = ((3689, 1170, 2673), (4699, 4387, 7470), (1091, 8732, 5547), (381, 5743, 8828))
_A6 = ((10, 3, 17, 3.5, 1.7, 8), (0.05, 10, 17, 0.1, 8, 14), (3, 3.5, 1.7, 10, 17, 8), (17, 8, 0.05, 10, 0.1, 14))
_P6 = (
    (1312, 1696, 5569, 124, 8283, 5886),
    (2329, 4135, 8307, 3736, 1004, 9991),
    (2348, 1451, 3522, 2883, 3047, 6650),
    (4047, 8828, 8732, 5743, 1091, 381),
)
_BIAS, _NOISE = 2.5, 2.0


def _make_train(function: Callable[[_Point, int, random.Random], float]) -> Callable[[Config, int], Curve]:
    """Return trainings by a function of a point and a step.

    A step takes 1 s, and a configuration's steps 1 + |z| times that, z normal with a deviation of 0.5: the stragglers
    of Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", appendix A.1.
    """

    def train(config: Config, seed: int) -> Curve:
        chance = random.Random(f"{seed} {sorted(config.items())}")
        step_seconds = 1 + abs(chance.gauss(0, _STRAGGLING))
        point = list(config.values())
        return Curve([function(point, step, chance) for step in range(1, _STEPS + 1)], step_seconds)

    return train


def _hartmann3(point: _Point, step: int, chance: random.Random) -> float:
    return _hartmann(point, step, chance, _A3, _P3)


def _hartmann6(point: _Point, step: int, chance: random.Random) -> float:
    return _hartmann(point, step, chance, _A6, _P6)


def _hartmann(
    point: _Point, step: int, chance: random.Random, slopes: Sequence[_Point], centres: Sequence[_Point]
) -> float:
    lacking = 1 - math.log(step) / math.log(_STEPS)
    value = -sum(
        (alpha - _BIAS * lacking)
        * math.exp(-sum(a * (x - c / 1e4) ** 2 for a, x, c in zip(row, point, centre, strict=True)))
        for alpha, row, centre in zip(_ALPHA, slopes, centres, strict=True)
    )
    return value + abs(chance.gauss(0, 1)) * _NOISE * lacking


def _branin(point: _Point, step: int, chance: random.Random) -> float:
    del chance
    (x, y), lacking = point, 1 - step / _STEPS
    b, c = 5.1 / (4 * math.pi**2) - 0.01 * lacking, 5 / math.pi - 0.1 * lacking
    t = 1 / (8 * math.pi) + 0.05 * lacking
    return (y - b * x**2 + c * x - 6) ** 2 + 10 * (1 - t) * math.cos(x) + 10


# -------------------------------------------------------------------------------------------- YAHPO Gym

_LCBENCH_EPOCHS = 52
_LCBENCH = {
    "batch_size": Parameter(16, 512, "log", is_whole=True),
    "learning_rate": Parameter(1e-4, 1e-1, "log"),
    "momentum": Parameter(0.1, 0.99),
    "weight_decay": Parameter(1e-5, 1e-1),
    "num_layers": Parameter(1, 5, is_whole=True),
    "max_units": Parameter(64, 1024, "log", is_whole=True),
    "max_dropout": Parameter(0.0, 1.0),
}
"""In the order in which the surrogate takes them, after the epoch."""
_AVERAGED = 256


def lcbench(folder: Path, task: str) -> Problem:
    """Return the training of networks on an OpenML task, as YAHPO Gym predicts it: its error is 1 - accuracy.

    Args:
        folder: `lcbench` of the repository `slds-lmu/yahpo_data`.
        task: the id of the task, such as `189906`.
    """
    numpy: Any = import_module("numpy")
    runtime: Any = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = runtime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    categories, numbers = (session_input.name for session_input in session.get_inputs())
    code = json.loads((folder / "encoding.json").read_text())["OpenML_task_id"][task]

    def train(config: Config, seed: int) -> Curve:
        del seed
        rows = [[epoch, *(config[name] for name in _LCBENCH)] for epoch in range(1, _LCBENCH_EPOCHS + 1)]
        inputs = {
            categories: numpy.full((_LCBENCH_EPOCHS, 1), code, dtype=numpy.int32),
            numbers: numpy.array(rows, dtype=numpy.float32),
        }
        predicted = session.run([session.get_outputs()[0].name], inputs)[0]
        seconds, accuracy = float(predicted[-1, 0]), predicted[:, 1]
        return Curve([1 - float(percent) / 100 for percent in accuracy], max(seconds, 1.0) / _LCBENCH_EPOCHS)

    chance = random.Random(0)
    configs = [{name: _draw_value(parameter, chance) for name, parameter in _LCBENCH.items()} for _ in range(_AVERAGED)]
    seconds = sum(train(config, 0).step_seconds for config in configs) / _AVERAGED * _LCBENCH_EPOCHS
    title = f"LCBench (YAHPO Gym), task {task}"
    return Problem(f"lcbench-{task}", title, _LCBENCH, _LCBENCH_EPOCHS, train, seconds, None)


def _draw_value(parameter: Parameter, chance: random.Random) -> float:
    share = chance.random()
    if parameter.scale == "log":
        value: float = parameter.low * (parameter.high / parameter.low) ** share
    else:
        value = parameter.low + (parameter.high - parameter.low) * share
    return round(value) if parameter.is_whole else value
