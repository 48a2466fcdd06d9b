"""Compute the progress of a search from events and reports, and render it to fit the terminal."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prefect_tune.core.display_text import first_line, format_amount, format_duration, make_visible, shorten
from prefect_tune.core.experiment.summary import format_best_label, format_status, rank_trials
from prefect_tune.core.experiment.trial_transitions import (
    ENDED_PHASES,
    Phase,
    Status,
    Trial,
    apply_report,
    newest_checkpoint,
)
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Scheduler
from prefect_tune.core.schedulers.median_stopping import MedianStopping
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search_view import SearchSnapshot
from prefect_tune.core.values import StepReport, flatten, get_metric
from prefect_tune.terminal.formatting import (
    UNLIMITED_WIDTH,
    format_counts,
    format_trial,
    format_value,
    get_output_width,
    make_borderless_table,
    to_plain_cells,
)

_RATE_WINDOW = timedelta(seconds=15)
_MIN_ELAPSED = timedelta(seconds=1)


@dataclass(frozen=True)
class SearchExtent:
    """What is known about the extent of a search when the search starts."""

    experiment: str
    objective: Objective | None = None
    trial_count: int | None = None
    """The total number of trials, including trials of earlier runs."""
    max_steps: int | None = None
    """The maximum number of steps of a trial."""
    time_budget: timedelta | None = None
    """The time budget of this run."""
    is_training: bool = False
    """Whether this is a single training, not a search."""
    resumes_all_paused: bool = True
    """Whether the scheduler resumes every trial that it pauses."""


def resumes_all_paused_trials(scheduler: Scheduler | None) -> bool:
    """Return whether the scheduler is known to resume every trial that it pauses, even if only to end the trial."""
    if isinstance(scheduler, ASHA):
        return scheduler.variant == "stopping"
    return scheduler is None or isinstance(scheduler, FIFO | PBT | MedianStopping)


class Note(NamedTuple):
    """A log line about a trial."""

    logged_at: datetime
    text: str
    is_problem: bool = False


@dataclass(frozen=True)
class ProgressState:
    """The progress of a search at one time."""

    extent: SearchExtent
    elapsed: timedelta
    counts: Mapping[Status, int]
    reports_per_second: float = 0.0
    time_left: timedelta | None = None
    """Estimated from the remaining steps and this run's rate; at most the remaining time budget. None if unknown."""
    rungs: Mapping[int, int] = field(default_factory=dict)
    """The number of trials about which the scheduler has decided, by step."""
    running: Sequence[Trial] = ()
    """The running trials with their newest reports, in the order of proposal."""
    others: Sequence[Trial] = ()
    """The trials that are not running and can be compared, the best first."""
    best: Trial | None = None
    notes: Sequence[Note] = ()
    """The last log lines about trials, oldest first."""
    stop_reason: str = ""
    """Why the search ends early; empty if the search does not end early."""
    incomparable_count: int = 0
    """The number of completed trials that cannot be compared, since their last report lacks a metric of the search."""
    has_started_attempt: bool = True
    """Whether this run has started an attempt; still False at the end if all trials ended in earlier runs."""


class ProgressReader:
    """Reads the progress of a search, and tracks the rate of reports. Not thread-safe.

    The caller passes times in seconds of a monotonic clock.
    """

    def __init__(
        self, read: Callable[[], SearchSnapshot], extent: SearchExtent, notes: Sequence[Note], now: float
    ) -> None:
        """`notes` are the last log lines about trials, oldest first; each `read_state` reads this sequence again."""
        self._read = read
        self._extent = extent
        self._notes = notes
        self._began = now
        self._rates: deque[tuple[float, int]] = deque([(now, 0)])

    def read_state(self, now: float) -> ProgressState:
        """Return the current progress; this takes a few microseconds per trial."""
        snapshot = self._read()
        experiment = snapshot.experiment
        trials = list(experiment.trials.values())
        objective, elapsed = self._extent.objective, timedelta(seconds=now - self._began)
        newest = [
            apply_report(trial, snapshot.get_newest_report(trial.id)) if trial.phase is Phase.RUNNING else trial
            for trial in trials
        ]
        if objective is None:  # no trial is better than another, so the last proposed comes first
            best_first = [trial for trial in reversed(newest) if trial.phase in ENDED_PHASES]
        else:
            best_first = [trial for trial, _ in rank_trials(newest, objective)]
        others = [trial for trial in best_first if trial.phase is not Phase.RUNNING]
        events = (event for trial in trials for event in trial.policy_events)
        steps = (event.report.step for event in events if event.report and event.kind == "decided")
        time_left = None if experiment.stop_reason else self._estimate_time_left(elapsed, newest, snapshot.counts.steps)
        counts = Counter(trial.status for trial in trials)
        comparable_count = sum(trial.status is Status.COMPLETED for trial in others)
        return ProgressState(
            extent=self._extent,
            elapsed=elapsed,
            counts=counts,
            reports_per_second=self._update_rate(now, snapshot.counts.reports),
            time_left=time_left,
            rungs=dict(sorted(Counter(steps).items())),
            running=[trial for trial in newest if trial.phase is Phase.RUNNING],
            others=others,
            best=next(iter(best_first), None),
            notes=tuple(self._notes),
            stop_reason=str(experiment.stop_reason),
            incomparable_count=counts[Status.COMPLETED] - comparable_count if objective else 0,
            has_started_attempt=bool(snapshot.running or snapshot.counts.ended_attempts),
        )

    def _update_rate(self, now: float, reports: int) -> float:
        while len(self._rates) > 1 and now - self._rates[0][0] > _RATE_WINDOW.total_seconds():
            self._rates.popleft()
        window_start, earlier_reports = self._rates[0]
        self._rates.append((now, reports))
        return (reports - earlier_reports) / (now - window_start) if now > window_start else 0.0

    def _estimate_time_left(self, elapsed: timedelta, trials: Sequence[Trial], trained_steps: int) -> timedelta | None:
        """Return the time for the remaining steps at the rate of this run, but at most the remaining time budget."""
        time = self._extent.time_budget
        budget = None if time is None else max(timedelta(0), time - elapsed)
        if elapsed < _MIN_ELAPSED or not trained_steps:
            return budget
        try:
            steps = estimate_remaining_steps(trials, self._extent)
            seconds = None if steps is None else elapsed.total_seconds() * steps / trained_steps
            left = budget if seconds is None else timedelta(seconds=seconds)
        except OverflowError:  # so many steps are left that only the budget can end the search
            return budget
        return left if left is None or budget is None else min(left, budget)


def estimate_remaining_steps(trials: Sequence[Trial], extent: SearchExtent) -> float | None:
    """Estimate how many steps a search has left; return None if the number of trials or of their steps is unknown.

    Assumptions: a running trial trains up to the maximum step; a new trial trains as long as ended trials did on
    average; a waiting trial continues from its newest checkpoint. Also return None if a paused trial may never resume.
    """
    last_steps = [trial.step for trial in trials if trial.status in {Status.COMPLETED, Status.PRUNED}]
    new_trial_steps = fmean(last_steps) if last_steps else extent.max_steps
    max_steps = extent.max_steps or new_trial_steps
    if extent.trial_count is None or not (max_steps and new_trial_steps) or not extent.resumes_all_paused:
        return None
    steps = max(0, extent.trial_count - len(trials)) * new_trial_steps
    for trial in trials:
        if trial.phase not in ENDED_PHASES:
            checkpoint = newest_checkpoint(trial)
            step = trial.step if trial.phase is Phase.RUNNING else checkpoint.step if checkpoint else 0
            steps += max(0, max_steps - step)
    return steps


def compute_search_completion(
    trials: Collection[Trial], newest: Callable[[str], StepReport | None], extent: SearchExtent
) -> float | None:
    """Return the completed share of the search's training; None if the number of trials is unknown."""
    if extent.trial_count is None:
        return None
    done = sum(compute_trial_completion(trial, newest(trial.id), extent) for trial in trials)
    return min(1.0, done / max(1, extent.trial_count, len(trials)))


def compute_trial_completion(trial: Trial, report: StepReport | None, extent: SearchExtent) -> float:
    """Return the completed share of a trial's training; 1 if it has ended, or is paused and may never resume."""
    if trial.phase in ENDED_PHASES or (trial.phase is Phase.PAUSED and not extent.resumes_all_paused):
        return 1.0
    step, steps = max(trial.step, report.step if report else 0), extent.max_steps
    return min(1.0, step / steps) if steps else 0.0


# The trials of a search as a table that fits the terminal.

_COLUMN_GAP = 2
_MAX_CELL_WIDTH = 24


def make_trials_table(
    trials: Sequence[Trial],
    metrics: Sequence[str],
    more: Mapping[str, list[str]] = MappingProxyType({}),
    *,
    width: int | None = None,
    styles: Mapping[Status, str] = MappingProxyType({}),
) -> tuple[Table, str]:
    """Return a table with a row per trial, and a line that names the hidden parameters ("" if none are hidden).

    The columns are the metrics, the columns in `more`, and the parameters that differ between trials; a parameter that
    does not fit into `width` (default: the width of stdout) is hidden. `styles` are the Rich styles of rows, by status.
    """
    names, rows, hidden = fit_columns(trials, metrics, width or get_output_width(), more)
    table = make_borderless_table()
    for name in names:
        table.add_column(Text(make_visible(name)), no_wrap=True)
    for trial, row in zip(trials, rows, strict=True):
        table.add_row(*to_plain_cells(row), style=styles.get(trial.status, ""))
    note = f"hidden, for lack of room: {', '.join(hidden)}; a wider terminal or a pipe shows all columns"
    return table, make_visible(note) if hidden else ""


def fit_columns(
    trials: Sequence[Trial], metrics: Sequence[str], width: int, more: Mapping[str, list[str]] = MappingProxyType({})
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return column names and rows that fit into `width` if possible, and the names of the hidden parameters.

    A column's name gets a prefix if another column already has this name.
    """
    columns: dict[str, list[str]] = {
        "trial": [trial.id for trial in trials],
        "status": [format_status(trial.status, trial.step) for trial in trials],
        "step": [str(trial.step) for trial in trials],
    }
    for name in metrics:
        cells = [_format_on_one_line(get_metric(trial.metrics, name)) for trial in trials]
        columns[f"metrics/{name}" if name in columns else name] = cells
    for name, cells in more.items():
        columns[f"trial's {name}" if name in columns else name] = cells
    used, hidden = sum(_measure_column(name, cells) + _COLUMN_GAP for name, cells in columns.items()) - _COLUMN_GAP, []
    configuration = _select_differing_parameters(trials, width if width >= UNLIMITED_WIDTH else _MAX_CELL_WIDTH)
    for name, cells in configuration.items():
        column_width = _measure_column(name, cells) + _COLUMN_GAP
        if used + column_width <= width:
            used += column_width
            columns[f"config/{name}" if name in columns else name] = cells
        else:
            hidden.append(name)
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)], hidden


def format_config(trial: Trial) -> str:
    """Return a configuration on one line, with shortened values."""
    parameters = _select_differing_parameters([trial], _MAX_CELL_WIDTH)
    return ", ".join(f"{name} {cells[0]}" for name, cells in parameters.items())


def _measure_column(name: str, cells: Sequence[str]) -> int:
    return max(len(name), *map(len, cells), 0)


def _select_differing_parameters(trials: Sequence[Trial], max_width: int) -> Mapping[str, list[str]]:
    """Return the parameters that differ between the trials; all parameters for a single trial."""
    configs = [flatten(trial.config) for trial in trials]
    columns: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for config in configs for name in config):
        cells = [shorten(_format_on_one_line(config.get(name)), max_width) for config in configs]
        if len(set(cells)) > 1 or len(cells) == 1:
            columns[name] = cells
    return columns


def _format_on_one_line(value: object) -> str:
    return " ".join(format_value(value).split())


def find_metric_names(trials: Sequence[Trial]) -> Sequence[str]:
    """Return the names of the metrics of the first trial that has reported any."""
    return next((tuple(trial.metrics) for trial in trials if trial.metrics), ())


# Render the progress as facts, as a table for a terminal, and as a line for a log.

_MAX_ROWS = 16
_MAX_NOTES = 5
_MAX_RUNGS = 8
_HEADER_LINE_COUNT = 8  # the lines that show neither trials nor notes
_STATUS_STYLES = {
    Status.RUNNING: "green",
    Status.ERRORED: "red",
    Status.INTERRUPTED: "yellow",
    Status.PAUSED: "cyan",
    Status.PRUNED: "dim",
    Status.PENDING: "dim",
}


def render_progress(state: ProgressState, width: int, height: int) -> RenderableType:
    """Render the progress for a terminal of `width` columns and `height` lines. The last line stays free.

    A third of the rows is reserved for the best trials that are not running; the remaining rows show running trials.
    For a single training there are no rows, since the facts describe the training.
    """
    room = max(0, height - 1 - _HEADER_LINE_COUNT)
    notes = state.notes[-min(_MAX_NOTES, room // 3) :] if room >= 3 else ()
    row_count = 0 if state.extent.is_training else min(_MAX_ROWS, room - len(notes))
    other_count = min(len(state.others), max(row_count // 3, row_count - len(state.running)))
    rows = [*state.running[: row_count - other_count], *state.others[:other_count]] if row_count > 0 else []
    title = Text.assemble((state.extent.experiment, "bold"), f"  {format_duration(state.elapsed)}")
    if left := _format_time_left(state):
        title.append(make_visible(f", {left}"))
    if rate := _format_rate(state):
        title.append(f"  {rate}", "dim")
    facts = collect_progress_facts(state).items()
    lines = (Text.assemble((f"{name:<8}", "dim"), make_visible(text)) for name, text in facts)
    parts: list[RenderableType] = [title, *lines]
    if rows:
        objective = state.extent.objective
        metrics = objective.metrics if objective else find_metric_names(rows)
        table, hidden = make_trials_table(rows, metrics, width=width, styles=_STATUS_STYLES)
        parts += [Text(), table]
        if hidden and len(rows) + len(notes) < room:
            parts.append(Text(hidden, style="dim"))
    if notes:
        parts.append(Text())
    for note in notes:
        text = (make_visible(note.text), "red" if note.is_problem else "")
        parts.append(Text.assemble((note.logged_at.strftime("%H:%M:%S"), "dim"), "  ", text))
    for part in parts:
        if isinstance(part, Text):  # truncate instead of wrapping
            part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


def render_progress_line(state: ProgressState) -> str:
    """Return the progress as one line for the log."""
    facts, elapsed = collect_progress_facts(state), format_duration(state.elapsed)
    objective = state.extent.objective
    if state.extent.is_training:
        metrics = f", {facts['metrics']}" if "metrics" in facts else ""
        parts = [f"step {facts['step']}{metrics} after {elapsed}"]
        if state.running:
            parts += [_format_rate(state), _format_time_left(state)]
        if "saved" in facts:
            parts.append(f"saved: {facts['saved']}")
    else:
        parts = [f"{facts['trials']} after {elapsed}"]
        if state.running:
            parts.append(_format_time_left(state))
        if state.incomparable_count and objective is not None:
            parts.append(f"{state.incomparable_count} without {', '.join(objective.metrics)} in the last report")
        if state.best is not None and objective is not None:
            parts.append(f"{format_best_label(objective)}: {format_trial(state.best, objective.metrics)}")
    return f"{state.extent.experiment}: {'; '.join(filter(None, parts))}"


def collect_progress_facts(state: ProgressState) -> Mapping[str, str]:
    """Return the facts above the table of trials: counts, rungs, and the best trial with its configuration.

    The facts of a single training are its step, metrics, newest checkpoint and configuration.
    """
    if state.extent.is_training:
        return _collect_training_facts(state)
    counts = {str(status): state.counts[status] for status in Status if state.counts.get(status)}
    facts = {"trials": format_counts(counts)}
    if (trial_count := state.extent.trial_count) is not None:
        # There are more trials than `trial_count` if an earlier run had a larger `num_samples`.
        facts["trials"] += f" of {max(trial_count, sum(state.counts.values()))}"
    if state.rungs:
        rungs = [f"{count} at step {step}" for step, count in state.rungs.items()]
        if len(rungs) > _MAX_RUNGS:
            rungs[_MAX_RUNGS // 2 : -_MAX_RUNGS // 2] = ["…"]
        facts["rungs"] = ", ".join(rungs)
    best, objective = state.best, state.extent.objective
    if best is not None and objective is not None:
        inherited = ", inherited from a cloned checkpoint" if best.has_inherited_report else ""
        facts[format_best_label(objective)] = f"{format_trial(best, objective.metrics)} at step {best.step}{inherited}"
        facts[""] = format_config(best)
    return facts


def _collect_training_facts(state: ProgressState) -> Mapping[str, str]:
    trial = next(iter((*state.running, *state.others)), None)
    if trial is None:
        return {"step": "none yet"}
    total = f" of {state.extent.max_steps}" if state.extent.max_steps else ""
    attempt = f", attempt {trial.attempt}" if trial.attempt > 1 else ""
    status = "" if trial.status is Status.RUNNING else f", {trial.status}"
    newest = newest_checkpoint(trial)
    facts = {
        "step": f"{trial.step}{total}{attempt}{status}",
        "metrics": format_value(flatten(trial.metrics)),
        "saved": f"step {newest.step}" if newest else "",
        "config": format_config(trial),
    }
    return {name: text for name, text in facts.items() if text}


def _format_rate(state: ProgressState) -> str:
    """Return the rate of a training's steps, or of a search's reports; empty before the first report."""
    unit = "steps/s" if state.extent.is_training else "reports/s"
    return f"{format_amount(state.reports_per_second)} {unit}" if state.reports_per_second else ""


def _format_time_left(state: ProgressState) -> str:
    """Describe the estimated time left, or why the search ends early; empty if neither is known."""
    if state.stop_reason:
        return f"ending: {first_line(state.stop_reason)}"
    return "" if state.time_left is None else f"about {format_duration(state.time_left)} left"
