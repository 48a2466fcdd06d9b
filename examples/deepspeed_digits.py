"""DeepSpeed: ZeRO divides the optimizer's state of each trial between two processes, on two GPUs where there are two.

Kill it, or one of its processes, whenever you like: all processes of the trial continue from its last commit.
"""

import os
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from sklearn.datasets import load_digits
from torch import distributed, nn

import prefect_tune as pt

# DeepSpeed loads pickles, which can run code of those who can write to the target; with this, of these classes only.
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
torch.serialization.add_safe_globals([fragment_address, LossScaler, ZeroStageEnum])


class Digits(pt.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        self.trial = trial = pt.get_trial()
        # DeepSpeed reads them from the environment only, and a trial of one process has none of them.
        for name, value in (("RANK", trial.rank), ("LOCAL_RANK", trial.local_rank), ("WORLD_SIZE", trial.world_size)):
            os.environ.setdefault(name, str(value))
        deepspeed.init_distributed(auto_mpi_discovery=False)
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, config["width"]), nn.ReLU(), nn.Linear(config["width"], 10))
        options = {
            "train_micro_batch_size_per_gpu": 64,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": True},
        }
        optimizer = torch.optim.AdamW(network.parameters(), lr=config["lr"])
        self.engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=options)
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images / 16, dtype=torch.bfloat16, device=self.engine.device)
        self.labels = torch.tensor(labels, device=self.engine.device)

    def step(self) -> dict[str, float]:
        # Each rank has its own part of the batch of this step.
        batch = torch.randperm(1500, generator=torch.Generator().manual_seed(self.trial.step))[:128]
        mine = batch[self.trial.rank :: self.trial.world_size]
        loss = nn.functional.cross_entropy(self.engine(self.images[mine]), self.labels[mine])
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss.item()}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self.engine.save_checkpoint(checkpoint_dir, tag="state", save_latest=False)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.engine.load_checkpoint(checkpoint_dir, tag="state")

    def cleanup(self) -> None:
        distributed.destroy_process_group()


if __name__ == "__main__":
    results = pt.tune(
        Digits,
        {"lr": pt.loguniform(0.001, 0.1), "width": pt.choice([16, 32, 64])},
        target=sys.argv[1] if len(sys.argv) > 1 else "./runs",
        experiment="deepspeed-digits",
        metric="loss",
        num_samples=3,
        stop={"step": 20},
        processes_per_trial=2,
    )
    print(results.best.config, results.best.metrics)
