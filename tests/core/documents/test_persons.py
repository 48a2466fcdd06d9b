"""What the journal stores about users: runs that they started by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import acquire_ownership, append_events, load_experiment
from prefect_tune.core.journal_events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointRef,
    DecisionMade,
    Event,
    Owner,
    TrialAdded,
    TrialFinished,
)
from prefect_tune.core.schedulers.base import Continue
from prefect_tune.core.values import StepReport, WriteStamp
from tests.core.driver import JOURNAL
from tests.fakes.stores.memory_store import MemoryStore

COMMITTED = CheckpointCommitted(trial="t", checkpoint=CheckpointRef(step=1, sequence=9))
DECIDED = DecisionMade(trial="t", report=StepReport(step=1, metrics={}, trained_seconds=1), decision=Continue())


class _Experiment:
    """An experiment that several flow runs open."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.stamps = 0

    def stamp(self) -> WriteStamp:
        self.stamps += 1
        return WriteStamp(write_id=f"w{self.stamps}", at="now")

    def open(self, flow_run: str | None, *, is_manual: bool = False) -> Experiment:
        owner = Owner(name="a run", host="here", pid=1, flow_run=flow_run, is_manual=is_manual)
        return acquire_ownership(self.store, JOURNAL, owner, self.stamp())

    def write(self, *events: Event) -> Experiment:
        return append_events(self.store, load_experiment(self.store, JOURNAL), events, self.stamp())


def start_experiment() -> _Experiment:
    experiment = _Experiment()
    experiment.open("run")
    experiment.write(TrialAdded(trial="t", config={}))
    return experiment


def count_restarts(experiment: _Experiment, *opened_by: str | None) -> list[int]:
    return [experiment.open(flow_run).restarts for flow_run in opened_by]


def test_starts_of_one_run_are_counted_until_it_is_another_or_a_persons() -> None:
    experiment = start_experiment()
    assert count_restarts(experiment, "run", "run", "run", "other", "other", None, None) == [1, 2, 3, 0, 1, 0, 0]
    assert count_restarts(experiment, "run", "run") == [0, 1]
    assert experiment.open("run", is_manual=True).restarts == 0
    assert count_restarts(experiment, "run") == [1]
    assert load_experiment(experiment.store, JOURNAL).restarts == 1


@pytest.mark.parametrize("progress", [[COMMITTED], [DECIDED], [TrialFinished(trial="t", reason="done")]])
def test_what_comes_of_a_start_ends_the_count(progress: Sequence[Event]) -> None:
    experiment = start_experiment()
    assert count_restarts(experiment, "run", "run") == [1, 2]
    assert experiment.write(AttemptStarted(trial="t", attempt=1, from_step=0)).restarts == 2
    assert experiment.write(*progress).restarts == 0
