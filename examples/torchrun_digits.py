"""torchrun: each trial starts a training script with torchrun, as you start it without this package.

Kill it, or one of its processes, whenever you like: all processes of the trial continue from its last commit.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn

import prefect_tune as pt
from prefect_tune.integrations.torch import load_state, save_state


def train(config: dict[str, Any]) -> None:
    """Start this file with torchrun, in the process of the trial; `config` is that of `pt.get_trial()` in each rank."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, __file__], check=True)


def train_rank() -> None:
    """Train in one of the processes that torchrun has started."""
    trial = pt.get_trial()
    distributed.init_process_group("gloo")
    torch.manual_seed(trial.rank)  # each rank drops out other units
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    width = trial.config["width"]
    network = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.config["lr"], momentum=0.9)
    if (checkpoint := pt.get_checkpoint()) is not None:
        with checkpoint.as_directory() as restored:
            load_state(Path(restored, f"rank-{trial.rank}"), model=model, optimizer=optimizer)
    while True:  # until a stopping criterion is met: then the report does not return
        # Each rank has its own part of the batch of this step.
        batch = torch.randperm(1500, generator=torch.Generator().manual_seed(trial.step))[:128]
        mine = batch[trial.rank :: trial.world_size]
        loss = nn.functional.cross_entropy(model(images[mine].float() / 16), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        directory = Path(trial.new_checkpoint_dir())
        is_due = trial.step % 2 == 1 or trial.should_checkpoint
        if is_due:
            save_state(directory / f"rank-{trial.rank}", model=model, optimizer=optimizer)
        pt.report({"loss": loss.item()}, checkpoint=pt.Checkpoint.from_directory(directory) if is_due else None)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_rank()
    else:
        results = pt.tune(
            train,
            {"lr": pt.loguniform(0.01, 1.0), "width": pt.choice([16, 32, 64])},
            target=sys.argv[1] if len(sys.argv) > 1 else "./runs",
            experiment="torchrun-digits",
            metric="loss",
            num_samples=3,
            stop={"step": 20},
        )
        print(results.best.config, results.best.metrics)
