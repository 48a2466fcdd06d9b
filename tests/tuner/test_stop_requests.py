"""Stop requests with unusual texts and numbers, from a target that does not always answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.experiment.experiment import nothing_yet
from prefect_tune.core.journal_events import TrialAdded
from prefect_tune.core.messages.target_messages import StopRequest, ask
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.tuner.stop_requests import Stopping, StopRequestPoller, StopSource, stop
from tests.fakes.artifacts import BUCKETS, Bucket, BucketTarget
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import write_search
from tests.fakes.searches.instant_executor import InstantExecutor
from tests.fakes.searches.pending_entries import WrittenEntries, limits_of, pending_entry, random_policy
from tests.fakes.trial_processes import until


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


# Reading requests to stop from a target that does not always answer.


class AwayBucket(Bucket):
    """A bucket whose reads fail while it is away."""

    is_there = False
    reads = 0

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self.reads += 1
        if not self.is_there:
            raise StoreUnavailable("no route to the bucket")
        return super().read(path, offset=offset, length=length)


def test_an_outage_is_logged_once_and_the_request_is_read_after_it(caplog: pytest.LogCaptureFixture) -> None:
    often = timedelta(milliseconds=5)
    BUCKETS["away"] = bucket = AwayBucket()
    request = StopRequest(write_id="w", at="now", reason="enough", term=0, trial=None)
    ask(bucket, nothing_yet(JournalKey(experiment="e", generation=1)), request)
    stop = threading.Event()
    with (
        caplog.at_level(logging.WARNING, "prefect_tune"),
        StopRequestPoller(BucketTarget(name="away"), first_generation("e"), 0, often, stop) as poller,
    ):
        until(lambda: bucket.reads > 3, seconds=60, what=lambda: "further reads")
        assert poller.take() == []
        bucket.is_there = True
        until(lambda: not poller._found.empty(), seconds=60, what=lambda: "the request")
        assert poller.take() == [request]
    assert [each.getMessage() for each in caplog.records] == ["stop requests are read later: no route to the bucket"]
