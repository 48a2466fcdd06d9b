"""Trainables of several processes: those that a framework starts, and examples one rank of which is killed."""

from __future__ import annotations

import importlib
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import prefect_tune as pt


def trainer(config: Mapping[str, Any]) -> None:
    """Fit with two processes, started as `config["strategy"]` does; report with or without the callback."""
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


def fabric(_config: Mapping[str, Any]) -> None:
    import lightning

    made = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    made.launch()
    pt.report({"rank": made.global_rank})


def _rank() -> None:
    for _ in range(4):
        pt.report({"loss": 1.0})


def launches_ranks(_config: Mapping[str, Any]) -> None:
    accelerate: Any = importlib.import_module("accelerate")
    accelerate.notebook_launcher(_rank, num_processes=2, use_port="0")


def killed(config: Mapping[str, Any]) -> None:
    """Train `config["example"]` with the rest of the configuration; `strike` is a rank and a step, or None."""
    kill_if_struck(config["strike"])
    train: Callable[[Mapping[str, Any]], None] = importlib.import_module(f"examples.{config['example']}").train
    train({name: each for name, each in config.items() if name not in ("example", "strike")})


def kill_if_struck(strike: Sequence[int] | None) -> None:
    """Kill this process after an optimizer's step of its first attempt, if `strike` names its rank and that step."""
    trial = pt.get_trial()
    if trial.attempt == 1 and strike is not None and strike[0] == trial.rank:
        _kill_after(strike[1])


def _kill_after(steps: int) -> None:
    hooks: Any = importlib.import_module("torch.optim.optimizer")
    taken = 0

    def count(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken == steps:
            os.kill(os.getpid(), signal.SIGKILL)

    hooks.register_optimizer_step_post_hook(count)
