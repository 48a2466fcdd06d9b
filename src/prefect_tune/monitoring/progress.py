"""Progress of a running search: a live table in a terminal or a notebook, and its log.

The log has a line for each trial that begins, pauses, resumes or ends, with its result and the best; without a live
table, a line on the whole search once a minute, too.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from rich.console import RenderableType

from prefect_tune.attempt import search_link
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.search_link import StepReported
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import Losses, best_label, best_saved, losses_in
from prefect_tune.core.experiment.trial import wasted_words
from prefect_tune.core.experiment.trial_transitions import Phase, Status, Trial, newest_key
from prefect_tune.core.html_tables import Html
from prefect_tune.core.journal_events import (
    Absorbed,
    AttemptEnded,
    Cause,
    Cloned,
    Event,
    Finished,
    GaveUp,
    Paused,
    Started,
    TrialAdded,
    events_in,
)
from prefect_tune.core.messages.live_status import RunningAttempts
from prefect_tune.core.reasons import AnyReason, Reason, without_result
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.shown_text import first_line, visible
from prefect_tune.core.storage.layout import JournalKey, below
from prefect_tune.core.values import metric_in, parse_time
from prefect_tune.monitoring.live_report import link_to
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.notebook.cell_output import Ending, live_output, output_here
from prefect_tune.notebook.html import progress_html
from prefect_tune.terminal import progress_view
from prefect_tune.terminal.formatting import format_value
from prefect_tune.terminal.live_display import NOTICE, can_show, live_display
from prefect_tune.terminal.progress_view import ProgressTracker, SearchEstimate, config_cells

_LOG_PERIOD = timedelta(minutes=1)


class Progress(SearchObserver):
    """A listener that updates a `ProgressTracker`; without a live table it logs the progress at most once a minute."""

    def __init__(
        self, tracker: ProgressTracker, log: Log, log_period: timedelta = _LOG_PERIOD, link: str | None = None
    ) -> None:
        self._tracker = tracker
        self._log = log
        self._link = link
        self._log_period = log_period.total_seconds()
        self._logged_at = time.monotonic()
        self.is_shown = False

    def applied(self, event: Event, experiment: Experiment) -> None:
        self._tracker.applied(event, experiment, datetime.now(UTC).astimezone())
        self._log_now_and_then()

    def reported(self, step: search_link.StepReported, experiment: Experiment) -> None:
        del step, experiment
        self._log_now_and_then()

    def log_progress(self) -> None:
        """Log the progress."""
        self._logged_at = time.monotonic()
        self._log.info("%s", progress_view.line(self._tracker.state(self._logged_at)))

    def conclude(self) -> None:
        """Log the final progress; if trials of a search errored, warn, and name where their errors are shown."""
        state = self._tracker.state(time.monotonic())
        if state.outlook.is_training:
            if self.is_shown:  # elsewhere the log has a line of its end
                self.log_progress()
        elif state.counts.get(Status.ERRORED):
            name = state.outlook.experiment
            self._log.warning(
                "%s; why: results.errors, or prefect-tune show TARGET %s", progress_view.line(state), name
            )
        else:
            self.log_progress()

    def draw(self, width: int, height: int) -> RenderableType:
        """Return the progress as a table."""
        return progress_view.frame(self._tracker.state(time.monotonic()), width, height)

    def draw_html(self, ending: Ending, why: str) -> tuple[Html, str]:
        """Return the progress as the output of a notebook's cell, and as one line."""
        state = self._tracker.state(time.monotonic())
        return progress_html(state, ending, why, self._link), progress_view.line(state)

    def fall_back(self, error: Exception) -> None:
        """Log progress lines from now on, after an error of the table."""
        self.is_shown = False
        self._log.warning("the live table ends, and the search continues: %s: %s", type(error).__name__, error)

    def _log_now_and_then(self) -> None:
        if not self.is_shown and time.monotonic() - self._logged_at >= self._log_period:
            self.log_progress()


@contextmanager
def progress(
    attempts: RunningAttempts, outlook: SearchEstimate, log: Log, stop: threading.Event, *, in_terminal: bool
) -> Iterator[SearchObserver]:
    """Yield the listener that shows the progress of a search or a single training; log one final line unless it raises.

    Args:
        attempts: the record of this run's attempts.
        outlook: the metric, and the numbers of trials and steps, as far as they are known beforehand.
        log: of the flow run.
        stop: whether the search is asked to stop.
        in_terminal: whether to show a table if stdout is a terminal.
    """
    seen = _begun(attempts, outlook, log)
    if (output := output_here()) is not None:
        seen.is_shown = True
        with live_output(output, seen.draw_html, seen.fall_back, stop):
            yield seen
    elif in_terminal and can_show(sys.stdout):
        seen.is_shown = True
        with live_display(seen.draw, seen.fall_back, sys.stdout):
            yield seen
    else:
        yield seen
    seen.conclude()


def _begun(attempts: RunningAttempts, outlook: SearchEstimate, log: Log) -> Progress:
    owner = attempts.experiment.owner
    return Progress(ProgressTracker(attempts, outlook, time.monotonic()), log, link=link_to(owner) if owner else None)


_METRICS = 3
"""Metrics in a line if the search compares trials by none."""


class SearchLog(SearchObserver):
    """A listener that logs what happens to trials, each with the trial's name. A single training has no names."""

    def __init__(self, experiment: Experiment, objective: Objective | None, uri: str, log: Log) -> None:
        self._objective = objective
        self._uri = uri
        self._log = log
        self._wasted = {each.trial: each.wasted_steps for each in experiment.trials.values()}
        self._lost: set[str] = set()  # trials whose lost attempt is logged, and not journaled yet
        self._left_unfinished = {trial.trial for trial in experiment.trials.values() if _is_left_unfinished(trial)}
        self._last_reports = {each.trial: self._last_report(each) for each in experiment.trials.values()}
        """In the order in which the trials were proposed."""

    def applied(self, event: Event, experiment: Experiment) -> None:
        for each in events_in(event):
            match each:
                case TrialAdded():
                    self._last_reports[each.trial] = None
                case Started() | Cloned() | AttemptEnded() | Finished() | Paused() | GaveUp():
                    trial = experiment.trial(each.trial)
                    self._last_reports[each.trial] = self._last_report(trial)
                    self._log_event(each, trial, experiment.key, is_earlier=_is_earlier(event, experiment))
                case _:
                    pass

    def reported(self, step: StepReported, experiment: Experiment) -> None:
        del experiment
        losses = self._losses_in(step.report.metrics)
        self._last_reports[step.trial] = None if losses is None else (losses, False)

    def lost(self, trial: Trial, why: str) -> None:
        if trial.phase is Phase.RUNNING:
            self._lost.add(trial.trial)
            text = f"crashed in attempt {trial.attempt}: {first_line(why)}"
        else:
            text = f"crashed before attempt {trial.attempt + 1} began: {first_line(why)}"
        self._write(trial, text, logging.WARNING)

    def _log_event(
        self,
        event: Started | Cloned | AttemptEnded | Finished | Paused | GaveUp,
        trial: Trial,
        experiment: JournalKey,
        *,
        is_earlier: bool,
    ) -> None:
        text, level, is_notice = "", logging.INFO, False
        match event:
            case Started():
                text = self._started(event, trial, is_earlier=is_earlier)
                is_notice = trial.trial in self._left_unfinished
                self._left_unfinished.discard(trial.trial)
            case Cloned(source=source):
                text = f"continues from trial {source.trial.trial}, step {source.step}: {_config_of(trial)}"
            case Finished(reason=reason):
                text = self._ended(trial.status, reason, trial, experiment)
            case Paused(reason=reason):
                text = self._ended(Status.PAUSED, reason, trial, experiment)
            case AttemptEnded(cause=Cause.PREEMPTED, reason=reason):
                text = self._ended(Status.INTERRUPTED, reason, trial, experiment)
            case AttemptEnded(reason=Reason(code="owner-vanished")) if trial.trial in self._lost:
                self._lost.discard(trial.trial)
            case AttemptEnded(reason=Reason(code="owner-vanished")):
                text, level = f"crashed in attempt {trial.attempt}: the run that trained it was killed", logging.WARNING
            case GaveUp(reason=reason):
                text, level = self._ended(Status.ERRORED, reason, trial, experiment), logging.ERROR
            case _:
                pass  # a failure that is retried: `FailureHandler` logs it
        if text:
            self._write(trial, text, level, is_notice=is_notice)

    def _write(self, trial: Trial, text: str, level: int, *, is_notice: bool = False) -> None:
        line = visible(f"trial {trial.trial} {text}" if trial.own_journal else f"the trial {text}")
        self._log.log(level, "%s", line, extra=NOTICE if is_notice else None)

    def _started(self, event: Started, trial: Trial, *, is_earlier: bool) -> str:
        repeated = trial.wasted_steps - self._wasted.get(trial.trial, 0)
        self._wasted[trial.trial] = trial.wasted_steps
        if is_earlier:
            return f"began attempt {event.attempt} in an earlier run: {_config_of(trial)}"
        if event.attempt == 1:
            return f"begins: {_config_of(trial)}"
        lost = f"; {wasted_words(repeated, at_least=trial.wasted_at_least)} trained again" if repeated else ""
        again = f"attempt {event.attempt}{lost}"
        if event.from_sequence is None:
            return f"begins again without a checkpoint ({again})"
        return f"resumes from step {event.from_step} ({again})"

    def _ended(self, end: str, reason: AnyReason, trial: Trial, experiment: JournalKey) -> str:
        saved = self._saved(end, trial, experiment)
        if not trial.step:
            return f"{end} before its first step: {first_line(reason)}{saved}"
        if self._losses_in(trial.metrics):
            reason = without_result(reason, trial.step)
        metrics = "" if self._names_result(reason) else self._metrics_of(trial)
        return f"{end} at step {trial.step}{metrics}{self._compared(trial)}: {first_line(reason)}{saved}"

    def _saved(self, end: str, trial: Trial, experiment: JournalKey) -> str:
        """Return the newest checkpoint; of a trial that the scheduler takes off its slot only what differs."""
        key = newest_key(experiment.trial_key(trial.trial), trial)
        if key is None:
            return "; no checkpoint"
        if end not in {Status.PAUSED, Status.PRUNED}:
            return f"; checkpoint of step {key.step}{self._better(trial)}: {below(self._uri, key.folder)}"
        return "" if key.step == trial.step else f"; checkpoint of step {key.step}"

    def _better(self, trial: Trial) -> str:
        """Return the best checkpoint in words; empty if the newest one is as good."""
        best = best_saved(trial.checkpoints, self._objective)[:1] if self._objective else []
        if not best or self._losses_in(best[0].metrics) == self._losses_in(trial.checkpoints[-1].metrics):
            return ""
        metrics = self._objective.metrics if self._objective else ()
        return f" (the best one is of step {best[0].step}{_listed(best[0].metrics, metrics)})"

    def _names_result(self, reason: AnyReason) -> bool:
        """Whether the reason names a metric of the objective with its value, such as a limit that is reached."""
        if not isinstance(reason, Reason) or not reason.arguments.keys() & {"value", "best"}:
            return False
        return self._objective is None or reason.arguments.get("metric") in self._objective.metrics

    def _metrics_of(self, trial: Trial) -> str:
        return _listed(trial.metrics, self._objective.metrics if self._objective else list(trial.metrics)[:_METRICS])

    def _losses_in(self, metrics: Mapping[str, object]) -> Losses | None:
        return losses_in(metrics, self._objective) if self._objective else None

    def _last_report(self, trial: Trial) -> tuple[Losses, bool] | None:
        """Return its losses and whether it inherits them; None if it cannot be compared."""
        losses = self._losses_in(trial.metrics)
        return None if losses is None else (losses, trial.inherits)

    def _compared(self, trial: Trial) -> str:
        """Return how a trial's last report compares with those of all trials, by the rule of `ranked`."""
        if self._objective is None or self._last_reports[trial.trial] is None or not trial.own_journal:
            return ""
        compared = ((name, report) for name, report in self._last_reports.items() if report is not None)
        best, (losses, _) = min(compared, key=lambda pair: pair[1])  # at the end of each of many trials: not sorted
        if best == trial.trial:
            return f" ({best_label(self._objective)} so far)"
        value = losses[0] if self._objective.modes[0] == "min" else -losses[0]
        return f" ({best_label(self._objective)}: {format_value(value)}, trial {best})"


def _is_left_unfinished(trial: Trial) -> bool:
    """Whether an earlier run has begun a trial of a search, and did not end or pause it."""
    return trial.own_journal and trial.attempt > 0 and trial.status in {Status.RUNNING, Status.INTERRUPTED}


def _is_earlier(event: Event, experiment: Experiment) -> bool:
    """Return whether a trial wrote the entry before this run began, by the clocks of both: for people only."""
    if not isinstance(event, Absorbed) or experiment.trial(event.trial).search_term == experiment.term > 0:
        return False  # this run requested the attempt
    at = parse_time(event.at) if event.at else None
    began = parse_time(experiment.runs[-1].began_at) if experiment.runs else None
    return at is not None and began is not None and at < began


def _listed(metrics: Mapping[str, object], names: Iterable[str]) -> str:
    found = {name: metric_in(metrics, name) for name in names}
    return "".join(f", {name} {format_value(value)}" for name, value in found.items() if value is not None)


def _config_of(trial: Trial) -> str:
    return ", ".join(f"{name} {value}" for name, value in config_cells(trial)) or "no parameters"
