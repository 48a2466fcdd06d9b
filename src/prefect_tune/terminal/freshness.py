"""How old is what a reader sees of an experiment: as JSON fields, and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.messages.live_status import ExperimentView
from prefect_tune.core.shown_text import format_duration
from prefect_tune.core.values import parse_time

_MISSED = 2
_SLACK = timedelta(seconds=1)
"""A live status is stale once this many updates are missing, and this time for the last one has passed."""
_SAME_DAY = timedelta(hours=12)


@dataclass(frozen=True, slots=True)
class Freshness:
    """The time of what is shown, and its age by this machine's clock."""

    as_of: datetime | None
    """None if the experiment does not say a time."""
    age: timedelta
    is_running: bool
    """Whether a trial runs by the journal."""
    period: timedelta | None = None
    """The time between two updates; None if the owner publishes none."""

    @property
    def is_stale(self) -> bool:
        """Whether the next two updates of a running experiment are missing: its process has probably ended."""
        return self.is_running and self.period is not None and self.age > self.period * _MISSED + _SLACK

    def fields(self) -> Mapping[str, object]:
        """Return the fields for JSON outputs."""
        known = self.as_of is not None
        return {
            "as_of": self.as_of.isoformat(timespec="seconds") if self.as_of else None,
            "age_seconds": round(self.age.total_seconds(), 1) if known else None,
            "is_stale": self.is_stale,
        }

    def short(self) -> str:
        """Return the time and the rough age: `01:32:20, 9 min ago`, with the date if it is not of these hours."""
        if self.as_of is None:
            return ""
        shape = "%H:%M:%S" if self.age < _SAME_DAY else "%Y-%m-%d %H:%M"
        rough = " ".join(format_duration(self.age).split()[:2])
        return f"{self.as_of:{shape}}, {rough} ago"

    def words(self, since: str = "ago") -> str:
        """Return a sentence for people; `since` follows the age."""
        if self.as_of is None:
            return "an unknown time"
        shape = "%H:%M:%S" if self.age < _SAME_DAY else "%Y-%m-%d %H:%M:%S"
        said = f"{self.as_of:{shape}} UTC, {format_duration(self.age)} {since}"
        if self.is_stale and self.period is not None:
            return f"{said}; updates every {format_duration(self.period)} are missing: its process has probably ended"
        if self.is_running and self.period is None:
            return f"{said}: the last journal entry; running trials may be further"
        return said


UNKNOWN = Freshness(None, timedelta(0), is_running=False)


def freshness_of(view: ExperimentView, now: datetime) -> Freshness:
    """Return how old `view` is at `now`; a time in the future counts as now, since clocks differ."""
    runs = any(each.status is Status.RUNNING for each in view.experiment.trials.values())
    period = timedelta(seconds=view.live.period_seconds) if view.live is not None else None
    as_of = parse_time(view.as_of)
    age = max(timedelta(0), now - as_of) if as_of is not None else timedelta(0)
    return Freshness(as_of, age, runs, period)


def format_moment(at: str | None, now: datetime) -> str:
    """Return how long ago a time of the target was: `12 s ago`; empty for none."""
    found = parse_time(at) if at else None
    return "" if found is None else f"{format_duration(max(timedelta(0), now - found))} ago"
