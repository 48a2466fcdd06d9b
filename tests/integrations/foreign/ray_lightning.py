"""`ray/tune/examples/mnist_ptl_mini.py` of ray 2.55.0 (Apache-2.0), with the lines of docs/integrations.md.

Changed: the callback, `ResumableLoader` and `ckpt_path`; scikit-learn's digits in place of MNIST, which is a download.
Lightning 2 has neither `gpus` of the Trainer nor `validation_epoch_end`: they are left out.
"""

from __future__ import annotations

import lightning.pytorch as pl
import sklearn.datasets
import torch
from torch.nn import functional as F
from torchmetrics import Accuracy  # type: ignore[import-not-found]  # Lightning installs it

from prefect_tune.integrations.lightning import TuneReportCheckpointCallback, get_checkpoint_path
from prefect_tune.integrations.torch import ResumableLoader


class DigitsDataModule(pl.LightningDataModule):
    def __init__(self, batch_size: int):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        images, labels = sklearn.datasets.load_digits(return_X_y=True)
        pixels = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        self.mnist_train = list(zip(F.pad(pixels, (10, 10, 10, 10)), labels, strict=True))

    def train_dataloader(self):
        return ResumableLoader(self.mnist_train, batch_size=self.batch_size)


class LightningMNISTClassifier(pl.LightningModule):
    def __init__(self, config):
        super(LightningMNISTClassifier, self).__init__()

        self.lr = config["lr"]
        layer_1, layer_2 = config["layer_1"], config["layer_2"]
        self.batch_size = config["batch_size"]

        # mnist images are (1, 28, 28) (channels, width, height)
        self.layer_1 = torch.nn.Linear(28 * 28, layer_1)
        self.layer_2 = torch.nn.Linear(layer_1, layer_2)
        self.layer_3 = torch.nn.Linear(layer_2, 10)
        self.accuracy = Accuracy(task="multiclass", num_classes=10, top_k=1)

    def forward(self, x):
        batch_size, channels, width, height = x.size()
        x = x.view(batch_size, -1)
        x = self.layer_1(x)
        x = torch.relu(x)
        x = self.layer_2(x)
        x = torch.relu(x)
        x = self.layer_3(x)
        x = torch.log_softmax(x, dim=1)
        return x

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def training_step(self, train_batch, batch_idx):
        x, y = train_batch
        logits = self.forward(x)
        loss = F.nll_loss(logits, y)
        acc = self.accuracy(logits, y)
        self.log("ptl/train_loss", loss)
        self.log("ptl/train_accuracy", acc)
        return loss


def train_mnist_tune(config, num_epochs=10):
    model = LightningMNISTClassifier(config)
    dm = DigitsDataModule(batch_size=config["batch_size"])
    metrics = {"loss": "ptl/train_loss", "acc": "ptl/train_accuracy"}
    trainer = pl.Trainer(
        max_epochs=num_epochs,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[TuneReportCheckpointCallback(metrics, every_steps=4)],
    )
    trainer.fit(model, dm, ckpt_path=get_checkpoint_path(), weights_only=True)


def train_with_seed(config):
    pl.seed_everything(0)
    train_mnist_tune(config)
