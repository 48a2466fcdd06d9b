"""Text and numbers from users: values that cannot be read back are refused or escaped before any write."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.core.checkpoints.manifest import normalize_metadata
from prefect_tune.core.display_text import did_you_mean, did_you_mean_or_list, make_storable
from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.experiment.stoppers import MaxTime, as_stopper
from prefect_tune.core.journal_events import AttemptEnded, Cause, TrialFinished
from prefect_tune.core.messages.process_messages import StepDone, TrainingEnded, from_trial_adapter
from prefect_tune.core.metrics import average_metrics, is_finite, is_number, short_repr, to_plain_metrics
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.resources import parse_resources
from prefect_tune.core.search.domains import grid_search, randint, uniform
from prefect_tune.core.search.objective import make_objective
from prefect_tune.core.search.space import validate_space
from prefect_tune.core.search_view import select_numeric_metrics
from prefect_tune.core.values import StepReport, canonical_json
from prefect_tune.runtime.trial_errors import failure_message

HALF = "\udcff"  # half a character, as in a file name that is not UTF-8
HUGE = 10**400  # too large for a float
ENORMOUS = 10**5000  # Python refuses to print it


def nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"x": value}
    return value


LOOP: dict[str, Any] = {}
LOOP["itself"] = LOOP


# --------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("number", [HUGE, -HUGE, ENORMOUS, Fraction(HUGE), float("nan"), float("inf")], ids=short_repr)
def test_what_no_float_holds_is_not_finite_and_can_be_shown(number: Any) -> None:
    assert not is_finite(number)
    assert not is_number(number)
    assert len(short_repr(number)) < 120


@pytest.mark.parametrize("number", [0, -1.5, 10**308, 2**63, Fraction(1, 3), sys.float_info.max])
def test_what_a_float_holds_is_finite(number: Any) -> None:
    assert is_number(number)


@pytest.mark.parametrize("number", [HUGE, -HUGE, ENORMOUS], ids=short_repr)
@pytest.mark.parametrize(
    "use",
    [
        lambda number: make_objective("loss", "min").loss({"loss": number}, "here"),  # type: ignore[union-attr]  # an objective is given
        lambda number: uniform(0, number),
        lambda number: randint(0, number),
        lambda number: grid_search([number]),
        lambda number: validate_space({"x": number}),
        lambda number: parse_resources({"cpu": number}, "here"),
        lambda number: as_stopper({"loss": number}),
        MaxTime,
    ],
    ids=[*("an objective", "a range", "whole numbers", "a grid", "a space"), *("resources", "a limit", "a time")],
)
def test_a_number_that_no_float_holds_is_one_clear_error(use: Callable[[int], object], number: int) -> None:
    with pytest.raises((InvalidInput, BadMetric)) as error:
        use(number)
    assert "expected" in str(error.value)
    assert len(str(error.value)) < 500


def test_a_number_that_no_float_holds_is_not_drawn_and_not_ranked() -> None:
    assert select_numeric_metrics({"a": HUGE, "b": 1, "c": True}) == {"b": 1.0}


# ------------------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize("value", [HALF, [f"a{HALF}"], {HALF: 1}, nest(300), float("nan"), ENORMOUS], ids=short_repr)
def test_what_could_not_be_read_back_is_never_written(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        canonical_json({"value": value})


@pytest.mark.parametrize("value", ["\U0001f600", "\\udcff", "\0", "é", nest(150), HUGE], ids=short_repr)
def test_what_can_be_read_back_is_written(value: Any) -> None:
    report = StepReport.model_validate_json(b'{"step":1,"metrics":%b}' % canonical_json({"value": value}))
    assert report.metrics == {"value": value}


@pytest.mark.parametrize("value", [HALF, [HALF], {HALF: 1}, nest(300), LOOP, ENORMOUS], ids=type)
def test_a_space_and_metadata_that_could_not_be_read_back_are_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="JSON") as error:
        validate_space({"x": value})
    str(error.value).encode()
    with pytest.raises(InvalidInput, match="JSON"):
        normalize_metadata({"x": value})


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("plain é \U0001f600", "plain é \U0001f600"),
        (f"a{HALF}b", "a\\udcffb"),
        ("a\0b", "a\\x00b"),
        ("\ud83d\ude00", "\\ud83d\\ude00"),  # each half of a surrogate pair separately
    ],
)
def test_text_of_any_origin_becomes_readable(text: str, readable: str) -> None:
    assert make_storable(text) == make_storable(make_storable(text)) == readable


@pytest.mark.parametrize("text", ["x" * 10**6, HALF * 10**6, "\0" * 99_999], ids=["long", "halves", "NULs"])
def test_of_an_enormous_text_the_ends_are_kept(text: str) -> None:
    kept = make_storable(f"begin {text} end")
    assert len(kept) <= 100_000
    assert kept.startswith("begin ")
    assert kept.endswith(" end")
    assert "characters left out" in kept
    assert make_storable(kept) == kept


@pytest.mark.parametrize("text", [HALF, "\0", "x" * 10**6], ids=["half", "NUL", "long"])
def test_an_events_and_a_messages_text_can_be_read_back(text: str) -> None:
    for reason in (f"ValueError: {text}", make_reason("save-failed", error=text)):
        event = AttemptEnded(trial="t", cause=Cause.TRAINABLE, reason=reason)
        assert AttemptEnded.model_validate_json(canonical_json(event.model_dump(mode="json"))) == event
    for message in (
        failure_message(ValueError(text), "t"),
        TrainingEnded(outcome=TrialFinished(trial="t", reason=text)),
    ):
        assert from_trial_adapter.validate_json(message.model_dump_json()) == message


@pytest.mark.parametrize("path", ["/tmp/plain", "/tmp/é", f"/tmp/{HALF}"])
def test_a_path_goes_through_a_message_whatever_its_bytes(path: str) -> None:
    message = StepDone(report=StepReport(step=1, metrics={}), checkpoint=str(Path(path)))
    assert from_trial_adapter.validate_json(message.model_dump_json()) == message


KNOWN = ("cpu", "gpu", "OptunaSearch")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("gpus", "gpu"), ("num_gpus", "gpu"), ("CPU", "cpu"), ("optuna", "OptunaSearch"), ("OPTUNASERCH", "OptunaSearch")],
)
def test_the_nearest_name_is_meant_in_any_case(name: str, meant: str) -> None:
    assert did_you_mean(name, KNOWN) == f"; did you mean {meant!r}?"
    assert did_you_mean_or_list(name, iter(KNOWN)) == f"did you mean {meant!r}?"


@pytest.mark.parametrize("name", ["memory", "", "gpu"])
def test_where_none_is_near_or_it_is_right_already_no_name_is_meant(name: str) -> None:
    assert did_you_mean(name, KNOWN) == ""
    assert did_you_mean_or_list(name, iter(KNOWN)) == "it has cpu, gpu, OptunaSearch"


# Metrics that can be stored, and those that are refused.


def nest_metrics(levels: int) -> dict[str, Any]:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"x": value}
    return {"x": value}


def test_metrics_may_be_nested_as_deep_as_readers_of_json_can_follow() -> None:
    assert to_plain_metrics(nest_metrics(99), "metrics") == nest_metrics(99)
    for levels in (100, 240, 5_000):
        with pytest.raises(BadMetric, match="at most 100 levels"):
            to_plain_metrics(nest_metrics(levels), "metrics")


@pytest.mark.parametrize("metrics", [{"name": "\udcff"}, {"\udcff": 1}, {"names": ["a", "\ud800"]}])
def test_a_text_that_is_not_unicode_is_refused_by_name(metrics: dict[str, Any]) -> None:
    with pytest.raises(BadMetric, match=r"metrics of step 3: .*expected Unicode text, found '\\ud"):
        to_plain_metrics(metrics, "metrics of step 3")


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([1, 2], 1.5),
        ([3, 3], 3),
        ([1e308, 1.5e308], 1.25e308),
        ([True, False], True),
        (["a", 1], "a"),
        ([1.0, None], 1.0),
        ([1.0, "b"], 1.0),
        ([{"x": 1.0, "y": 2.0}, {"x": 2.0}], {"x": 1.5, "y": 2.0}),
        ([{"x": 1.0}, 2.0], {"x": 1.0}),
        ([2.0, {"x": 1.0}], 2.0),
        ([[1.0], [2.0]], [1.0]),
    ],
)
def test_the_mean_is_over_numbers_that_every_rank_has_and_anything_else_is_that_of_the_first(
    values: list[object], mean: object
) -> None:
    assert average_metrics([{"m": value} for value in values]) == {"m": mean}


def test_a_name_that_the_first_rank_lacks_is_left_out() -> None:
    assert average_metrics([{"a": 1.0}, {"a": 3.0, "b": 2.0}, {"a": 5.0, "b": 2.0}]) == {"a": 3.0}
