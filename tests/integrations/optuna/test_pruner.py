"""Pruners decide like in Optuna itself; a resumed search makes the decisions of an uninterrupted search."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import optuna
import pytest
from optuna import pruners

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import Schedule, Stop, TrialReport
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport
from prefect_tune.integrations.optuna import OptunaPruner
from tests.long_cases import long_after

ACCURACY = Objective(metrics=("accuracy",), modes=("max",))
LOSS = Objective(metrics=("loss", "ignored"), modes=("min", "max"))
SEED = 3
STEPS = 30
TRIALS = 30
PRUNERS: dict[str, Callable[[], pruners.BasePruner]] = {
    "median": lambda: pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3, interval_steps=2),
    "percentile": lambda: pruners.PercentilePruner(25.0, n_startup_trials=3),
    "halving": lambda: pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=3, min_early_stopping_rate=1),
    "halving, resources found out": pruners.SuccessiveHalvingPruner,
    "Hyperband": lambda: pruners.HyperbandPruner(min_resource=1, max_resource=27, reduction_factor=3),
    "Hyperband, resources found out": pruners.HyperbandPruner,
    "threshold": lambda: pruners.ThresholdPruner(lower=0.3, n_warmup_steps=4, interval_steps=5),
    "patient": lambda: pruners.PatientPruner(pruners.MedianPruner(), patience=3),
    "Wilcoxon": lambda: pruners.WilcoxonPruner(p_threshold=0.2),
    "none": pruners.NopPruner,
}


def compute_accuracy(trial: int, step: int) -> float:
    """Return a point of a learning curve with noise; trials differ in quality."""
    best = random.Random(f"{trial}").random()
    return best * (1 - 0.8**step) + random.Random(f"{trial} {step}").uniform(-0.05, 0.05)


@dataclass
class RecordedSchedule:
    """A schedule with a record of its calls, which a resume repeats on a new schedule."""

    pruner: pruners.BasePruner
    objective: Objective = ACCURACY
    events: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.schedule = self.resume()

    def resume(self) -> Schedule:
        schedule = OptunaPruner(self.pruner).begin(self.objective, SEED)
        for method, arguments in self.events:
            getattr(schedule, method)(*arguments)
        return schedule

    def call(self, method: str, *arguments: object) -> str:
        self.events.append((method, arguments))
        decision = getattr(self.schedule, method)(*arguments)
        return "" if decision is None else str(decision.type)

    def decide(self, trial: int, step: int) -> str:
        report = StepReport(step=step, metrics={"accuracy": compute_accuracy(trial, step)})
        return self.call("decide", TrialReport(f"{trial}", report))


def iter_stop_steps(recorded: RecordedSchedule, trial: int) -> Iterator[int]:
    """Train a trial; yield the step at which the schedule stops it, if any."""
    step = 0
    while (milestone := recorded.schedule.next_milestone(f"{trial}", step)) is not None and milestone <= STEPS:
        assert milestone > step
        step = milestone
        if recorded.decide(trial, step) == "stop":
            yield step
            return


def run_trials(recorded: RecordedSchedule) -> list[int]:
    lengths = []
    for trial in range(TRIALS):
        recorded.call("on_trial_added", f"{trial}", {})
        lengths.append(next(iter_stop_steps(recorded, trial), STEPS))
        recorded.call("on_trial_ended", f"{trial}")
    return lengths


def run_trials_in_optuna(pruner: pruners.BasePruner) -> list[int]:
    lengths = []

    def train(trial: optuna.Trial) -> float:
        for step in range(1, STEPS + 1):
            trial.report(compute_accuracy(trial.number, step), step)
            if trial.should_prune():
                lengths.append(step)
                raise optuna.TrialPruned
        lengths.append(STEPS)
        return compute_accuracy(trial.number, STEPS)

    study = optuna.create_study(direction="maximize", pruner=pruner, study_name=f"prefect-tune-{SEED}")
    study.optimize(train, n_trials=TRIALS)
    return lengths


pytestmark = pytest.mark.filterwarnings(
    "ignore::optuna.exceptions.ExperimentalWarning", "ignore:WilcoxonPruner finds steps"
)


@pytest.mark.parametrize("name", long_after(3, PRUNERS))
def test_trials_are_as_long_as_optuna_itself_makes_them(name: str) -> None:
    lengths = run_trials(RecordedSchedule(PRUNERS[name]()))
    assert lengths == run_trials_in_optuna(PRUNERS[name]())
    assert (min(lengths) < STEPS) == (name != "none")  # each prunes


@pytest.mark.long
@pytest.mark.parametrize("name", PRUNERS)
def test_a_resumed_schedule_decides_what_the_first_would_have(name: str) -> None:
    recorded, decisions = RecordedSchedule(PRUNERS[name]()), []
    for trial in range(TRIALS):
        recorded.call("on_trial_added", f"{trial}", {})
        if trial % 10 == 9:
            recorded.schedule = recorded.resume()
        decisions.append(next(iter_stop_steps(recorded, trial), STEPS))
        recorded.call("on_trial_ended", f"{trial}")
    assert decisions == run_trials(RecordedSchedule(PRUNERS[name]()))


def test_trials_side_by_side_are_compared_as_they_come() -> None:
    recorded = RecordedSchedule(pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2))
    for trial in ("good", "bad"):
        recorded.call("on_trial_added", trial, {})
    assert recorded.call("decide", TrialReport("good", StepReport(step=1, metrics={"accuracy": 0.9}))) == "continue"
    assert recorded.call("decide", TrialReport("bad", StepReport(step=1, metrics={"accuracy": 0.1}))) == "stop"


def test_a_step_that_is_trained_again_is_answered_the_same_and_not_counted_twice() -> None:
    recorded = RecordedSchedule(pruners.ThresholdPruner(upper=0.5))
    recorded.call("on_trial_added", "trial", {})

    def decide(step: int, value: float) -> str:
        return recorded.call("decide", TrialReport("trial", StepReport(step=step, metrics={"accuracy": value})))

    assert [decide(1, 0.1), decide(2, 0.2)] == ["continue", "continue"]
    assert [decide(1, 0.9), decide(2, 0.9)] == ["continue", "continue"]  # other numbers, after a crash
    assert [decide(3, 0.9), decide(3, 0.1)] == ["stop", "stop"]


def test_a_stopped_trial_that_is_to_go_on_goes_on() -> None:
    recorded = RecordedSchedule(pruners.ThresholdPruner(upper=0.5))
    recorded.call("on_trial_added", "trial", {})
    assert recorded.call("decide", TrialReport("trial", StepReport(step=1, metrics={"accuracy": 0.9}))) == "stop"
    recorded.call("on_trial_ended", "trial")
    recorded.call("on_trial_added", "trial", {})
    assert recorded.call("decide", TrialReport("trial", StepReport(step=2, metrics={"accuracy": 0.4}))) == "continue"
    recorded.call("on_trial_ended", "trial")


def test_the_reason_names_the_pruner_and_the_value_as_it_was_reported() -> None:
    schedule = OptunaPruner(pruners.ThresholdPruner(lower=0.5)).begin(ACCURACY, SEED)
    schedule.on_trial_added("trial", {})
    decision = schedule.decide(TrialReport("trial", StepReport(step=1, metrics={"accuracy": 0.25})))
    assert decision == Stop(reason=make_reason("pruner", name="ThresholdPruner", metric="accuracy", value=0.25))


def test_trials_are_asked_only_where_the_pruner_looks() -> None:
    def list_milestones(pruner: pruners.BasePruner) -> list[int]:
        schedule, steps = OptunaPruner(pruner).begin(LOSS, SEED), [0]
        schedule.on_trial_added("trial", {})
        while (step := schedule.next_milestone("trial", steps[-1])) is not None and step <= STEPS:
            steps.append(step)
        return steps[1:]

    assert list_milestones(PRUNERS["halving"]()) == [6, 18]
    assert list_milestones(PRUNERS["Hyperband"]()) == [1, 3, 9, 27]
    assert list_milestones(PRUNERS["threshold"]()) == [4, 9, 14, 19, 24, 29]
    assert list_milestones(PRUNERS["none"]()) == []
    for name in ("median", "patient", "Hyperband, resources found out", "halving, resources found out"):
        assert list_milestones(PRUNERS[name]()) == list(range(1, STEPS + 1))


def test_the_pruner_of_the_user_is_not_touched() -> None:
    pruner = pruners.HyperbandPruner()
    before = dict(vars(pruner))
    run_trials(RecordedSchedule(pruner))
    assert vars(pruner) == before


def test_a_trial_without_its_metric_is_the_users_to_mend() -> None:
    schedule = OptunaPruner(pruners.MedianPruner()).begin(LOSS, SEED)
    schedule.on_trial_added("trial", {})
    with pytest.raises(BadMetric, match="trial 'trial', step 1: expected a number for metric 'loss'"):
        schedule.decide(TrialReport("trial", StepReport(step=1, metrics={"ignored": 1.0})))


def test_a_trial_that_ends_without_a_report_is_no_measure_for_others() -> None:
    recorded = RecordedSchedule(pruners.MedianPruner(n_startup_trials=1))
    recorded.call("on_trial_added", "silent", {})
    recorded.call("on_trial_ended", "silent")
    recorded.call("on_trial_added", "0", {})
    assert recorded.decide(0, 1) == "continue"


def test_wilcoxon_says_that_it_misses_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_tune.integrations.optuna.find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match="WilcoxonPruner: it needs scipy: pip install scipy"):
        OptunaPruner(PRUNERS["Wilcoxon"]()).begin(LOSS, SEED)


@pytest.mark.parametrize(
    ("pruner", "message"), [("MedianPruner", "'MedianPruner'"), (pruners.MedianPruner, "the class MedianPruner")]
)
def test_what_is_no_pruner_is_refused_at_construction(pruner: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=rf"as in pt\.OptunaPruner\(optuna\.pruners.*found {message}"):
        OptunaPruner(pruner)
