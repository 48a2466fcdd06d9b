"""Small pure rules: retention, cadence, causes of failures, and the stoppers of trials and experiments."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, cast

import pytest
from pydantic import ValidationError

from prefect_tune.core.errors import BadStop, InvalidInput
from prefect_tune.core.experiment.failure_policy import (
    EndRun,
    FailTrial,
    FailureDecision,
    FailurePolicy,
    QuarantineCheckpoint,
    RetryTrial,
    decide_after_failure,
    end_reason_after_error,
)
from prefect_tune.core.experiment.retention import (
    Cadence,
    Retention,
    find_quarantined_to_retire,
    find_sequences_to_retire,
)
from prefect_tune.core.experiment.stoppers import (
    AnyOf,
    CompositeState,
    ExperimentPlateau,
    MaxFailures,
    MaxSteps,
    MaxTime,
    Never,
    Plateau,
    StopExperiment,
    Stopper,
    StopperState,
    StopProposing,
    TimeBudget,
    TrialBudget,
    as_stopper,
    extract_experiment_stoppers,
    extract_trial_stopper,
)
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, apply_trial_event, newest_checkpoint
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointCommitted,
    CheckpointQuarantined,
    CheckpointRef,
    QuarantinedCheckpoint,
)
from prefect_tune.core.reasons import AnyReason, Reason, find_root_error, get_reason_code, make_reason
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.usage_records import AttemptRecord, PhaseSeconds
from prefect_tune.core.values import StepReport

# ------------------------------------------------------------------------------------------- retention

LOSSES = [5.0, 3.0, 3.0, math.nan, 9.0, 4.0]
SAVES = [CheckpointRef(step=10 * n, sequence=n, metrics={"loss": loss}) for n, loss in enumerate(LOSSES, 1)]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Retention(), [1, 2, 3, 4, 5, 6]),
        (Retention(last=1), [6]),
        (Retention(last=3), [4, 5, 6]),
        (Retention(last=99), [1, 2, 3, 4, 5, 6]),
        (Retention(best=1, metric="loss"), [2, 6]),
        (Retention(best=2, metric="loss"), [2, 3, 6]),
        (Retention(best=1, metric="loss", mode="max"), [5, 6]),
        (Retention(best=99, metric="loss"), [1, 2, 3, 5, 6]),
        (Retention(best=1, metric="missing"), [6]),
        (Retention(every=20), [2, 4, 6]),
        (Retention(every=50, best=1, metric="loss", last=2), [2, 5, 6]),
    ],
)
def test_a_checkpoint_stays_when_one_rule_keeps_it(policy: Retention, kept: list[int]) -> None:
    assert [ref.sequence for ref in SAVES if ref.sequence not in find_sequences_to_retire(SAVES, policy)] == kept


@pytest.mark.parametrize(
    ("policy", "sequences", "retired"),
    [
        (Retention(), [2, 3], []),
        (Retention(last=2), [2, 3], [2, 3]),
        (Retention(last=2), [5], []),  # newer than a checkpoint that `last` keeps
        (Retention(last=5), [2], []),  # every live checkpoint stays
        (Retention(last=2, best=1, metric="loss"), [2, 3], [3]),
        (Retention(last=2, best=2, metric="loss"), [2, 3], []),
        (Retention(last=2, every=20), [2, 3], [3]),
    ],
)
def test_what_was_put_aside_is_retired_when_it_would_be_as_a_live_one(
    policy: Retention, sequences: list[int], retired: list[int]
) -> None:
    live = [ref for ref in SAVES if ref.sequence not in sequences]
    quarantined_refs = [ref for ref in SAVES if ref.sequence in sequences]
    quarantined = [QuarantinedCheckpoint(checkpoint=ref, since=9, reason="misread") for ref in quarantined_refs]
    assert [ref.sequence for ref in find_quarantined_to_retire(quarantined, live, policy)] == retired


def test_a_score_that_is_no_number_is_never_among_the_best() -> None:
    saves = [CheckpointRef(step=1, sequence=0, metrics={"loss": "low"}), *SAVES[:2]]
    assert 0 in find_sequences_to_retire(saves, Retention(best=5, metric="loss"))


@pytest.mark.parametrize("fields", [{"best": 3}, {"metric": "loss"}])
def test_the_best_are_best_by_something(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="require each other"):
        Retention.model_validate(fields)


# --------------------------------------------------------------------------------------------- cadence


@pytest.mark.parametrize(
    ("cadence", "steps", "seconds", "due"),
    [
        (Cadence(), 1, 59, False),
        (Cadence(), 1, 60, True),
        (Cadence(every_steps=5), 5, 0, True),
        (Cadence(every_steps=5), 4, 60, True),
        (Cadence(every_steps=5, every_seconds=None), 4, 999, False),
        (Cadence(every_seconds=None), 999, 999, False),
    ],
)
def test_it_is_time_to_save_at_whichever_comes_first(
    cadence: Cadence, steps: int, seconds: float, *, due: bool
) -> None:
    assert cadence.is_save_due(steps, timedelta(seconds=seconds)) is due


# -------------------------------------------------------------------------------------------- failures

BOOM = make_reason("raised", text="boom")


def failure(code: str, **arguments: object) -> FailTrial:
    return FailTrial(make_reason(code, **arguments, error=BOOM))


@pytest.mark.parametrize(
    ("cause", "counts", "policy", "expected"),
    [
        (Cause.PREEMPTED, {"machine_failures": 99}, FailurePolicy(), EndRun()),
        (Cause.MACHINE, {"machine_failures": 10}, FailurePolicy(), RetryTrial()),
        (Cause.MACHINE, {"machine_failures": 11}, FailurePolicy(), failure("max-machine-failures", failures=11)),
        (Cause.TRAINABLE, {"trainable_failures": 1}, FailurePolicy(), failure("max-failures", failures=1, limit=0)),
        (Cause.TRAINABLE, {"trainable_failures": 2}, FailurePolicy(max_failures=2), RetryTrial()),
        (
            Cause.TRAINABLE,
            {"trainable_failures": 3},
            FailurePolicy(max_failures=2),
            failure("max-failures", failures=3, limit=2),
        ),
        (Cause.IMPORT, {}, FailurePolicy(max_failures=9), failure("not-retried", cause="import")),
        (Cause.OUT_OF_MEMORY, {}, FailurePolicy(max_failures=9), failure("not-retried", cause="out-of-memory")),
        (Cause.BAD_METRIC, {}, FailurePolicy(max_failures=9), failure("not-retried", cause="bad-metric")),
        (Cause.BAD_STOP, {}, FailurePolicy(max_failures=9), failure("not-retried", cause="bad-stop")),
        (Cause.MACHINE, {"restored_sequence": 7, "consecutive_start_failures": 2}, FailurePolicy(), RetryTrial()),
        (
            Cause.MACHINE,
            {"restored_sequence": 7, "consecutive_start_failures": 3},
            FailurePolicy(),
            QuarantineCheckpoint(7, make_reason("died-at-start", attempts=3, error=BOOM)),
        ),
        (Cause.MACHINE, {"restored_sequence": None, "consecutive_start_failures": 3}, FailurePolicy(), RetryTrial()),
    ],
)
def test_a_failure_is_tried_again_while_its_budget_lasts(
    cause: Cause, counts: dict[str, object], policy: FailurePolicy, expected: FailureDecision
) -> None:
    decision = decide_after_failure(Trial(id="t", config={}, end_reason=BOOM).model_copy(update=counts), cause, policy)
    assert decision == expected
    assert not isinstance(decision, FailTrial) or find_root_error(decision.reason) == BOOM


def make_trial(trial: str, error: AnyReason, step: int = 0, **fields: object) -> Trial:
    defaults: dict[str, Any] = {
        "id": trial,
        "config": {},
        "phase": Phase.ERRORED,
        "attempt": 1,
        "end_reason": error,
        "step": step,
        "attempt_records": (
            AttemptRecord(attempt=1, began_at="2026-01-01T00:00:05Z", seconds=PhaseSeconds(training=1)),
        ),
    }
    return Trial(**{**defaults, **fields})


def running_trial(trial: str, started_at: str) -> Trial:
    return make_trial(trial, "", phase=Phase.RUNNING, attempt_records=(AttemptRecord(attempt=1, began_at=started_at),))


KEY_ERROR = make_reason("raised", type="KeyError", text="'x'", traceback="Trace")
ALIKE = [make_trial(str(n), make_reason("max-failures", failures=1, limit=0, error=KEY_ERROR)) for n in range(3)]


@pytest.mark.parametrize(
    ("trials", "is_over"),
    [
        (ALIKE, True),
        (
            [*ALIKE, running_trial("3", "2026-01-01T00:00:07Z"), make_trial("4", "", phase=Phase.PENDING, attempt=0)],
            True,
        ),
        ([*ALIKE, running_trial("3", "2026-01-01T00:00:04Z")], False),
        ([*ALIKE, running_trial("3", "2026-01-01T00:00:06Z")], False),
        (ALIKE[:2], False),
        ([*ALIKE, make_trial("3", make_reason("raised", type="ValueError", text="'x'"))], False),
        ([*ALIKE[:2], make_trial("3", KEY_ERROR, step=1)], True),
        ([*ALIKE, make_trial("3", KEY_ERROR, step=2)], False),
        ([*ALIKE, make_trial("3", "", phase=Phase.RUNNING, step=2)], False),
        ([*ALIKE, make_trial("3", "", phase=Phase.FINISHED)], False),
    ],
)
def test_a_search_ends_when_three_trials_erred_alike_and_none_has_trained_a_second_step(
    trials: list[Trial], *, is_over: bool
) -> None:
    error = make_reason("raised", type="KeyError", text="'x'")
    reason = make_reason("same-errors", count=3, error=error) if is_over else None
    assert end_reason_after_error(trials[0], trials, fail_fast=None) == reason
    assert end_reason_after_error(trials[0], trials, fail_fast=False) is None
    assert end_reason_after_error(trials[0], trials, fail_fast=True) == make_reason("fail-fast", trial="0", error=error)


# The checkpoints that an attempt's end may quarantine.

POLICY = FailurePolicy(max_failures=99)


def make_saved_trial(*steps: int) -> Trial:
    checkpoints = tuple(CheckpointRef(step=step, sequence=step) for step in steps)
    return Trial(id="t", config={}, attempt=1, step=steps[-1], checkpoints=checkpoints)


def end_attempt(trial: Trial, *, cause: Cause, at_start: bool) -> tuple[Trial, FailureDecision]:
    """Restore the newest checkpoint, end the attempt with `cause`, and apply the decision."""
    newest = newest_checkpoint(trial)
    assert newest is not None
    start = AttemptStarted(trial="t", attempt=trial.attempt + 1, from_step=newest.step, from_sequence=newest.sequence)
    trial = apply_trial_event(trial, start)
    trial = apply_trial_event(trial, AttemptEnded(trial="t", cause=cause, reason="boom", before_first_step=at_start))
    decision = decide_after_failure(trial, cause, POLICY)
    if isinstance(decision, QuarantineCheckpoint):
        event = CheckpointQuarantined(
            trial="t", sequence=decision.sequence, reason=decision.reason, crashes_trainable=True
        )
        trial = apply_trial_event(trial, event)
    return trial, decision


def end_attempts_until_failure(trial: Trial, *, cause: Cause, at_start: bool) -> tuple[Trial, FailTrial]:
    for _ in range(99):
        trial, decision = end_attempt(trial, cause=cause, at_start=at_start)
        if isinstance(decision, FailTrial):
            return trial, decision
    raise AssertionError("the policy never gave up")


def test_deaths_of_machines_spend_their_budget_and_put_no_checkpoint_aside() -> None:
    trial, failure = end_attempts_until_failure(make_saved_trial(10, 20, 30, 40), cause=Cause.MACHINE, at_start=False)
    assert get_reason_code(failure.reason) == "max-machine-failures"
    assert [ref.step for ref in trial.checkpoints] == [10, 20, 30, 40]
    assert trial.quarantined_sequences == ()


def test_one_checkpoint_at_most_is_put_aside_for_killing_the_trainable() -> None:
    trial, failure = end_attempts_until_failure(make_saved_trial(10, 20, 30, 40), cause=Cause.TRAINABLE, at_start=True)
    assert get_reason_code(failure.reason) == "died-at-each-start"
    assert [ref.step for ref in trial.checkpoints] == [10, 20, 30]


def test_a_commit_clears_the_checkpoint_that_was_put_aside_before_it() -> None:
    trial = make_saved_trial(10, 20).model_copy(update={"quarantined_since_commit": 1, "phase": Phase.RUNNING})
    trial = apply_trial_event(trial, CheckpointCommitted(trial="t", checkpoint=CheckpointRef(step=30, sequence=30)))
    trial = trial.model_copy(update={"phase": Phase.PENDING})
    decisions = []
    for _ in range(POLICY.quarantine_after):
        trial, decision = end_attempt(trial, cause=Cause.TRAINABLE, at_start=True)
        decisions.append(type(decision))
    assert decisions == [RetryTrial, RetryTrial, QuarantineCheckpoint]


def test_a_damaged_checkpoint_is_blamed_for_no_death() -> None:
    """The damage was found before the checkpoint was loaded."""
    trial = apply_trial_event(make_saved_trial(10, 20), CheckpointQuarantined(trial="t", sequence=20, reason="damaged"))
    assert (trial.quarantined_since_commit, trial.lost_checkpoint_count) == (0, 1)


def test_a_damaged_manifest_that_was_never_a_commit_is_no_lost_checkpoint() -> None:
    trial = Trial(id="t", config={}, attempt=1, step=3, phase=Phase.RUNNING)
    trial = apply_trial_event(trial, CheckpointQuarantined(trial="t", sequence=7, reason="torn manifest"))
    assert (trial.quarantined_sequences, trial.lost_checkpoint_count) == ((7,), 0)


# -------------------------------------------------------------------------------------------- stoppers


def make_reports(*losses: float, seconds: float = 1.0) -> list[StepReport]:
    return [
        StepReport(step=step, metrics={"loss": loss}, trained_seconds=step * seconds)
        for step, loss in enumerate(losses, 1)
    ]


def stop_at_step_three(metrics: object) -> bool:
    assert isinstance(metrics, dict)
    return bool(metrics["step"] == 3 and metrics["loss"] == 1)


def step_limit(step: int, limit: int) -> Reason:
    return make_reason("step-limit", step=step, limit=limit)


PLATEAU_REASON = make_reason("plateau", metric="loss", mean=1.0, spread=0.0)
FUNCTION_REASON = make_reason("stop-function", name="stop_at_step_three")


def loss_limit(loss: float) -> Reason:
    return make_reason("metric-limit", metric="loss", value=loss, limit=0.5)


@pytest.mark.parametrize(
    ("stopper", "reported", "reason"),
    [
        (Never(), make_reports(1), None),
        (MaxSteps(3), make_reports(1, 1), None),
        (MaxSteps(3), make_reports(1, 1, 1), step_limit(3, 3)),
        (MaxSteps(2), make_reports(1, 1, 1), step_limit(3, 2)),
        (MaxTime(timedelta(seconds=30)), make_reports(1, 1, seconds=14), None),
        (
            MaxTime(timedelta(seconds=30)),
            make_reports(1, 1, seconds=15),
            make_reason("time-limit", seconds=30.0, limit=30.0),
        ),
        (Plateau("loss"), make_reports(1, 1, 1), None),
        (Plateau("loss"), make_reports(9, 1, 1, 1, 1), PLATEAU_REASON),
        (Plateau("loss"), make_reports(1, 1, 1, 2), None),
        (Plateau("loss", grace=6), make_reports(1, 1, 1, 1, 1), None),
        (Plateau("loss", reports=2, grace=0), make_reports(1, 1), PLATEAU_REASON),
        (MaxSteps(9) | Plateau("loss"), make_reports(1, 1, 1, 1), PLATEAU_REASON),
        (as_stopper(None), make_reports(1), None),
        (as_stopper(MaxSteps(1)), make_reports(1), step_limit(1, 1)),
        (as_stopper({"step": 2}), make_reports(1), None),
        (as_stopper({"step": 2}), make_reports(1, 1), step_limit(2, 2)),
        (as_stopper({"loss": 0.5, "step": 9}), make_reports(0.5), loss_limit(0.5)),
        (as_stopper({"loss": 0.5}), make_reports(0.49), None),
        (as_stopper({"loss": 0.5}), make_reports(0.51), loss_limit(0.51)),
        (as_stopper(stop_at_step_three), make_reports(1, 1), None),
        (as_stopper(stop_at_step_three), make_reports(1, 1, 1), FUNCTION_REASON),
        (as_stopper([{"step": 3}, MaxSteps(2)]), make_reports(1, 1), step_limit(2, 2)),
    ],
)
def test_a_trial_stops_when_it_has_had_enough(
    stopper: Stopper, reported: list[StepReport], reason: Reason | None
) -> None:
    assert stopper.stop_reason(reported) == reason


def test_only_who_needs_the_past_looks_back() -> None:
    assert not AnyOf((MaxSteps(1), MaxTime(timedelta(1)), Never(), as_stopper({"step": 1}))).needs_history
    assert (MaxSteps(1) | Plateau("loss")).needs_history


@pytest.mark.parametrize(
    "stop",
    [
        lambda: MaxSteps(0),
        lambda: MaxTime(timedelta(0)),
        lambda: MaxTime(cast("timedelta", "1h")),
        lambda: MaxTime(cast("timedelta", True)),
        lambda: MaxTime(cast("timedelta", math.nan)),
        lambda: MaxTime(cast("timedelta", math.inf)),
        lambda: TimeBudget(cast("timedelta", -1)),
        lambda: Plateau("loss", std=-1),
        lambda: Plateau("loss", reports=1),
        lambda: Plateau("loss", grace=-1),
        lambda: MaxFailures(0),
        lambda: TrialBudget(0),
        lambda: ExperimentPlateau(top=1),
        lambda: ExperimentPlateau(std=-1),
        lambda: ExperimentPlateau(patience=-1),
        lambda: as_stopper({"loss": math.nan}),
        lambda: as_stopper({"loss": True}),
        lambda: as_stopper({"loss": "low"}),
        lambda: as_stopper("step 5"),
        lambda: as_stopper(5),
        lambda: as_stopper({"accuracy": 0.9}).stop_reason(make_reports(1)),
        lambda: Plateau("accuracy").stop_reason(make_reports(1)),
    ],
)
def test_a_stopper_that_could_never_be_right_is_refused(stop: object) -> None:
    assert callable(stop)
    with pytest.raises(InvalidInput):
        stop()


def test_a_number_is_a_time_in_seconds_and_what_is_none_is_told_so() -> None:
    assert MaxTime(cast("timedelta", 90)) == MaxTime(timedelta(minutes=1.5))
    assert TimeBudget(cast("timedelta", 0.5)) == TimeBudget(timedelta(seconds=0.5))
    with pytest.raises(InvalidInput, match=r"MaxTime: expected a positive timedelta or number of seconds.*found '1h'"):
        MaxTime(cast("timedelta", "1h"))


@pytest.mark.parametrize(
    ("stopper", "message"),
    [
        (
            as_stopper({"steps": 3}),
            r"expected metric 'steps' in each report, found only \['loss'\]; did you mean 'step'\?",
        ),
        (as_stopper([{"step": 99, "los": 3}]), r"found only \['loss'\]; did you mean 'loss'\?"),
        (Plateau("lost"), r"found only \['loss'\]; did you mean 'loss'\?"),
        (as_stopper({"accuracy": 3}), r"found only \['loss'\]$"),
    ],
)
def test_a_stop_criterion_whose_metric_is_not_reported_names_the_one_that_was_meant(
    stopper: Stopper, message: str
) -> None:
    with pytest.raises(BadStop, match=message):
        stopper.stop_reason(make_reports(1, 1, 1, 1))


def test_a_limit_by_the_name_that_ray_gives_a_step_says_what_it_is_called_here() -> None:
    with pytest.raises(InvalidInput, match="Ray Tune's training_iteration is 'step' here"):
        as_stopper({"training_iteration": 3}).stop_reason(make_reports(1))


# ------------------------------------------------------------------------------------------- stoppers of an experiment

LOSS = Objective(metrics=("loss",), modes=("min",))


def make_report(loss: float) -> StepReport:
    return StepReport(step=1, metrics={"loss": loss, "score": -loss})


def finish_trials(state: StopperState, *losses: float, start: int = 0) -> None:
    for number, loss in enumerate(losses, start=start):
        state.on_trial_added(str(number))
        state.on_trial_ended(str(number), make_report(loss), failed=False)


def test_max_failures_counts_trials_that_are_errored_now() -> None:
    state = MaxFailures(2).begin(None)
    for trial, failed in (("a", True), ("b", False), ("a", True)):
        state.on_trial_ended(trial, None, failed=failed)
    assert state.verdict() is None
    state.on_trial_ended("c", None, failed=True)
    verdict = state.verdict()
    assert verdict == StopExperiment(make_reason("failed-trials", count=2, limit=2))
    assert str(verdict.reason) == "2 trials have errored; the limit is MaxFailures(2)"
    state.on_trial_added("a")  # the trial is retried
    assert state.verdict() is None


def test_a_trial_budget_ends_no_trial_that_has_begun() -> None:
    state = TrialBudget(2).begin(None)
    for trial in ("a", "a"):
        state.on_trial_added(trial)
    assert state.verdict() is None
    state.on_trial_added("b")
    verdict = state.verdict()
    assert verdict == StopProposing(make_reason("trial-budget", limit=2))
    assert str(verdict.reason) == "the trial budget of 2 is spent"


def test_a_time_budget_counts_what_counts_once() -> None:
    state = TimeBudget(timedelta(seconds=10)).begin(None)
    for trial, seconds in (("a", 4.0), ("a", 5.0), ("b", 4.9), ("a", 3.0), ("a", 5.0)):
        state.on_training_time(trial, seconds)
    assert state.verdict() is None
    state.on_training_time("b", 5.0)
    verdict = state.verdict()
    assert verdict == StopExperiment(make_reason("search-time-limit", seconds=10.0, limit=10.0))
    assert str(verdict.reason) == "its trials have trained for 10 s, the limit is 10 s"


def test_a_plateau_is_when_the_best_trials_are_all_as_good_as_each_other() -> None:
    state = ExperimentPlateau(top=3, std=0.01).begin(LOSS)
    finish_trials(state, 0.5, 0.2, 0.9)
    assert state.verdict() is None
    finish_trials(state, 0.201, 0.8, start=3)
    assert state.verdict() is None
    finish_trials(state, 0.202, start=5)
    verdict = state.verdict()
    assert isinstance(verdict, StopExperiment)
    assert get_reason_code(verdict.reason) == "search-plateau"
    assert str(verdict.reason) == "loss of the best 3 trials has settled: ± 0.000816497"


def test_a_plateau_with_patience_waits_for_more_trials_that_do_not_change_it() -> None:
    state = ExperimentPlateau(top=2, std=0.01, patience=2).begin(LOSS)
    finish_trials(state, 0.2, 0.2, 0.9)
    assert state.verdict() is None
    finish_trials(state, 0.1, start=3)  # an improvement resets the count
    finish_trials(state, 0.1, 0.7, start=4)
    assert state.verdict() is None
    finish_trials(state, 0.8, start=6)
    assert isinstance(state.verdict(), StopExperiment)


def test_a_plateau_passes_over_what_failed_or_reported_something_else_and_what_goes_on() -> None:
    state = ExperimentPlateau(top=2, std=0.01).begin(LOSS)
    finish_trials(state, 0.2)
    state.on_trial_ended("failed", make_report(0.2), failed=True)
    state.on_trial_ended("silent", StepReport(step=1, metrics={"other": 1.0}), failed=False)
    state.on_trial_ended("nothing", None, failed=False)
    assert state.verdict() is None
    state.on_trial_added("0")  # trial 0 was extended
    state.on_trial_ended("0", make_report(0.2), failed=False)
    assert state.verdict() is None


def test_a_plateau_has_a_metric_of_its_own_or_that_of_the_search() -> None:
    own = ExperimentPlateau(metric="score", mode="max", top=2, std=0.01).begin(None)
    finish_trials(own, 0.2, 5.0, 0.2)
    assert isinstance(own.verdict(), StopExperiment)
    with pytest.raises(InvalidInput, match="expected a metric"):
        ExperimentPlateau().begin(None)


def test_stoppers_of_trials_and_of_the_experiment_are_combined_and_taken_apart() -> None:
    steps, time = MaxSteps(3), MaxTime(timedelta(seconds=1))
    combined = steps | MaxFailures(1) | time | TrialBudget(9)
    assert extract_trial_stopper(combined) == AnyOf((steps, time))
    assert list(extract_experiment_stoppers(combined)) == [MaxFailures(1), TrialBudget(9)]
    assert (extract_trial_stopper(TrialBudget(9) | steps), extract_trial_stopper(TrialBudget(9))) == (steps, Never())
    assert (combined.stop_reason([make_report(1)]), MaxFailures(1).stop_reason([make_report(1)])) == (None, None)
    assert not MaxFailures(1).needs_history


def test_of_several_an_end_comes_before_the_end_of_new_trials() -> None:
    state = CompositeState(
        [stopper.begin(None) for stopper in (TrialBudget(1), MaxFailures(1), TimeBudget(timedelta(days=1)))]
    )
    assert state.verdict() is None
    state.on_trial_added("a")
    assert isinstance(state.verdict(), StopProposing)
    state.on_training_time("a", 1.0)
    state.on_trial_ended("a", None, failed=True)
    assert state.verdict() == StopExperiment(make_reason("failed-trials", count=1, limit=1))
    assert CompositeState([]).verdict() is None
