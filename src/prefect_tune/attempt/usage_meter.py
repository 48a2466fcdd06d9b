"""The time, memory, CPUs (from /proc) and GPUs (from NVML) that an attempt uses, and the GPUs that it may use.

This module does not use psutil, because Prefect does not depend on psutil, and psutil scans all processes of the
machine to find children. Regular samples are taken at most once a second, and use at most a thousandth of a processor.
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
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

from prefect_tune.clock import run_clock_now
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.resources import Processes, compute_process_count
from prefect_tune.core.usage_records import AttemptUsage, GroupUsage, PhaseSeconds, RankEnd
from prefect_tune.linux import MemoryLimit, count_available_cpus, iter_process_tree, read_process_usage

_MIN_SAMPLE_INTERVAL_SECONDS = 1.0
_MIN_PAUSE_FACTOR = 1200
"""The pause after a sample is at least this multiple of the sample's processor time."""
_NEAR_LIMIT = 0.95  # a killed trial counts as out of memory if its memory reached this share of its limit


class UsageMeter:
    """Measures what an attempt uses after the meter's creation. Call methods in the attempt's thread, unless noted."""

    def __init__(self, memory: MemoryLimit | None = None) -> None:
        """Args: memory: the memory limit of the trial; None: the limit of this process, which the trial inherits."""
        self.began_at = run_clock_now()
        self._memory_limit = memory or MemoryLimit()
        self._kills = self._kills_before = self._memory_limit.count_oom_kills()
        self._next_sample_at = self._next_kill_count_at = 0.0
        self.environment: Mapping[str, str] = {}
        """The variables that the trial's environment adds to that of this process, such as CUDA_VISIBLE_DEVICES."""
        self.last_output: Callable[[], str] = str  # returns the trial's last output; may be called from any thread
        self.rank_ends: Sequence[RankEnd] = ()
        self._start_time = time.monotonic()
        self._restored_seconds = 0.0
        self._loaded_at: float | None = None
        self._ended_at: float | None = None
        self._trial = PhaseSeconds()
        self._phase = "training"
        self._processes: _ProcessSampler | None = None  # None before loading, for a trial in a thread, or without /proc

    @contextmanager
    def measuring_restore(self) -> Iterator[None]:
        """Count the time of the `with` block as restoring a checkpoint."""
        start = time.monotonic()
        yield
        self._restored_seconds += time.monotonic() - start

    def on_loaded(self, pid: int, *, is_rank_0: bool = True) -> None:
        """Start to sample the process `pid`, which has loaded the trainable. A parent process counts as rank 0."""
        if is_rank_0:
            self._loaded_at = time.monotonic()
        if pid == os.getpid() or read_process_usage(pid) is None:
            return
        if self._processes is None:
            self._processes = _ProcessSampler(pid, {**os.environ, **self.environment})
        else:
            self._processes.add_process(pid)

    def record_phase_seconds(self, seconds: PhaseSeconds | None, *, is_last_step: bool) -> None:
        """Record each phase's seconds, as the trial sent them (None: unchanged). At the last step, take a sample."""
        self._trial = seconds or self._trial
        if is_last_step and self._processes is not None:
            self._processes.take_sample()  # now, since another thread may journal the usage after the commit

    def sample_if_due(self, phase: str) -> None:
        """Record the current phase, `training`, `saving` or `waiting`, and take a sample if one is due."""
        self._phase, now = phase, time.monotonic()
        if now >= self._next_kill_count_at:
            self._kills_before, self._kills = self._kills, self._memory_limit.count_oom_kills()
            self._next_kill_count_at = now + _MIN_SAMPLE_INTERVAL_SECONDS
        if self._processes is not None and now >= self._next_sample_at:
            start = time.thread_time()
            self._processes.take_sample()
            pause_seconds = max(_MIN_SAMPLE_INTERVAL_SECONDS, _MIN_PAUSE_FACTOR * (time.thread_time() - start))
            self._next_sample_at = time.monotonic() + pause_seconds

    def on_trial_end(self) -> None:
        """Record the end of the trial, and take the last sample. Call this while the trial's processes still exist."""
        if self._ended_at is None:
            self._ended_at = time.monotonic()
            if self._processes is not None:
                self._processes.take_sample()

    def add_startup_seconds(self, trial: PhaseSeconds | None) -> PhaseSeconds:
        """Return the trial's seconds, plus those of the attempt's start and restore. May be called from any thread."""
        start = self._loaded_at - self._start_time - self._restored_seconds if self._loaded_at is not None else 0.0
        seconds = (trial or PhaseSeconds()).with_added_seconds("start", max(0.0, start))
        return _round_seconds(seconds.with_added_seconds("restoring", self._restored_seconds))

    def get_usage(self) -> AttemptUsage:
        """Return the usage of the attempt so far. May be called from any thread."""
        now = time.monotonic()
        until, ending = (now, 0.0) if self._ended_at is None else (self._ended_at, now - self._ended_at)
        seconds = self.add_startup_seconds(self._trial)
        rest = until - self._start_time - seconds.total
        phase = self._phase if self._loaded_at is not None else "start"
        seconds = _round_seconds(seconds.with_added_seconds(phase, max(0.0, rest)).with_added_seconds("ending", ending))
        figures = {"output": self.last_output(), **(self._processes.summarize() if self._processes else {})}
        if self.rank_ends:
            return GroupUsage(seconds=seconds, **figures, ends=tuple(self.rank_ends))
        return AttemptUsage(seconds=seconds, **figures)

    def is_out_of_memory(self, *, is_killed: bool) -> bool:
        """Return whether the kernel recently killed a process to free memory, or the trial was killed near its limit.

        Earlier kills do not count, because the kernel's counter includes kills of processes of other trials.
        """
        peak = self._processes.memory.peak if self._processes is not None else None
        return self._has_new_oom_kill() or (is_killed and (peak or 0) >= _NEAR_LIMIT * self._memory_limit.read_limit())

    def out_of_memory_reason(self) -> Reason:
        """Return the reason `out-of-memory` with the peak, the limit, and the largest process of the last sample."""
        peak_bytes, process, process_bytes = 0, None, None
        if self._processes is not None:
            process, process_bytes = self._processes.largest
            peak_bytes = round(self._processes.memory.peak or 0)
        if self._has_new_oom_kill():  # the samples may lack the last second before the kill
            peak_bytes = max(peak_bytes, self._memory_limit.read_peak_usage())
        sizes = {"peak_bytes": peak_bytes, "limit_bytes": self._memory_limit.read_limit()}
        return make_reason("out-of-memory", process=process, process_bytes=process_bytes, **sizes)

    def _has_new_oom_kill(self) -> bool:
        return self._memory_limit.count_oom_kills() > self._kills_before  # not `_kills`, which may include the new kill


def _round_seconds(seconds: PhaseSeconds) -> PhaseSeconds:
    return seconds.model_copy(update={name: round(getattr(seconds, name), 4) for name in PhaseSeconds.model_fields})


# Sample the processes of a trial, and their visible GPUs.


class _ProcessSampler:
    """Samples memory, processor time and GPUs of processes and their descendants. `summarize` is thread-safe."""

    def __init__(self, pid: int, environment: Mapping[str, str]) -> None:
        """Take the first sample. Args: environment: all environment variables of the process `pid`."""
        self._pids = [pid]
        self._gpu_names = environment.get("CUDA_VISIBLE_DEVICES")
        self._guard = threading.Lock()
        self._cpu_begin: float | None = None
        self._cpu_seconds: float | None = None  # None until the second sample
        self.memory, self._gpu_memory, self._gpu_utilization = _PeakAndMean(), _PeakAndMean(), _PeakAndMean()
        self.largest = pid, 0
        self.take_sample()

    def add_process(self, pid: int) -> None:
        """Sample another process and its descendants too."""
        self._pids.append(pid)
        self.take_sample()

    def take_sample(self) -> None:
        """Take a sample of the processes that still run, and of their GPUs."""
        stats = {pid: read_process_usage(pid) for root in self._pids for pid in iter_process_tree(root)}
        running = {pid: stat for pid, stat in stats.items() if stat is not None and stat[1]}
        gpus = _sample_gpus(self._gpu_names)
        with self._guard:
            if running:
                cpu_seconds = sum(seconds for seconds, _ in running.values())
                if self._cpu_begin is None:
                    self._cpu_begin = cpu_seconds
                else:
                    self._cpu_seconds = max(self._cpu_seconds or 0.0, cpu_seconds - self._cpu_begin)
                sizes = {pid: size_bytes for pid, (_, size_bytes) in running.items()}
                self.memory.add(sum(sizes.values()))
                self.largest = max(sizes.items(), key=itemgetter(1))
            if gpus is not None:
                self._gpu_memory.add(gpus[0])
                self._gpu_utilization.add(gpus[1])

    def summarize(self) -> dict[str, Any]:
        """Return the measured fields of an `AttemptUsage`."""
        with self._guard:
            return {
                "cpu_seconds": _round_or_none(self._cpu_seconds, 2),
                "peak_memory_bytes": _round_or_none(self.memory.peak),
                "mean_memory_bytes": _round_or_none(self.memory.mean),
                "peak_gpu_memory_bytes": _round_or_none(self._gpu_memory.peak),
                "mean_gpu_utilization": _round_or_none(self._gpu_utilization.mean, 3),
            }


class _PeakAndMean:
    """The maximum and the mean of the added values."""

    def __init__(self) -> None:
        self.peak: float | None = None
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self.peak = value if self.peak is None else max(self.peak, value)
        self._sum += value
        self._count += 1

    @property
    def mean(self) -> float | None:
        return self._sum / self._count if self._count else None


def _round_or_none(value: float | None, digits: int | None = None) -> float | None:
    return None if value is None else round(value, digits)


@cache
def _start_loading_nvml() -> Sequence[Any]:
    """Load `nvidia-ml-py` in a thread, since waking GPUs is slow. Return a list to which the thread adds the module."""
    loaded: list[Any] = []

    def load_library() -> None:
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                loaded.append(pynvml)

    if Path("/dev/nvidiactl").exists():
        threading.Thread(target=load_library, name="nvml", daemon=True).start()
    return loaded


def _sample_gpus(visible: str | None) -> tuple[int, float] | None:
    """Return the used bytes and the mean utilization (0 to 1) of the `visible` GPUs (None: all); None if unknown."""
    if not (loaded := _start_loading_nvml()):
        return None
    (nvml,) = loaded
    used_bytes, utilizations = 0, list[float]()
    try:
        for name in map(str, range(nvml.nvmlDeviceGetCount())) if visible is None else parse_visible_devices(visible):
            by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            gpu = by_index(int(name)) if name.isdecimal() else by_uuid(name)
            used_bytes += int(nvml.nvmlDeviceGetMemoryInfo(gpu).used)
            utilizations.append(float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu))
    except nvml.NVMLError:  # for example, a partition of a GPU (MIG) has no utilization
        return None
    return (used_bytes, sum(utilizations) / len(utilizations) / 100) if utilizations else None


# The resources that this process may use, found without a library that initializes GPUs.

_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
PROCESSES_VARIABLE = "LOCAL_WORLD_SIZE"
"""The environment variable with the number of processes that train a trial in a slot. torchrun uses the same name."""
_NVIDIA_SMI_TIMEOUT_SECONDS = 30  # a long time, since nvidia-smi first wakes up all GPUs


def list_gpus(environment: Mapping[str, str], driver: Path = _DRIVER_FOLDER) -> tuple[str, ...]:
    """Return the names of the visible GPUs, from CUDA_VISIBLE_DEVICES if it is set, otherwise from the driver."""
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return parse_visible_devices(visible)
    if driver.is_dir():
        return tuple(str(number) for number in range(len(list(driver.iterdir()))))
    if (program := shutil.which("nvidia-smi")) is None:  # a container may lack the driver's folder: ask this program
        return ()
    with suppress(OSError, subprocess.TimeoutExpired):
        command, timeout = [program, "-L"], _NVIDIA_SMI_TIMEOUT_SECONDS
        listed = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        return tuple(re.findall(r"^GPU (\d+):", listed.stdout, re.MULTILINE))
    return ()


def choose_process_count(wanted: Processes, environment: Mapping[str, str]) -> int:
    """Return how many processes train a trial in a slot with this environment.

    If `wanted` is a range, return the slot's `LOCAL_WORLD_SIZE`. If this is not set, return the slot's number of GPUs,
    or, without GPUs, the number of CPUs. In each case, the number is limited to the range.
    """
    if isinstance(wanted, int):
        return wanted
    size = environment.get(PROCESSES_VARIABLE)
    limit = int(size) if size else len(list_gpus({**os.environ, **environment})) or count_available_cpus()
    return compute_process_count(wanted, limit)


def parse_visible_devices(visible: str) -> tuple[str, ...]:
    """Split CUDA_VISIBLE_DEVICES as CUDA does: an empty or negative entry hides all later entries."""
    return tuple(takewhile(lambda name: name and not name.startswith("-"), map(str.strip, visible.split(","))))
