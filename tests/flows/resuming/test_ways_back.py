"""Retry, automations, Cancel: each continues the same run, and a mistaken one does no harm."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import Committed
from tests.flows.training import entries_at, experiment_at, trial_at, undisturbed
from tests.flows.ui import Ui, eventually
from tests.trainables.witness import acts_of

_MLP = "tests.trainables.numpy_mlp:NumpyMlp"
_STEPS, _INTERVAL = 60, 5
_AUTOMATION = "State changed by Automation 00000000-0000-0000-0000-000000000000"


pytestmark = [pytest.mark.deep, pytest.mark.timeout(1200)]


class _Training:
    """A deployed training of 60 steps."""

    def __init__(self, ui: Ui, folder: Path, name: str, *, step_seconds: float = 0.2) -> None:
        self.ui = ui
        self.name = name
        self.target = LocalTarget(path=str(folder / name))
        self.witness = folder / f"{name}.witness"
        self.gate = folder / f"{name}.gate"
        self.run: UUID = ui.start(
            "durable-trainable",
            trainable=_MLP,
            config={
                "step_seconds": step_seconds,
                "witness": str(self.witness),
                "gate": str(self.gate),
                "gate_step": _STEPS - 3,
            },
            stop={"step": _STEPS},
            target=self.target.uri,
            experiment=name,
            checkpoint={"every_steps": _INTERVAL},
        )

    def term(self) -> int:
        return experiment_at(self.target, self.name).term

    def committed(self) -> Sequence[int]:
        """The steps committed in the present term."""
        entries = entries_at(self.target, self.name)
        term = entries[-1].term if entries else 0
        events_of_run = (event for entry in entries if entry.term == term for event in entry.events)
        return [event.checkpoint.step for event in events_of_run if isinstance(event, Committed)]

    def until_committed(self, term: int, times: int = 1) -> None:
        eventually(
            f"{times} commits of term {term}\n{self.ui.log(self.run)}",
            lambda: self.term() >= term and len(self.committed()) >= times,
        )

    def kill(self) -> None:
        os.kill(self.ui.process_of(self.run), signal.SIGKILL)

    def require_no_committed_step_again(self) -> None:
        """Every attempt began at a commit, and no process trained a step that an earlier one had committed."""
        begun: dict[Any, list[int]] = {}
        for each in acts_of(self.witness):
            if each.act == "begin":
                begun.setdefault(each.pid, []).append(each.step)
        for earlier, later in zip(list(begun.values()), list(begun.values())[1:], strict=False):
            assert (later[0] - 1) % _INTERVAL == 0, begun
            assert earlier[0] < later[0], begun  # and not from nothing

    def require_identical_end(self) -> None:
        trial = trial_at(self.target, self.name)
        assert (trial.status, trial.metrics["state"]) == (Status.COMPLETED, undisturbed(_STEPS).state[_STEPS])


def test_a_killed_run_is_retried_and_one_that_was_alive_is_left_to_the_process_started_in_its_place(
    ui: Ui, tmp_path: Path
) -> None:
    training = _Training(ui, tmp_path, "retried")
    training.until_committed(term=1)
    training.kill()
    eventually("the crash is known", lambda: ui.state(training.run).is_crashed())
    ui.retry(training.run)
    training.until_committed(term=2)
    ui.retry(training.run, _AUTOMATION)  # a false alarm
    eventually("the next owner", lambda: training.term() == 3)
    training.gate.touch()
    assert ui.until_final(training.run).is_completed(), ui.log(training.run)
    training.require_identical_end()
    training.require_no_committed_step_again()
    # Runner and worker both report the kill, and nothing else is killed: the second report may come at any later time.
    killed = re.compile(r"exited with .*status code:? -9\b")
    history = [str(each.name) for each in ui.history(training.run) if not killed.search(str(each.message))]
    assert not {"Crashed", "Failed"} & set(history), history
    assert history.count("AwaitingRetry") == 2
    eventually("the log", lambda: "this process is owner 2, and owner 3" in ui.log(training.run), timedelta(seconds=30))
    owners = [entry.events[0].owner.by_hand for entry in entries_at(training.target, "retried") if _opens(entry)]
    assert owners == [False, True, False]


def _opens(entry: Any) -> bool:
    return bool(entry.events[0].type == "opened")


def test_a_cancelled_run_says_what_is_resumable(ui: Ui, tmp_path: Path) -> None:
    training = _Training(ui, tmp_path, "cancelled")
    training.until_committed(term=1)
    ui.cancel(training.run)
    assert ui.until_final(training.run).is_cancelled(), ui.log(training.run)
    eventually("the log", lambda: "resumable at step" in ui.log(training.run), timedelta(seconds=30))
    at = trial_at(training.target, "cancelled").checkpoints[-1].step
    assert f"experiment 'cancelled': resumable at step {at}; press Retry, or run it again" in ui.log(training.run)
