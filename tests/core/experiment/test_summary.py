"""The best trial, for each scope, and the learning curves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.summary import (
    LearningCurves,
    Scope,
    compute_losses,
    find_pareto_front,
    format_best_label,
    rank_trials,
    score_reports,
    sort_trials,
    validate_scope,
)
from prefect_tune.core.experiment.trial_transitions import Trial, apply_report, apply_trial_event
from prefect_tune.core.journal_events import AttemptStarted, CheckpointCloned, CheckpointRef, Entry, Event, StepReported
from prefect_tune.core.search.objective import Objective, infer_mode, make_objective
from prefect_tune.core.values import StepReport

LOSS = Objective(metrics=("loss",), modes=("min",))
CURVE = [{"loss": 4.0}, {"loss": 1.0}, {"loss": 3.0}, {"loss": 2.0}]


@pytest.mark.parametrize(
    ("scope", "loss"), [("last", 2.0), ("all", 1.0), ("avg", 4.0), ("last-5-avg", 3.0), ("last-10-avg", 4.0)]
)
def test_a_scope_says_by_which_reports_a_trial_is_compared(scope: Scope, loss: float) -> None:
    assert score_reports([{"loss": 9.0}, {"loss": 5.0}, *CURVE], LOSS, scope) == (loss,)


@pytest.mark.parametrize("scope", ["first", "best", "last-2-avg", "avg-5", "", "LAST"])
def test_a_scope_that_is_none_is_refused(scope: Scope) -> None:
    with pytest.raises(InvalidInput, match=r"scope .*: expected one of 'last', 'all', 'avg', 'last-5-avg'"):
        validate_scope(scope)


def test_the_best_of_several_metrics_is_named_by_the_one_that_decides() -> None:
    several = Objective(metrics=("loss", "size"), modes=("min", "min"))
    assert (format_best_label(LOSS), format_best_label(several)) == ("best", "best loss")


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), "low", None])
def test_what_no_float_can_hold_is_nothing_to_compare(value: object) -> None:
    assert compute_losses({"loss": value}, LOSS) is None


def test_large_is_good_where_the_mode_says_so() -> None:
    accuracy = Objective(metrics=("accuracy",), modes=("max",))
    assert score_reports([{"accuracy": 0.9}, {"accuracy": 0.7}], accuracy, "all") == (-0.9,)


@pytest.mark.parametrize("missing", [{}, {"loss": "text"}, {"loss": None}, {"loss": float("nan")}])
def test_a_report_without_the_metric_is_passed_over(missing: dict[str, object]) -> None:
    assert compute_losses(missing, LOSS) is None
    assert score_reports([missing, {"loss": 2.0}, missing], LOSS, "avg") == (2.0,)
    assert score_reports([{"loss": 2.0}, missing], LOSS, "last") is None
    assert score_reports([missing], LOSS, "all") is None


def test_trials_that_can_be_compared_are_ranked_and_of_equals_the_first_proposed_is_the_better() -> None:
    metrics_by_trial = {"a": {"loss": 2.0}, "b": {}, "c": {"loss": 1.0}, "d": {"loss": "text"}, "e": {"loss": 1.0}}
    trials = [Trial(id=name, config={}, metrics=metrics) for name, metrics in metrics_by_trial.items()]
    assert [(trial.id, loss) for trial, loss in rank_trials(trials, LOSS)] == [("c", (1,)), ("e", (1,)), ("a", (2,))]
    assert [trial.id for trial in sort_trials(trials, LOSS)] == ["c", "e", "a", "b", "d"]
    assert rank_trials(trials, None) == []
    assert sort_trials(trials, None) == trials


def test_of_equals_a_clone_comes_after_the_trial_that_made_the_report_until_it_has_made_one_itself() -> None:
    saved, copy = (CheckpointRef(step=4, sequence=number, metrics={"loss": 1.0}) for number in (7, 9))
    source = Trial(id="b", config={}, metrics=saved.metrics, step=4, checkpoints=(saved,))
    clone = apply_trial_event(
        Trial(id="a", config={"lr": 1}),
        CheckpointCloned(trial="a", checkpoint=copy, source="b", config={"lr": 2}, reason="behind"),
    )
    started = apply_trial_event(clone, AttemptStarted(trial="a", attempt=1, from_step=4, from_sequence=9))
    for trial in (clone, started):
        assert [ranked.id for ranked, _ in rank_trials([trial, source], LOSS)] == ["b", "a"]
    own = apply_report(started, StepReport(step=5, metrics={"loss": 1.0}))
    assert [ranked.id for ranked, _ in rank_trials([own, source], LOSS)] == ["a", "b"]
    worse = source.model_copy(update={"metrics": {"loss": 2.0}, "step": 5})
    assert [ranked.id for ranked, _ in rank_trials([clone, worse], LOSS)] == ["a", "b"]


@pytest.mark.parametrize(("step", "loss"), [(1, 2.0), (2, 2.0), (3, 0.5)])
def test_a_trial_is_shown_with_a_report_only_if_that_is_newer(step: int, loss: float) -> None:
    trial = Trial(id="t", config={}, step=2, metrics={"loss": 2.0}, trained_seconds=20.0)
    report = StepReport(step=step, metrics={"loss": 0.5}, trained_seconds=10.0 * step)
    shown = apply_report(trial, report)
    assert (shown.step, shown.metrics, shown.trained_seconds) == (max(2, step), {"loss": loss}, 10.0 * max(2, step))
    assert apply_report(trial, None) is trial


def test_the_front_holds_who_is_beaten_by_nobody_in_everything() -> None:
    scores = {"a": (1.0, 9.0), "b": (2.0, 2.0), "c": (2.0, 3.0), "d": (9.0, 1.0), "same as b": (2.0, 2.0)}
    assert find_pareto_front(scores.items()) == ["a", "b", "same as b", "d"]


@pytest.mark.parametrize(
    ("metric", "mode"), [(["loss", "size"], ["min"]), ("loss", "least"), ([], "min"), (["loss"], ["min", "max"])]
)
def test_modes_that_do_not_fit_the_metrics_are_refused(metric: list[str] | str, mode: list[str] | str) -> None:
    with pytest.raises(InvalidInput, match="mode: expected 'min' or 'max'"):
        make_objective(metric, mode)  # type: ignore[arg-type]  # invalid on purpose


def test_one_mode_serves_all_metrics() -> None:
    assert make_objective(["loss", "size"], "max") == Objective(metrics=("loss", "size"), modes=("max", "max"))
    assert make_objective(None, "min") is None


# Learning curves.


def make_report(step: int, loss: float, trial: str = "t") -> StepReported:
    return StepReported(trial=trial, report=StepReport(step=step, metrics={"loss": loss}, trained_seconds=float(step)))


def make_entry(*events: Event) -> Entry:
    return Entry(number=1, term=1, write_id="w", at="now", previous="", events=events)


def losses_of(reports: Sequence[StepReport]) -> list[tuple[int, object]]:
    return [(report.step, report.metrics["loss"]) for report in reports]


RESTARTED = (
    *[make_report(step, 1.0) for step in (1, 2, 3)],
    make_report(1, 7.0, "other"),
    AttemptStarted(trial="other", attempt=1, from_step=0),
    AttemptStarted(trial="t", attempt=2, from_step=1, from_sequence=4),
    make_report(2, 2.0),
)
CLONED = (
    *[make_report(step, 1.0) for step in (1, 2, 3)],
    CheckpointCloned(
        trial="t",
        checkpoint=CheckpointRef(step=8, sequence=9, metrics={"loss": 0.1}, trained_seconds=8.0),
        source="other",
        reason="it is better",
    ),
    AttemptStarted(trial="t", attempt=2, from_step=8, from_sequence=9),
    make_report(9, 0.05),
)


@pytest.mark.parametrize(("events", "counted"), [(RESTARTED, [(1, 1.0), (2, 2.0)]), (CLONED, [(8, 0.1), (9, 0.05)])])
def test_a_curve_forgets_what_was_done_again_and_what_came_before_a_clone(
    events: tuple[Event, ...], counted: list[tuple[int, object]]
) -> None:
    assert losses_of(LearningCurves([make_entry(*events)]).get_curve("t")) == counted


def test_the_curves_of_all_trials_are_in_the_entries_of_the_experiment() -> None:
    curves = LearningCurves()
    curves.add_entry(make_entry(make_report(1, 1.0), make_report(2, 2.0)))
    curves.add_event(make_report(1, 7.0, "other"))
    assert (losses_of(curves.get_curve("t")), losses_of(curves.get_curve("other"))) == (
        [(1, 1.0), (2, 2.0)],
        [(1, 7.0)],
    )
    assert curves.get_curve("silent") == []
    assert curves.report_count == 3


# The mode that the name of a metric suggests.

NAMES = {
    "max": "accuracy acc val_acc test/accuracy eval_f1 mAP@50 map50 valAcc top1_acc AUC roc_auc f1-score F1Score r2 "
    "IoU episode_reward bleu recall@10 macro.precision score neg_mean_squared_error negLogLoss",
    "min": "loss val_loss train/loss error error_score err error_rate rmse valRMSE brier_score perplexity nll FID "
    "negative_log_likelihood accuracy_loss wer",
    None: "surf1 step lr tracc lossy accident mapping speed x metric seconds 1 é",
}


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for mode, names in NAMES.items() for name in names.split()])
def test_the_mode_that_a_name_suggests(name: str, mode: str | None) -> None:
    assert infer_mode(name) == mode
