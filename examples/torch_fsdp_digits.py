"""PyTorch FSDP2 with distributed checkpoints: each process holds, saves and loads its part of the model.

Kill it whenever you like and run it again, also with another number of processes: each loads what it needs.
"""

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import prefect_tune as pt
from prefect_tune.integrations.torch_distributed import CheckpointReader, CheckpointWriter


class Digits(pt.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        self.trial = trial = pt.get_trial()
        has_gpus = torch.cuda.device_count() >= trial.world_size
        self.device = torch.device("cuda", trial.local_rank) if has_gpus else torch.device("cpu")
        distributed.init_process_group("nccl" if has_gpus else "gloo", rank=trial.rank, world_size=trial.world_size)
        torch.manual_seed(0)
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images / 16, dtype=torch.float32, device=self.device)
        self.labels = torch.tensor(labels, device=self.device)
        self.model = nn.Sequential(nn.Linear(64, config["width"]), nn.ReLU(), nn.Linear(config["width"], 10))
        # Without a mesh, FSDP takes GPUs where there is any, though there may be fewer than ranks.
        mesh = init_device_mesh(self.device.type, (trial.world_size,))
        fully_shard(self.model.to(self.device), mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config["lr"])

    def step(self) -> dict[str, float]:
        # Each rank has its own part of the batch of this step, and FSDP averages over ranks.
        batch = torch.randperm(1500, generator=torch.Generator().manual_seed(self.trial.step))[:128]
        mine = batch[self.trial.rank :: self.trial.world_size]
        loss = nn.functional.cross_entropy(self.model(self.images[mine]), self.labels[mine])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        dcp.save(self.state(), storage_writer=CheckpointWriter(checkpoint_dir))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        state = self.state()
        dcp.load(state, storage_reader=CheckpointReader(checkpoint_dir))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def cleanup(self) -> None:
        distributed.destroy_process_group()


if __name__ == "__main__":
    results = pt.tune(
        Digits,
        {"lr": pt.loguniform(0.001, 0.1), "width": pt.choice([16, 32, 64])},
        target=sys.argv[1] if len(sys.argv) > 1 else "./runs",
        experiment="torch-fsdp-digits",
        metric="loss",
        num_samples=3,
        scheduler=pt.ASHA(max_t=54, grace_period=18),
        checkpoint=pt.Cadence(every_steps=10),
        processes_per_trial=2,
    )
    print(results.best.config, results.best.metrics)
