"""Trainables with one defect each; the file `config["touch"]` shows whether a step was ever trained."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import prefect_tune as pt


class NoStep:
    """Not a trainable."""


class Plain:
    """Not a trainable either."""

    def step(self) -> Mapping[str, object]:
        return {"loss": 1.0}


class Stepless(pt.Trainable):
    """Written for another interface."""

    def _train(self) -> Mapping[str, object]:
        return {"loss": 1.0}


class NoConfig(pt.Trainable):
    """Written without the configuration."""

    def setup(self) -> None:  # type: ignore[override]  # that is the fault
        pass

    def step(self) -> Mapping[str, object]:
        return {"loss": 1.0}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        pass


def take_two(_config: Mapping[str, object], _data: object) -> None:
    pt.report({"loss": 1.0})


def train_once(config: Mapping[str, object]) -> None:
    """Train one step, and leave a trace of it."""
    if "touch" in config:
        Path(str(config["touch"])).touch()
    pt.report({"loss": 1.0})


def report_nan(_config: Mapping[str, object]) -> None:
    pt.report({"loss": float("nan")})


def report_array(_config: Mapping[str, object]) -> None:
    import numpy as np  # here: all other trials save the 0.2 s of CPU time that it takes

    pt.report({"loss": np.zeros(3)})


def report_text(_config: Mapping[str, object]) -> None:
    pt.report("0.5")  # type: ignore[arg-type]  # that is the fault


def report_remote_checkpoint(_config: Mapping[str, object]) -> None:
    pt.report({"loss": 1.0}, checkpoint=pt.Checkpoint("s3://bucket/elsewhere"))


def report_dangling_link(_config: Mapping[str, object]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "weights").symlink_to("/nowhere/at/all")
        pt.report({"loss": 1.0}, checkpoint=pt.Checkpoint.from_directory(directory))
