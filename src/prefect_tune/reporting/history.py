"""The history of an experiment, from its journal: owners, attempts, learning curves and costs over time."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice

from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Cause,
    Cloned,
    Committed,
    Configured,
    Entry,
    Event,
    Finished,
    GaveUp,
    Opened,
    Owner,
    Paused,
    Reported,
    Started,
    TrialAdded,
)
from prefect_tune.core.metrics import is_number
from prefect_tune.core.usage_records import GroupSeconds, GroupUse, RankEnd, Use
from prefect_tune.core.values import StepReport, leaves, parse_time

# A learning curve with a bounded number of points.


class Series:
    """Numbers by step, the first and the last among them; of more than `most`, every second, fourth, ... is kept."""

    __slots__ = ("_most", "_since", "_steps", "_stride", "_values")

    def __init__(self, points: Iterable[tuple[float, float]] = (), *, most: int = 96) -> None:
        self._most = most
        self._steps = array("d")
        self._values = array("d")
        self._stride = 1
        self._since = 1
        for step, value in points:
            self.add(step, value)

    def add(self, step: float, value: float) -> None:
        """Add the next number; a step that is not after the last one is ignored. `cut` first to replace steps."""
        if self._steps and step <= self._steps[-1]:
            return
        if self._since < self._stride and len(self._steps) > 1:
            self._since += 1
            self._steps[-1], self._values[-1] = step, value
            return
        self._since = 1
        self._steps.append(step)
        self._values.append(value)
        if len(self._steps) > self._most:
            self._thin()

    def cut(self, step: float) -> None:
        """Remove the points after `step`."""
        kept = bisect_right(self._steps, step)
        if kept < len(self._steps):
            del self._steps[kept:], self._values[kept:]
            self._since = self._stride

    def points(self) -> Sequence[tuple[float, float]]:
        """Return the points, by step."""
        return list(zip(self._steps, self._values, strict=True))

    def _thin(self) -> None:
        """An odd number of points, so that the last one stays as the first does."""
        self._steps, self._values = self._steps[::2], self._values[::2]
        self._stride *= 2
        self._since = self._stride


def numbers_in(metrics: Mapping[str, object]) -> Mapping[str, float]:
    """Return the numeric metrics, which can be drawn."""
    found = ((name, _number(value)) for name, value in leaves(metrics))
    return {name: number for name, number in found if number is not None}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and is_number(value) else None


_METRICS = 4
_OTHERS = 12
"""The other metrics with curves; of a thirteenth only its name is kept."""
_POINTS_OF_OTHERS = 24
_MOST_NAMES = 1000


class AttemptEnd(StrEnum):
    """How an attempt ended."""

    FINISHED = "finished"
    PAUSED = "paused"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"


_ENDS_BY_CAUSE = {Cause.MACHINE: AttemptEnd.LOST, Cause.PREEMPTED: AttemptEnd.STOPPED}
_ENDS_BY_EVENT: Mapping[type[Event], AttemptEnd] = {
    Finished: AttemptEnd.FINISHED,
    Paused: AttemptEnd.PAUSED,
    GaveUp: AttemptEnd.FAILED,
}


@dataclass(frozen=True, slots=True)
class OwnershipPeriod:
    """The time during which one run owned the experiment."""

    term: int
    owner: Owner
    began: datetime
    last: datetime
    """The time of its last journal entry."""
    trials: int = 0
    """The number of trials that it added."""
    samples: int = 0
    """The number of samples it was asked to add to those of earlier runs; 0 if not asked."""


@dataclass(frozen=True, slots=True)
class AttemptPeriod:
    """One attempt of a trial, with its times."""

    trial: str
    attempt: int
    began: datetime
    from_step: int
    step: int
    """The last step that it reported."""
    owner: Owner | None
    ended: datetime | None = None
    end: AttemptEnd | None = None
    rank_count: int = 1
    rank_ends: Sequence[RankEnd] = ()
    """How ranks ended that did not end like the others."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes committed and uploaded. Of an adopted commit the uploaded bytes are not known."""

    commits: int = 0
    committed_bytes: int = 0
    measured_bytes: int = 0
    """The part of `committed_bytes` for which the next two fields are known."""
    sent_bytes: int = 0
    upload_seconds: float = 0.0
    cloned_bytes: int = 0
    """Size of checkpoints that are copies of others; these upload no bytes."""


@dataclass(frozen=True, slots=True)
class HistoryView:
    """An immutable extract of the history."""

    metrics: tuple[str, ...] = ()
    """The metrics of the objective; without one, the first four reported numbers."""
    others: tuple[str, ...] = ()
    """The first twelve other reported numbers."""
    metric_count: int = 0
    """How many metrics were reported, also those without curves."""
    curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]] = field(default_factory=dict)
    """Points by trial and metric, thinned out."""
    attempts: Sequence[AttemptPeriod] = ()
    ownerships: Sequence[OwnershipPeriod] = ()
    costs: Costs = Costs()
    is_whole: bool = True
    """Whether it begins with the journal's first entry."""


class ExperimentHistory:
    """Builds the history from events in their order; keeps about 1 KiB per trial and metric, however long it trains.

    Not thread-safe.
    """

    def __init__(self, metrics: Sequence[str] = (), *, is_whole: bool = True) -> None:
        """Args: metrics: those of the objective."""
        self._metrics = tuple(metrics)
        self._names: dict[str, None] = {}  # of the other metrics
        self._is_whole = is_whole
        self._curves: dict[str, dict[str, Series]] = {}
        self._attempts: list[AttemptPeriod] = []
        self._open: dict[str, int] = {}  # the index of each trial's open attempt in the list
        self._free_at: dict[str, datetime] = {}  # when the last attempt of the trial ended
        self._owners: dict[str, Owner] = {}
        self._last_entry_at: dict[str, datetime] = {}  # when
        self._ended_at: dict[str, datetime] = {}  # attempts that ended without an entry of their own
        self._ownerships: list[OwnershipPeriod] = []
        self._steps: dict[str, int] = {}  # the last step of each trial
        self._costs = Costs()

    def add_entry(self, entry: Entry) -> None:
        """Take in the next entry."""
        at = moment(entry.at)
        for event in entry.events:
            self.add_event(event, at)

    def add_event(self, event: Event, at: datetime) -> None:
        """Take in the next event, journaled at `at` or about to be."""
        if isinstance(event, Opened) and event.trial is None:
            self._ownerships.append(OwnershipPeriod(event.term, event.owner, at, at))
            self._cut_short([trial for trial in self._open if trial not in self._owners])
        elif isinstance(event, Absorbed):
            at = moment(event.at) if event.at else at
            for each in event.events:
                self._add(each, event.trial, at)
        else:
            self._add(event, getattr(event, "trial", None), at)
            self._count(event)
        self._extend_ownership(at)

    def _count(self, event: Event) -> None:
        """Count what the current owner adds to the experiment."""
        if not self._ownerships:
            return
        newest = self._ownerships[-1]
        if isinstance(event, TrialAdded):
            self._ownerships[-1] = replace(newest, trials=newest.trials + 1)
        elif isinstance(event, Configured):
            self._ownerships[-1] = replace(newest, samples=newest.samples + sum(event.extensions.values()))

    def _extend_ownership(self, at: datetime) -> None:
        """Extend the time of the run that owned the experiment at `at`, which may be an earlier one."""
        for place in range(len(self._ownerships) - 1, -1, -1):
            ownership = self._ownerships[place]
            if at >= ownership.began:
                self._ownerships[place] = replace(ownership, last=max(ownership.last, at))
                return

    def _cut_short(self, trials: Iterable[str]) -> None:
        """Note for trials that another owner takes over that their open attempts ended at their last entry."""
        for trial in trials:
            if trial in self._open:
                self._ended_at[trial] = self._last_entry_at[trial]

    def add_report(self, trial: str, report: StepReport) -> None:
        """Take in a step's report before the journal has it."""
        if trial in self._open:
            self._report(trial, report)

    def set_owner(self, owner: Owner, term: int, at: datetime) -> None:
        """Record the owner, if the entry with the change of owner was not passed to `add_entry`."""
        if not self._ownerships or self._ownerships[-1].term != term:
            self._ownerships.append(OwnershipPeriod(term, owner, at, at))

    def view(self, trials: Collection[str]) -> HistoryView:
        """Return the history, with the curves of these trials."""
        drawn = {trial: self._curves[trial] for trial in trials if trial in self._curves}
        return HistoryView(
            metrics=self._metrics,
            others=tuple(self._names)[:_OTHERS],
            metric_count=len(self._metrics) + len(self._names),
            curves={trial: {name: each.points() for name, each in curves.items()} for trial, curves in drawn.items()},
            attempts=tuple(
                each if each.ended else replace(each, step=self._steps.get(each.trial, each.step))
                for each in self._attempts
            ),
            ownerships=tuple(self._ownerships),
            costs=self._costs,
            is_whole=self._is_whole,
        )

    # -------------------------------------------------------------------------------------------- one event

    def _add(self, event: object, trial: str | None, at: datetime) -> None:
        match event:
            case Opened(owner=owner) if trial is not None:
                self._owners[trial] = owner
                self._cut_short([trial])
                return
            case Started():
                self._started(event, at)
            case Reported():
                self._report(event.trial, event.report)
            case Committed():
                self._committed(event)
            case Cloned(inherited=False):
                self._cloned(event)
            case AttemptEnded(cause=cause):
                self._note_ranks(event.trial, event.use)
                self._ended(event.trial, _ENDS_BY_CAUSE.get(cause, AttemptEnd.FAILED), at)
            case Finished() | Paused() | GaveUp():
                self._note_ranks(event.trial, None if isinstance(event, GaveUp) else event.use)
                self._ended(event.trial, _ENDS_BY_EVENT[type(event)], at)
            case _:
                return
        if trial is not None:
            self._last_entry_at[trial] = at

    def _started(self, event: Started, at: datetime) -> None:
        """Begin an attempt, at the earliest when the one before of its trial has ended: their clocks may differ."""
        trial = event.trial
        self._ended(trial, AttemptEnd.LOST, at)
        began = max(parse_time(event.at or "") or at, self._free_at.get(trial, moment("")))
        owner = self._owners.get(trial) or (self._ownerships[-1].owner if self._ownerships else None)
        self._open[trial] = len(self._attempts)
        self._attempts.append(AttemptPeriod(trial, event.attempt, began, event.from_step, event.from_step, owner))
        for series in self._curves.get(trial, {}).values():
            series.cut(event.from_step)
        self._steps[trial] = event.from_step

    def _report(self, trial: str, report: StepReport) -> None:
        if report.step <= self._steps.get(trial, 0):
            return
        self._add_points(trial, report.step, report.metrics)
        self._steps[trial] = report.step

    def _add_points(self, trial: str, step: int, metrics: Mapping[str, object]) -> None:
        """Add a step's numbers to the curves of the trial."""
        numbers = numbers_in(metrics)
        self._metrics = self._metrics or tuple(numbers)[:_METRICS]
        curves = self._curves.setdefault(trial, {})
        for name in numbers:
            if name not in self._metrics and len(self._names) < _MOST_NAMES:
                self._names[name] = None
        for name in (*self._metrics, *islice(self._names, _OTHERS)):
            if name in numbers:
                if name not in curves:
                    curves[name] = Series() if name in self._metrics else Series(most=_POINTS_OF_OTHERS)
                curves[name].add(step, numbers[name])

    def _committed(self, event: Committed) -> None:
        self._note_ranks(event.trial, event)
        costs, size_bytes = self._costs, event.checkpoint.size_bytes
        costs = replace(costs, commits=costs.commits + 1, committed_bytes=costs.committed_bytes + size_bytes)
        if event.sent_bytes is not None:
            costs = replace(
                costs,
                measured_bytes=costs.measured_bytes + size_bytes,
                sent_bytes=costs.sent_bytes + event.sent_bytes,
                upload_seconds=costs.upload_seconds + (event.upload_seconds or 0.0),
            )
        self._costs = costs

    def _note_ranks(self, trial: str, known: Use | Committed | None) -> None:
        """Take in how many ranks an open attempt has, and how they ended."""
        place = self._open.get(trial)
        if place is not None and known is not None and isinstance(known.seconds, GroupSeconds):
            ranks, ends = known.seconds.ranks, known.ends if isinstance(known, GroupUse) else ()
            self._attempts[place] = replace(self._attempts[place], rank_count=len(ranks.writing), rank_ends=ends)

    def _cloned(self, event: Cloned) -> None:
        copy = event.checkpoint
        self._costs = replace(self._costs, cloned_bytes=self._costs.cloned_bytes + copy.size_bytes)
        self._steps[event.trial] = copy.step
        self._curves.pop(event.trial, None)
        self._add_points(event.trial, copy.step, copy.metrics)

    def _ended(self, trial: str, end: AttemptEnd, at: datetime) -> None:
        """End an attempt; one that died counts until its last entry, not until its death was detected."""
        place = self._open.pop(trial, None)
        if place is None:
            return
        attempt = self._attempts[place]
        ended = max(attempt.began, self._ended_at.pop(trial, at))
        self._attempts[place] = replace(attempt, step=self._steps.get(trial, attempt.step), ended=ended, end=end)
        self._free_at[trial] = ended


def moment(at: str) -> datetime:
    """Return the time of an entry; the earliest possible time if it has none."""
    return parse_time(at) or datetime.fromtimestamp(0, UTC)


def history_of(entries: Iterable[Entry], metrics: Sequence[str] = ()) -> ExperimentHistory:
    """Return the history of these entries, which are in the journal's order."""
    history = ExperimentHistory(metrics)
    for entry in entries:
        history.add_entry(entry)
    return history
