"""PyTorch: search for the best network for handwritten digits, with dropout, momentum and a learning rate that decays.

Kill it whenever you like and run it again: no trial loses more than ten batches.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import prefect_tune as pt
from prefect_tune.integrations.torch import ResumableLoader, load_state, save_state


class Digits(pt.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
        self.data = ResumableLoader(torch.utils.data.TensorDataset(self.images[:1500], self.labels[:1500]), 64)
        self.batches = self.endless()
        self.model = nn.Sequential(
            nn.Linear(64, config["width"]), nn.ReLU(), nn.Dropout(0.2), nn.Linear(config["width"], 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["lr"], momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=54)

    def endless(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from self.data

    def step(self) -> dict[str, float]:
        images, labels = next(self.batches)
        loss = nn.functional.cross_entropy(self.model.train()(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        with torch.no_grad():
            right = self.model.eval()(self.images[1500:]).argmax(1) == self.labels[1500:]
        return {"loss": loss.item(), "accuracy": right.float().mean().item()}

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "data": self.data}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        save_state(checkpoint_dir, **self.parts())

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        load_state(checkpoint_dir, **self.parts())


if __name__ == "__main__":
    results = pt.tune(
        Digits,
        {"lr": pt.loguniform(0.01, 1), "width": pt.choice([16, 32, 64])},
        target=sys.argv[1] if len(sys.argv) > 1 else "./runs",
        experiment="torch-digits",
        metric="loss",
        num_samples=3,
        scheduler=pt.ASHA(max_t=54, grace_period=18),
        checkpoint=pt.Cadence(every_steps=10),
    )
    print(results.best.config, results.best.metrics)
