"""Which trial is the best, by whatever scope."""

from __future__ import annotations

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.objective import Objective, objective_of
from prefect_tune.core.ranking import front, losses_in, needs_curve, scored, valid_scope

LOSS = Objective(metrics=("loss",), modes=("min",))
CURVE = [{"loss": 4.0}, {"loss": 1.0}, {"loss": 3.0}, {"loss": 2.0}]


@pytest.mark.parametrize(
    ("scope", "loss"),
    [("last", 2.0), ("best", 1.0), ("all", 1.0), ("avg", 2.5), ("last-2-avg", 2.5), ("last-3-avg", 2.0)],
)
def test_a_scope_says_by_which_reports_a_trial_is_compared(scope: str, loss: float) -> None:
    assert scored(CURVE, LOSS, scope) == (loss,)


def test_more_reports_than_there_are_is_all_of_them() -> None:
    assert scored(CURVE, LOSS, "last-9-avg") == scored(CURVE, LOSS, "avg")


@pytest.mark.parametrize("scope", ["first", "last-0-avg", "last--avg", "last-x-avg", "avg-5", "", "LAST"])
def test_a_scope_that_is_none_is_refused(scope: str) -> None:
    with pytest.raises(InvalidInput, match=r"scope .*: expected 'last'"):
        valid_scope(scope)


def test_only_the_last_report_is_known_without_reading_the_curve() -> None:
    assert [scope for scope in ("last", "best", "all", "avg", "last-3-avg") if not needs_curve(scope)] == ["last"]


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), "low", None])
def test_what_no_float_can_hold_is_nothing_to_compare(value: object) -> None:
    assert losses_in({"loss": value}, LOSS) is None


def test_large_is_good_where_the_mode_says_so() -> None:
    accuracy = Objective(metrics=("accuracy",), modes=("max",))
    assert scored([{"accuracy": 0.9}, {"accuracy": 0.7}], accuracy, "best") == (-0.9,)


@pytest.mark.parametrize("missing", [{}, {"loss": "text"}, {"loss": None}, {"loss": float("nan")}])
def test_a_report_without_the_metric_is_passed_over(missing: dict[str, object]) -> None:
    assert losses_in(missing, LOSS) is None
    assert scored([missing, {"loss": 2.0}, missing], LOSS, "avg") == (2.0,)
    assert scored([{"loss": 2.0}, missing], LOSS, "last") is None
    assert scored([missing], LOSS, "best") is None


def test_the_front_holds_who_is_beaten_by_nobody_in_everything() -> None:
    scores = {"a": (1.0, 9.0), "b": (2.0, 2.0), "c": (2.0, 3.0), "d": (9.0, 1.0), "same as b": (2.0, 2.0)}
    assert front(scores.items()) == ["a", "b", "same as b", "d"]


@pytest.mark.parametrize(
    ("metric", "mode"), [(["loss", "size"], ["min"]), ("loss", "least"), ([], "min"), (["loss"], ["min", "max"])]
)
def test_modes_that_do_not_fit_the_metrics_are_refused(metric: list[str] | str, mode: list[str] | str) -> None:
    with pytest.raises(InvalidInput, match="mode: expected 'min' or 'max'"):
        objective_of(metric, mode)  # type: ignore[arg-type]  # what is refused is the test


def test_one_mode_serves_all_metrics() -> None:
    both = objective_of(["loss", "size"], "max")
    assert both == Objective(metrics=("loss", "size"), modes=("max", "max"))
    assert objective_of(None, "min") is None
