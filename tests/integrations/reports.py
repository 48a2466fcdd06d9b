"""A trial in this process: what it reports, and a checkpoint of each report, from the start or from one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_tune.core.journal_events import Paused
from prefect_tune.runtime.trainable import TrialOver
from tests.integrations.undisturbed import Undisturbed


@dataclass
class Reports(Undisturbed):
    """Keeps what is reported, and a checkpoint of each step."""

    restored_step: int = 0
    pause_at: int | None = None
    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    may_lack: dict[int, bool] = field(default_factory=dict)
    """Whether a report may lack the metric of the search."""

    def __post_init__(self) -> None:
        self.step = self.restored_step

    def report_step(self, metrics: Mapping[str, Any], save: Any, *, may_lack: bool = False) -> None:
        if self.step == self.pause_at:
            raise TrialOver(Paused(trial="trial", reason="it was paused before"))
        self.step += 1
        self.may_lack[self.step] = may_lack
        self.metrics[self.step] = {name: float(value) for name, value in metrics.items()}
        place = self.directory / str(self.step)
        place.mkdir(parents=True, exist_ok=True)
        save(str(place))
        if self.step == self.pause_at:
            raise TrialOver(Paused(trial="trial", reason="paused"))

    def restored(self) -> Any:
        return str(self.directory / str(self.restored_step)) if self.restored_step else None
