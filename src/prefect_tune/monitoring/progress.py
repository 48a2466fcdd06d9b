"""Progress of a running search: a live table in a terminal or a notebook; otherwise a log line once a minute."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from rich.console import RenderableType

from prefect_tune.attempt import search_link
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.html_tables import Html
from prefect_tune.core.journal_events import Event
from prefect_tune.core.messages.live_status import RunningAttempts
from prefect_tune.monitoring.live_report import link_to
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.notebook.cell_output import Ending, live_output, output_here
from prefect_tune.notebook.html import progress_html
from prefect_tune.terminal import progress_view
from prefect_tune.terminal.live_display import can_show, live_display
from prefect_tune.terminal.progress_state import ProgressTracker
from prefect_tune.terminal.time_left import SearchEstimate

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
