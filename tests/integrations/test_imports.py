"""Trials of modules that import PyTorch or JAX; a thousand forks after one import of PyTorch."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.trial_spec import get_absolute_sys_path
from prefect_tune.runtime.trainable import Reuse
from tests.attempt.processes.modules import Module, Trainer, count_distinct
from tests.fakes.trial_processes import LogRecorder, family, make_log, make_start, no_leaks, receive_metrics

pytestmark = pytest.mark.integrations
torch = pytest.importorskip("torch")
torch_trainable = pytest.importorskip("tests.integrations.torch_trainable")
_TRIALS = 1000


def train_trials(folder: Path, log: logging.Logger) -> Sequence[Mapping[str, Any]]:
    """Train `_TRIALS` trials, two at a time; return the metrics of each."""
    start = make_start(os.getcwd, folder, {"lr": 0.1}, steps=1).model_copy(
        update={"trainable": "tests.integrations.torch_trainable:train", "import_path": get_absolute_sys_path()}
    )

    def train(pool: TrialProcessPool) -> Mapping[str, Any]:
        with pool.open_process(start, log) as channel:
            return {**receive_metrics(channel), "supervisor": torch_trainable.resident_bytes(os.getpid())}

    with no_leaks(), family(), TrialProcessPool(slots=2, reuse="auto") as pool, ThreadPoolExecutor(2) as threads:
        return list(threads.map(train, [pool] * _TRIALS))


@pytest.mark.parametrize("reuse", ["auto", "never"])
def test_trials_draw_different_numbers_of_torch_unless_the_module_seeds_it(
    train_trials: Trainer, module: Module, recorder: LogRecorder, reuse: Reuse
) -> None:
    body = "import torch\n{}\ntorch.rand(3)\ndef measure(config): return {{'drawn': torch.rand(1).item()}}"
    module.write(body.format(""))
    assert count_distinct(train_trials(3, reuse), "drawn") == 3
    module.write(body.format("torch.manual_seed(7)"))
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    assert {metrics["drawn"] for metrics in train_trials(3, reuse)} == {torch.rand(1, generator=generator).item()}
    assert recorder.reasons == []


def test_a_process_that_has_computed_with_jax_is_not_forked_and_each_trial_imports_it(
    train_trials: Trainer, module: Module, recorder: LogRecorder
) -> None:
    pytest.importorskip("jax")
    module.write("""
        import jax
        one = jax.numpy.ones(3)
        def measure(config): return {"sum": float((one * 2).sum())}
    """)
    results = train_trials(3)
    assert (count_distinct(results), {metrics["sum"] for metrics in results}) == (3, {6.0})
    assert "it imports JAX, which cannot be forked" in recorder.reasons[0]


@pytest.mark.timeout(2000)
def test_a_thousand_forks_of_a_process_that_has_imported_torch_train_alike(
    tmp_path: Path, recorder: LogRecorder
) -> None:
    results = train_trials(tmp_path, make_log(recorder))
    assert recorder.reasons == []
    assert len({metrics["pid"] for metrics in results}) == _TRIALS
    assert {(metrics["before"], metrics["product"]) for metrics in results} == {(results[0]["before"], 256.0**3)}
    assert len({metrics["drawn"] for metrics in results}) > _TRIALS - 10  # of 2**24 numbers
    for process in ("resident", "server", "supervisor"):
        require_flat([metrics[process] for metrics in results])


def require_flat(resident: Sequence[int]) -> None:
    """Require that the last tenth of the trials takes at most 8 MiB more than the second tenth."""
    tenth = max(1, len(resident) // 10)
    early, late = resident[tenth : 2 * tenth] or resident[:1], resident[-tenth:]
    assert max(late) < max(early) + (8 << 20), resident[:: max(1, len(resident) // 20)]
