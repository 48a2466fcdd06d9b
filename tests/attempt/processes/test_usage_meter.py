"""The usage that the supervisor measures, and the resources of its machine: real processes and control groups."""

from __future__ import annotations

import logging
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_tune.attempt import usage_meter
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.attempt.usage_meter import UsageMeter, choose_process_count, list_gpus
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.journal_events import AttemptEnded, Cause, Outcome
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.usage_records import PhaseSeconds
from prefect_tune.executors.trial_executor import get_local_machine
from prefect_tune.linux import MemoryLimit, count_available_cpus
from tests.attempt.test_supervisor import supervise
from tests.fakes.trial_processes import make_start, supervised_process
from tests.flows.forked_programs import get_preloaded_context

LIMIT_BYTES = 1 << 30
_LIMITS = ("memory.max", "memory.limit_in_bytes")


@contextmanager
def running_python(code: str) -> Iterator[int]:
    """Run a program that prints a line when it is ready; yield its pid."""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield child.pid
    finally:
        child.kill()  # its own child reads the end of its input
        child.wait()


def test_the_phases_of_an_attempt_are_its_time() -> None:
    meter = UsageMeter()
    with meter.measuring_restore():
        time.sleep(0.02)
    meter.on_loaded(os.getpid())
    meter.record_phase_seconds(PhaseSeconds(training=0.03, saving=0.01), is_last_step=False)
    time.sleep(0.06)
    meter.sample_if_due("waiting")
    meter.on_trial_end()
    time.sleep(0.02)

    usage = meter.get_usage()
    assert usage.seconds.restoring >= 0.02
    assert (usage.seconds.training, usage.seconds.saving) == (0.03, 0.01)
    assert usage.seconds.waiting >= 0.01  # what its last message does not cover
    assert usage.seconds.ending >= 0.02
    assert (usage.cpu_seconds, usage.peak_memory_bytes) == (None, None)  # a thread of this process


def test_an_attempt_that_never_loads_its_trainable_only_starts() -> None:
    meter = UsageMeter()
    time.sleep(0.02)
    meter.on_trial_end()
    assert meter.get_usage().seconds.start >= 0.02


def test_the_memory_and_the_processor_time_are_those_of_the_process_and_its_children() -> None:
    inner = "data = b'x' * (50 << 20); print(flush=True); input()"
    start = f"subprocess.Popen([sys.executable, '-c', {inner!r}], stdout=subprocess.PIPE).stdout.readline()"
    code = f"import subprocess, sys; data = b'x' * (80 << 20); {start}; print(flush=True)\nwhile True: pass"
    with running_python(code) as pid:
        meter = UsageMeter()
        meter.on_loaded(pid)
        assert meter.get_usage().cpu_seconds is None, "one sample is no time"
        time.sleep(1.0)
        meter.on_trial_end()
        usage = meter.get_usage()
    assert usage.peak_memory_bytes is not None
    assert usage.mean_memory_bytes is not None
    assert 130 << 20 <= usage.mean_memory_bytes <= usage.peak_memory_bytes < 400 << 20
    assert usage.cpu_seconds is not None
    assert usage.cpu_seconds > 0.05


def test_samples_take_less_than_a_thousandth_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_seconds = [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: cpu_seconds[0])

    def walk_slowly(pid: int) -> Iterator[int]:
        cpu_seconds[0] += 0.05
        yield pid

    monkeypatch.setattr(usage_meter, "iter_process_tree", walk_slowly)
    with running_python("print(flush=True); input()") as pid:
        meter = UsageMeter()
        meter.on_loaded(pid)
        meter.sample_if_due("training")
        seconds_before = cpu_seconds[0]
        for _ in range(10):
            meter.sample_if_due("training")
    assert cpu_seconds[0] == seconds_before  # the next one is due in a minute


def test_gpus_are_those_that_the_trial_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[object] = []

    def get_handle(device: object) -> object:
        devices.append(device)
        return device

    library = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=get_handle,
        nvmlDeviceGetHandleByUUID=get_handle,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=1000),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=50),
    )
    monkeypatch.setattr(usage_meter, "_start_loading_nvml", lambda: [library])
    meter = UsageMeter()
    meter.environment = {"CUDA_VISIBLE_DEVICES": "1, GPU-4af"}
    with running_python("print(flush=True); input()") as pid:
        meter.on_loaded(pid)
    assert devices == [1, "GPU-4af"]
    assert (meter.get_usage().peak_gpu_memory_bytes, meter.get_usage().mean_gpu_utilization) == (2000, 0.5)


@pytest.mark.parametrize("names", ["memory", ""], ids=["version 1", "version 2"])
def test_the_limit_is_the_lowest_of_the_control_groups(tmp_path: Path, names: str) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text(f"4:{names}:/a/b\n1:cpu:/c\n")
    folder = tmp_path / names / "a" / "b"
    folder.mkdir(parents=True)
    limit, count = ("memory.limit_in_bytes", "memory.oom_control") if names else ("memory.max", "memory.events")
    (folder / limit).write_text("max" if not names else str(1 << 62))
    (folder.parent / limit).write_text("4096")
    (folder / count).write_text("oom_kill_disable 0\noom_kill 3\n")

    limits = MemoryLimit(tmp_path, membership)
    assert (limits.read_limit(), limits.count_oom_kills()) == (4096, 3)
    assert MemoryLimit(tmp_path, tmp_path / "none").read_limit() > 4096


def fill_memory(_config: Mapping[str, object]) -> None:
    blocks = []
    while True:
        blocks.append(bytearray(4 << 20))
        time.sleep(0.002)


def exceed_address_space(_config: Mapping[str, object]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    bytearray(2 * LIMIT_BYTES)


def run_until_end(trainable: object, folder: Path) -> Outcome:
    target, key = LocalTarget(path=str(folder)), TrialKey(experiment="e", generation=1, trial="t")
    spec = TrialSpec(target=target, trial=key, trainable="", stopper="", needs_history=False)
    with supervised_process(make_start(trainable, folder), logging.getLogger()) as channel:
        return supervise(channel, spec)


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group with a memory limit."""
    for top in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        group = top / f"prefect-tune-test-{os.getpid()}-{threading.get_ident()}"
        with suppress(OSError):
            group.mkdir()
            for name in _LIMITS:
                if (group / name).exists():
                    (group / name).write_text(str(LIMIT_BYTES))
                    yield group
                    group.rmdir()
                    return
            group.rmdir()
    pytest.skip("no control group can be made here: that takes root")


def _run_in_control_group(group: str, folder: str) -> None:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    outcome = run_until_end(fill_memory, Path(folder))
    assert isinstance(outcome, AttemptEnded)
    Path(folder, "outcome").write_text(f"{outcome.cause} {outcome.reason}")


def test_a_trial_that_its_control_group_kills_says_the_peak_the_limit_and_the_process(
    control_group: Path, tmp_path: Path
) -> None:
    supervisor = get_preloaded_context().Process(target=_run_in_control_group, args=(str(control_group), str(tmp_path)))
    supervisor.start()
    supervisor.join(120)
    outcome = (tmp_path / "outcome").read_text()
    assert re.match(
        r"out-of-memory out of memory: peak (9\d\d MiB|1,0\d\d MiB|1 GiB) of limit 1 GiB \(process \d+, [\d,]+ MiB",
        outcome,
    )
    assert "in its last sample); the trial's process ended by SIGKILL" in outcome


@pytest.mark.long
def test_a_memory_error_says_the_limit_of_the_address_space(tmp_path: Path) -> None:
    outcome = run_until_end(exceed_address_space, tmp_path)
    assert outcome.cause is Cause.OUT_OF_MEMORY
    assert "the address space is limited to 1 GiB (ulimit -v); out of memory: peak " in str(outcome.reason)


# GPUs by CUDA's variables and driver, without loading either, and CPUs by affinity and quota.


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("4, 7", ("4", "7")),
        ("GPU-8932f937,MIG-3f2", ("GPU-8932f937", "MIG-3f2")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
    ],
)
def test_what_this_process_may_see_is_all_there_is(visible: str, gpus: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    assert list_gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == gpus


def test_the_driver_has_a_folder_for_each(tmp_path: Path) -> None:
    for address in ("0000:01:00.0", "0000:41:00.0"):
        (tmp_path / address).mkdir()
    assert list_gpus({}, tmp_path) == ("0", "1")


def write_nvidia_smi(folder: Path, commands: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{commands}")
    (folder / "nvidia-smi").chmod(0o755)


def test_where_its_folder_is_missing_the_drivers_program_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_nvidia_smi(tmp_path, "echo 'GPU 0: NVIDIA A100 (UUID: GPU-1)'\necho '  MIG 1g (UUID: x)'\necho 'GPU 1: B'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert list_gpus({}, tmp_path / "nothing") == ("0", "1")


def test_a_program_that_fails_has_found_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nvidia_smi(tmp_path, "echo 'NVIDIA-SMI has failed'\nexit 9\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert list_gpus({}, tmp_path / "nothing") == ()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert list_gpus({}, tmp_path / "nothing") == ()


def test_a_machine_has_the_processors_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    machine = get_local_machine()
    assert machine.cpu_count >= 1
    assert machine.gpus == ("2",)


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "20000 100000"}, 1),
        ({"pod/cpu.max": "300000 100000", "pod/main/cpu.max": "max 100000"}, 3),
        ({"another/cpu.max": "100000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu.max": "unreadable"}, 8),
        ({"cpu.max": "100000 0"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "0"}, 8),
    ],
    ids=str,
)
def test_a_container_has_the_processors_of_its_quota(
    quotas: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    membership = tmp_path / "own"
    membership.write_text("0::/pod/main\n")
    groups = tmp_path / "groups"
    for name, text in quotas.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{text}\n")
    assert count_available_cpus(groups, membership) == expected


@pytest.mark.parametrize(
    ("wanted", "environment", "expected"),
    [
        (2, {"LOCAL_WORLD_SIZE": "7"}, 2),
        ((1, 8), {"LOCAL_WORLD_SIZE": "3", "CUDA_VISIBLE_DEVICES": "0"}, 3),
        ((1, 8), {"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ((4, 8), {"CUDA_VISIBLE_DEVICES": "0,1"}, 4),
        ((1, 8), {"CUDA_VISIBLE_DEVICES": ""}, 5),
        ((1, 4), {"CUDA_VISIBLE_DEVICES": ""}, 4),
    ],
)
def test_of_a_range_an_attempt_takes_as_many_processes_as_there_are_devices(
    wanted: Any, environment: Mapping[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_meter, "count_available_cpus", lambda: 5)
    assert choose_process_count(wanted, environment) == expected
