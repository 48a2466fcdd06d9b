"""Attempts that have outlived their search: the next one finds them, answers what they ask, and can stop them."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.wire import Leave
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
