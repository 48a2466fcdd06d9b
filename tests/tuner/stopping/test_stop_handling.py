"""Stop requests with unusual texts and numbers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from prefect_tune.core.journal_events import TrialAdded
from prefect_tune.core.messages.target_messages import StopRequest
from prefect_tune.tuner.stop_requests import Stopping, StopSource, stop
from tests.fakes.searches.experiments import write_search
from tests.fakes.searches.instant_executor import InstantExecutor
from tests.fakes.searches.pending_entries import WrittenEntries, limits_of, pending_entry, random_policy


@pytest.mark.parametrize("trial", [None, "00000", "00001"], ids=["all", "one", "refused"])
def test_a_reason_gives_the_terminal_no_commands(trial: str | None, caplog: pytest.LogCaptureFixture) -> None:
    class Asking(StopSource):
        def take(self) -> Sequence[StopRequest]:
            return [StopRequest(write_id="w", at="", reason="enough\x1b]0;title\x07", term=0, trial=trial)]

    policy = random_policy()
    pending = pending_entry(WrittenEntries(), policy)
    pending.put(TrialAdded(trial="00000", config={}))
    Stopping(limits_of(1), policy, InstantExecutor(9), pending, lambda _: None, logging.getLogger("a run")).heed(
        Asking(threading.Event())
    )
    assert "\\x1b]0;title\\x07" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.timeout(60)
def test_a_wait_that_is_no_number_is_no_endless_one(tmp_path: Path) -> None:
    write_search(tmp_path, "e", {"a": 0.5})
    assert stop("e", target=str(tmp_path), wait_seconds=float("nan")).status == "unanswered"
