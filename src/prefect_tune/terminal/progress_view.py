"""The progress of a search: its state, from the events and reports of the run, and as much of it as fits a terminal."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prefect_tune.core.experiment.summary import best_label, named, ranked
from prefect_tune.core.experiment.trial import status_label
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Status, Trial, newest_checkpoint, with_report
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Scheduler
from prefect_tune.core.schedulers.median_stopping import MedianStopping
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search_view import SearchSnapshot
from prefect_tune.core.shown_text import first_line, format_duration, shown_amount, visible
from prefect_tune.core.values import StepReport, flat, metric_in
from prefect_tune.terminal.formatting import (
    UNLIMITED_WIDTH,
    borderless_table,
    format_counts,
    format_value,
    output_width,
    plain_cells,
)

_RATE_OVER = timedelta(seconds=15)
_TOO_EARLY = timedelta(seconds=1)


@dataclass(frozen=True)
class SearchEstimate:
    """The expected extent of a search, as far as it is known at its start."""

    experiment: str
    objective: Objective | None = None
    trial_count: int | None = None
    """Total number of trials, including those of earlier runs."""
    step_count: int | None = None
    """The most steps that a trial trains."""
    time: timedelta | None = None
    """The time budget of this run."""
    is_training: bool = False
    """Whether it is a single training, not a search."""
    resumes_paused: bool = True
    """Whether the scheduler resumes every trial that it pauses, as in a population that takes turns."""


def resumes_paused(scheduler: Scheduler | None) -> bool:
    """Return whether a scheduler is known to resume every trial that it pauses, if only to end it."""
    if isinstance(scheduler, ASHA):
        return scheduler.variant == "stopping"
    return scheduler is None or isinstance(scheduler, FIFO | PBT | MedianStopping)


class Note(NamedTuple):
    """A line of the log on a trial."""

    at: datetime
    text: str
    is_bad: bool = False


@dataclass(frozen=True)
class ProgressState:
    """A running search at one moment."""

    outlook: SearchEstimate
    elapsed: timedelta
    counts: Mapping[Status, int]
    reports_per_second: float = 0.0
    time_left: timedelta | None = None
    """The remaining steps at the pace of this run, or the rest of the time budget; None if unknown."""
    rungs: Mapping[int, int] = field(default_factory=dict)
    """How many trials the scheduler has judged, by step."""
    running: Sequence[Trial] = ()
    """Running trials with their newest reports, in the order of proposal."""
    others: Sequence[Trial] = ()
    """Trials that do not run and can be compared, the best first."""
    best: Trial | None = None
    notes: Sequence[Note] = ()
    """The last events, oldest first."""
    ended_because: str = ""
    """Why the search ends early; empty while it does not."""
    lacking_count: int = 0
    """The number of completed trials that cannot be compared: their last report lacks a metric of the search."""
    has_trained: bool = True
    """Whether this run has started an attempt; if not, every trial had ended before it."""


class ProgressReader:
    """Reads the progress of a search from its view, and remembers how fast reports came; for one thread.

    The caller passes the times, in seconds of a monotonic clock.
    """

    def __init__(
        self, read: Callable[[], SearchSnapshot], outlook: SearchEstimate, notes: Sequence[Note], now: float
    ) -> None:
        """Args: notes: the last lines of the log, oldest first; they may change."""
        self._read = read
        self._outlook = outlook
        self._notes = notes
        self._began = now
        self._rates: deque[tuple[float, int]] = deque([(now, 0)])

    def state(self, now: float) -> ProgressState:
        """Return the current progress; takes a few microseconds per trial."""
        snapshot = self._read()
        experiment = snapshot.experiment
        trials = list(experiment.trials.values())
        outlook, elapsed = self._outlook, timedelta(seconds=now - self._began)
        objective = outlook.objective
        newest = [
            with_report(each, snapshot.newest(each.trial)) if each.phase is Phase.RUNNING else each for each in trials
        ]
        best_first = _best_first(newest, objective)
        others = [each for each in best_first if each.phase is not Phase.RUNNING]
        counts = Counter(each.status for each in trials)
        compared = sum(each.status is Status.COMPLETED for each in others)
        return ProgressState(
            outlook=outlook,
            elapsed=elapsed,
            counts=counts,
            reports_per_second=self._rate(now, snapshot.counts.reports),
            time_left=None if experiment.ends else self._time_left(elapsed, newest, snapshot.counts.steps),
            rungs=rungs_of(trials),
            running=[each for each in newest if each.phase is Phase.RUNNING],
            others=others,
            best=next(iter(best_first), None),
            notes=tuple(self._notes),
            ended_because=str(experiment.ends),
            lacking_count=counts[Status.COMPLETED] - compared if objective else 0,
            has_trained=bool(snapshot.running or snapshot.counts.ended_attempts),
        )

    def _rate(self, now: float, reports: int) -> float:
        while len(self._rates) > 1 and now - self._rates[0][0] > _RATE_OVER.total_seconds():
            self._rates.popleft()
        since, before = self._rates[0]
        self._rates.append((now, reports))
        return (reports - before) / (now - since) if now > since else 0.0

    def _time_left(self, elapsed: timedelta, trials: Sequence[Trial], trained_steps: int) -> timedelta | None:
        """Return the time of the remaining steps at the pace of this run, or the rest of the time budget if shorter."""
        time = self._outlook.time
        budget = None if time is None else max(timedelta(0), time - elapsed)
        if elapsed < _TOO_EARLY or not trained_steps:
            return budget
        try:
            steps = remaining_steps(trials, self._outlook)
            seconds = None if steps is None else elapsed.total_seconds() * steps / trained_steps
            left = budget if seconds is None else timedelta(seconds=seconds)
        except OverflowError:  # so large a number of steps is no limit: something else ends the search
            return budget
        return left if left is None or budget is None else min(left, budget)


def rungs_of(trials: Iterable[Trial]) -> Mapping[int, int]:
    """Return how many trials the scheduler has judged, by step."""
    judged = (past.report.step for trial in trials for past in trial.past if past.report and past.what == "decided")
    return dict(sorted(Counter(judged).items()))


def remaining_steps(trials: Sequence[Trial], estimate: SearchEstimate) -> float | None:
    """Return the number of steps that a search has left; None if the number of its trials or steps is unknown.

    Running trials train `step_count` steps, and new ones as many as those that have ended did on average. Steps after
    a waiting trial's newest checkpoint are trained again. If only some of the trials that pause resume, it is unknown.

    Args:
        trials: all trials so far, each running one with its newest report.
        estimate: the extent of the search.
    """
    last_steps = [trial.step for trial in trials if trial.status in {Status.COMPLETED, Status.PRUNED}]
    steps_of_new = fmean(last_steps) if last_steps else estimate.step_count
    step_count = estimate.step_count or steps_of_new
    if estimate.trial_count is None or not (step_count and steps_of_new) or not estimate.resumes_paused:
        return None
    steps = max(0, estimate.trial_count - len(trials)) * steps_of_new
    for trial in trials:
        if trial.phase not in ENDED:
            checkpoint = newest_checkpoint(trial)
            step = trial.step if trial.phase is Phase.RUNNING else checkpoint.step if checkpoint else 0
            steps += max(0, step_count - step)
    return steps


def _best_first(trials: Sequence[Trial], objective: Objective | None) -> Sequence[Trial]:
    """Return the comparable trials, the best first; without an objective, the last ones that ended."""
    if objective is None:
        return [each for each in reversed(trials) if each.phase in ENDED]
    return [each for each, _ in ranked(trials, objective)]


def share_of_search(
    trials: Collection[Trial], newest: Callable[[str], StepReport | None], outlook: SearchEstimate
) -> float | None:
    """Return the share of the search's training that is done; None if its number of trials is unknown."""
    if outlook.trial_count is None:
        return None
    done = sum(share_of_trial(each, newest(each.trial), outlook) for each in trials)
    return min(1.0, done / max(1, outlook.trial_count, len(trials)))


def share_of_trial(trial: Trial, report: StepReport | None, outlook: SearchEstimate) -> float:
    """Return the share of the trial's training that is done; a paused one counts as done unless all are resumed."""
    if trial.phase in ENDED or (trial.phase is Phase.PAUSED and not outlook.resumes_paused):
        return 1.0
    step, steps = max(trial.step, report.step if report else 0), outlook.step_count
    return min(1.0, step / steps) if steps else 0.0


# The trials of a search as a table that fits its terminal.

_GAP = 2
_WIDEST_CELL = 24


def trials_table(
    trials: Sequence[Trial],
    metrics: Sequence[str],
    more: Mapping[str, list[str]] = MappingProxyType({}),
    *,
    width: int | None = None,
    styles: Mapping[Status, str] = MappingProxyType({}),
) -> tuple[Table, str]:
    """Return a table with a row per trial: metrics, the columns `more`, and the differing parameters that fit.

    With it comes a line that names the parameters that do not fit; empty if all do. `width` is that of stdout by
    default; `styles` are Rich's styles of rows.
    """
    names, rows, hidden = cells_of(trials, metrics, width or output_width(), more)
    table = borderless_table()
    for name in names:
        table.add_column(Text(visible(name)), no_wrap=True)
    for trial, row in zip(trials, rows, strict=True):
        table.add_row(*plain_cells(row), style=styles.get(trial.status, ""))
    return table, hidden_columns_note(hidden, "a wider terminal or a pipe has all columns")


def cells_of(
    trials: Sequence[Trial], metrics: Sequence[str], width: int, more: Mapping[str, list[str]] = MappingProxyType({})
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return column names and rows that are no wider than `width` if that is possible, and the hidden parameters."""
    kept: dict[str, list[str]] = {
        "trial": [each.trial for each in trials],
        "status": [status_label(each.status, each.step) for each in trials],
        "step": [str(each.step) for each in trials],
    }
    for name in metrics:
        kept[_free(name, kept, "metrics/")] = [_on_one_line(metric_in(each.metrics, name)) for each in trials]
    for name, cells in more.items():
        kept[_free(name, kept, "trial's ")] = cells
    used, hidden = sum(_width(name, cells) + _GAP for name, cells in kept.items()) - _GAP, []
    for name, cells in _configuration(trials, math.inf if width >= UNLIMITED_WIDTH else _WIDEST_CELL).items():
        column_width = _width(name, cells) + _GAP
        if used + column_width <= width:
            used += column_width
            kept[_free(name, kept, "config/")] = cells
        else:
            hidden.append(name)
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)], hidden


def hidden_columns_note(hidden: Sequence[str], where: str) -> str:
    """Return which parameters a table has no room for, and where they are shown; empty if it has all."""
    return visible(f"hidden, for lack of room: {', '.join(hidden)}; {where}") if hidden else ""


def _free(name: str, taken: Collection[str], prefix: str) -> str:
    """Return `name`, or with a prefix if another column has it."""
    return f"{prefix}{name}" if name in taken else name


def config_cells(trial: Trial) -> Sequence[tuple[str, str]]:
    """Return the names and values of a configuration, each short."""
    return [(name, cells[0]) for name, cells in _configuration([trial]).items()]


def _width(name: str, cells: Sequence[str]) -> int:
    return max(len(name), *map(len, cells), 0)


def _configuration(trials: Sequence[Trial], widest: float = _WIDEST_CELL) -> Mapping[str, list[str]]:
    """Return the parameters that differ between the trials; all parameters for a single trial."""
    configs = [flat(each.config) for each in trials]
    names = dict.fromkeys(name for config in configs for name in config)
    found = {name: [_short(_on_one_line(config.get(name)), widest) for config in configs] for name in names}
    return {name: cells for name, cells in found.items() if len(set(cells)) > 1 or len(cells) == 1}


def _on_one_line(value: object) -> str:
    return " ".join(format_value(value).split())


def _short(text: str, widest: float) -> str:
    return text if len(text) <= widest else f"{text[: _WIDEST_CELL - 1]}…"


_MOST_ROWS = 16
_MOST_NOTES = 5
_HEAD = 8  # lines of everything that is neither a trial nor an event
_STYLES = {
    Status.RUNNING: "green",
    Status.ERRORED: "red",
    Status.INTERRUPTED: "yellow",
    Status.PAUSED: "cyan",
    Status.PRUNED: "dim",
    Status.PENDING: "dim",
}
_LONG_RUNGS = 8


def frame(state: ProgressState, width: int, height: int) -> RenderableType:
    """Render for a terminal of `width` columns and `height` lines, leaving its last line free."""
    room = max(0, height - 1 - _HEAD)
    notes = state.notes[-min(_MOST_NOTES, room // 3) :] if room >= 3 else ()
    rows = chosen_trials(state, min(_MOST_ROWS, room - len(notes)))
    parts: list[RenderableType] = [_cut(each) for each in _head(state)]
    if rows:
        objective = state.outlook.objective
        metrics = objective.metrics if objective else common_metrics(rows)
        table, hidden = trials_table(rows, metrics, width=width, styles=_STYLES)
        parts += [Text(), table]
        if hidden and len(rows) + len(notes) < room:
            parts.append(_cut(Text(hidden, style="dim")))
    if notes:
        parts += [Text(), *map(_note_text, notes)]
    return Group(*parts)


def line(state: ProgressState) -> str:
    """Return the progress as one line, for a log."""
    if state.outlook.is_training:
        return f"{state.outlook.experiment}: {'; '.join(_of_training(state))}"
    parts = [f"{_trial_counts(state)} after {format_duration(state.elapsed)}"]
    if state.running and (left := format_time_left(state)):
        parts.append(left)
    if state.lacking_count and state.outlook.objective is not None:
        parts.append(f"{state.lacking_count} without {', '.join(state.outlook.objective.metrics)} in the last report")
    if state.best is not None and state.outlook.objective is not None:
        name = named(state.best.trial, state.best.status)
        parts.append(f"{best_label(state.outlook.objective)}: trial {name}, {_compared(state, state.best)}")
    return f"{state.outlook.experiment}: {'; '.join(parts)}"


def _head(state: ProgressState) -> Iterator[Text]:
    yield _title(state)
    yield from (_labelled(name, text) for name, text in head_facts(state).items())


def head_facts(state: ProgressState) -> Mapping[str, str]:
    """Return the progress beside the table of trials: counts, rungs, the best trial, and below it its configuration.

    A single training has no table: its step, metrics, newest checkpoint and configuration.
    """
    if state.outlook.is_training:
        return _training_facts(state)
    facts = {"trials": _trial_counts(state)}
    if state.rungs:
        facts["rungs"] = _rungs(state)
    if state.best is not None and state.outlook.objective is not None:
        best = state.best
        of_another = ", of the checkpoint that it continues from" if best.inherits else ""
        said = f"trial {named(best.trial, best.status)}, {_compared(state, best)} at step {best.step}{of_another}"
        facts[best_label(state.outlook.objective)] = said
        facts[""] = ", ".join(f"{name} {value}" for name, value in config_cells(best))
    return facts


def _training_facts(state: ProgressState) -> Mapping[str, str]:
    trial = next(iter((*state.running, *state.others)), None)
    if trial is None:
        return {"step": "none yet"}
    of_all = f" of {state.outlook.step_count}" if state.outlook.step_count else ""
    attempt = f", attempt {trial.attempt}" if trial.attempt > 1 else ""
    ended = "" if trial.status is Status.RUNNING else f", {trial.status}"
    newest = newest_checkpoint(trial)
    facts = {
        "step": f"{trial.step}{of_all}{attempt}{ended}",
        "metrics": ", ".join(f"{name} {format_value(value)}" for name, value in flat(trial.metrics).items()),
        "saved": f"step {newest.step}" if newest else "",
        "config": ", ".join(f"{name} {value}" for name, value in config_cells(trial)),
    }
    return {name: text for name, text in facts.items() if text}


def _of_training(state: ProgressState) -> Iterator[str]:
    facts = _training_facts(state)
    metrics = f", {facts['metrics']}" if "metrics" in facts else ""
    yield f"step {facts['step']}{metrics} after {format_duration(state.elapsed)}"
    if state.running:
        yield from filter(None, (pace(state), format_time_left(state)))
    if "saved" in facts:
        yield f"saved: {facts['saved']}"


def pace(state: ProgressState) -> str:
    """Return how fast steps, or reports of all trials, come; empty before the first."""
    unit = "steps/s" if state.outlook.is_training else "reports/s"
    return f"{shown_amount(state.reports_per_second)} {unit}" if state.reports_per_second else ""


def format_time_left(state: ProgressState) -> str:
    """Return the estimate of the time left in words, or why the search ends early; empty if there is neither."""
    if state.ended_because:
        return f"ending: {first_line(state.ended_because)}"
    return "" if state.time_left is None else f"about {format_duration(state.time_left)} left"


def _title(state: ProgressState) -> Text:
    title = Text.assemble((state.outlook.experiment, "bold"), f"  {format_duration(state.elapsed)}")
    if left := format_time_left(state):
        title.append(visible(f", {left}"))
    if found := pace(state):
        title.append(f"  {found}", "dim")
    return title


def _trial_counts(state: ProgressState) -> str:
    counts = {str(status): state.counts[status] for status in Status if state.counts.get(status)}
    asked = state.outlook.trial_count
    if asked is None:
        return format_counts(counts)
    # An earlier run of the experiment may have passed a larger `num_samples`.
    return f"{format_counts(counts)} of {max(asked, sum(state.counts.values()))}"


def _rungs(state: ProgressState) -> str:
    """Return the number of trials that the scheduler has judged at each rung."""
    rungs = list(state.rungs.items())
    shown = rungs if len(rungs) <= _LONG_RUNGS else [*rungs[: _LONG_RUNGS // 2], *rungs[-_LONG_RUNGS // 2 :]]
    said_rungs = [f"{count} at step {step}" for step, count in shown]
    if len(shown) < len(rungs):
        said_rungs.insert(_LONG_RUNGS // 2, "…")
    return ", ".join(said_rungs)


def _compared(state: ProgressState, trial: Trial) -> str:
    metrics = state.outlook.objective.metrics if state.outlook.objective else ()
    return ", ".join(f"{name} {format_value(metric_in(trial.metrics, name))}" for name in metrics)


def chosen_trials(state: ProgressState, most: int) -> Sequence[Trial]:
    """Return the trials to show: running ones, with a third of the lines for the best of the others.

    None for a single training, which `head_facts` shows.
    """
    if state.outlook.is_training:
        return ()
    others = min(len(state.others), max(most // 3, most - len(state.running)))
    return [*state.running[: most - others], *state.others[:others]] if most > 0 else ()


def common_metrics(trials: Sequence[Trial]) -> Sequence[str]:
    """Return the metrics that the first trial with any has reported."""
    return next((tuple(each.metrics) for each in trials if each.metrics), ())


def _note_text(note: Note) -> Text:
    text = (visible(note.text), "red" if note.is_bad else "")
    return _cut(Text.assemble((note.at.strftime("%H:%M:%S"), "dim"), "  ", text))


def _labelled(name: str, text: str) -> Text:
    return Text.assemble((f"{name:<8}", "dim"), visible(text))


def _cut(text: Text) -> Text:
    """Truncate instead of wrapping."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
