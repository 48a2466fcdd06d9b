"""Trainables that train nothing, for the processes of trials: this module imports only the measured package."""

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

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Not called: its trials save nothing."""

    def reset_config(self, config: Mapping[str, object]) -> bool:
        del config
        return True


def weigh(config: Mapping[str, object]) -> Mapping[str, object]:
    """Report the memory of this process and of its subreaper; where the fork server is its own, of that too.

    A search's fork server has many of them: what they share with it does not count.
    """
    subreaper = os.getppid()
    if config["forks"]:
        return {"mib": sum(_kib(pid, "Private_") for pid in (os.getpid(), subreaper)) / 1024}
    return {"mib": sum(_kib(pid, "Pss:") for pid in (os.getpid(), subreaper, _parent_of(subreaper))) / 1024}


def _kib(pid: int, kind: str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind))


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
