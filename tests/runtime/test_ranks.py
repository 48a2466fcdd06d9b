"""Which rank of distributed training may report, and which programs a trial's process may not start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.runtime import ranks
from prefect_tune.runtime.ranks import _on_audit_event, detect_rank, find_ancestor_trial


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PREFECT_TUNE_TRIAL_PROCESS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 0)),
        ({"LOCAL_RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 3)),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, (2, 4, 0)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, (0, 2, 0)),
        ({"RANK": "1"}, (1, 1, 0)),
        ({"RANK": "x", "WORLD_SIZE": "2"}, (0, 2, 0)),
        ({}, (0, 1, 0)),
    ],
)
def test_a_launchers_variables_say_which_rank_this_is(
    monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str], expected: tuple[int, int, int]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    detected = detect_rank()
    assert (detected.rank, detected.world_size, detected.local_rank) == expected


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (0, 1)])
def test_what_torch_says_of_ranks_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    module = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: rank, get_world_size=lambda: size
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", module)  # type: ignore[arg-type]  # a fake module
    assert (detect_rank().rank, detect_rank().world_size) == (rank, size)


def test_a_process_knows_which_trial_has_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_ancestor_trial() is None
    monkeypatch.setenv("PREFECT_TUNE_TRIAL_PROCESS", f"{os.getpid()} t")
    assert find_ancestor_trial() is None, "this is the trial's process itself"
    monkeypatch.setenv("PREFECT_TUNE_TRIAL_PROCESS", "1 a trial")
    ancestor = find_ancestor_trial()
    assert ancestor is not None
    assert (ancestor.pid, ancestor.trial_name) == (1, "a trial")


_TRIAL = "prefect_tune.runtime.processes.trial_process"


@pytest.fixture
def trial_process(monkeypatch: pytest.MonkeyPatch) -> None:
    main = SimpleNamespace(__spec__=SimpleNamespace(name=_TRIAL), __file__="/site/trial_process.py")
    monkeypatch.setattr(ranks, "INITIAL_MAIN_MODULE", main)
    monkeypatch.setattr(sys, "argv", ["/site/trial_process.py", "5", "7"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-P", "-m", _TRIAL, "5", "7"])


@pytest.mark.usefixtures("trial_process")
@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("subprocess.Popen", ("python", ["python", "-m", _TRIAL, "5", "7"], None, None)),
        ("subprocess.Popen", ("python", ["python", "/site/trial_process.py", "5", "7"], None, None)),
        ("os.exec", ("python", [b"python", b"-m", _TRIAL.encode(), b"5", b"7"], None)),
        ("os.exec", ("python", ["python", "-P", "-m", _TRIAL, "5", "7"], None)),
        ("os.posix_spawn", ("python", ("python", "-m", _TRIAL, "5", "7"), {})),
    ],
)
def test_a_second_copy_of_a_trials_process_is_refused_however_it_is_started(
    event: str, arguments: tuple[object, ...]
) -> None:
    with pytest.raises(InvalidInput, match=r"a copy of the trial's own program .*To train a trial with N processes"):
        _on_audit_event(event, arguments)


@pytest.mark.usefixtures("trial_process")
@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("subprocess.Popen", (None, ["python", "-P", "-m", _TRIAL, "9", "11"], None, None)),  # a search within a trial
        ("subprocess.Popen", (None, f"python -m {_TRIAL} 5 7", None, None)),
        ("subprocess.Popen", (None, ["grep", _TRIAL, "5", "7"], None, None)),
        ("subprocess.Popen", (None, ["python", "-c", "from multiprocessing.spawn import spawn_main"], None, None)),
        ("os.exec", ("/bin/true", ["true"], None)),
        ("open", ("python", ["python", "-m", _TRIAL, "5", "7"])),
    ],
)
def test_every_other_program_may_be_started(event: str, arguments: tuple[object, ...]) -> None:
    _on_audit_event(event, arguments)


def test_a_program_that_trains_no_trial_may_start_itself_again() -> None:
    _on_audit_event("os.exec", (sys.executable, sys.orig_argv, None))
