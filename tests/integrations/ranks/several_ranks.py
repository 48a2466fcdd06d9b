"""Trainables that train with two processes of their framework."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
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
