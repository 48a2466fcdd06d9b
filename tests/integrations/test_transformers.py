"""Hugging Face's Trainer: bitwise identical after kills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.examples import Example
from tests.integrations.states import flat

pytestmark = pytest.mark.integrations
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def learned(directory: Path) -> Mapping[str, Any]:
    """Return weights, moments, schedule, and the generator that dropout uses."""
    states = {name: torch.load(directory / name, weights_only=True) for name in ("optimizer.pt", "scheduler.pt")}
    with safe_numpy():
        random = torch.load(directory / "rng_state.pth", weights_only=True)
    weights = (directory / "model.safetensors").read_bytes()
    return {**flat(states), "torch": flat(random["cpu"]), "weights": weights}


def safe_numpy() -> Any:
    """Allow what the file of a generator's state holds, besides tensors."""
    import numpy as np

    names = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]  # type: ignore[attr-defined]  # pickles name it
    return torch.serialization.safe_globals(names)


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(example: Callable[[str, str], Example]) -> None:
    example("transformers", "train").ends_as_undisturbed(learned, reach=3, interval=1, steps={4, 12})
