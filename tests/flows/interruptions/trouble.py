"""An experiment in this process that fails like its configuration says, and its log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.flows.durable_trainable import TrialResult, durable_trainable
from prefect_tune.parameters.search_plan import SearchPlan
from tests.flows.training import trial_at
from tests.trainables.witness import acts_of

_NAME = "troubled"


class Trouble:
    """One experiment of a trainable that fails like its configuration says."""

    def __init__(self, folder: Path, records: Sequence[logging.LogRecord]) -> None:
        self.folder = folder
        self.target = LocalTarget(path=str(folder / "target"))
        self.witness = folder / "witness"
        self.config: dict[str, Any] = {
            "witness": str(self.witness),
            "ledger": str(folder / "failures"),
            "poison": str(folder / "poison"),
        }
        self.options: dict[str, Any] = {"checkpoint": Cadence(every_steps=5)}
        self.trainable: Any = "tests.trainables.troublesome:Counter"
        self.records = records

    def run(self, *, steps: int | None = 20, **overrides: Any) -> TrialResult:
        options = {"stop": {"step": steps} if steps else None, **self.options, **overrides}
        return durable_trainable(self.trainable, self.config, target=self.target, experiment=_NAME, **options)

    def make_plan(self, stop: object) -> SearchPlan:
        return SearchPlan(trainable=self.trainable, target=self.target, experiment=_NAME, stop=stop)

    def poison(self, step: int, failure: str) -> None:
        """Make every attempt that loads the checkpoint of `step` fail before its next step."""
        (self.folder / "poison").write_text(f"{step} {failure}")

    @property
    def trial(self) -> Trial:
        return trial_at(self.target, _NAME)

    def steps_of(self, act: str) -> Sequence[int]:
        return [event.step for event in acts_of(self.witness) if event.act == act]

    def warning_text(self) -> str:
        """Return the logged errors and warnings."""
        return "\n".join(record.getMessage() for record in self.records if record.levelno >= logging.WARNING)


@contextmanager
def recording_logs() -> Iterator[list[logging.LogRecord]]:
    """Record what Prefect's loggers log in the block."""
    handler = BufferingHandler(capacity=sys.maxsize)
    logging.getLogger("prefect").addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logging.getLogger("prefect").removeHandler(handler)
