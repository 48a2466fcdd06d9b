"""The answer to the last form of a run, however many forms there were before."""

from __future__ import annotations

import pytest
from prefect.input import RunInput

from tests.flows.resuming.left_run import LeftRun

_MOST_INPUTS = 200
"""So many Prefect lists at once, the oldest first."""


class _GoOn(RunInput):
    go_on: bool = True
    why: str = ""


def test_the_answer_to_one_of_many_forms_is_the_answer_that_was_given(left_run: LeftRun) -> None:
    left_run.has_answered(_MOST_INPUTS // 3)
    left_run.ask(_GoOn.with_initial_data(description="Does it continue?"))
    left_run.resume({"go_on": False, "why": "it costs too much"})
    found = left_run.last_form()
    assert found is not None
    assert found.answer == {"go_on": False, "why": "it costs too much"}
    left_run.retry()
    assert left_run.last_form() == found


@pytest.mark.long
def test_a_form_is_not_answered_by_whatever_starts_the_run_again(left_run: LeftRun) -> None:
    assert left_run.last_form() is None
    left_run.retry()
    left_run.ask(_GoOn)
    left_run.resume()
    left_run.ask(_GoOn)
    left_run.retry()
    found = left_run.last_form()
    assert found is not None
    assert found.answer is None


@pytest.mark.long
def test_a_form_that_is_left_as_it_is_was_answered_with_nothing(left_run: LeftRun) -> None:
    left_run.ask(_GoOn)
    left_run.resume()
    found = left_run.last_form()
    assert found is not None
    assert found.answer == {}
