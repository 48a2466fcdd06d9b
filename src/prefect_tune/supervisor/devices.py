"""Find this machine's processors and GPUs without loading a library that would initialize them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from prefect_tune.core.resources import Machine

__all__ = ["gpus_in", "machine_here"]

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_PATIENCE_SECONDS = 30  # the driver wakes every card up


def machine_here() -> Machine:
    """Return the processors that this process may use, and the GPUs that it sees."""
    return Machine(cpu_count=_processors(), gpus=gpus_in(os.environ))


def gpus_in(environment: Mapping[str, str], driver: Path = _NVIDIA) -> tuple[str, ...]:
    """Return the names of the visible GPUs: those in CUDA_VISIBLE_DEVICES, or, if it is not set, all of the driver."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _named(visible)
    if driver.is_dir():
        return tuple(str(number) for number in range(len(list(driver.iterdir()))))
    return _told_by_driver()


def _named(visible: str) -> tuple[str, ...]:
    """Split CUDA_VISIBLE_DEVICES as CUDA does: an empty or negative entry hides all that follow."""
    names = []
    for name in (each.strip() for each in visible.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return tuple(names)


def _told_by_driver() -> tuple[str, ...]:
    """Count the GPUs with nvidia-smi: in containers the driver's folder in /proc may be missing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    listed = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = [program, "-L"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False).stdout
    return tuple(re.findall(r"^GPU (\d+):", listed, re.MULTILINE))


def _processors() -> int:
    with suppress(AttributeError):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
