"""A small network in PyTorch on 512 random points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.real.reporting import begin, report


def train(config: Mapping[str, Any]) -> None:
    """Train `config["epochs"]` epochs."""
    begin(config)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=generator)
    y = x[:, :1] * x[:, 1:2]
    network = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=config["lr"])
    for _ in range(config["epochs"]):
        loss = torch.nn.functional.mse_loss(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(loss.item())
