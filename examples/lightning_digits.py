"""Lightning: search for the best network for handwritten digits, reported and saved every nine steps.

Kill it whenever you like and run it again: no trial loses more than nine steps, in the middle of an epoch or not.
"""

import logging
import sys
import tempfile
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn

import prefect_tune as pt
from prefect_tune.integrations.lightning import TuneReportCheckpointCallback, get_checkpoint_path
from prefect_tune.integrations.torch import ResumableLoader


class Digits(lightning.LightningModule):
    def __init__(self, lr: float, width: int) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _number: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=54)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


def train(config: dict[str, Any]) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    lightning.seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=pt.get_trial().world_size,  # with processes_per_trial=2 Lightning's DDP trains on two
        use_distributed_sampler=False,  # ResumableLoader divides the data
        max_steps=54,
        callbacks=[TuneReportCheckpointCallback("loss", every_steps=3)],
        default_root_dir=tempfile.mkdtemp(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = ResumableLoader(data, batch_size=64)
    trainer.fit(Digits(**config), loader, ckpt_path=get_checkpoint_path(), weights_only=True)


if __name__ == "__main__":
    results = pt.tune(
        train,
        {"lr": pt.loguniform(0.001, 0.1), "width": pt.choice([16, 32, 64])},
        target=sys.argv[1] if len(sys.argv) > 1 else "./runs",
        experiment="lightning-digits",
        metric="loss",
        num_samples=3,
        scheduler=pt.ASHA(max_t=18, grace_period=6),
        checkpoint=pt.Cadence(every_steps=3),
    )
    print(results.best.config, results.best.metrics)
