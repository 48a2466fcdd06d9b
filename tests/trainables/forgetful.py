"""A small PyTorch training with every kind of state; it can omit one of them from its checkpoints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import prefect_tune as pt
from tests.drills.class_as_function import make_function


class Whole(pt.Trainable):
    """Saves and loads the whole state except what `config["forgets"]` names."""

    def setup(self, config: dict[str, Any]) -> None:
        self.forgets, self.device = config.get("forgets", ""), config.get("device", "cpu")
        random.seed(1)
        np.random.seed(2)  # noqa: NPY002 - the global generator, which many trainings use
        torch.manual_seed(3)
        self.inputs = torch.randn(256, 8).to(self.device)
        self.targets = self.inputs.sum(1, keepdim=True)
        self.order, self.place = np.random.permutation(256), 0  # noqa: NPY002 - the global generator, as above
        self.model = nn.Sequential(nn.Linear(8, config.get("width", 16)), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.model.to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.scaler = torch.amp.GradScaler(self.device, init_scale=2.0**10, growth_interval=2)
        self.steps = 0

    def step(self) -> dict[str, float]:
        if self.place + 32 > 256:
            self.order, self.place = np.random.permutation(256), 0  # noqa: NPY002 - the global generator, as above
        rows = self.order[self.place : self.place + 32]
        self.place += 32
        scale = 1 + 0.1 * random.random() + 0.01 * np.random.random() + 0.001 * self.steps  # noqa: NPY002 - the global generator, as above
        loss = nn.functional.mse_loss(self.model(self.inputs[rows] * scale), self.targets[rows])
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # of PyTorch
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.steps += 1
        return {"loss": loss.item(), "scale": self.scaler.get_scale()}

    def state(self) -> dict[str, Any]:
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if self.device == "cuda" else [],
        }
        return {name: part for name, part in parts.items() if name != self.forgets}

    def plain(self) -> dict[str, Any]:
        numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
        numpy["state"]["key"] = numpy["state"]["key"].tolist()  # type: ignore[index]  # of the old interface
        parts = {
            "python": random.getstate(),
            "numpy": numpy,
            "order": [self.order.tolist(), self.place],
            "steps": self.steps,
        }
        return {name: part for name, part in parts.items() if name != self.forgets}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        torch.save(self.state(), Path(checkpoint_dir, "state.pt"))
        Path(checkpoint_dir, "state.json").write_text(json.dumps(self.plain()))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        state = torch.load(Path(checkpoint_dir, "state.pt"), weights_only=True)
        for name in ("model", "optimizer", "schedule", "scaler"):
            if name in state:
                getattr(self, name).load_state_dict(state[name])
        if "torch" in state:
            torch.set_rng_state(state["torch"])
        torch.cuda.set_rng_state_all(state.get("cuda", []))
        plain = json.loads(Path(checkpoint_dir, "state.json").read_text())
        if "python" in plain:
            version, values, gauss = plain["python"]
            random.setstate((version, tuple(values), gauss))
        if "numpy" in plain:
            np.random.set_state(plain["numpy"])  # noqa: NPY002 - as above
        if "order" in plain:
            self.order, self.place = np.array(plain["order"][0]), plain["order"][1]
        self.steps = plain.get("steps", self.steps)


train = make_function(Whole)
