"""A trainable whose module imports PyTorch: each step trains a small network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

network = torch.nn.Linear(16, 1)
"""Each fork has a copy, so every trial starts with the same weights."""


def train(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Take a step with PyTorch's default threads; `server` is the memory of the process that forked this one."""
    before = network.weight.sum().item()
    optimizer = torch.optim.Adam(network.parameters(), lr=config["lr"])
    x = torch.ones(4096, 16)
    loss = torch.nn.functional.mse_loss(network(x), x[:, :1] @ torch.ones(1, 1))
    loss.backward()
    optimizer.step()
    product = (torch.ones(256, 256) @ torch.ones(256, 256)).sum().item()
    return {
        "pid": os.getpid(),
        "before": before,
        "drawn": torch.rand(1).item(),
        "product": product,
        "resident": resident_bytes(os.getpid()),
        "server": resident_bytes(parent_of(os.getppid())),
    }


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
