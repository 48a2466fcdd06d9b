"""Find this machine's processors and GPUs without loading a library that would initialize them."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from prefect_tune.core.resources import Machine

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_PATIENCE_SECONDS = 30  # the driver wakes every card up


def machine_here() -> Machine:
    """Return the processors that this process may use, and the GPUs that it sees."""
    return Machine(cpu_count=cpu_count_here(), gpus=gpus_in(os.environ))


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


def cpu_count_here(control_groups: Path = _CONTROL_GROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of processors that this process may use, by its affinity and the quota of its container."""
    available = os.cpu_count() or 1
    with suppress(AttributeError):  # Linux only
        available = len(os.sched_getaffinity(0))
    return max(1, min([available, *map(math.ceil, _quotas(control_groups, own))]))


def _quotas(control_groups: Path, own: Path) -> Iterator[float]:
    """Yield the processors that each control group of this process allows: Linux's cgroup v2, or v1 in a container."""
    with suppress(OSError, ValueError, ArithmeticError):
        quota, period = (
            int((control_groups / "cpu" / f"cpu.cfs_{each}_us").read_text()) for each in ("quota", "period")
        )
        if quota > 0:
            yield quota / period
    for folder in _groups(control_groups, own):
        with suppress(OSError, ValueError, ArithmeticError):  # "max" is no quota
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            yield quota / period


def _groups(control_groups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all that contain it."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            if line.startswith("0::/"):
                group = control_groups / line.removeprefix("0::/")
                yield from (each for each in (group, *group.parents) if each.is_relative_to(control_groups))
