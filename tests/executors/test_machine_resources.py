"""The machine's GPUs by CUDA's variables and driver, without loading either, and its CPUs by affinity and quota."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt import usage_meter
from prefect_tune.attempt.usage_meter import cpu_count_here, gpus_in, processes_here
from prefect_tune.executors.trial_executor import machine_here


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
    assert gpus_in({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == gpus


def test_the_driver_has_a_folder_for_each(tmp_path: Path) -> None:
    for address in ("0000:01:00.0", "0000:41:00.0"):
        (tmp_path / address).mkdir()
    assert gpus_in({}, tmp_path) == ("0", "1")


def test_where_its_folder_is_missing_the_drivers_program_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA A100 (UUID: GPU-1)'\necho '  MIG 1g (UUID: x)'\necho 'GPU 1: B'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus_in({}, tmp_path / "nothing") == ("0", "1")


def test_a_program_that_fails_has_found_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus_in({}, tmp_path / "nothing") == ()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert gpus_in({}, tmp_path / "nothing") == ()


def test_a_machine_has_the_processors_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    found = machine_here()
    assert found.cpu_count >= 1
    assert found.gpus == ("2",)


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
    own = tmp_path / "own"
    own.write_text("0::/pod/main\n")
    groups = tmp_path / "groups"
    for name, text in quotas.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{text}\n")
    assert cpu_count_here(groups, own) == expected


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
    monkeypatch.setattr(usage_meter, "cpu_count_here", lambda: 5)
    assert processes_here(wanted, environment) == expected
