"""Publishing the live status: when, at what cost, and with a target that fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest

from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.experiment.experiment import nothing_yet
from prefect_tune.core.messages.live_status import RunningTrial, newest_live_status
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.monitoring import live_status
from prefect_tune.monitoring.live_status import LiveStatusPublisher
from tests.fakes.artifacts import BUCKETS, Bucket, BucketTarget
from tests.fakes.trial_processes import until

KEY = JournalKey(experiment="e", generation=1)
OFTEN = timedelta(milliseconds=5)
STATE = nothing_yet(KEY).model_copy(update={"term": 3})
TRIAL = RunningTrial(trial="a", attempt=1)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(live_status, "_FIRST", timedelta(0))
    BUCKETS["live"] = Bucket()
    yield BUCKETS["live"]
    del BUCKETS["live"]


def publisher(period: timedelta | None, running: Sequence[RunningTrial]) -> LiveStatusPublisher:
    return LiveStatusPublisher(BucketTarget(name="live"), KEY, period, lambda: (STATE, list(running)))


def test_nothing_is_written_before_an_attempt_begins(bucket: Bucket) -> None:
    idle = publisher(OFTEN, [TRIAL])
    idle.close()
    assert not bucket.operations


def test_it_is_written_again_and_again_so_that_its_time_says_that_the_owner_lives(bucket: Bucket) -> None:
    running = publisher(OFTEN, [TRIAL])
    running.begin()
    until(lambda: bucket.operations["put"] > 3)
    running.close()
    found = newest_live_status(bucket, KEY)
    assert found is not None
    assert (found.term, found.trials) == (3, (TRIAL,))
    assert found.number > 3


def test_at_the_end_it_is_deleted_unless_a_trial_was_left_running(bucket: Bucket) -> None:
    trials = [TRIAL]
    running = publisher(OFTEN, trials)
    running.begin()
    until(lambda: bucket.operations["put"] > 1)
    trials.clear()
    running.close()
    assert not bucket.objects


def test_without_a_period_nothing_is_published(bucket: Bucket) -> None:
    silent = publisher(None, [TRIAL])
    silent.begin()
    silent.close()
    assert not bucket.operations


def test_an_outage_is_logged_once_and_the_next_write_needs_no_repair(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.failures = [StoreUnavailable("no route to the bucket")] * 3
    running = publisher(OFTEN, [TRIAL])
    with caplog.at_level(logging.WARNING, "prefect_tune"):
        running.begin()
        until(lambda: newest_live_status(bucket, KEY))
        running.close()
    assert [each.getMessage() for each in caplog.records] == [
        "the newest steps of running trials cannot be published; retried later: no route to the bucket"
    ]


def test_a_slow_target_gets_fewer_writes_and_they_contain_the_longer_period(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 2))  # each write takes 2 s
    pauses: list[float] = []
    running = publisher(OFTEN, [TRIAL])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))

    def is_closed_after(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) > 3

    monkeypatch.setattr(running._closed, "wait", is_closed_after)
    running._run(OFTEN)
    assert pauses == [0.0, OFTEN.total_seconds(), 40.0, 40.0]
    found = newest_live_status(bucket, KEY)
    assert found is not None
    assert found.period_seconds == 40
