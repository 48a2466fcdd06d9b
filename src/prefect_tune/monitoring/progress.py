"""Show the progress of a running search: a live table in a terminal or a notebook, and log lines.

The log has a line when a trial begins, pauses, resumes or ends. At a pause or an end, the line has the trial's result
and the best result. Without a live table, the log also has a line about the whole search once a minute.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from rich.console import RenderableType

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.core.display_text import first_line, make_visible
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import (
    Losses,
    compute_losses,
    format_best_label,
    format_recomputed_steps,
    rank_checkpoints,
)
from prefect_tune.core.experiment.trial_transitions import Phase, Status, Trial, newest_checkpoint_key
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointCloned,
    Event,
    TrialErrored,
    TrialFinished,
    TrialPaused,
)
from prefect_tune.core.reasons import AnyReason, Reason, omit_step_result
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.storage.layout import JournalKey, join_uri
from prefect_tune.core.values import get_metric
from prefect_tune.monitoring.live_report import make_run_url
from prefect_tune.monitoring.search_observer import SearchObserver, SearchRecorder
from prefect_tune.notebook import CellStatus, current_cell_output, live_output, render_progress_html
from prefect_tune.terminal import progress_view
from prefect_tune.terminal.formatting import format_value
from prefect_tune.terminal.live_display import NOTICE, can_show_display, live_display
from prefect_tune.terminal.progress_view import Note, ProgressReader, SearchExtent, format_config

_LOG_PERIOD = timedelta(minutes=1)


class ProgressObserver(SearchObserver):
    """Shows the progress in a live table, or logs the progress at most once a minute."""

    def __init__(
        self, reader: ProgressReader, log: Log, log_period: timedelta = _LOG_PERIOD, link: str | None = None
    ) -> None:
        self._reader = reader
        self._log = log
        self._link = link
        self._log_period = log_period.total_seconds()
        self._last_logged_at = time.monotonic()
        self.is_shown = False

    def on_event(self, event: Event, experiment: Experiment) -> None:
        del event, experiment
        if not self.is_shown and time.monotonic() - self._last_logged_at >= self._log_period:
            self.log_progress()

    def log_progress(self) -> None:
        self._last_logged_at = time.monotonic()
        self._log.info("%s", progress_view.render_progress_line(self._reader.read_state(self._last_logged_at)))

    def log_final_progress(self) -> None:
        """Log the final progress; if trials of a search errored, log a warning that says how to show their errors."""
        state = self._reader.read_state(time.monotonic())
        if state.counts.get(Status.ERRORED) and not state.extent.is_training:
            line, name = progress_view.render_progress_line(state), state.extent.experiment
            self._log.warning("%s; see results.errors, or prefect-tune show TARGET %s", line, name)
        elif self.is_shown or not state.extent.is_training:  # a training without a table has already logged its end
            self.log_progress()

    def render_table(self, width: int, height: int) -> RenderableType:
        """Return the progress as a table."""
        return progress_view.render_progress(self._reader.read_state(time.monotonic()), width, height)

    def render_html(self, status: CellStatus, error: str) -> tuple[str, str]:
        """Return the progress as HTML for a notebook's cell, and as one line of text."""
        state = self._reader.read_state(time.monotonic())
        return render_progress_html(state, status, error, self._link), progress_view.render_progress_line(state)

    def on_display_error(self, error: Exception) -> None:
        """Log `error`, and from now on log progress lines instead of showing the table."""
        self.is_shown = False
        self._log.warning("the live table failed; the search continues: %s: %s", type(error).__name__, error)


@contextmanager
def showing_progress(
    recorder: SearchRecorder,
    extent: SearchExtent,
    notes: Sequence[Note],
    log: Log,
    stop: threading.Event,
    *,
    in_terminal: bool,
) -> Iterator[SearchObserver]:
    """Yield an observer that shows the progress of a search or a training; log a final line if no error ends the block.

    `notes` are the last lines of the log. `in_terminal` allows a live table if stdout is a terminal.
    """
    owner = recorder.read_search_snapshot().experiment.owner
    reader = ProgressReader(recorder.read_search_snapshot, extent, notes, time.monotonic())
    observer = ProgressObserver(reader, log, link=make_run_url(owner) if owner else None)
    if (output := current_cell_output()) is not None:
        observer.is_shown = True
        with live_output(output, observer.render_html, observer.on_display_error, stop):
            yield observer
    elif in_terminal and can_show_display(sys.stdout):
        observer.is_shown = True
        with live_display(observer.render_table, observer.on_display_error, sys.stdout):
            yield observer
    else:
        yield observer
    observer.log_final_progress()


_LoggedEvent: TypeAlias = AttemptStarted | CheckpointCloned | AttemptEnded | TrialFinished | TrialPaused | TrialErrored
_MAX_NOTES = 50
_NO_PARAMETERS = "no parameters"
_MAX_METRICS = 3
"""The maximum number of metrics in a log line if the search has no objective."""


class SearchLog(SearchObserver):
    """Logs the events of trials. Each line names the trial, except in a single training."""

    def __init__(self, recorder: SearchRecorder, objective: Objective | None, uri: str, log: Log) -> None:
        self.notes: deque[Note] = deque(maxlen=_MAX_NOTES)
        """The last lines of the log."""
        experiment = recorder.read_search_snapshot().experiment
        self._recorder = recorder
        self._objective = objective
        self._uri = uri
        self._log = log
        self._recomputed_steps = {trial.id: trial.recomputed_steps for trial in experiment.trials.values()}
        self._lost_trials: set[str] = set()  # trials with a lost attempt whose end is logged, but not yet journaled
        self._unfinished_trials = {  # trials that an earlier run began, but did not end or pause
            trial.id
            for trial in experiment.trials.values()
            if trial.proposed_by_search and trial.attempt > 0 and trial.status in {Status.RUNNING, Status.INTERRUPTED}
        }

    def on_event(self, event: Event, experiment: Experiment) -> None:
        if not isinstance(event, _LoggedEvent):
            return
        trial, text, level, is_notice = experiment.trial(event.trial), "", logging.INFO, False
        match event:
            case AttemptStarted():
                is_earlier = trial.outbox is not None and trial.launch_term < experiment.term
                text = self._describe_start(event, trial, is_earlier=is_earlier)
                is_notice = trial.id in self._unfinished_trials
                self._unfinished_trials.discard(trial.id)
            case CheckpointCloned(source=source):
                text = f"continues from trial {source}, step {trial.step}: {format_config(trial) or _NO_PARAMETERS}"
            case TrialFinished(reason=reason):
                text = self._describe_end(trial.status, reason, trial, experiment.key)
            case TrialPaused(reason=reason):
                text = self._describe_end(Status.PAUSED, reason, trial, experiment.key)
            case AttemptEnded(cause=Cause.PREEMPTED, reason=reason):
                text = self._describe_end(Status.INTERRUPTED, reason, trial, experiment.key)
            case AttemptEnded(reason=Reason(code="owner-vanished")) if trial.id in self._lost_trials:
                self._lost_trials.discard(trial.id)
            case AttemptEnded(reason=Reason(code="owner-vanished")):
                text, level = f"crashed in attempt {trial.attempt}: the run that trained it was killed", logging.WARNING
            case TrialErrored(reason=reason):
                text, level = self._describe_end(Status.ERRORED, reason, trial, experiment.key), logging.ERROR
            case _:
                pass  # a retried failure is logged by `FailureHandler`
        if text:
            self._log_line(trial, text, level, is_notice=is_notice)

    def on_attempt_lost(self, trial: Trial, reason: str) -> None:
        if trial.phase is Phase.RUNNING:
            self._lost_trials.add(trial.id)
            text = f"crashed in attempt {trial.attempt}: {first_line(reason)}"
        else:
            text = f"crashed before attempt {trial.attempt + 1} began: {first_line(reason)}"
        self._log_line(trial, text, logging.WARNING)

    def _log_line(self, trial: Trial, text: str, level: int, *, is_notice: bool = False) -> None:
        line = make_visible(f"trial {trial.id} {text}" if trial.proposed_by_search else f"the trial {text}")
        self.notes.append(Note(datetime.now(UTC).astimezone(), line, is_problem=level >= logging.WARNING))
        self._log.log(level, "%s", line, extra=NOTICE if is_notice else None)

    def _describe_start(self, event: AttemptStarted, trial: Trial, *, is_earlier: bool) -> str:
        repeated = trial.recomputed_steps - self._recomputed_steps.get(trial.id, 0)
        self._recomputed_steps[trial.id] = trial.recomputed_steps
        config, again = format_config(trial) or _NO_PARAMETERS, f"attempt {event.attempt}"
        if is_earlier:
            return f"began attempt {event.attempt} in an earlier run: {config}"
        if event.attempt == 1:
            return f"begins: {config}"
        if repeated:
            steps = format_recomputed_steps(repeated, at_least=trial.recomputed_is_lower_bound)
            again = f"{again}; {steps} trained again"
        if event.from_sequence is None:
            return f"begins again without a checkpoint ({again})"
        return f"resumes from step {event.from_step} ({again})"

    def _describe_end(self, end: str, reason: AnyReason, trial: Trial, experiment: JournalKey) -> str:
        """Describe a trial's end: its last metrics, whether they are the best, the reason, and the checkpoint."""
        saved = self._describe_checkpoint(end, trial, experiment)
        if not trial.step:
            return f"{end} before its first step: {first_line(reason)}{saved}"
        has_losses = self._compute_losses(trial.metrics) is not None
        if has_losses:
            reason = omit_step_result(reason, trial.step)
        names = self._objective.metrics if self._objective else list(trial.metrics)[:_MAX_METRICS]
        reason_has_result = (  # the reason already has a metric's value, for example the value that reached a limit
            isinstance(reason, Reason)
            and bool(reason.arguments.keys() & {"value", "best"})
            and (self._objective is None or reason.arguments.get("metric") in self._objective.metrics)
        )
        metrics, compared = "" if reason_has_result else _format_metrics(trial.metrics, names), ""
        best = self._recorder.best
        if self._objective is not None and best is not None and trial.proposed_by_search and has_losses:
            label, (name, losses) = format_best_label(self._objective), best
            value = losses[0] if self._objective.modes[0] == "min" else -losses[0]
            other = f"{label}: {format_value(value)}, trial {name}"
            compared = f" ({label} so far)" if name == trial.id else f" ({other})"
        return f"{end} at step {trial.step}{metrics}{compared}: {first_line(reason)}{saved}"

    def _describe_checkpoint(self, end: str, trial: Trial, experiment: JournalKey) -> str:
        """Describe the newest checkpoint; if the trial is paused or pruned, omit a checkpoint of the last step."""
        key = newest_checkpoint_key(experiment.trial_key(trial.id), trial)
        if key is None:
            return "; no checkpoint"
        if end in {Status.PAUSED, Status.PRUNED}:
            return "" if key.step == trial.step else f"; checkpoint of step {key.step}"
        better = ""  # names the best checkpoint, unless the newest checkpoint is as good
        best = next(iter(rank_checkpoints(trial.checkpoints, self._objective)), None) if self._objective else None
        if best and self._compute_losses(best.metrics) != self._compute_losses(trial.checkpoints[-1].metrics):
            names = self._objective.metrics if self._objective else ()
            better = f" (the best one is of step {best.step}{_format_metrics(best.metrics, names)})"
        return f"; checkpoint of step {key.step}{better}: {join_uri(self._uri, key.folder)}"

    def _compute_losses(self, metrics: Mapping[str, object]) -> Losses | None:
        return compute_losses(metrics, self._objective) if self._objective else None


def _format_metrics(metrics: Mapping[str, object], names: Iterable[str]) -> str:
    values = {name: get_metric(metrics, name) for name in names}
    return "".join(f", {name} {format_value(value)}" for name, value in values.items() if value is not None)
