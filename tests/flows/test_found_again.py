"""Attempts that have outlived their search: the next one finds them, answers what they ask, and can stop them."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.trial import Status
from prefect_tune.core.wire import Leave, StopAndSave
from prefect_tune.flows.limits import Limits
from tests.fakes.far_attempts import FarAttempt
from tests.fakes.far_searches import FarSearch

TRIAL = "00000"


@pytest.fixture
def target(tmp_path: Path) -> LocalTarget:
    return LocalTarget(path=str(tmp_path / "target"))


@pytest.fixture
def attempt(target: LocalTarget) -> FarAttempt:
    return FarAttempt(target)


def nothing() -> None:
    """Let a moment pass."""


def test_one_that_has_reported_nothing_yet_is_told_to_stop_when_it_is_to(
    target: LocalTarget, attempt: FarAttempt
) -> None:
    FarSearch(target).live(nothing, attempt.starts, nothing)
    resumed = FarSearch(target)
    resumed.live(nothing, lambda: resumed.stop(TRIAL), nothing)
    assert resumed.machines.started == [(TRIAL, 1, None)]
    assert attempt.told() == Leave(reason="enough", save=True, for_good=True)


def test_one_that_was_to_stop_while_nobody_ran_the_search_is_told_and_ends_by_itself(
    target: LocalTarget, attempt: FarAttempt
) -> None:
    FarSearch(target).live(nothing, attempt.starts, lambda: attempt.reports(1), nothing)
    resumed = FarSearch(target)
    resumed.stop(TRIAL)
    running = resumed.live(nothing, lambda: attempt.reports(2), nothing)
    assert attempt.told() == Leave(reason="enough", save=True, for_good=True)
    assert (running.trial(TRIAL).status, running.trial(TRIAL).step) == (Status.RUNNING, 2)


def test_they_are_all_found_and_stopped_with_the_search_however_few_slots_there_are_now(target: LocalTarget) -> None:
    attempts = [FarAttempt(target, trial) for trial in ("00000", "00001")]
    FarSearch(target, samples=2).live(nothing, *(each.starts for each in attempts), nothing)
    resumed = FarSearch(target, samples=2, limits=Limits(max_concurrent_trials=1))
    resumed.live(nothing, resumed.stop, nothing)
    assert [each.told() for each in attempts] == [StopAndSave()] * 2
