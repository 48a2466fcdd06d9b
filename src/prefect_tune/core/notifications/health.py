"""Health warnings of a running experiment: silent trials, lagging saves or journals, budgets nearly spent.

No decision depends on them. The caller passes times, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from prefect_tune.core.notifications.prefect_events import BudgetNearlySpent, ExperimentEvent, SyncLagged, TrialStalled

_NEARLY = 0.8
Spent: TypeAlias = Literal["time", "training-time", "trials"]


@dataclass(frozen=True)
class Budget:
    """A limit of seconds or trials."""

    what: Spent
    most: float

    def is_nearly(self, spent: float) -> bool:
        """Return whether 80 % are spent. Not for a trial budget that is spent: then the search has ended."""
        return spent >= _NEARLY * self.most and (self.what != "trials" or spent < self.most)


@dataclass(frozen=True)
class HealthThresholds:
    """Thresholds: something is overdue after `times` its longest duration so far, and at least `at_least` seconds."""

    at_least: float = 300.0
    times: float = 5.0
    for_the_first: float = 1800.0
    """Seconds for a first report, when no duration is known yet."""
    for_the_journal: float = 420.0
    """Seconds, more than `sync_period`: reports not journaled by then mean that the target does not accept writes."""

    def limit(self, longest: float | None) -> float:
        """Return the threshold in seconds, given the longest duration so far; None for the first."""
        return self.for_the_first if longest is None else max(self.at_least, self.times * longest)


@dataclass
class _Wait:
    """Since when something is awaited, and how long it took at most; each wait is overdue once."""

    since: float | None = None
    """None: nothing is awaited."""
    longest: float | None = None
    is_reported: bool = False

    def begin(self, now: float) -> None:
        if self.since is None:
            self.since, self.is_reported = now, False

    def end(self) -> None:
        self.since = None

    def renew(self, now: float) -> None:
        """End a wait, note how long it was, and begin the next one."""
        if self.since is not None:
            self.longest = max(self.longest or 0.0, now - self.since)
        self.since, self.is_reported = now, False

    def overdue(self, now: float, limit: float) -> float | None:
        """Return the waiting time in seconds if it exceeds `limit`; else None."""
        if self.since is None or self.is_reported or now - self.since <= limit:
            return None
        self.is_reported = True
        return round(now - self.since, 1)


@dataclass
class _AttemptHealth:
    reports: _Wait
    saves: _Wait = field(default_factory=_Wait)
    unwritten: _Wait = field(default_factory=_Wait)
    journaled: int = 0

    @property
    def may_lag(self) -> bool:
        """Whether the trial has reported since its last save, and the time between saves is known."""
        return self.saves.longest is not None and (self.reports.since or 0.0) > (self.saves.since or 0.0)


@dataclass
class HealthMonitor:
    """Records what happens in an experiment, and emits each warning once.

    `reported` may be called in another thread than the other methods.
    """

    began: float
    budgets: Sequence[Budget] = ()
    patience: HealthThresholds = field(default_factory=HealthThresholds)

    def __post_init__(self) -> None:
        self._attempts: dict[str, _AttemptHealth] = {}
        self._unwritten = _Wait()
        self._nearly_spent: set[Spent] = set()

    def started(self, trial: str, step: int, now: float) -> None:
        """Record that an attempt begins after `step`."""
        self._attempts[trial] = _AttemptHealth(_Wait(now), journaled=step)

    def ended(self, trial: str) -> None:
        """Record that an attempt is over."""
        self._attempts.pop(trial, None)

    def reported(self, trial: str, step: int, now: float) -> None:
        """Record the report of a step."""
        if (attempt := self._attempts.get(trial)) is not None:
            attempt.reports.renew(now)
            if step > attempt.journaled:
                attempt.unwritten.begin(now)

    def journaled(self, trial: str, step: int) -> None:
        """Record that a trial's steps up to this one are in its journal."""
        if (attempt := self._attempts.get(trial)) is not None:
            attempt.journaled = step
            attempt.unwritten.end()

    def committed(self, trial: str, now: float) -> None:
        """Record a commit; from the second one on, the interval is known."""
        if (attempt := self._attempts.get(trial)) is not None:
            attempt.saves.renew(now)

    def queued(self, now: float) -> None:
        """Record that events wait for the experiment's journal."""
        self._unwritten.begin(now)

    def wrote(self) -> None:
        """Record that the experiment's journal has them."""
        self._unwritten.end()

    def look(self, now: float, trained_seconds: float = 0.0, ended_trials: int = 0) -> Iterator[ExperimentEvent]:
        """Yield the warnings that are due by now and were not emitted before."""
        for trial, attempt in self._attempts.items():
            reports, saves, unwritten = attempt.reports, attempt.saves, attempt.unwritten
            if (silent := reports.overdue(now, self.patience.limit(reports.longest))) is not None:
                yield TrialStalled(trial=trial, silent_seconds=silent)
            if attempt.may_lag and (late := saves.overdue(now, self.patience.limit(saves.longest))) is not None:
                yield SyncLagged(what="checkpoint", seconds=late, trial=trial)
            if (late := unwritten.overdue(now, self.patience.for_the_journal)) is not None:
                yield SyncLagged(what="journal", seconds=late, trial=trial)
        if (late := self._unwritten.overdue(now, self.patience.for_the_journal)) is not None:
            yield SyncLagged(what="journal", seconds=late, trial=None)
        yield from self._nearly_spent_budgets(now, trained_seconds, ended_trials)

    def _nearly_spent_budgets(self, now: float, trained_seconds: float, ended_trials: int) -> Iterator[ExperimentEvent]:
        spent = {"time": now - self.began, "training-time": trained_seconds, "trials": float(ended_trials)}
        for budget in self.budgets:
            if budget.what not in self._nearly_spent and budget.is_nearly(spent[budget.what]):
                self._nearly_spent.add(budget.what)
                yield BudgetNearlySpent(what=budget.what, spent=round(spent[budget.what], 1), budget=budget.most)


@dataclass
class Allowance:
    """A token bucket for events: `most` at once, and `per_second` in the long run."""

    most: float
    per_second: float
    _left: float = field(init=False)
    _at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._left = self.most

    def take(self, count: int, now: float) -> bool:
        """Return whether `count` more may be emitted now, and take their tokens if so."""
        self._left = min(self.most, self._left + max(0.0, now - self._at) * self.per_second)
        self._at = max(self._at, now)
        if self._left < count:
            return False
        self._left -= count
        return True
