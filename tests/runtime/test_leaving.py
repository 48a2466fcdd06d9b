"""A trial that receives "save and leave" saves the step at which it leaves, whenever the message arrives."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.core.experiment.trial_stoppers import Never
from prefect_tune.core.messages.process_messages import CheckpointSaved, FromTrial, Leave, StateSaved, StepDone, ToTrial
from prefect_tune.runtime.session import TrialSession
from prefect_tune.runtime.trainable import TrialOver
from tests.fakes.trial_processes import start_of


class Supervisor:
    """Sends `said` at the `moment`-th check for a message, and acknowledges every checkpoint."""

    def __init__(self, moment: int, said: ToTrial) -> None:
        self._moment = moment
        self._said = said
        self._looks = 0
        self._waiting: deque[ToTrial] = deque()
        self.steps = 0
        self.saved = 0

    def has_message(self) -> bool:
        self._looks += 1
        if self._looks == self._moment:
            self._waiting.append(self._said)
        return bool(self._waiting)

    def receive(self) -> ToTrial:
        return self._waiting.popleft()

    def send(self, message: FromTrial) -> None:
        match message:
            case StateSaved(report=report) | StepDone(report=report, checkpoint=str()):
                self.steps = self.saved = report.step
                self._waiting.append(CheckpointSaved(step=report.step))
            case StepDone(report=report):
                self.steps = report.step
            case _:
                pass


@pytest.mark.parametrize("moment", range(1, 13))
def test_a_trial_that_is_told_to_save_and_leave_saves_the_step_at_which_it_leaves(tmp_path: Path, moment: int) -> None:
    supervisor: Any = Supervisor(moment, Leave(reason="enough", save=True, for_good=True))
    session = TrialSession(supervisor, start_of("any:Thing", tmp_path), Never())

    def train() -> None:
        for _ in range(12):
            session.report_step({"loss": 1.0}, lambda _: None)

    with pytest.raises(TrialOver) as over:
        train()
    assert over.value.ended.left
    assert supervisor.saved == supervisor.steps == session.step
