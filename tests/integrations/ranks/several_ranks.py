"""Trainables with several processes: a framework starts them, or one rank of an example is killed."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import prefect_tune as pt


def fit_lightning(config: Mapping[str, Any]) -> None:
    """Fit with two processes, started by `config["strategy"]`; report with or without the callback."""
    import lightning
    import torch

    from prefect_tune.integrations.lightning import TuneReportCheckpointCallback
    from prefect_tune.integrations.torch import ResumableLoader
    from tests.integrations.line import Line

    loader: Any = ResumableLoader if config["callback"] else torch.utils.data.DataLoader
    callbacks: Any = [TuneReportCheckpointCallback("loss", every_steps=1)] if config["callback"] else []
    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=config["strategy"],
        use_distributed_sampler=not callbacks,
        max_steps=4,
        callbacks=callbacks,
        default_root_dir=tempfile.mkdtemp(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Line(reports=not callbacks), loader(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=1))


def launch_fabric(_config: Mapping[str, Any]) -> None:
    import lightning

    launcher = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    launcher.launch()
    pt.report({"rank": launcher.global_rank})


def _report_steps() -> None:
    for _ in range(4):
        pt.report({"loss": 1.0})


def launch_ranks(_config: Mapping[str, Any]) -> None:
    accelerate: Any = importlib.import_module("accelerate")
    accelerate.notebook_launcher(_report_steps, num_processes=2, use_port="0")


def train_and_kill(config: Mapping[str, Any]) -> None:
    """Train `config["example"]` with the other options; `strike` is a rank and a step, or None."""
    maybe_kill(config["strike"])
    train: Callable[[Mapping[str, Any]], None] = importlib.import_module(f"examples.{config['example']}").train
    train({name: value for name, value in config.items() if name not in ("example", "strike")})


def maybe_kill(strike: Sequence[int] | None) -> None:
    """Kill this process in its first attempt after an optimizer step, if `strike` is its rank and that step."""
    trial = pt.get_trial()
    if trial.attempt > 1 or strike is None or strike[0] != trial.rank:
        return
    hooks: Any = importlib.import_module("torch.optim.optimizer")
    steps = itertools.count(1)

    def kill_after_step(*_: object) -> None:
        if next(steps) == strike[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    hooks.register_optimizer_step_post_hook(kill_after_step)
