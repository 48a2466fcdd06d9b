"""The same network in Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import lightning
import torch

from benchmarks.real.reporting import begin, report

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class _Network(lightning.LightningModule):  # type: ignore[misc]  # of no known type
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: Any, _: int) -> Any:
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.last = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def on_train_epoch_end(self) -> None:
        report(self.last)


def train(config: Mapping[str, Any]) -> None:
    """Train `config["epochs"]` epochs."""
    begin(config)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=generator)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1] * x[:, 1:2]), batch_size=512)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=config["epochs"], accelerator="cpu", enable_model_summary=False, log_every_n_steps=1, **quiet
    )
    trainer.fit(_Network(config["lr"]), data)
