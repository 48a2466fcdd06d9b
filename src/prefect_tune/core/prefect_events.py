"""The Prefect events of an experiment: the events of its journal by their types, and six with names of their own.

The journal is the truth: these events may get lost, and no decision depends on them. An event of the journal becomes
the Prefect event `prefect-tune.<its type>` with its fields as payload; `NOT_EMITTED` has the exceptions. What no
journal records is a class of this module: `name` is the event's name, the docstring says when it is emitted.
`docs/events.md` lists them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, Literal, TypeAlias

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import Losses, best_saved, losses_in
from prefect_tune.core.experiment.trial_transitions import ENDED, Trial, newest_checkpoint
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Event,
    Finished,
    GaveUp,
    Paused,
    Quarantined,
    Question,
    StopAsked,
    events_in,
)
from prefect_tune.core.reasons import code_of
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.shown_text import first_line
from prefect_tune.core.usage_records import GroupUse
from prefect_tune.core.values import Json, Metrics, Value, metric_in

# Track the best model of an experiment: the best of all commits, and of the last steps of ended trials.


class BestSoFar:
    """Compares each commit and each ended trial with the best before. Metrics are compared in order, as a tuple.

    Without an objective no result is better than another.
    """

    def __init__(self, objective: Objective | None, experiment: Experiment) -> None:
        """Args: experiment: its state before the first call of `committed` or `ended`, which sets the best so far."""
        self._objective = objective
        self._experiment = experiment.key
        known = [(losses, trial.trial) for trial in experiment.trials.values() for losses in self._all_of(trial)]
        best: tuple[Losses | None, str | None] = min(known, key=lambda each: each[0], default=(None, None))
        self._losses, self.trial = best
        """The trial of the best model; None where no trial can be compared."""

    def committed(self, trial: Trial) -> BestImproved | None:
        """Return the news if the trial's newest checkpoint is better than all models before; else None."""
        newest = newest_checkpoint(trial)
        if newest is None or not self._improves(trial.trial, newest.metrics):
            return None
        key = self._experiment.trial_key(trial.trial).checkpoint_key(newest)
        return self._improved(trial.trial, newest.step, newest.metrics, key.manifest_path)

    def ended(self, trial: Trial) -> BestImproved | None:
        """Return the news if the trial's last step, which may not be saved, is better than all before; else None."""
        if not self._improves(trial.trial, trial.metrics):
            return None
        return self._improved(trial.trial, trial.step, trial.metrics, None)

    def _all_of(self, trial: Trial) -> Iterator[Losses]:
        if self._objective is None:
            return
        reported = [each.metrics for each in trial.checkpoints] + ([trial.metrics] if trial.phase in ENDED else [])
        for metrics in reported:
            if (losses := losses_in(metrics, self._objective)) is not None:
                yield losses

    def _improves(self, trial: str, metrics: Metrics) -> bool:
        losses = None if self._objective is None else losses_in(metrics, self._objective)
        if losses is None or (self._losses is not None and losses >= self._losses):
            return False
        self._losses, self.trial = losses, trial
        return True

    def _improved(self, trial: str, step: int, metrics: Metrics, manifest: str | None) -> BestImproved:
        compared = () if self._objective is None else self._objective.metrics
        first = {name: metric_in(metrics, name) for name in compared}
        return BestImproved(trial=trial, step=step, metrics={**first, **metrics}, manifest=manifest)


def best_checkpoints(experiment: Experiment, objective: Objective | None) -> Mapping[str, int]:
    """Return the sequence of the best checkpoint of all, by its trial; of equally good ones each trial's first.

    The best model that `BestSoFar` announced last is among them, if it is saved. Empty without an objective.
    """
    if objective is None:
        return {}
    by_trial = {each.trial: best_saved(each.checkpoints, objective)[:1] for each in experiment.trials.values()}
    best = [(trial, ref, losses_in(ref.metrics, objective)) for trial, refs in by_trial.items() for ref in refs]
    least = min((losses for _, _, losses in best if losses is not None), default=None)
    return {trial: ref.sequence for trial, ref, losses in best if losses == least}


VERSION = 2
"""The version of the payloads: raised when a field is renamed or changes its meaning, not for a new field."""
NOT_EMITTED = frozenset(
    (
        *("absorbed", "decided", "opened", "reported", "trial-added"),
        *("claimed", "retired", "slot-freed"),
        *("adopted", "configured", "forked", "deletion"),
    )
)
"""Types of journal events that are not emitted: there are many of them, or only the journal needs them."""
LABELS = ("trial", "status", "cause", "reason_code", "kind", "kills", "what", "end")
"""Fields of a payload that are also labels of the event's resource: automations match labels, and no payload."""
_TEXT = 500
_ITEMS = 20


class ExperimentEvent(Value):
    """An event about an experiment that its journal does not record."""

    name: ClassVar[str]


class ExperimentStarted(ExperimentEvent):
    """A run starts the experiment, or resumes it."""

    name: ClassVar[str] = "prefect-tune.experiment.started"
    term: int
    """The number of the owner: 1 for the first run."""
    trials: Mapping[str, int]
    """The number of trials by status."""


class SyncLagged(ExperimentEvent):
    """Training is ahead of what is stored: the `journal`, or a trial's saves (`checkpoint`), lag behind."""

    name: ClassVar[str] = "prefect-tune.experiment.lag"
    what: str
    seconds: float
    trial: str | None


class TrialStalled(ExperimentEvent):
    """A trial is training, and has not reported for an unusually long time."""

    name: ClassVar[str] = "prefect-tune.experiment.stalled"
    trial: str
    silent_seconds: float


class BestImproved(ExperimentEvent):
    """A checkpoint or an ended trial is better than all before; emitted at most every 30 s, and at the end."""

    name: ClassVar[str] = "prefect-tune.experiment.best"
    trial: str
    step: int
    metrics: Metrics
    manifest: str | None
    """The path of the checkpoint's manifest; None where that step was not saved."""


class BudgetNearlySpent(ExperimentEvent):
    """80 % of a budget is spent: of `time` of this run, of `training-time` of all trials, or of `trials`."""

    name: ClassVar[str] = "prefect-tune.experiment.budget"
    what: str
    spent: float
    """Seconds, or the number of trials that have ended."""
    budget: float


class ExperimentEnded(ExperimentEvent):
    """This run has ended: `finished` with no trial left, `stopped`, `superseded` by another run, or `failed`."""

    name: ClassVar[str] = "prefect-tune.experiment.ended"
    end: str
    message: str
    """Why it ended before the experiment was finished; empty if it is finished."""
    trials: Mapping[str, int]
    best: str | None
    """The trial with the best model so far."""
    dropped: int
    """The number of events of trials that the rate limit left out."""


def event_name(event: Event) -> str:
    """Return the name of the Prefect event of a journal event: its type, but for reinstatements and questions."""
    match event:
        case Quarantined(quarantined=False):
            return "prefect-tune.reinstated"
        case AttemptEnded(question=Question()):
            return "prefect-tune.questioned"
        case _:
            return f"prefect-tune.{event.type}"


def emitted_in(event: Event) -> Iterator[Event]:
    """Yield the events to emit for an event of the journal, and for those that it absorbs."""
    return (each for each in events_in(event) if each.type not in NOT_EMITTED)


def payload_of(event: Event | ExperimentEvent, after: Trial | None = None) -> dict[str, object]:
    """Return an event's payload as JSON, with the version, and for the end of an attempt how the trial `after` it is.

    A reason is its sentence, for people, and `reason_code`, for conditions; the code is None for a text of the user's.
    Texts are cut to their first line and 500 characters, lists and tables to 20 items.
    """
    fields = event.model_dump(mode="json", exclude={"type"})
    if (reason := getattr(event, "reason", None)) is not None:
        fields |= {"reason": str(reason), "reason_code": code_of(reason)}
    if isinstance(use := getattr(event, "use", None), GroupUse):
        fields["use"] |= {"ends": [{**end.model_dump(), "how": str(end.how)} for end in use.ends]}
    if isinstance(event, StopAsked) and event.refused is not None:
        fields["refused"] = str(event.refused)
    if after is not None and isinstance(event, AttemptEnded | GaveUp | Finished | Paused):
        outcome = {"attempt", "step", "metrics", "wasted_steps", "wasted_at_least"}
        fields |= {"status": after.status.value, **after.model_dump(mode="json", include=outcome)}
    return {"version": VERSION, **{name: abbreviated(value) for name, value in fields.items()}}


def labels_of(payload: Mapping[str, object]) -> dict[str, str]:
    """Return the labels that an event's resource has for its payload; truth values are `true` and `false`."""
    known = {name: payload[name] for name in LABELS if payload.get(name) is not None}
    words = {name: str(each).lower() if isinstance(each, bool) else str(each) for name, each in known.items()}
    return {f"prefect-tune.{name}": word for name, word in words.items()}


def short(text: str) -> str:
    """Return the first line of a text, cut to 500 characters."""
    line = first_line(text)
    return line if len(line) <= _TEXT else f"{line[: _TEXT - 1]}…"


def abbreviated(value: Json) -> Json:
    """Return a JSON value with texts made `short`, and the first 20 items of each list and table."""
    match value:
        case str():
            return short(value)
        case dict():
            return {name: abbreviated(each) for name, each in islice(value.items(), _ITEMS)}
        case list():
            return [abbreviated(each) for each in value[:_ITEMS]]
        case _:
            return value


# Health warnings of a running experiment: silent trials, lagging saves or journals, budgets nearly spent.
#
# No decision depends on them. The caller passes times, in seconds of a monotonic clock.

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
