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
    """Locks its devices in each step: at most `config["share"]` trials per device, by files in `config["house"]`."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self.reset_config(config)
        self.devices = os.environ.get("CUDA_VISIBLE_DEVICES", "any")  # like CUDA, which reads it at its first use

    def reset_config(self, config: Mapping[str, Any]) -> bool:
        self.config = config
        return True

    def step(self) -> Mapping[str, Any]:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "any")
        if devices != self.devices:
            raise RuntimeError(f"started on {self.devices}, but the step runs on {devices}")
        with ExitStack() as held:
            for device in devices.split(","):
                held.enter_context(_device_lock(Path(self.config["house"]), device, int(self.config.get("share", 1))))
            time.sleep(0.05)
        return {"loss": 1.0, "gpus": devices, "threads": os.environ.get("OMP_NUM_THREADS", ""), "pid": os.getpid()}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "nothing").touch()

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        del checkpoint_dir


@contextmanager
def _device_lock(folder: Path, device: str, share: int) -> Iterator[None]:
    for slot in range(share):
        with (folder / f"{device}-{slot}").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield
            return
    raise RuntimeError(f"device {device} is taken")
