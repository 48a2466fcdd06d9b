"""The age of a view, in words and as JSON, by the reader's clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.journal_events import Started, TrialAdded
from prefect_tune.core.messages.target_messages import ExperimentView, LiveStatus
from prefect_tune.terminal.formatting import format_moment, freshness_of
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import after

NOW = datetime(2026, 11, 23, 1, 33, 18, tzinfo=UTC)
AT = "2026-11-23T01:32:20.123+00:00"


def running() -> Experiment:
    return after(
        nothing_yet(first_generation("e")),
        [TrialAdded(trial="a", config={}), Started(trial="a", attempt=1, from_step=0)],
    )


def live(period_seconds: float) -> LiveStatus:
    return LiveStatus(term=0, owner=None, number=1, at=AT, period_seconds=period_seconds, trials=())


@pytest.mark.parametrize(
    ("period", "said"),
    [
        (30, "01:32:20 UTC, 58 s ago"),
        (5, "01:32:20 UTC, 58 s ago; updates every 5 s are missing: its process has probably ended"),
        (None, "01:32:20 UTC, 58 s ago: the last journal entry; running trials may be further"),
    ],
)
def test_what_is_old_says_its_age_and_what_that_means(period: float | None, said: str) -> None:
    view = ExperimentView(running(), AT, live(period) if period else None)
    fresh = freshness_of(view, NOW)
    assert fresh.words() == said
    assert fresh.fields() == {"as_of": "2026-11-23T01:32:20+00:00", "age_seconds": 57.9, "is_stale": period == 5}
    assert fresh.short() == "01:32:20, 58 s ago"
    assert freshness_of(view, NOW + timedelta(hours=1)).short() == "01:32:20, 1 h ago"
    assert said.replace(" ago", " before now") == fresh.words("before now")


@pytest.mark.parametrize(("seconds", "is_stale"), [(10, False), (10.9, False), (11.1, True), (60, True)])
def test_it_is_stale_once_the_next_two_updates_are_missing(seconds: float, is_stale: bool) -> None:
    at = NOW - timedelta(seconds=seconds)
    status = live(5).model_copy(update={"at": at.isoformat()})
    assert freshness_of(ExperimentView(running(), status.at, status), NOW).is_stale == is_stale


def test_without_a_running_trial_nothing_is_stale_and_what_is_old_has_its_date() -> None:
    fresh = freshness_of(ExperimentView(nothing_yet(first_generation("e")), AT), NOW + timedelta(days=2))
    assert fresh.words() == "2026-11-23 01:32:20 UTC, 2 d ago"
    assert fresh.short() == "2026-11-23 01:32, 2 d ago"
    assert not fresh.is_stale


@pytest.mark.parametrize("at", ["", "yesterday", "0001-01-01T00:00:00+14:00"])
def test_a_journal_that_says_no_time_has_no_age(at: str) -> None:
    fresh = freshness_of(ExperimentView(running(), at), NOW)
    assert (fresh.words(), fresh.short()) == ("an unknown time", "")
    assert fresh.fields() == {"as_of": None, "age_seconds": None, "is_stale": False}


def test_the_future_of_another_clock_is_now() -> None:
    assert freshness_of(ExperimentView(running(), AT), NOW - timedelta(hours=1)).age == timedelta(0)
    assert format_moment(AT, NOW - timedelta(hours=1)) == "0 s ago"


def test_a_moment_is_an_age_and_none_is_nothing() -> None:
    assert (format_moment(AT, NOW), format_moment(None, NOW)) == ("58 s ago", "")
