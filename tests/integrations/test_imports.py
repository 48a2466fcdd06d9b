"""A thousand trials of a module that imports PyTorch: forked after one import, and in kept processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.supervisor.process_pool import TrialProcessPool
from prefect_tune.supervisor.trial_spec import Reuse, import_path
from tests.fakes.trial_processes import Hearing, family, log_to, metrics_of, start_of

pytestmark = pytest.mark.integrations
pytest.importorskip("torch")
_TRIALS = 1000


def trained(folder: Path, reuse: Reuse, hearing: Hearing) -> Sequence[Mapping[str, Any]]:
    """Train `_TRIALS` trials, two at a time; return what each reports."""
    start = start_of(os.getcwd, folder, {"lr": 0.1}, steps=1).model_copy(
        update={"trainable": "tests.integrations.torch_trainable:train", "import_path": import_path()}
    )

    def train(pool: TrialProcessPool) -> Mapping[str, Any]:
        with pool.process(start, log_to(hearing)) as channel:
            return metrics_of(channel)

    with family(), TrialProcessPool(slots=2, reuse=reuse) as pool, ThreadPoolExecutor(2) as threads:
        return list(threads.map(train, [pool] * _TRIALS))


@pytest.mark.timeout(2000)
def test_a_thousand_forks_of_a_process_that_has_imported_torch_train_alike(tmp_path: Path) -> None:
    hearing = Hearing()
    found = trained(tmp_path, "fork", hearing)
    assert hearing.lines == []
    assert len({each["pid"] for each in found}) == _TRIALS
    assert {(each["before"], each["drawn"], each["product"]) for each in found} == {
        (found[0]["before"], found[0]["drawn"], 256.0**3)
    }


@pytest.mark.timeout(2000)
def test_the_memory_of_processes_that_serve_a_thousand_trials_is_flat(tmp_path: Path) -> None:
    found = trained(tmp_path, "keep", Hearing())
    pids = {each["pid"] for each in found}
    assert len(pids) == 2
    for pid in pids:
        resident = [each["resident"] for each in found if each["pid"] == pid]
        assert max(resident[-50:]) < max(resident[50:100]) + (8 << 20), resident[:: len(resident) // 20]
