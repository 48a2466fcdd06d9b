"""The cost of a search whose machine's clock was set, or that slept, while it ran."""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune import journal_access


def train(config: dict[str, Any]) -> None:
    for _ in range(2):
        pt.report({"loss": config["loss"]})
    Path(config["moves_clock"]).touch()


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize("jump", [timedelta(hours=8), timedelta(hours=-1)])
def test_a_clock_that_is_moved_between_two_trials_adds_and_hides_no_second(
    jump: timedelta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moved = tmp_path / "moved"

    class MovedClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz) + (jump if moved.exists() else timedelta(0))

    monkeypatch.setattr(journal_access, "datetime", MovedClock)
    space = {"loss": pt.grid_search([1.0, 2.0, 3.0]), "moves_clock": str(moved)}
    options: dict[str, Any] = {"metric": "loss", "num_samples": 1, "max_concurrent_trials": 1}
    cost = pt.tune(train, space, target=str(tmp_path / "runs"), experiment="e", **options).cost
    assert moved.exists()
    assert "earlier run" not in caplog.text
    (run,) = cost.runs
    assert 0 < run.seconds < 600
    assert cost.slot_seconds == pytest.approx(run.seconds, rel=0.01, abs=0.1)
    assert all(0 <= seconds < 600 for seconds in cost.seconds.values())
