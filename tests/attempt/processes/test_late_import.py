"""What the first optimizer of PyTorch imports is imported once, after the first trial was forked, and only if needed.

PyTorch itself takes seconds: a package of the same name has the parts that matter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attempt.processes.modules import Module, Trains, different
from tests.fakes.trial_processes import LogRecorder

pytestmark = pytest.mark.usefixtures("ours")  # fails if a process outlives its test

TORCH = """
import importlib
from types import SimpleNamespace

class SGD:
    def __init__(self, parameters, lr):
        importlib.import_module("torch._dynamo")

    def step(self):
        pass

optim = SimpleNamespace(SGD=SGD)
cuda = SimpleNamespace(is_initialized=lambda: False)

def nothing(*_, **__):
    return None

zeros = seed = manual_seed = initial_seed = get_rng_state = set_rng_state = nothing
"""
DYNAMO = """
import os
with open({imports!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
"""
TRAIN = """
import sys, torch
def measured(config):
    late = "torch._dynamo" in sys.modules
    torch.optim.SGD([0], lr=0.0).step()
    return {"late": late}
"""
HELPER = """
import torch
def step():
    torch.optim.SGD([0], lr=0.0).step()
"""
WITH_HELPER = """
import sys, torch, helper_of_training
def measured(config):
    late = "torch._dynamo" in sys.modules
    helper_of_training.step()
    return {"late": late}
"""
WITHOUT = """
import sys, torch
def measured(config):
    return {"late": "torch._dynamo" in sys.modules}
"""


@pytest.fixture
def imports(tmp_path: Path, module: Module) -> Path:
    """Write the packages, and return the file to which each import of `torch._dynamo` adds its process."""
    del module  # which has put the folder on the path
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "torch" / "_dynamo.py").write_text(DYNAMO.format(imports=str(tmp_path / "late imports")))
    (tmp_path / "helper_of_training.py").write_text(HELPER)
    return tmp_path / "late imports"


def test_the_first_trial_does_not_wait_for_the_late_import_and_the_others_have_it(
    trains: Trains, module: Module, imports: Path, recorder: LogRecorder
) -> None:
    module.write(WITH_HELPER)  # whose own code names no optimizer
    found = trains(4)
    assert [each["late"] for each in found] == [False, True, True, True]
    importers = [int(line) for line in imports.read_text().split()]
    assert len(importers) == 2
    assert {found[0]["pid"]} == {each["pid"] for each in found}.intersection(importers)
    assert (len(module.imports), different(found)) == (1, 4)
    assert recorder.reasons == []


def test_where_the_code_names_an_optimizer_the_second_trial_has_it_at_the_latest(
    trains: Trains, module: Module, imports: Path, recorder: LogRecorder
) -> None:
    module.write(TRAIN)
    assert [each["late"] for each in trains(3)][1:] == [True, True]
    assert len(imports.read_text().split()) <= 2  # the first trial waits for it if its request comes late
    assert recorder.reasons == []


def test_trials_without_an_optimizer_import_nothing_late(trains: Trains, module: Module, imports: Path) -> None:
    module.write(WITHOUT)
    assert [each["late"] for each in trains(3)] == [False] * 3
    assert not imports.exists()


def test_a_late_import_that_starts_a_thread_ends_the_forks_and_no_trial(
    trains: Trains, module: Module, imports: Path, tmp_path: Path, recorder: LogRecorder
) -> None:
    threads = "threading.Thread(target=threading.Event().wait, daemon=True, name='of dynamo').start()"
    (tmp_path / "torch" / "_dynamo.py").write_text(f"import threading\n{threads}\n")
    module.write(TRAIN)
    found = trains(3)
    assert (len(module.imports), different(found)) == (3, 3)
    (reason,) = recorder.reasons
    assert "trials cannot be forked after its import" in reason
    assert "threads that still run: of dynamo" in reason
    assert not imports.exists()
