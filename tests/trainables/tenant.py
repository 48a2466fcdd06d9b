"""A trainable that reports its devices, and fails if another process uses them."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import prefect_tune as pt


class Tenant(pt.Trainable):
    """Each step locks its devices, at most `config["share"]` tenants on each, in the folder `config["house"]`."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.reset_config(config)
        self.devices = os.environ.get("CUDA_VISIBLE_DEVICES", "any")  # as CUDA: what it is when it is first used

    def reset_config(self, config: Mapping[str, Any]) -> bool:
        self.config = config
        return True

    def step(self) -> Mapping[str, Any]:
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "any")
        if given != self.devices:
            raise RuntimeError(f"began on {self.devices}, and is to continue on {given}")
        with ExitStack() as held:
            for device in given.split(","):
                held.enter_context(_room(Path(self.config["house"]), device, int(self.config.get("share", 1))))
            time.sleep(0.05)
        return {"loss": 1.0, "gpus": given, "threads": os.environ.get("OMP_NUM_THREADS", ""), "pid": os.getpid()}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "nothing").touch()

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        del checkpoint_dir


@contextmanager
def _room(house: Path, device: str, share: int) -> Iterator[None]:
    for bed in range(share):
        with (house / f"{device}-{bed}").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield
            return
    raise RuntimeError(f"device {device} is taken")
