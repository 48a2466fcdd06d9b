"""Events that a search algorithm receives about trials stopped by the scheduler, and their effect; without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import optuna
import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.experiment import after_event, nothing_yet
from prefect_tune.core.journal_events import (
    Cause,
    Decided,
    Event,
    Finished,
    FinishKind,
    GaveUp,
    Paused,
    StopAsked,
    TrialAdded,
)
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import Continue, Decision, Pause, Stop
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.search.base import Proposals, Search, Space, Suggestion
from prefect_tune.core.search.domains import uniform
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.core.values import StepReport
from prefect_tune.integrations.optuna import OptunaSearch
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.planned_search import PlannedSearch, UnreliableExecutor

SCHEDULERS = {
    "asha stopping": ASHA(max_t=9, variant="stopping"),
    "asha promotion": ASHA(max_t=9, variant="promotion"),
    "hyperband": Hyperband(max_t=9),
}
SPACE = {"x": uniform(0, 1)}


@dataclass(frozen=True)
class Noting(Search):
    """Random search that records the events that it receives."""

    events: list[tuple[str, int]] = field(default_factory=list)

    def begin(self, space: Space, objective: Objective | None, seed: int) -> Proposals:
        return _NotingProposals(RandomSearch(9).begin(space, objective, seed), self.events)


class _NotingProposals(Proposals):
    def __init__(self, proposals: Proposals, events: list[tuple[str, int]]) -> None:
        self._proposals = proposals
        self._events = events

    def suggest(self, number: int) -> Suggestion:
        return self._proposals.suggest(number)

    def recall(self, number: int, config: Mapping[str, object]) -> None:
        self._proposals.recall(number, config)

    def stopped(self, number: int) -> None:
        self._events.append(("stopped", number))

    def ended(self, number: int, last: StepReport | None, *, failed: bool) -> None:
        assert last is not None
        assert not failed
        self._events.append((f"ended at {last.step}", number))


@pytest.mark.parametrize("name", ["asha stopping", "asha promotion", "hyperband"])
def test_the_search_hears_of_whom_the_scheduler_stops_before_his_time_now_and_after_a_resume(
    name: str, local_target: LocalTarget
) -> None:
    searched = PlannedSearch(local_target, slots=1, executor=UnreliableExecutor(12))
    options = {"space": SPACE, "num_samples": None, "stop": {"step": 12}, "scheduler": SCHEDULERS[name]}
    live, again = Noting(), Noting()
    state = searched.run(search=live, **options)
    steps = {number: each.step for number, each in enumerate(state.trials.values())}
    assert {number for what, number in live.events if what == "stopped"} == {
        number for number, step in steps.items() if step < 9
    }
    assert 0 < sum(step == 9 for step in steps.values()) < 9
    before = [live.events[index - 1] for index, (what, _) in enumerate(live.events) if what.startswith("ended")]
    assert [number for what, number in before if what == "stopped"] == [
        number for what, number in live.events if what == "stopped"
    ]
    assert searched.run(search=again, **options).trials == state.trials
    assert again.events == live.events


def test_who_is_asked_to_stop_or_ends_by_himself_at_a_rung_is_not_stopped_by_the_scheduler() -> None:
    stop, pause = Stop(reason="too bad"), Pause(reason="waits")
    ended = {
        "stopped": [decided(stop), Finished(trial="t", reason="too bad", kind=FinishKind.PRUNED)],
        "stopped while it waits": [
            decided(pause),
            Paused(trial="t", reason=""),
            Finished(trial="t", reason="", kind=FinishKind.PRUNED),
        ],
        "trained all": [
            decided(Stop(reason="", early=False)),
            Finished(trial="t", reason="", kind=FinishKind.ALL_STEPS),
        ],
        "its own stopper": [decided(stop), Finished(trial="t", reason="step 3 of 3")],
        "asked": [
            decided(pause),
            StopAsked(trial="t", reason=""),
            Finished(trial="t", reason="", kind=FinishKind.STOPPED),
        ],
        "errored": [decided(pause), Paused(trial="t", reason=""), GaveUp(trial="t", cause=Cause.USER, reason="")],
        "continued": [decided(Continue()), Finished(trial="t", reason="", kind=FinishKind.STOPPED)],
    }
    assert {name for name, events in ended.items() if after(*events)} == {"stopped", "stopped while it waits"}


def decided(decision: Decision) -> Decided:
    return Decided(trial="t", report=StepReport(step=3, metrics={"loss": 1.0}), decision=decision)


def after(*events: Event) -> bool:
    """Return whether the trial counts as stopped after these."""
    state = reduce(
        lambda found, event: after_event(found, event, 1), (TrialAdded(trial="t", config={}), *events), EMPTY
    )
    return state.trial("t").past[-1].stopped


EMPTY = nothing_yet(first_generation("e"))


def test_what_optuna_proposes_beside_a_scheduler_is_the_same_in_one_run_and_in_three(tmp_path: Path) -> None:
    def configs(name: str, *counts: int) -> Sequence[object]:
        searched = PlannedSearch(LocalTarget(path=str(tmp_path / name)), slots=1, executor=UnreliableExecutor(12))
        options = {"space": SPACE, "num_samples": None, "stop": {"step": 12}, "scheduler": SCHEDULERS["asha stopping"]}
        for count in counts:
            sampler = optuna.samplers.TPESampler(n_startup_trials=3)
            state = searched.run(search=OptunaSearch(sampler, count), **options)
        return [each.config for each in state.trials.values()]

    assert configs("at once", 18) == configs("in three", 5, 12, 18)
