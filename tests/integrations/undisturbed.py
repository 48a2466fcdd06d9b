"""`python -m tests.integrations.undisturbed EXAMPLE`: train an example's trainable without flow, target and kills.

Its input is a JSON list of trainings: the trainable, the configuration, the number of steps, and the directory for the
state after the last step. It saves only once, and restores nothing.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect_tune.core.journal_events import TrialPaused
from prefect_tune.runtime.checkpoint import Checkpoint
from prefect_tune.runtime.trainable import StopTraining, Trainable, TrialInfo, activate_session


@dataclass
class StepCountingSession:
    """A session that only counts steps, and saves once."""

    config: Mapping[str, object]
    steps: int
    directory: Path
    step: int = 0
    belongs_to_this_process: bool = True

    def report_step(
        self, metrics: Mapping[str, object], save: Callable[[str], None], *, allow_missing: bool = False
    ) -> None:
        del metrics, allow_missing
        if self.step == self.steps:
            raise StopTraining(TrialPaused(trial="trial", reason="it was over before"))
        self.step += 1
        if self.step == self.steps:
            save(str(self.directory))
            raise StopTraining(TrialPaused(trial="trial", reason="trained as far as the other"))

    def report(self, metrics: Mapping[str, object], checkpoint: Checkpoint | None) -> None:
        assert checkpoint is not None
        self.report_step(metrics, lambda directory: Path(checkpoint.path).rename(directory))

    def save_last_step(self, save: Callable[[str], None]) -> None:
        """Do nothing: the last step is saved already."""

    def get_restored_directory(self) -> None:
        return None

    def poll_stop_request(self) -> bool:
        return False

    def make_checkpoint_directory(self) -> Path:
        directory = self.directory.with_name(f"{self.directory.name}-{self.step}")
        directory.mkdir()
        return directory

    def make_trial_info(self) -> TrialInfo:
        return TrialInfo("undisturbed", "undisturbed", 1, self.directory, self.config, 0, 1, 0, self)


@dataclass
class RecordingSession(StepCountingSession):
    """Keeps the reports, and a checkpoint of each step."""

    restored_step: int = 0
    pause_at: int | None = None
    metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    allow_missing: dict[int, bool] = field(default_factory=dict)
    """Whether a report may lack the metric of the search."""

    def __post_init__(self) -> None:
        self.step = self.restored_step

    def report_step(self, metrics: Mapping[str, Any], save: Any, *, allow_missing: bool = False) -> None:
        if self.step == self.pause_at:
            raise StopTraining(TrialPaused(trial="trial", reason="it was paused before"))
        self.step += 1
        self.allow_missing[self.step] = allow_missing
        self.metrics[self.step] = {name: float(value) for name, value in metrics.items()}
        directory = self.directory / str(self.step)
        directory.mkdir(parents=True, exist_ok=True)
        save(str(directory))
        if self.step == self.pause_at:
            raise StopTraining(TrialPaused(trial="trial", reason="paused"))

    def get_restored_directory(self) -> Any:
        return str(self.directory / str(self.restored_step)) if self.restored_step else None


def train(trainable: Any, session: StepCountingSession) -> None:
    """Train until the session stops it; a function returns when its framework's loop has ended."""
    activate_session(session, whole_process=True)
    session.directory.mkdir(parents=True)
    try:
        if isinstance(trainable, type) and issubclass(trainable, Trainable):
            model = trainable()
            model.setup(session.config)
            while True:
                session.report_step(model.step(), model.save_checkpoint)
        trainable(dict(session.config))
    except StopTraining:
        pass
    assert session.step == session.steps


def main() -> None:
    example = runpy.run_path(sys.argv[1])
    for training in json.load(sys.stdin):
        train(
            example[training["trainable"]],
            StepCountingSession(training["config"], training["steps"], Path(training["directory"])),
        )


if __name__ == "__main__":
    main()
