"""The subscribers of a running search: callbacks, progress, events, the report, and its learning curves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.blocks import StorageTarget
from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import Curves
from prefect_tune.core.journal_events import Event
from prefect_tune.journal_access import JournalWriter
from prefect_tune.monitoring.callback_runner import Callbacks
from prefect_tune.monitoring.event_emitter import EventContext, EventEmitter, emitting_events
from prefect_tune.monitoring.live_report import Reporter, reported
from prefect_tune.monitoring.live_status import LiveStatusPublisher
from prefect_tune.monitoring.progress import SearchLog, progress
from prefect_tune.monitoring.search_observer import AttemptRecorder, DisplayGroup, ObserverGroup, SearchObserver
from prefect_tune.storage_retries import skip_prefect_introspection
from prefect_tune.tasks.experiments import publish_results
from prefect_tune.terminal.time_left import SearchEstimate

_PATIENCE = timedelta(seconds=30)
_PATIENCE_WHEN_STOPPED = timedelta(seconds=2)
_MOST_REPORTS = 300_000


class Subscribers:
    """The subscribers of one run of a search, from its start to its end."""

    def __init__(  # noqa: PLR0913  the subscribers need different things
        self,
        target: StorageTarget,
        search: SearchInfo,
        callbacks: Sequence[Callback],
        outlook: SearchEstimate,
        *,
        in_terminal: bool,
        news: EventContext,
        live_period: timedelta | None,
    ) -> None:
        self._target = target
        self._outlook = outlook
        self._in_terminal = in_terminal
        self._search = search
        self._news = news
        self._live_period = live_period
        self._callbacks = callbacks

    @contextmanager
    def listening(
        self, journal_writer: JournalWriter, runs: Callable[[str], bool], stop: threading.Event, log: Log
    ) -> Iterator[SearchObserver]:
        """Yield the listener that the driver notifies; on exit, wait for the subscribers to process what is queued.

        `runs` returns whether a trial is running now.

        Results are published if the search ended without a request to stop. On exit, callbacks get 30 s together,
        or 2 s after a request to stop.
        """
        callbacks = Callbacks(self._callbacks, self._target, self._search, log)
        keeper = _CurveKeeper(journal_writer.experiment)
        recorder = AttemptRecorder(journal_writer.experiment)
        lines = SearchLog(journal_writer.experiment, self._search.objective, self._target.uri, log)
        callbacks.start(journal_writer.experiment)
        try:
            with (
                reported(Reporter(self._target, recorder.attempts, self._outlook, log), stop) as reporter,
                emitting_events(EventEmitter(self._news, journal_writer.experiment, log), stop) as emitter,
                progress(recorder.attempts, self._outlook, log, stop, in_terminal=self._in_terminal) as seen,
                LiveStatusPublisher(self._target, recorder.attempts, self._live_period, runs),
            ):
                shows = DisplayGroup([recorder, lines, emitter, seen, reporter], log)
                yield ObserverGroup([keeper, callbacks, shows])
                reporter.conclude()  # it draws the last page while the other subscribers end
                if not stop.is_set():
                    self._publish(journal_writer.experiment, keeper.curves, log)
        finally:
            callbacks.end(journal_writer.experiment, _PATIENCE_WHEN_STOPPED if stop.is_set() else _PATIENCE)

    def _publish(self, experiment: Experiment, curves: Curves | None, log: Log) -> None:
        """Publish the results as files; log an error if that fails, since the journal holds the same results."""
        try:
            publish_results(
                self._target,
                skip_prefect_introspection(experiment),
                self._search.objective,
                skip_prefect_introspection(curves),
            )
        except TuneError as error:
            log.error("the results could not be published as files: %s", error)  # noqa: TRY400 - no trace: it is handled


class _CurveKeeper(SearchObserver):
    """Collects the learning curves of a new experiment while it runs: publishing them need not read the journal."""

    def __init__(self, experiment: Experiment) -> None:
        self.curves: Curves | None = None if experiment.trials else Curves()

    def applied(self, event: Event, experiment: Experiment) -> None:
        del experiment
        if self.curves is not None:
            self.curves.tell_event(event)
            if self.curves.report_count > _MOST_REPORTS:
                self.curves = None  # to bound the memory; publishing reads them from the journal
