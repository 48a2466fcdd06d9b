"""Searches that run until a test ends them, and the contents of their journals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import load
from tests.fakes.checkpoints import first_generation

STEPS = 300
SAVED_EVERY = 25
LINGERS_AT = SAVED_EVERY + 1
"""The step from which on the trials are slow: a checkpoint is committed by then."""
_PATIENCE = timedelta(minutes=4)


@dataclass(frozen=True)
class Search:
    """A search whose trials are slow until the file `hurry` exists."""

    folder: Path
    experiment: str
    space: Mapping[str, Any]
    num_samples: int = 1
    also: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the flow."""

    @property
    def parameters(self) -> dict[str, Any]:
        files = {"hurry": str(self.folder / "hurry"), "mended": str(self.folder / "mended")}
        return {
            "trainable": "tests.trainables.counting:Descent",
            "space": {**self.space, **files, "lingers_at": LINGERS_AT},
            "target": str(self.folder / "target"),
            "experiment": self.experiment,
            "metric": "loss",
            "num_samples": self.num_samples,
            "stop": {"step": STEPS},
            **self.also,
        }

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def mend(self) -> None:
        (self.folder / "mended").touch()

    def trials(self) -> Mapping[str, Trial]:
        """Return its trials by the journals on the target."""
        with LocalTarget(path=str(self.folder / "target")).open(timeout=_PATIENCE) as store:
            return load(store, first_generation(self.experiment), side_by_side=map).trials


def until(holds: Callable[[], object], what: Callable[[], object]) -> None:
    """Return as soon as it holds; fail with `what()` when that takes minutes."""
    end = time.monotonic() + _PATIENCE.total_seconds()
    while not holds():
        assert time.monotonic() < end, f"not within {_PATIENCE}: {what()}"
        time.sleep(0.2)
