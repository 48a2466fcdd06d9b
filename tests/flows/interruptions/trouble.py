"""An experiment that fails as its configuration says, in this process, with its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
_COUNTER = "tests.trainables.troublesome:Counter"


class Trouble:
    """One experiment of a trainable that fails as its configuration says, run in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = LocalTarget(path=str(folder / "target"))
        self.witness = folder / "witness"
        self.config: dict[str, Any] = {
            "witness": str(self.witness),
            "ledger": str(folder / "failures"),
            "poison": str(folder / "poison"),
        }
        self.options: dict[str, Any] = {"checkpoint": Cadence(every_steps=5)}
        self.trainable: Any = _COUNTER
        self.said: list[logging.LogRecord] = []

    def run(self, *, steps: int | None = 20, **more: Any) -> TrialResult:
        """Call the flow; it may be called several times."""
        options = {"stop": {"step": steps} if steps else None, **self.options, **more}
        return durable_trainable(self.trainable, self.config, target=self.target, experiment=_NAME, **options)

    def plan(self, stop: object) -> SearchPlan:
        """Return the flow's plan for its parameters."""
        return SearchPlan(trainable=self.trainable, target=self.target, experiment=_NAME, stop=stop)

    def poison(self, step: int, way: str) -> None:
        """From now on every attempt that loads the checkpoint of `step` fails before its next step."""
        (self.folder / "poison").write_text(f"{step} {way}")

    @property
    def trial(self) -> Trial:
        return trial_at(self.target, _NAME)

    def acts(self, act: str) -> Sequence[int]:
        return [each.step for each in acts_of(self.witness) if each.act == act]

    def loudly(self) -> str:
        """Return the logged errors and warnings."""
        return "\n".join(each.getMessage() for each in self.said if each.levelno >= logging.WARNING)


class _Listening(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def listening(records: list[logging.LogRecord]) -> Iterator[None]:
    """Record what Prefect's loggers log within the block."""
    handler = _Listening(records)
    logging.getLogger("prefect").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("prefect").removeHandler(handler)
