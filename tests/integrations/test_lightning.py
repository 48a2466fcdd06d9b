"""Lightning: bitwise identical after kills, also in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.examples import Example
from tests.integrations.states import flat

pytestmark = pytest.mark.integrations
torch = pytest.importorskip("torch")
pytest.importorskip("lightning")


def learned(directory: Path) -> Mapping[str, Any]:
    """Return weights, moments, schedule, place in the data, and the generator that dropout uses."""
    saved = torch.load(directory / "checkpoint.ckpt", weights_only=True)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
    (callback,) = saved["callbacks"].values()
    data = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return flat({**{name: saved[name] for name in names}, "torch": callback["random"]["torch"], "data": data})


@pytest.mark.timeout(2000)
def test_the_example_ends_with_the_state_of_an_undisturbed_one(example: Callable[[str, str], Example]) -> None:
    example("lightning", "train").ends_as_undisturbed(learned, reach=4, interval=3, steps={6, 18})
