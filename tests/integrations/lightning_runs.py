"""A small Lightning training in this process: its reports and checkpoints, from the start or from a checkpoint."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging

import prefect_tune as pt
from prefect_tune.integrations.lightning import TuneReportCheckpointCallback, get_checkpoint_path
from prefect_tune.integrations.torch import ResumableLoader
from prefect_tune.runtime.trainable import activate_session
from tests.integrations.undisturbed import RecordingSession

BATCHES = 6  # in an epoch
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "validation each second epoch": {"check_val_every_n_epoch": 2},
    "validation within an epoch": {"val_check_interval": 3},
    "plateau within an epoch": {"val_check_interval": 3},
    "validation each fourth batch": {"val_check_interval": 4, "check_val_every_n_epoch": None},
    "shortened epochs": {"limit_train_batches": 4, "limit_val_batches": 1},
    "accumulated gradients": {"accumulate_grad_batches": 2},
}


class Module(lightning.LightningModule):
    """Logs what a checkpoint may miss: the examples, the learning rate, the number of calls of each hook."""

    def __init__(self, kind: str, kill_at: int | None = None, signal_number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.kind, self.kill_at, self.signal_number = kind, kill_at, signal_number
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
        self.register_buffer("calls", torch.zeros(5))

    def loss(self, batch: Any) -> Any:
        return (self.layers(batch[0])[:, 0] - batch[1]).square().mean()

    def training_step(self, batch: Any, number: int) -> Any:
        if self.trainer.global_step == self.kill_at and pt.get_trial().attempt == 1:
            os.kill(os.getpid(), self.signal_number)
        loss = self.loss(batch)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log_dict({"loss": loss, "example": batch[1][0], "rate": rate, "number": float(number)})
        return loss

    def validation_step(self, batch: Any, _number: int) -> None:
        if not self.trainer.sanity_checking:
            self.log("val_loss", self.loss(batch))
            self.calls[0] += len(batch[1])

    def on_validation_epoch_end(self) -> None:
        self.calls[1] += not self.trainer.sanity_checking

    def on_train_batch_end(self, *_: Any) -> None:
        self.calls[2] += 1

    def on_train_epoch_start(self) -> None:
        self.calls[3] += torch.rand(())

    def on_train_epoch_end(self) -> None:
        self.calls[4] += torch.rand(())

    def on_train_batch_start(self, *_: Any) -> None:
        self.log_dict({f"calls {index}": count.clone() for index, count in enumerate(self.calls)})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if self.kind.startswith("plateau"):
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=5, threshold_mode="abs"
            )
            within = {"interval": "step", "monitor": "loss"} if self.kind == "plateau within an epoch" else {}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss", **within}}
        if self.kind == "one cycle":
            steps = int(self.trainer.estimated_stepping_batches)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "epoch"}}


def make_callbacks(kind: str) -> Sequence[Any]:
    if kind == "averaged weights":
        return [EMAWeightAveraging(decay=0.9)]
    if kind.startswith("early stopping"):
        at_epoch_end = kind == "early stopping at the end of an epoch"
        return [EarlyStopping("val_loss", patience=1, min_delta=5, check_on_train_epoch_end=at_epoch_end)]
    return []


def fit(
    kind: str,
    limit: Mapping[str, int],
    every_steps: int | None,
    directory: Path,
    kill_at: int | None = None,
    signal_number: int = signal.SIGKILL,
) -> Mapping[str, Any]:
    """Train to the end, or to the pause; return the state then."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(8 * BATCHES, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[TuneReportCheckpointCallback(every_steps=every_steps), *make_callbacks(kind)],
        default_root_dir=str(directory),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**limit, **OPTIONS.get(kind, {})},
    )
    module = Module(kind, kill_at, signal_number)
    validation = ResumableLoader(data, batch_size=16)
    path = get_checkpoint_path()
    trainer.fit(module, ResumableLoader(data, batch_size=8), validation, ckpt_path=path, weights_only=True)
    return {**module.state_dict(), "epoch": torch.tensor(trainer.current_epoch), "random": torch.get_rng_state()}


def run(kind: str, limit: Mapping[str, int], every_steps: int | None, reports: RecordingSession) -> Mapping[str, Any]:
    """Call `fit` as the only trial of a context, like a new process."""

    def train() -> Mapping[str, Any]:
        activate_session(reports, whole_process=False)
        with warnings.catch_warnings():
            return fit(kind, limit, every_steps, reports.directory)

    return copy_context().run(train)


def train_and_kill(config: Mapping[str, Any]) -> None:
    """Train; send a signal to the first attempt before the batch after step `kill_at`."""
    directory, signal_number = pt.get_trial().directory, config["signal"]
    fit("plateau", {"max_epochs": 4}, config["every_steps"], directory, config["kill_at"], signal_number)
