"""PyTorch DDP: each trial is trained by two processes, on two GPUs where there are two.

Kill it, or one of its processes, whenever you like: all processes of the trial continue from its last commit.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn

import prefect_tune as pt
from prefect_tune.integrations.torch import load_state, save_state


class Digits(pt.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        self.trial = trial = pt.get_trial()
        has_gpus = torch.cuda.device_count() >= trial.world_size
        self.device = torch.device("cuda", trial.local_rank) if has_gpus else torch.device("cpu")
        distributed.init_process_group("nccl" if has_gpus else "gloo", rank=trial.rank, world_size=trial.world_size)
        torch.manual_seed(trial.rank)  # each rank drops out other units
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images / 16, dtype=torch.float32, device=self.device)
        self.labels = torch.tensor(labels, device=self.device)
        network = nn.Sequential(
            nn.Linear(64, config["width"]), nn.ReLU(), nn.Dropout(0.2), nn.Linear(config["width"], 10)
        )
        self.model = nn.parallel.DistributedDataParallel(network.to(self.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["lr"], momentum=0.9)

    def step(self) -> dict[str, float]:
        # Each rank has its own part of the batch of this step.
        batch = torch.randperm(1500, generator=torch.Generator().manual_seed(self.trial.step))[:128]
        mine = batch[self.trial.rank :: self.trial.world_size]
        loss = nn.functional.cross_entropy(self.model(self.images[mine]), self.labels[mine])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        save_state(self.own(checkpoint_dir), model=self.model, optimizer=self.optimizer)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        load_state(self.own(checkpoint_dir), model=self.model, optimizer=self.optimizer)

    def own(self, checkpoint_dir: str) -> Path:
        """Return the folder of this rank, whose random state differs from that of the others."""
        return Path(checkpoint_dir, f"rank-{self.trial.rank}")

    def cleanup(self) -> None:
        distributed.destroy_process_group()


if __name__ == "__main__":
    results = pt.tune(
        Digits,
        {"lr": pt.loguniform(0.01, 1), "width": pt.choice([16, 32, 64])},
        target=sys.argv[1] if len(sys.argv) > 1 else "./runs",
        experiment="torch-ddp-digits",
        metric="loss",
        num_samples=3,
        scheduler=pt.ASHA(max_t=54, grace_period=18),
        checkpoint=pt.Cadence(every_steps=10),
        processes_per_trial=2,
    )
    print(results.best.config, results.best.metrics)
