"""What this process may use of its machine: processors, GPUs and memory, without a library that initializes them."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from prefect_tune.core.resources import Processes, processes_on

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
PROCESSES = "LOCAL_WORLD_SIZE"
"""The variable of a slot with the number of processes of its trials, under torchrun's name."""
_PATIENCE_SECONDS = 30  # the driver wakes every card up


def gpus_in(environment: Mapping[str, str], driver: Path = _NVIDIA) -> tuple[str, ...]:
    """Return the names of the visible GPUs: those in CUDA_VISIBLE_DEVICES, or, if it is not set, all of the driver."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible_gpus(visible)
    if driver.is_dir():
        return tuple(str(number) for number in range(len(list(driver.iterdir()))))
    return _listed_by_driver()


def processes_here(wanted: Processes, environment: Mapping[str, str]) -> int:
    """Return how many processes train a trial in a slot with this environment.

    Of a range it is as many as the slot says (`LOCAL_WORLD_SIZE`); else as many as there are GPUs, or processors
    where there are none.
    """
    if isinstance(wanted, int):
        return wanted
    said = environment.get(PROCESSES)
    return processes_on(wanted, int(said) if said else len(gpus_in({**os.environ, **environment})) or cpu_count_here())


def visible_gpus(visible: str) -> tuple[str, ...]:
    """Split CUDA_VISIBLE_DEVICES as CUDA does: an empty or negative entry hides all that follow."""
    names = []
    for name in (each.strip() for each in visible.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return tuple(names)


def _listed_by_driver() -> tuple[str, ...]:
    """Count the GPUs with nvidia-smi: in containers the driver's folder in /proc may be missing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    listed = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = [program, "-L"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False).stdout
    return tuple(re.findall(r"^GPU (\d+):", listed, re.MULTILINE))


def cpu_count_here(root: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Return the number of processors that this process may use, by its affinity and the quota of its container."""
    available = os.cpu_count() or 1
    with suppress(AttributeError):  # Linux only
        available = len(os.sched_getaffinity(0))
    return max(1, min([available, *map(math.ceil, _quotas(root, own))]))


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Yield the processors that each control group of this process allows: Linux's cgroup v2, or v1 in a container."""
    with suppress(OSError, ValueError, ArithmeticError):
        quota, period = (int((root / "cpu" / f"cpu.cfs_{each}_us").read_text()) for each in ("quota", "period"))
        if quota > 0:
            yield quota / period
    for folder in control_groups("", root, own):
        with suppress(OSError, ValueError, ArithmeticError):  # "max" is no quota
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            yield quota / period


class MemoryLimit:
    """The memory limit of this process: that of its control groups (version 2, or 1), or all memory of the machine."""

    def __init__(self, root: Path = _CONTROL_GROUPS, own: Path = _OWN_GROUPS) -> None:
        self._folders = list(control_groups("memory", root, own))

    def limit_bytes(self) -> int:
        """Return the lowest limit."""
        limits = self._numbers("memory.max", "memory.limit_in_bytes")
        return min((*limits, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))

    def peak_bytes(self) -> int:
        """Return the highest memory of the group; 0 if that is not counted."""
        return next(self._numbers("memory.peak", "memory.max_usage_in_bytes"), 0)

    def kills(self) -> int:
        """Return how many processes the kernel has killed in it for memory; without a count, on the whole machine."""
        for folder in self._folders[:1]:
            for name in ("memory.events", "memory.oom_control"):
                with suppress(OSError, ValueError, IndexError):
                    return _number_after((folder / name).read_text(), "oom_kill ")
        with suppress(OSError, ValueError, IndexError):
            return _number_after(Path("/proc/vmstat").read_text(), "oom_kill ")
        return 0

    def _numbers(self, *names: str) -> Iterator[int]:
        for folder in self._folders:
            for name in names:
                with suppress(OSError, ValueError):  # "max" is no limit
                    yield int((folder / name).read_text())


def _number_after(text: str, name: str) -> int:
    """Return the number after `name`. Raises `ValueError` if there is none."""
    return int(text.partition(name)[2].split(maxsplit=1)[0])


def control_groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all that contain it.

    Args:
        controller: the name of a controller of version 1; empty for version 2 alone.
        root: where control groups are mounted.
        own: the file that names those of this process.
    """
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", controller):
                top = root / controllers
                group = top / path.lstrip("/")
                yield from (each for each in (group, *group.parents) if each.is_relative_to(top))
