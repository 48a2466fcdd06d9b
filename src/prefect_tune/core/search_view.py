"""The live view of a search: its attempts with their newest reports, counts, the best trial, curves and costs.

Each event is applied once, to one `SearchView`. The view feeds the table, notebooks, reports, log lines, the live
status, and Prefect's artifacts and events. It has no effect on decisions or resumes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import Losses, compute_losses, objective_from_settings
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointCloned,
    CheckpointCommitted,
    Entry,
    Event,
    ExperimentConfigured,
    Owner,
    OwnerChanged,
    StepReported,
    TrialAdded,
    TrialErrored,
    TrialFinished,
    TrialPaused,
)
from prefect_tune.core.metrics import is_number
from prefect_tune.core.usage_records import GroupUsage, RankEnd
from prefect_tune.core.values import StepReport, iter_leaves, parse_time

_OBJECTIVE_COUNT = 4
"""Without an objective, this many metrics have large panels: the first numbers of the first report that has any."""
_OTHER_METRIC_COUNT = 12
"""The number of other metrics that have curves. Only the names of further metrics are kept."""
_OTHER_POINT_COUNT = 24
_MAX_METRIC_NAMES = 1000
_EPOCH = datetime.fromtimestamp(0, UTC)


class Series:
    """Numbers by step. Of more than `max_points` points, only the first, the last and every second (fourth, …) stay."""

    __slots__ = ("_max_points", "_points_since_kept", "_steps", "_stride", "_values")

    def __init__(self, *, max_points: int = 96) -> None:
        self._max_points = max_points
        self._steps = array("d")
        self._values = array("d")
        self._stride = 1
        self._points_since_kept = 1

    def add_point(self, step: float, value: float) -> None:
        """Add a number, if its step is later than the last step. To replace steps, call `truncate_after` first."""
        if self._steps and step <= self._steps[-1]:
            return
        if self._points_since_kept < self._stride and len(self._steps) > 1:
            self._points_since_kept += 1
            self._steps[-1], self._values[-1] = step, value
            return
        self._points_since_kept = 1
        self._steps.append(step)
        self._values.append(value)
        if len(self._steps) > self._max_points:  # the number of points is odd here, so `[::2]` keeps the last
            self._steps, self._values = self._steps[::2], self._values[::2]
            self._stride *= 2
            self._points_since_kept = self._stride

    def truncate_after(self, step: float) -> None:
        """Remove the points after `step`."""
        kept = bisect_right(self._steps, step)
        if kept < len(self._steps):
            del self._steps[kept:], self._values[kept:]
            self._points_since_kept = self._stride

    def list_points(self) -> Sequence[tuple[float, float]]:
        return list(zip(self._steps, self._values, strict=True))


def select_numeric_metrics(metrics: Mapping[str, object]) -> Mapping[str, float]:
    """Return the metrics that are numbers; a chart can show only these."""
    leaves = iter_leaves(metrics)
    return {name: float(value) for name, value in leaves if isinstance(value, int | float) and is_number(value)}


class RunCounts(NamedTuple):
    """What a run has done so far."""

    reports: int = 0
    steps: int = 0
    """Trained steps; repeated steps count again."""
    ended_attempts: int = 0


@dataclass(frozen=True, slots=True)
class OwnershipPeriod:
    """The time during which one run owned the experiment."""

    term: int
    owner: Owner
    began_at: datetime
    last_entry_at: datetime
    """The time of the run's last journal entry."""
    trial_count: int = 0
    """The number of trials that the run added."""
    sample_count: int = 0
    """The number of samples that the user requested in addition to the samples of earlier runs."""


@dataclass(frozen=True, slots=True)
class AttemptPeriod:
    """One attempt of a trial, with its times."""

    trial: str
    attempt: int
    began_at: datetime
    from_step: int
    step: int
    """The last step that the attempt reported; `from_step` before its first report."""
    owner: Owner | None
    last_event_at: datetime
    is_earlier: bool = False
    """Whether an earlier run started the attempt."""
    is_abandoned: bool = False
    """Whether another owner took over before the attempt's end was known. The last event then counts as the end."""
    report: StepReport | None = None
    """The newest report while the attempt runs; None before its first report, and after its end."""
    reported_at: datetime | None = None
    longest_gap_seconds: float | None = None
    """The longest time between two consecutive reports, or before the first report."""
    ended_at: datetime | None = None
    status: Status = Status.RUNNING
    """The status for charts; `COMPLETED` after every `TrialFinished`, even of a pruned trial. See `_STATUS_AFTER`."""
    is_lost: bool = False
    """Whether the attempt ended because its machine, its target or its run failed."""
    rank_ends: Sequence[RankEnd] = ()
    """How those ranks ended whose end differed from that of the other ranks."""

    @property
    def is_running(self) -> bool:
        return self.ended_at is None and not self.is_abandoned


@dataclass(frozen=True, slots=True)
class StorageCosts:
    """Committed and uploaded bytes. The uploaded bytes of adopted commits are unknown."""

    commit_count: int = 0
    committed_bytes: int = 0
    measured_bytes: int = 0
    """The committed bytes, but only of the commits whose uploaded bytes and upload time are known."""
    sent_bytes: int = 0
    upload_seconds: float = 0.0
    cloned_bytes: int = 0
    """The size of cloned checkpoints. A clone uploads no bytes."""


@dataclass(frozen=True, slots=True)
class SearchSnapshot:
    """The state of a `SearchView` at some time."""

    experiment: Experiment
    running: Mapping[str, AttemptPeriod] = field(default_factory=dict)
    """The running attempts, by trial."""
    counts: RunCounts = field(default_factory=RunCounts)
    """The counts of this run."""
    metrics: tuple[str, ...] = ()
    """The names of the objective's metrics; without an objective, of the first four reported numbers."""
    other_metrics: tuple[str, ...] = ()
    """The names of the first twelve other reported numbers."""
    metric_count: int = 0
    """The number of reported metrics, including metrics without curves."""
    curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]] = field(default_factory=dict)
    """The points of a `Series`, by trial and metric."""
    attempts: Sequence[AttemptPeriod] = ()
    ownerships: Sequence[OwnershipPeriod] = ()
    costs: StorageCosts = StorageCosts()
    is_complete: bool = True
    """Whether the view covers the journal from the first entry."""

    def get_newest_report(self, trial: str) -> StepReport | None:
        """Return the newest report of the trial's running attempt; None without a report."""
        return self.running[trial].report if trial in self.running else None


_STATUS_AFTER: Mapping[type[Event] | Cause, Status] = {
    TrialFinished: Status.COMPLETED,
    TrialPaused: Status.PAUSED,
    Cause.PREEMPTED: Status.INTERRUPTED,
    Cause.MACHINE: Status.INTERRUPTED,
}
"""The status after an attempt, by the event that ended it or by its cause; `ERRORED` for other events and causes."""


class SearchView:
    """Applies the events of an experiment in order. Not thread-safe.

    The view needs about 1 KiB per trial and metric, however long the experiment runs.
    """

    def __init__(self, experiment: Experiment) -> None:
        """Begin without events; `begin_run` adds the attempts that are already running."""
        self._experiment = experiment
        self._objective = objective_from_settings(experiment.settings)
        self._metrics = self._objective.metrics if self._objective else ()
        self._other_metrics: dict[str, None] = {}
        self._curves: dict[str, dict[str, Series]] = {}
        self._attempts: list[AttemptPeriod] = []
        self._newest: dict[str, int] = {}  # by trial: the index of its newest attempt in `_attempts`
        self._running_trials: dict[str, None] = {}
        self._supervisors: dict[str, Owner] = {}  # of attempts on other machines, by trial
        self._ownerships: list[OwnershipPeriod] = []
        self._costs = StorageCosts()
        self._counts = RunCounts()
        self._run_began = _EPOCH
        self._is_complete = True
        self._losses: dict[str, tuple[Losses, bool]] = {}  # of each trial's last report, and whether it was inherited
        self._best: tuple[str, Losses] | None = None  # None if a change may have made it invalid: see `best`

    def begin_run(self, at: datetime) -> None:
        """Begin the present owner's run: restart the counts, and compare trials by the last report in their state."""
        experiment, self._run_began, self._counts = self._experiment, at, RunCounts()
        if not self._ownerships:
            self._is_complete = not (experiment.trials or experiment.extensions)
        if experiment.owner is not None and (not self._ownerships or self._ownerships[-1].term != experiment.term):
            self._ownerships.append(OwnershipPeriod(experiment.term, experiment.owner, at, at))
        for trial in experiment.trials.values():
            self._refresh_losses(trial.id)
            index = self._newest.get(trial.id)
            if index is not None:
                self._attempts[index] = replace(self._attempts[index], is_earlier=True)
            elif trial.status is Status.RUNNING:
                step = trial.step
                self._add_attempt(AttemptPeriod(trial.id, trial.attempt, at, step, step, None, at, is_earlier=True))

    def apply_entry(self, entry: Entry) -> None:
        """Apply the next entry of the journal."""
        for event in entry.events:
            self.apply_event(event, parse_time(entry.at) or _EPOCH)

    def apply_event(self, event: Event, at: datetime, experiment: Experiment | None = None) -> None:
        """Apply the next event. `at` is the event's time; `experiment` is the state after it; None if unknown."""
        self._experiment, counts = experiment or self._experiment, self._counts
        self._dispatch_event(event, at)
        if experiment is not None and isinstance(
            event,
            TrialAdded | AttemptStarted | CheckpointCloned | AttemptEnded | TrialFinished | TrialPaused | TrialErrored,
        ):
            self._refresh_losses(event.trial)
        if at < self._run_began:
            self._counts = counts
        for index in range(len(self._ownerships) - 1, -1, -1):
            ownership = self._ownerships[index]
            if at >= ownership.began_at:  # this run, perhaps an earlier one, owned the experiment at that time
                self._ownerships[index] = replace(ownership, last_entry_at=max(ownership.last_entry_at, at))
                break

    def apply_report(self, trial: str, report: StepReport, at: datetime) -> None:
        """Apply a step's report, from the journal or from the live status. Ignore a report that was already applied."""
        if (attempt := self._find_running_attempt(trial)) is None or report.step <= attempt.step:
            return
        self._add_points(trial, report.step, report.metrics)
        # Do not count the steps that an earlier run's attempt trained before its first report in this run.
        step_count = 0 if attempt.is_earlier and attempt.report is None else report.step - attempt.step
        self._counts = self._counts._replace(reports=self._counts.reports + 1, steps=self._counts.steps + step_count)
        gap = (at - (attempt.reported_at or attempt.began_at)).total_seconds()
        longest = max(attempt.longest_gap_seconds or 0.0, gap)
        self._update_attempt(trial, step=report.step, report=report, reported_at=at, longest_gap_seconds=longest)
        if self._objective is not None:
            self._set_losses(trial, compute_losses(report.metrics, self._objective), is_inherited=False)

    def set_experiment(self, experiment: Experiment) -> None:
        """Set the state after a write of the journal. The state can include entries that non-owners have added."""
        self._experiment = experiment

    @property
    def best(self) -> tuple[str, Losses] | None:
        """The trial with the best last report, by the rule of `rank_trials`; None if no trial can be compared."""
        if self._best is None and self._losses:
            trials = (trial for trial in self._experiment.trials if trial in self._losses)  # in the order of proposal
            best = min(trials, key=self._losses.__getitem__)
            self._best = best, self._losses[best][0]
        return self._best

    @property
    def running(self) -> Mapping[str, AttemptPeriod]:
        """The running attempts, by trial."""
        return {trial: self._attempts[self._newest[trial]] for trial in self._running_trials}

    def take_snapshot(self, drawn: Collection[str] = ()) -> SearchSnapshot:
        """Return the present state, with the curves of the trials in `drawn`."""
        return SearchSnapshot(
            experiment=self._experiment,
            running=self.running,
            counts=self._counts,
            metrics=self._metrics,
            other_metrics=tuple(self._other_metrics)[:_OTHER_METRIC_COUNT],
            metric_count=len(self._metrics) + len(self._other_metrics),
            curves={
                trial: {name: series.list_points() for name, series in self._curves[trial].items()}
                for trial in drawn
                if trial in self._curves
            },
            attempts=tuple(self._attempts),
            ownerships=tuple(self._ownerships),
            costs=self._costs,
            is_complete=self._is_complete,
        )

    def _dispatch_event(self, event: Event, at: datetime) -> None:
        match event:
            case OwnerChanged():
                self._ownerships.append(OwnershipPeriod(event.term, event.owner, at, at))
                for trial in self._newest.keys() - self._supervisors.keys():
                    self._abandon_attempt(trial)
            case AttemptStarted():
                self._start_attempt(event, at)
            case StepReported():
                self.apply_report(event.trial, event.report, at)
                self._update_attempt(event.trial, last_event_at=at)
            case CheckpointCommitted():
                self._update_attempt(event.trial, last_event_at=at)
                self._add_commit_costs(event)
            case CheckpointCloned():
                copy = event.checkpoint
                self._costs = replace(self._costs, cloned_bytes=self._costs.cloned_bytes + copy.size_bytes)
                self._curves.pop(event.trial, None)
                self._add_points(event.trial, copy.step, copy.metrics)
            case AttemptEnded() | TrialFinished() | TrialPaused() | TrialErrored():
                if isinstance(use := getattr(event, "usage", None), GroupUsage):
                    self._update_attempt(event.trial, rank_ends=use.ends)
                end = event.cause if isinstance(event, AttemptEnded) else type(event)
                self._end_attempt(event.trial, end, at)
            case TrialAdded() if self._ownerships:
                period = self._ownerships[-1]
                self._ownerships[-1] = replace(period, trial_count=period.trial_count + 1)
            case ExperimentConfigured() if self._ownerships:
                period = self._ownerships[-1]
                samples = period.sample_count + sum(event.extensions.values())
                self._ownerships[-1] = replace(period, sample_count=samples)
            case _:
                pass

    def _find_running_attempt(self, trial: str) -> AttemptPeriod | None:
        index = self._newest.get(trial)
        return self._attempts[index] if index is not None and self._attempts[index].is_running else None

    def _update_attempt(self, trial: str, **changes: object) -> None:
        """Change the newest attempt of a trial, if the attempt has not ended."""
        index = self._newest.get(trial)
        if index is not None and self._attempts[index].ended_at is None:
            self._attempts[index] = replace(self._attempts[index], **changes)  # type: ignore[arg-type]  # its fields

    def _add_attempt(self, attempt: AttemptPeriod) -> None:
        self._newest[attempt.trial] = len(self._attempts)
        self._running_trials[attempt.trial] = None
        self._attempts.append(attempt)

    def _start_attempt(self, event: AttemptStarted, at: datetime) -> None:
        """Begin an attempt; if its machine's clock is behind, let it begin at the previous attempt's end."""
        trial, free_at = event.trial, _EPOCH
        self._end_attempt(trial, Cause.MACHINE, at)
        if (index := self._newest.get(trial)) is not None:
            free_at = self._attempts[index].ended_at or free_at
        began = max(parse_time(event.at or "") or at, free_at)
        if event.supervisor is None:
            self._supervisors.pop(trial, None)
        else:
            self._supervisors[trial] = event.supervisor
        owner = event.supervisor
        if owner is None and self._ownerships:
            owner = self._ownerships[-1].owner.model_copy(update={"task_run": event.task_run})
        self._add_attempt(AttemptPeriod(trial, event.attempt, began, event.from_step, event.from_step, owner, at))
        for series in self._curves.get(trial, {}).values():
            series.truncate_after(event.from_step)

    def _abandon_attempt(self, trial: str) -> None:
        if self._find_running_attempt(trial) is not None:
            self._update_attempt(trial, is_abandoned=True, report=None)
            del self._running_trials[trial]
            self._counts = self._counts._replace(ended_attempts=self._counts.ended_attempts + 1)

    def _end_attempt(self, trial: str, end: type[Event] | Cause, at: datetime) -> None:
        """End an attempt. An abandoned attempt ended at its last event, not when a later owner journaled its end."""
        index = self._newest.get(trial)
        if index is None or (attempt := self._attempts[index]).ended_at is not None:
            return
        ended = max(attempt.began_at, attempt.last_event_at if attempt.is_abandoned else at)
        self._abandon_attempt(trial)
        status = _STATUS_AFTER.get(end, Status.ERRORED)
        self._update_attempt(trial, ended_at=ended, status=status, is_lost=end is Cause.MACHINE)

    def _add_points(self, trial: str, step: int, metrics: Mapping[str, object]) -> None:
        numbers = select_numeric_metrics(metrics)
        self._metrics = self._metrics or tuple(numbers)[:_OBJECTIVE_COUNT]
        curves = self._curves.setdefault(trial, {})
        for name in numbers:
            if name not in self._metrics and len(self._other_metrics) < _MAX_METRIC_NAMES:
                self._other_metrics[name] = None
        for name in (*self._metrics, *islice(self._other_metrics, _OTHER_METRIC_COUNT)):
            if name in numbers:
                if name not in curves:
                    curves[name] = Series() if name in self._metrics else Series(max_points=_OTHER_POINT_COUNT)
                curves[name].add_point(step, numbers[name])

    def _add_commit_costs(self, event: CheckpointCommitted) -> None:
        costs, size_bytes = self._costs, event.checkpoint.size_bytes
        costs = replace(costs, commit_count=costs.commit_count + 1, committed_bytes=costs.committed_bytes + size_bytes)
        if event.sent_bytes is not None:
            costs = replace(
                costs,
                measured_bytes=costs.measured_bytes + size_bytes,
                sent_bytes=costs.sent_bytes + event.sent_bytes,
                upload_seconds=costs.upload_seconds + (event.upload_seconds or 0.0),
            )
        self._costs = costs

    def _refresh_losses(self, trial: str) -> None:
        """Set a trial's losses from the last report in its state, and compare the trial with the best trial."""
        if self._objective is not None and (state := self._experiment.trials.get(trial)) is not None:
            losses = compute_losses(state.metrics, self._objective)
            self._set_losses(trial, losses, is_inherited=state.has_inherited_report)

    def _set_losses(self, trial: str, losses: Losses | None, *, is_inherited: bool) -> None:
        if self._best is not None and (trial == self._best[0] or (losses is not None and losses <= self._best[1])):
            self._best = None
        if losses is None:
            self._losses.pop(trial, None)
        else:
            self._losses[trial] = losses, is_inherited
