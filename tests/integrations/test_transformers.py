"""Hugging Face's Trainer: bitwise identical after kills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.journal_events import Cause
from prefect_tune.core.messages.process_messages import Broke
from tests.fakes.trial_processes import LogRecorder, log_to, messages_of, start_of
from tests.integrations.examples import Example
from tests.integrations.ranks import several_ranks
from tests.integrations.states import flat

pytestmark = pytest.mark.integrations
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def learned(directory: Path) -> Mapping[str, Any]:
    """Return weights, moments, schedule, and the generator that dropout uses."""
    states = {name: torch.load(directory / name, weights_only=True) for name in ("optimizer.pt", "scheduler.pt")}
    with torch.serialization.safe_globals(_numpys()):
        random = torch.load(directory / "rng_state.pth", weights_only=True)
    weights = (directory / "model.safetensors").read_bytes()
    return {**flat(states), "torch": flat(random["cpu"]), "weights": weights}


def _numpys() -> list[Any]:
    import numpy as np

    return [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]  # type: ignore[attr-defined]  # pickles name it


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(example: Callable[[str, str], Example]) -> None:
    example("transformers", "train").ends_as_undisturbed(learned, reach=3, interval=1, steps={4, 12})


def test_ranks_that_accelerate_starts_are_told_where_to_report(tmp_path: Path) -> None:
    with TrialProcessPool(slots=1) as pool:
        start = start_of(several_ranks.launches_ranks, tmp_path)
        with pool.process(start, log_to(LogRecorder())) as channel:
            (*_, ended) = messages_of(channel, seconds=300)
    assert isinstance(ended, Broke)
    assert ended.cause is Cause.USER
    assert "One process trains a trial: return results to that process" in ended.message
