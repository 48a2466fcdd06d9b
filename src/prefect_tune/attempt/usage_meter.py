"""What a machine has, and what an attempt uses of it: phases by a monotonic clock, processes by /proc, GPUs by NVML.

psutil is not needed for that: Prefect does not bring it, and it reads each process of the machine to find the children
of one. A sample is taken once a second, or less often, so that it takes a thousandth of a processor at most.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from prefect_tune.clock import run_now
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.resources import Processes, processes_on
from prefect_tune.core.usage_records import AttemptUse, GroupUse, PhaseSeconds, RankEnd
from prefect_tune.linux import MemoryLimit, cpu_count_here, process_tree, process_use

_LEAST_PERIOD_SECONDS = 1.0
_SHARE = 1200
"""The pause after a sample is at least this multiple of the processor time that it took."""
_NEAR = 0.95
"""A process killed at this share of its limit, or above, was killed for its memory."""


class UsageMeter:
    """The clock and the samples of one attempt. It begins when it is made; call it from the attempt's thread."""

    def __init__(self, memory: MemoryLimit | None = None) -> None:
        """Args: memory: the limit of the trial's memory. Default: that of this process, which starts the trial's."""
        self.began_at = run_now()
        self._memory_limit = memory or MemoryLimit()
        self._kills = self._kills_before = self._memory_limit.kills()
        self._due = self._kills_due = 0.0
        self.environment: Mapping[str, str] = {}
        """Variables of the trial's process besides those of this one, such as its GPUs."""
        self.last_output: Callable[[], str] = str  # of the trial's processes; called from any thread
        self.rank_ends: Sequence[RankEnd] = ()
        self._began = time.monotonic()
        self._restored_seconds = 0.0
        self._loaded_at: float | None = None
        self._ended_at: float | None = None
        self._trial = PhaseSeconds()
        self._phase = "training"
        self._processes: _ProcessSamples | None = None  # before it is loaded, and for a thread of this process

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Measure the block as a restore."""
        began = time.monotonic()
        yield
        self._restored_seconds += time.monotonic() - began

    def loaded(self, pid: int, *, decides: bool = True) -> None:
        """Take in that the trainable is loaded in the process `pid`, whose seconds count if it is that of rank 0."""
        if decides:
            self._loaded_at = time.monotonic()
        if pid == os.getpid() or process_use(pid) is None:
            return
        if self._processes is None:
            self._processes = _ProcessSamples(pid, {**os.environ, **self.environment})
        else:
            self._processes.add(pid)

    def note_seconds(self, seconds: PhaseSeconds | None, *, is_last_step: bool) -> None:
        """Take in the seconds that the trial has sent."""
        self._trial = seconds or self._trial
        if is_last_step and self._processes is not None:
            self._processes.sample()  # its checkpoint is journaled with the end, in another thread

    def look(self, phase: str) -> None:
        """Take in what the trial does now, `training`, `saving` or `waiting`, and take a sample if one is due."""
        self._phase, now = phase, time.monotonic()
        if now >= self._kills_due:
            self._kills_before, self._kills = self._kills, self._memory_limit.kills()
            self._kills_due = now + _LEAST_PERIOD_SECONDS
        if self._processes is not None and now >= self._due:
            began = time.thread_time()
            self._processes.sample()
            self._due = time.monotonic() + max(_LEAST_PERIOD_SECONDS, _SHARE * (time.thread_time() - began))

    def ended(self) -> None:
        """Take in that the trial has ended, or is to be ended: take the last sample while its processes are there."""
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            if self._processes is not None:
                self._processes.sample()

    def seconds_at(self, trial: PhaseSeconds | None) -> PhaseSeconds:
        """Return the seconds of the attempt up to a step, with which the trial has sent its own."""
        return self._before_training(trial or PhaseSeconds())

    def use(self) -> AttemptUse:
        """Return what the attempt has used so far. May be called from any thread."""
        now = time.monotonic()
        until, ending = (now, 0.0) if self._ended_at is None else (self._ended_at, now - self._ended_at)
        seconds = self._before_training(self._trial)
        rest = until - self._began - seconds.total
        phase = self._phase if self._loaded_at is not None else "start"
        seconds = seconds.plus(phase, max(0.0, rest)).plus("ending", ending)
        figures = {"output": self.last_output(), **(self._processes.figures() if self._processes else {})}
        if self.rank_ends:
            return GroupUse(seconds=_rounded(seconds), **figures, ends=tuple(self.rank_ends))
        return AttemptUse(seconds=_rounded(seconds), **figures)

    def is_out_of_memory(self, *, is_killed: bool) -> bool:
        """Return whether the kernel has killed a process in the last seconds, or a killed trial was near the limit.

        The count is that of a control group, or of the machine: an earlier kill may be that of another trial.
        """
        peak = self._processes.memory.peak if self._processes is not None else None
        return self._was_killed() or (is_killed and (peak or 0) >= _NEAR * self._memory_limit.limit_bytes())

    def memory_reason(self) -> Reason:
        """Return the highest memory, the limit, and the largest process of the trial with its last sample."""
        peak_bytes, process, process_bytes = 0, None, None
        if self._processes is not None:
            process, process_bytes = self._processes.largest
            peak_bytes = round(self._processes.memory.peak or 0)
        if self._was_killed():  # the last second is in no sample
            peak_bytes = max(peak_bytes, self._memory_limit.peak_bytes())
        limit_bytes = self._memory_limit.limit_bytes()
        sizes = {"peak_bytes": peak_bytes, "limit_bytes": limit_bytes, "process_bytes": process_bytes}
        return make_reason("out-of-memory", process=process, **sizes)

    def _was_killed(self) -> bool:
        return self._memory_limit.kills() > self._kills_before  # the last look may lie between a kill and its end

    def _before_training(self, trial: PhaseSeconds) -> PhaseSeconds:
        """Return the trial's own seconds with those of the supervisor before it was loaded."""
        start = self._loaded_at - self._began - self._restored_seconds if self._loaded_at is not None else 0.0
        return _rounded(trial.plus("start", max(0.0, start)).plus("restoring", self._restored_seconds))


def _rounded(seconds: PhaseSeconds) -> PhaseSeconds:
    return seconds.model_copy(update={name: round(getattr(seconds, name), 4) for name in PhaseSeconds.model_fields})


# Sample the processes of a trial, and the GPUs that they see.


class _ProcessSamples:
    """Samples of processes and their descendants: memory, processor time, GPUs. Call `figures` from any thread."""

    def __init__(self, pid: int, environment: Mapping[str, str]) -> None:
        """Take the first sample. Args: environment: all variables of the process."""
        self._pids = [pid]
        self._gpu_names = environment.get("CUDA_VISIBLE_DEVICES")
        self._guard = threading.Lock()
        self._cpu_begin: float | None = None
        self._cpu_seconds: float | None = None  # the first sample is of the time before
        self.memory = _Samples()
        self._gpu_memory = _Samples()
        self._gpu_utilization = _Samples()
        self.largest = pid, 0
        self.sample()

    def add(self, pid: int) -> None:
        """Sample another process and its descendants too."""
        self._pids.append(pid)
        self.sample()

    def sample(self) -> None:
        """Take a sample; of a process that has ended there is none."""
        stats = {pid: process_use(pid) for root in self._pids for pid in process_tree(root)}
        found = {pid: stat for pid, stat in stats.items() if stat is not None and stat[1]}  # else it has ended
        gpus = _gpu_sample(self._gpu_names)
        with self._guard:
            if found:
                self._take_in(found)
            if gpus is not None:
                self._gpu_memory.add(gpus[0])
                self._gpu_utilization.add(gpus[1])

    def _take_in(self, found: Mapping[int, tuple[float, int]]) -> None:
        cpu_seconds = sum(seconds for seconds, _ in found.values())
        if self._cpu_begin is None:
            self._cpu_begin = cpu_seconds
        else:
            self._cpu_seconds = max(self._cpu_seconds or 0.0, cpu_seconds - self._cpu_begin)
        self.memory.add(sum(size_bytes for _, size_bytes in found.values()))
        self.largest = max(((pid, size_bytes) for pid, (_, size_bytes) in found.items()), key=lambda each: each[1])

    def figures(self) -> dict[str, Any]:
        """Return the figures of an `AttemptUse`."""
        with self._guard:
            utilization = self._gpu_utilization.mean
            return {
                "cpu_seconds": None if self._cpu_seconds is None else round(self._cpu_seconds, 2),
                "peak_memory_bytes": _whole(self.memory.peak),
                "mean_memory_bytes": _whole(self.memory.mean),
                "peak_gpu_memory_bytes": _whole(self._gpu_memory.peak),
                "mean_gpu_utilization": None if utilization is None else round(utilization, 3),
            }


class _Samples:
    """The highest of some numbers, and their mean."""

    def __init__(self) -> None:
        self.peak: float | None = None
        self._sum = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self.peak = value if self.peak is None else max(self.peak, value)
        self._sum += value
        self._count += 1

    @property
    def mean(self) -> float | None:
        return self._sum / self._count if self._count else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


@cache
def _nvml() -> Sequence[Any]:
    """Return `nvidia-ml-py` once a thread has initialized it, which wakes the cards up; nothing before."""
    loaded: list[Any] = []

    def load() -> None:
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                loaded.append(pynvml)

    if Path("/dev/nvidiactl").exists():
        threading.Thread(target=load, name="nvml", daemon=True).start()
    return loaded


def _gpu_sample(visible: str | None) -> tuple[int, float] | None:
    """Return the memory in use on the `visible` GPUs (None: all), and the share of time in which they computed."""
    if not (loaded := _nvml()):
        return None
    (nvml,) = loaded
    used_bytes, busy = 0, list[float]()
    try:
        for name in map(str, range(nvml.nvmlDeviceGetCount())) if visible is None else visible_gpus(visible):
            by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            gpu = by_index(int(name)) if name.isdecimal() else by_uuid(name)
            used_bytes += int(nvml.nvmlDeviceGetMemoryInfo(gpu).used)
            busy.append(float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu))
    except nvml.NVMLError:  # a part of a card (MIG) counts no time
        return None
    return (used_bytes, sum(busy) / len(busy) / 100) if busy else None


# What this process may use of its machine, without a library that initializes it.

_NVIDIA = Path("/proc/driver/nvidia/gpus")
PROCESSES = "LOCAL_WORLD_SIZE"
"""The variable of a slot with the number of processes of its trials, under torchrun's name."""
_NVIDIA_SMI_TIMEOUT_SECONDS = 30  # the driver wakes every card up


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
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_SECONDS, check=False
        ).stdout
    return tuple(re.findall(r"^GPU (\d+):", listed, re.MULTILINE))
