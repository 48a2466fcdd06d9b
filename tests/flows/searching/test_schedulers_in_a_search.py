"""The reaction of a search to its scheduler's decisions and errors; without a server, and without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import optuna
import pytest

from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.experiment.experiment import Experiment, apply_event, make_empty_experiment
from prefect_tune.core.experiment.trial_transitions import Status, newest_checkpoint
from prefect_tune.core.journal_events import (
    Cause,
    CheckpointCommitted,
    CheckpointRef,
    DecisionMade,
    Event,
    FinishKind,
    StepReported,
    StopRequested,
    TrialAdded,
    TrialErrored,
    TrialFinished,
    TrialPaused,
)
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Continue, Decision, Exploit, Pause, Scheduler, Stop
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.schedulers.median_stopping import MedianStopping
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.base import Search, SearchState, Space, Suggestion
from prefect_tune.core.search.domains import uniform
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.core.values import StepReport
from prefect_tune.integrations.optuna import OptunaPruner, OptunaSearch
from prefect_tune.journal_access import write_entry_directly
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.planned_search import PlannedSearch, UnreliableExecutor, make_remote_experiment

SCHEDULERS = {
    "asha stopping": ASHA(max_t=9, variant="stopping"),
    "asha promotion": ASHA(max_t=9, variant="promotion"),
    "hyperband": Hyperband(max_t=9),
    "median": MedianStopping(min_time_slice=2),
    "pbt": PBT(perturbation_interval=2, hyperparam_mutations={"x": [1.0, 2.0]}),
    "pruner": OptunaPruner(optuna.pruners.MedianPruner()),
}
SPACE = {"x": uniform(0, 1)}
SAVED = CheckpointRef(step=3, sequence=1, metrics={"loss": 1.0})


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_metric_that_nobody_reports_is_each_trials_error_and_the_search_goes_on(
    scheduler: Scheduler, local_target: LocalTarget
) -> None:
    options = {"space": SPACE, "num_samples": 3, "metric": "lsos", "scheduler": scheduler}
    search = PlannedSearch(local_target, slots=2)
    state = search.run(**options)
    assert phases_of(state) == ["errored"] * 3
    assert all("'lsos'" in trial.reason for trial in state.trials.values())
    assert phases_of(search.run(**options)) == ["errored"] * 3


def phases_of(state: Experiment) -> Sequence[str]:
    return [str(trial.phase) for trial in state.trials.values()]


@pytest.mark.parametrize("scheduler", [FIFO(), *SCHEDULERS.values()], ids=["fifo", *SCHEDULERS])
def test_a_trial_that_paused_without_a_decision_goes_on(scheduler: Scheduler, local_target: LocalTarget) -> None:
    make_remote_experiment(
        local_target,
        StepReported(trial="00000", report=StepReport(step=1, metrics={"accuracy": 1.0})),
        TrialPaused(trial="00000", reason="expected a number for metric 'loss'"),
    )
    state = PlannedSearch(local_target, slots=1).run(space=SPACE, num_samples=2, scheduler=scheduler)
    assert set(phases_of(state)) == {"finished"}


PAUSING = {name: scheduler for name, scheduler in SCHEDULERS.items() if name not in ("asha stopping", "pruner")}
OTHERS = {**SCHEDULERS, "fifo": FIFO(), "smaller": Hyperband(max_t=1), "larger": Hyperband(max_t=27)}
CHANGES = [(one, other) for one in PAUSING for other in OTHERS if one != other]


@pytest.mark.long
@pytest.mark.parametrize("min_starts", [7, *(pytest.param(count, marks=pytest.mark.deep) for count in (2, 5, 9))])
@pytest.mark.parametrize(("one", "other"), CHANGES)
def test_whatever_paused_goes_on_where_another_scheduler_decides_from_now_on(
    one: str, other: str, min_starts: int, local_target: LocalTarget
) -> None:
    executor = UnreliableExecutor()
    search = PlannedSearch(local_target, slots=1, executor=executor)
    before = search.run(
        lambda: executor.start_count >= min_starts and not len(executor), space=SPACE, scheduler=PAUSING[one]
    )
    assert "paused" in phases_of(before)
    after = search.run(space=SPACE, scheduler=OTHERS[other])
    assert phases_of(after) == ["finished"] * 9
    assert search.run(space=SPACE, scheduler=OTHERS[other]).trials == after.trials


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_pause_that_was_decided_and_not_done_does_not_outlast_its_scheduler(
    is_saved: bool, local_target: LocalTarget
) -> None:
    reported = StepReported(trial="00000", report=StepReport(step=3, metrics={"loss": 1.0}))
    committed = [CheckpointCommitted(trial="00000", checkpoint=SAVED)] if is_saved else []
    pause = DecisionMade(trial="00000", report=reported.report, decision=Pause(reason="waits for others"))
    write_entry_directly(local_target, make_remote_experiment(local_target, reported, *committed), [pause])
    state = PlannedSearch(local_target, slots=1).run(space=SPACE, num_samples=2)
    assert [(str(trial.status), trial.step) for trial in state.trials.values()] == [("completed", 9)] * 2


def test_a_trial_whose_end_nobody_had_heard_goes_on_where_the_budget_is_larger_now(local_target: LocalTarget) -> None:
    experiment = make_remote_experiment(
        local_target,
        StepReported(trial="00000", report=StepReport(step=3, metrics={"loss": 1.0})),
        CheckpointCommitted(trial="00000", checkpoint=SAVED),
        TrialFinished(trial="00000", reason="step 3 of 3"),
    )
    assert experiment.trial("00000").status is Status.PENDING
    executor = UnreliableExecutor()
    for _ in range(2):
        state = PlannedSearch(local_target, slots=1, executor=executor).run(
            space=SPACE, num_samples=1, stays_finished=lambda trial: trial.step >= 9
        )
        assert (state.trial("00000").status, state.trial("00000").step) == (Status.COMPLETED, 9)
        assert (state.trial("00000").attempt, executor.start_count) == (2, 1)


class _ExploitRecorder(UnreliableExecutor):
    """Keeps the requests that follow an exploit, each with the milestone."""

    def start_attempt(self, spec: TrialSpec, request: AttemptRequest) -> None:
        newest = newest_checkpoint(request.trial)
        if newest is not None and newest.origin is not None:
            self.exploits.append((spec.trial.trial, newest.origin.trial, request.milestone))
        super().start_attempt(spec, request)

    exploits: list[tuple[str, str, int | None]]


def test_after_an_exploit_a_trial_is_compared_an_interval_after_its_sources_last_comparison(
    local_target: LocalTarget,
) -> None:
    """With one slot the source is behind: the trial does not wait until its own old step is passed again."""
    executor = _ExploitRecorder()
    executor.exploits = []
    state = PlannedSearch(local_target, slots=1, executor=executor).run(
        space=SPACE, num_samples=2, scheduler=SCHEDULERS["pbt"]
    )
    events = [event for trial in state.trials.values() for event in trial.policy_events if event.report is not None]
    compared_steps: dict[str, int] = {}
    expected = []
    for event in sorted(events, key=lambda event: event.order):
        trial = next(name for name, other in state.trials.items() if event in other.policy_events)
        if event.kind == "decided" and event.report is not None:
            exploit = event.decision if isinstance(event.decision, Exploit) else None
            compared_steps[trial] = compared_steps[exploit.source] if exploit else event.report.step
            expected += [(trial, exploit.source, compared_steps[trial] + 2)] if exploit else []
    assert executor.exploits == expected
    assert any(milestone == 4 for *_, milestone in expected)


# Events that a search algorithm receives about trials stopped by the scheduler, and their effect; without a server.


STOPPING = {
    "asha stopping": ASHA(max_t=9, variant="stopping"),
    "asha promotion": ASHA(max_t=9, variant="promotion"),
    "hyperband": Hyperband(max_t=9),
}


@dataclass(frozen=True)
class RecordingSearch(Search):
    """Random search that records the events that it receives."""

    events: list[tuple[str, int]] = field(default_factory=list)

    def begin(self, space: Space, objective: Objective | None, seed: int) -> SearchState:
        return _RecordingState(RandomSearch(9).begin(space, objective, seed), self.events)


class _RecordingState(SearchState):
    def __init__(self, proposals: SearchState, events: list[tuple[str, int]]) -> None:
        self._proposals = proposals
        self._events = events

    def suggest(self, number: int) -> Suggestion:
        return self._proposals.suggest(number)

    def restore_trial(self, number: int, config: Mapping[str, object]) -> None:
        self._proposals.restore_trial(number, config)

    def on_trial_stopped(self, number: int) -> None:
        self._events.append(("stopped", number))

    def on_trial_ended(self, number: int, report: StepReport | None, *, failed: bool) -> None:
        assert report is not None
        assert not failed
        self._events.append((f"ended at {report.step}", number))


@pytest.mark.parametrize("name", ["asha stopping", "asha promotion", "hyperband"])
def test_the_search_hears_of_whom_the_scheduler_stops_before_his_time_now_and_after_a_resume(
    name: str, local_target: LocalTarget
) -> None:
    planned_search = PlannedSearch(local_target, slots=1, executor=UnreliableExecutor(12))
    options = {"space": SPACE, "num_samples": None, "stop": {"step": 12}, "scheduler": STOPPING[name]}
    first, again = RecordingSearch(), RecordingSearch()
    state = planned_search.run(search=first, **options)
    steps = {number: trial.step for number, trial in enumerate(state.trials.values())}
    assert {number for kind, number in first.events if kind == "stopped"} == {
        number for number, step in steps.items() if step < 9
    }
    assert 0 < sum(step == 9 for step in steps.values()) < 9
    before = [first.events[index - 1] for index, (kind, _) in enumerate(first.events) if kind.startswith("ended")]
    assert [number for kind, number in before if kind == "stopped"] == [
        number for kind, number in first.events if kind == "stopped"
    ]
    assert planned_search.run(search=again, **options).trials == state.trials
    assert again.events == first.events


def test_who_is_asked_to_stop_or_ends_by_himself_at_a_rung_is_not_stopped_by_the_scheduler() -> None:
    stop, pause = Stop(reason="too bad"), Pause(reason="waits")
    ended = {
        "stopped": [make_decision(stop), TrialFinished(trial="t", reason="too bad", kind=FinishKind.PRUNED)],
        "stopped while it waits": [
            make_decision(pause),
            TrialPaused(trial="t", reason=""),
            TrialFinished(trial="t", reason="", kind=FinishKind.PRUNED),
        ],
        "trained all": [
            make_decision(Stop(reason="", early=False)),
            TrialFinished(trial="t", reason="", kind=FinishKind.ALL_STEPS),
        ],
        "its own stopper": [make_decision(stop), TrialFinished(trial="t", reason="step 3 of 3")],
        "asked": [
            make_decision(pause),
            StopRequested(trial="t", reason=""),
            TrialFinished(trial="t", reason="", kind=FinishKind.STOPPED),
        ],
        "errored": [
            make_decision(pause),
            TrialPaused(trial="t", reason=""),
            TrialErrored(trial="t", cause=Cause.TRAINABLE, reason=""),
        ],
        "continued": [make_decision(Continue()), TrialFinished(trial="t", reason="", kind=FinishKind.STOPPED)],
    }
    assert {name for name, events in ended.items() if is_stopped(*events)} == {"stopped", "stopped while it waits"}


def make_decision(decision: Decision) -> DecisionMade:
    return DecisionMade(trial="t", report=StepReport(step=3, metrics={"loss": 1.0}), decision=decision)


def is_stopped(*events: Event) -> bool:
    """Return whether the trial counts as stopped after these."""
    state = reduce(
        lambda state, event: apply_event(state, event, 1), (TrialAdded(trial="t", config={}), *events), EMPTY
    )
    return state.trial("t").policy_events[-1].stopped


EMPTY = make_empty_experiment(first_generation("e"))


def test_what_optuna_proposes_beside_a_scheduler_is_the_same_in_one_run_and_in_three(tmp_path: Path) -> None:
    def propose_configs(name: str, *counts: int) -> Sequence[object]:
        search = PlannedSearch(LocalTarget(path=str(tmp_path / name)), slots=1, executor=UnreliableExecutor(12))
        options = {"space": SPACE, "num_samples": None, "stop": {"step": 12}, "scheduler": STOPPING["asha stopping"]}
        for count in counts:
            sampler = optuna.samplers.TPESampler(n_startup_trials=3)
            state = search.run(search=OptunaSearch(sampler, count), **options)
        return [trial.config for trial in state.trials.values()]

    assert propose_configs("at once", 18) == propose_configs("in three", 5, 12, 18)
