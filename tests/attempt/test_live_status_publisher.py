"""Publishing the live status: when, at what cost, and with a target that fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from prefect_tune import clock
from prefect_tune.core.errors import StoreUnavailable, Superseded, TuneError
from prefect_tune.core.experiment.experiment import apply_event, make_empty_experiment
from prefect_tune.core.journal_events import AttemptEnded, AttemptStarted, Cause, Event, TrialAdded
from prefect_tune.core.messages.target_messages import read_newest_live_status
from prefect_tune.core.search_view import SearchView
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.monitoring import search_observer
from prefect_tune.monitoring.search_observer import LiveStatusPublisher
from tests.fakes.artifacts import BUCKETS, Bucket, BucketTarget
from tests.fakes.trial_processes import wait_until

KEY = JournalKey(experiment="e", generation=1)
SHORT_PERIOD = timedelta(milliseconds=5)
STARTED_AT = "2026-11-23T01:00:00.000+00:00"
START_TIME = datetime.fromisoformat(STARTED_AT)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(search_observer, "_FIRST_DELAY", timedelta(0))
    BUCKETS["live"] = Bucket()
    yield BUCKETS["live"]
    del BUCKETS["live"]


class Search:
    """An experiment with one running trial, and the publisher of its live status."""

    def __init__(self, period: timedelta | None) -> None:
        self.state = make_empty_experiment(KEY).model_copy(update={"term": 3})
        self.view = SearchView(self.state)
        self.publisher = LiveStatusPublisher(BucketTarget(name="live"), self.view.take_snapshot, period)
        self.apply_event(TrialAdded(trial="a", config={}))
        self.apply_event(AttemptStarted(trial="a", attempt=1, from_step=0))

    def apply_event(self, event: Event) -> None:
        self.state = apply_event(self.state, event, 1)
        self.view.apply_event(event, START_TIME, self.state)


def test_it_is_written_again_and_again_so_that_its_time_says_that_the_owner_lives(bucket: Bucket) -> None:
    with Search(SHORT_PERIOD).publisher:
        wait_until(lambda: bucket.operations["put"] > 3)
    status = read_newest_live_status(bucket, KEY)
    assert (status.term, [(trial.trial, trial.began_at) for trial in status.trials]) == (3, [("a", STARTED_AT)])
    assert status.number > 3


def test_at_the_end_it_is_deleted_unless_a_trial_was_left_running(bucket: Bucket) -> None:
    search = Search(SHORT_PERIOD)
    with search.publisher:
        wait_until(lambda: bucket.operations["put"] > 1)
        search.apply_event(AttemptEnded(trial="a", cause=Cause.MACHINE, reason="lost"))
    assert not bucket.objects


def test_without_a_period_nothing_is_published(bucket: Bucket) -> None:
    with Search(None).publisher:
        pass
    assert not bucket.operations


def test_an_outage_is_logged_once_and_the_next_write_needs_no_repair(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.failures = [StoreUnavailable("no route to the bucket")] * 3
    with caplog.at_level(logging.WARNING, "prefect_tune"), Search(SHORT_PERIOD).publisher:
        wait_until(lambda: read_newest_live_status(bucket, KEY))
    assert [record.getMessage() for record in caplog.records] == [
        "the newest steps of running trials cannot be published; retried later: no route to the bucket"
    ]


def test_a_slow_target_gets_fewer_writes_and_they_contain_the_longer_period(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 10_000, 2))  # each write takes 2 s
    pauses: list[float] = []
    publisher = Search(SHORT_PERIOD).publisher
    monkeypatch.setattr(clock, "_run_start", None)  # the clock of a run reads it too
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))

    def wait_until_closed(pause: float) -> bool:
        pauses.append(pause)
        return len(pauses) > 3

    monkeypatch.setattr(publisher._closed, "wait", wait_until_closed)
    publisher._run_publisher(SHORT_PERIOD)
    assert pauses == [0.0, SHORT_PERIOD.total_seconds(), 40.0, 40.0]
    status = read_newest_live_status(bucket, KEY)
    assert status.period_seconds == 40


@pytest.mark.usefixtures("bucket")
def test_a_trial_that_this_owner_does_not_run_is_not_published() -> None:
    search, run_here = Search(SHORT_PERIOD), set[str]()
    publisher = LiveStatusPublisher(
        BucketTarget(name="live"), search.view.take_snapshot, SHORT_PERIOD, run_here.__contains__
    )
    assert publisher._read_running_trials()[1] == ()
    run_here.add("a")
    assert [trial.trial for trial in publisher._read_running_trials()[1]] == ["a"]


@pytest.mark.parametrize("error", [Superseded("by another run"), StoreUnavailable("gone")])
def test_what_a_superseded_run_wrote_is_deleted_and_what_another_error_ends_stays(
    error: TuneError, bucket: Bucket
) -> None:
    def publish_and_fail() -> None:
        with Search(SHORT_PERIOD).publisher:
            wait_until(lambda: bucket.operations["put"] > 0)
            raise error

    with pytest.raises(type(error)):
        publish_and_fail()
    assert bool(bucket.objects) is not isinstance(error, Superseded)
