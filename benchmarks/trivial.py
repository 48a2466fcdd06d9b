"""Trainables that train nothing, imported by trials' processes: nothing but what is measured is loaded here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import prefect_tune as pt

__all__ = ["Resettable", "train", "weigh"]


def train(_config: Mapping[str, object]) -> Mapping[str, object]:
    """Train one step."""
    return {"loss": 1.0}


class Resettable(pt.Trainable):
    """Trains trial after trial in one process."""

    def step(self) -> Mapping[str, object]:
        return {"loss": 1.0}

    def reset_config(self, config: Mapping[str, object]) -> bool:
        del config
        return True


def weigh(config: Mapping[str, object]) -> Mapping[str, object]:
    """Report the memory that nobody else has: of this process and, where `config` says so, of its parent."""
    pids = [os.getpid(), *([os.getppid()] if config["parent_too"] else [])]
    return {"mib": sum(_private_kib(pid) for pid in pids) / 1024}


def _private_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
