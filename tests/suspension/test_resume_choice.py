"""How a suspended run may continue: the options of the form, and the settings that each yields."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.suspension import (
    ResumeChoice,
    ResumeLimits,
    Way,
    choice_of,
    stop_extended,
)

THERE = ResumeLimits(samples=10, steps=100, hours=2, checkpoints=(10, 20))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"way": "stop here", "samples": 10, "steps": 100, "hours": 2, "checkpoint": 20},
        {"samples": 10, "steps": 100, "hours": 2, "checkpoint": 20},
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
        ({"way": "extend", "hours": 1e12}, "hours: "),
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


CHANGED: dict[str, Any] = {"samples": 12, "steps": 120, "hours": 3, "checkpoint": 10}
"""A new value of each field beside `way`."""


@pytest.mark.parametrize("field", CHANGED)
@pytest.mark.parametrize("way", get_args(Way))
def test_what_is_typed_into_a_field_is_used_or_the_form_is_refused(way: Way, field: str) -> None:
    uses = {"extend": {"samples", "steps", "hours"}, "other checkpoint": {"checkpoint"}}
    shown = {"samples": 10, "steps": 100, "hours": 2, "checkpoint": 20}  # as the form shows them
    for others in ({}, shown, {"samples": 11} if way == "extend" and field == "checkpoint" else {}):
        answer = {**others, "way": way, field: CHANGED[field]}
        if field in uses.get(way, ()):
            assert getattr(choice_of(answer, THERE), field) == CHANGED[field]
        else:
            meant = "other checkpoint" if field == "checkpoint" else "extend"
            with pytest.raises(InvalidInput, match=rf"^{way}: .*{CHANGED[field]}.*choose {meant} to "):
                choice_of(answer, THERE)


def test_steps_beyond_the_end_that_the_scheduler_sets_are_refused() -> None:
    there = ResumeLimits(steps=20, scheduler_steps=27)
    assert choice_of({"way": "extend", "steps": 27}, there).steps == 27
    with pytest.raises(InvalidInput, match="the scheduler ends each trial at step 27, and the form has 28"):
        choice_of({"way": "extend", "steps": 28}, there)


def test_samples_that_would_change_nothing_are_refused() -> None:
    there = ResumeLimits(samples=10, stop_trials=15)
    assert choice_of({"way": "extend", "samples": 15}, there).samples == 15
    with pytest.raises(InvalidInput, match="TrialBudget ends the search after 15 trials, and the form has 16"):
        choice_of({"way": "extend", "samples": 16}, there)
    with pytest.raises(InvalidInput, match="no number of samples that a form can change"):
        choice_of({"way": "extend", "samples": 16}, ResumeLimits())


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
