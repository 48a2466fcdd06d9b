"""Attempts elsewhere, heard by their journals: what they ask is heard, and answered where they look."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.flows.crew import Message
from prefect_tune.flows.remote_crew import RemoteCrew
from prefect_tune.stores.posix import PosixStore
from prefect_tune.tasks.line import Told
from prefect_tune.tasks.plan import Orders
from tests.fakes.far_attempts import FarAttempt, FarMachines, plan_at

NOW = timedelta(0)


@pytest.fixture
def target(tmp_path: Path) -> LocalTarget:
    return LocalTarget(path=str(tmp_path / "target"))


@pytest.fixture
def crew(target: LocalTarget) -> RemoteCrew:
    """One attempt is under way in it, to be asked about at step 2."""
    crew = RemoteCrew(target, FarMachines(), look_every=NOW)
    crew.start(plan_at(target), Orders(milestone=2), 1, absorbed=0)
    return crew


def told(heard: list[Message]) -> list[tuple[int, bool]]:
    return [(each.report.step, each.asks) for each in heard if isinstance(each, Told)]


def test_a_target_that_goes_away_in_the_middle_takes_no_question_with_it(
    target: LocalTarget, crew: RemoteCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = FarAttempt(target)
    attempt.starts()
    attempt.reports(1, 2)
    read, first_absent = PosixStore.read, f"{attempt.written + 1:010d}.json"

    def fails_once(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith(first_absent):
            monkeypatch.undo()
            raise StoreUnavailable("503")
        return read(store, path, offset=offset, length=length)

    monkeypatch.setattr(PosixStore, "read", fails_once)
    heard = [*crew.hear(NOW), *crew.hear(NOW)]
    assert told(heard) == [(1, False), (2, True)]
