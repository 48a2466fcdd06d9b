"""A journaled decision about a trial still holds if the search died before it acted on it."""

from __future__ import annotations

import pytest

from prefect_tune.core.experiment.trial_transitions import PastEvent, Phase, Trial
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import Continue, Decision, Pause, Stop
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.core.values import StepReport
from prefect_tune.tuner.search_policy import SearchPolicy, open_decision

LOSS = Objective(metrics=("loss",), modes=("min",))
ADDED = PastEvent(order=1, what="added")
ALL = [Phase.PENDING, Phase.RUNNING, Phase.PAUSED, Phase.FINISHED]


def decided(decision: Decision) -> PastEvent:
    return PastEvent(order=2, what="decided", report=StepReport(step=3, metrics={"loss": 1.0}), decision=decision)


def policy_of(trial: Trial) -> SearchPolicy:
    schedule = ASHA(max_t=27, grace_period=3, reduction_factor=3, variant="stopping").begin(LOSS, 0)
    policy = SearchPolicy(RandomSearch(1).begin({}, LOSS, 0), schedule)
    for each in trial.past:
        policy.record(trial, each) if each.report is None else policy.decide(trial, each.report)
    return policy


@pytest.mark.parametrize("decision", [Stop(reason="slow"), Pause(reason="waits")])
@pytest.mark.parametrize("status", ALL)
def test_one_to_leave_stands_until_the_trial_has_left(decision: Decision, status: Phase) -> None:
    trial = Trial(trial="00000", config={}, phase=status, past=(ADDED, decided(decision)))
    found = open_decision(trial)
    if status in (Phase.PENDING, Phase.RUNNING):
        assert found is not None
        assert found.decision == decision
        assert policy_of(trial).milestone(trial) == 3
    else:
        assert found is None
        assert policy_of(trial).milestone(trial) == 9


@pytest.mark.parametrize(
    "past",
    [(ADDED,), (ADDED, decided(Continue())), (ADDED, decided(Pause(reason="")), PastEvent(order=3, what="resumed"))],
)
def test_nothing_else_stands(past: tuple[PastEvent, ...]) -> None:
    trial = Trial(trial="00000", config={}, past=past)
    assert open_decision(trial) is None
    assert policy_of(trial).milestone(trial) == (3 if past == (ADDED,) else 9)
