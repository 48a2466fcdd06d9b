"""No early stopping."""

from __future__ import annotations

from prefect_tune.core.schedulers.base import Continue
from prefect_tune.core.schedulers.fifo import FIFO
from tests.core.schedulers.asking import Asked


def test_nobody_is_ever_asked_paused_or_stopped() -> None:
    asked = Asked(FIFO())
    asked.add("a", "b")
    assert asked.schedule.milestone("a", 0) is None
    assert asked.report("a", 1, float("nan")) == Continue()  # a report without metrics is valid
    asked.schedule.resumed("a")
    asked.schedule.exhausted()
    asked.end("a")
    assert (asked.resume_all(), asked.stop_all(), asked.schedule.is_waiting()) == ([], [], False)
