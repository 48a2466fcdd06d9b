"""How a suspended run may continue: the options of the form, and the settings that each yields."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.resume_choice import (
    ResumeChoice,
    ResumeLimits,
    choice_of,
    ignored_numbers,
    stop_extended,
)

THERE = ResumeLimits(samples=10, steps=100, hours=2, checkpoints=(10, 20))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"way": "stop here", "samples": 3},
        {"way": "extend", "samples": 11},
        {"way": "extend", "steps": 101, "samples": 10},
        {"way": "extend", "hours": 2.5, "steps": 0},
        {"way": "other checkpoint", "checkpoint": 20},
    ],
)
def test_what_can_be_done_is_chosen(answer: dict[str, Any]) -> None:
    assert choice_of(answer, THERE) == ResumeChoice(**answer)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"way": "begin again"}, "way: "),
        ({"samples": -1}, "samples: "),
        ({"hours": float("inf")}, "hours: "),
        ({"colour": "red"}, "colour: "),
        ({"way": "extend"}, "nothing is larger"),
        ({"way": "extend", "samples": 10, "steps": 100}, "nothing is larger"),
        ({"way": "extend", "samples": 5, "steps": 200}, r"less than before: samples 5 \(it has 10\)"),
        ({"way": "other checkpoint", "checkpoint": 15}, r"the step of a checkpoint \(10, 20\), found 15"),
    ],
)
def test_what_cannot_be_done_says_why(answer: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        choice_of(answer, THERE)


@pytest.mark.parametrize(
    ("answer", "ignored"),
    [
        ({"samples": 12}, "samples 12 (it has 10)"),
        (
            {"way": "other checkpoint", "checkpoint": 20, "steps": 200, "hours": 1},
            "steps 200 (it has 100), hours 1 (it has 2)",
        ),
        ({"samples": 10, "steps": 100, "hours": 2}, ""),
        ({"way": "extend", "samples": 12}, ""),
        ({"way": "stop here", "samples": 12}, ""),
    ],
)
def test_a_changed_number_that_the_way_does_not_use_is_named(answer: dict[str, Any], ignored: str) -> None:
    assert ignored_numbers(choice_of(answer, THERE), THERE) == ignored


def test_what_is_not_there_cannot_be_chosen() -> None:
    with pytest.raises(InvalidInput, match=r"the step of a checkpoint \(none\)"):
        choice_of({"way": "other checkpoint"}, ResumeLimits())
    with pytest.raises(InvalidInput, match="is code"):
        choice_of({"way": "extend", "steps": 9}, ResumeLimits(stop_is_code=True))


@pytest.mark.parametrize(
    ("stop", "steps", "hours", "then"),
    [
        (None, 5, 0, [{"step": 5}]),
        ({"step": 3, "loss": 0.1}, 5, 0, [{"loss": 0.1}, {"step": 5}]),
        ({"MaxSteps": {"steps": 3}}, 5, 0, [{"step": 5}]),
        ([{"step": 3}, {"MaxTime": {"time_seconds": 9}}], 0, 1, [{"step": 3}, {"MaxTime": {"time_seconds": 3600}}]),
        ("package.module:stop", 0, 1, ["package.module:stop", {"MaxTime": {"time_seconds": 3600}}]),
    ],
)
def test_a_larger_limit_takes_the_place_of_the_smaller_one(
    stop: object, steps: int, hours: float, then: object
) -> None:
    assert stop_extended(stop, steps, hours) == then
