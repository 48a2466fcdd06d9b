"""Report and progress of a running experiment, published as Prefect artifacts while it runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from prefect.utilities.urls import url_for

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import objective_in
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial
from prefect_tune.core.journal.journal import entries_beyond
from prefect_tune.core.journal_events.experiment_events import Event, Owner
from prefect_tune.core.models import StepReport, digest_of
from prefect_tune.monitoring.artifact_publisher import (
    ArtifactContent,
    ArtifactPublisher,
    EarlierArtifacts,
    artifact_key,
    plain_key,
)
from prefect_tune.monitoring.search_observer import SearchObserver
from prefect_tune.reporting.history import ExperimentHistory, HistoryView, history_of
from prefect_tune.reporting.page import page_of
from prefect_tune.reporting.render_markdown import as_markdown
from prefect_tune.reporting.report_input import drawn_trials, report_input_of
from prefect_tune.storage_retries import with_retries
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.supervisor import search_link
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.terminal.formatting import format_duration
from prefect_tune.terminal.progress_state import share_of_search, share_of_trial
from prefect_tune.terminal.time_left import SearchEstimate

REFRESH_PERIOD = timedelta(seconds=15)
"""The shortest pause between two updates of a report that changes."""
_TIMEOUT = timedelta(minutes=5)
_PATIENCE = timedelta(seconds=10)
_PATIENCE_WHEN_STOPPED = timedelta(seconds=2)
_LONGEST_HISTORY = 20_000
"""Journal entries. Of a longer journal the earlier runs are not read: that would take a minute of CPU time."""
_MOST_EARLY = 100_000
_TRIALS = 10
"""Trials with a progress artifact at a time; each costs the server about 15 ms per update."""


class Reporter(SearchObserver):
    """A listener that records events in microseconds; the artifact publisher's thread does the rest."""

    def __init__(self, target: StorageTarget, experiment: Experiment, outlook: SearchEstimate, log: Log) -> None:
        self._target = target
        self._outlook = outlook
        self._log = log
        self._guard = threading.Lock()
        self._experiment = experiment
        self._begun_at = experiment.number
        self._metrics = _metrics_of(experiment)
        self._early: list[tuple[Event | search_link.StepReported, datetime]] | None = None
        self._history = self._fresh(experiment)
        if experiment.trials or experiment.extensions:
            self._early = []  # until the entries of earlier runs are read
        self._followed: Sequence[str] = ()
        self._publisher = ArtifactPublisher(self._artifacts, REFRESH_PERIOD, log, _earlier(experiment, target.uri))

    def happened(self, event: Event, experiment: Experiment) -> None:
        self._note(event, experiment)

    def reported(self, step: search_link.StepReported, experiment: Experiment) -> None:
        self._note(step, experiment)

    def latest(self, newest: search_link.LatestReport) -> None:
        with self._guard:
            self._history.add_latest(newest.trial, newest.report)
        self._publisher.stir()

    def wrote(self, experiment: Experiment) -> None:
        with self._guard:
            if experiment.number >= self._experiment.number:
                self._experiment = experiment
        self._publisher.stir()

    def conclude(self) -> None:
        """Start to publish the final report; return without waiting."""
        self._publisher.conclude()

    def close(self, patience: timedelta) -> None:
        """Publish the final report; wait at most `patience`."""
        self._publisher.close(patience)

    def leave(self) -> None:
        """Publish nothing more: another run owns the experiment and its report now."""
        self._publisher.leave()

    def _note(self, news: Event | search_link.StepReported, experiment: Experiment) -> None:
        now = datetime.now(UTC)
        with self._guard:
            self._experiment = experiment
            if self._early is not None and len(self._early) < _MOST_EARLY:
                self._early.append((news, now))
            else:
                _add(self._history, news, now)
        self._publisher.stir()

    # --------------------------------------------------------------------------------- in the publisher's thread

    def _artifacts(self) -> Sequence[ArtifactContent]:
        if self._early is not None:
            self._catch_up()
        with self._guard:
            experiment = self._experiment
        drawn = drawn_trials(experiment)
        with self._guard:  # both of one moment: a history that is ahead has trials that the experiment lacks
            experiment, history = self._experiment, self._history.view(drawn)
        now = datetime.now(UTC)
        uri, expected = self._target.uri, self._outlook.trial_count
        found = report_input_of(experiment, history, uri=uri, now=now, expected=expected, age=_age_of(experiment, now))
        page = page_of(found, link_to)
        said = f"Experiment {experiment.name} at {uri}"
        report = ArtifactContent(artifact_key("report", experiment.name), "markdown", as_markdown(page), said)
        return [report, *self._progress(experiment, history), *self._progress_of_trials(experiment, history)]

    def _catch_up(self) -> None:
        """Read the entries of earlier runs, then add the events since this run began."""
        before = self._before()
        with self._guard:
            self._history = before or self._fresh(self._experiment, is_whole=False)
            for news, at in self._early or ():
                _add(self._history, news, at)
            self._early = None

    def _before(self) -> ExperimentHistory | None:
        if self._begun_at > _LONGEST_HISTORY:
            return None
        try:
            with self._target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
                entries = with_retries(lambda: entries_beyond(store, self._experiment.key, 0, side_by_side=transfers))
        except TuneError as error:
            self._log.warning("the report covers only this run, since earlier entries could not be read: %s", error)
            return None
        return history_of((each for each in entries if each.number <= self._begun_at), self._metrics)

    def _fresh(self, experiment: Experiment, *, is_whole: bool = True) -> ExperimentHistory:
        history = ExperimentHistory(self._metrics, is_whole=is_whole)
        if experiment.owner is not None:
            history.set_owner(experiment.owner, experiment.epoch, datetime.now(UTC))
        return history

    # ------------------------------------------------------------------------------------------------- progress

    def _progress(self, experiment: Experiment, history: HistoryView) -> Iterator[ArtifactContent]:
        """Yield the progress of the experiment, if its number of trials is known."""
        if self._outlook.trial_count is None or not experiment.trials:
            return
        newest = history.newest
        expected = max(self._outlook.trial_count, len(experiment.trials))  # an earlier run may have asked for more
        share = share_of_search(experiment.trials.values(), newest, self._outlook) or 0.0
        over = sum(each.phase in ENDED for each in experiment.trials.values())
        said = f"Experiment {experiment.name}: {over} of {expected} trials done"
        if expected == 1:
            trial = next(iter(experiment.trials.values()))
            said = f"Experiment {experiment.name}: {_said(trial, newest.get(trial.trial), self._outlook)}"
        yield ArtifactContent(artifact_key("progress", experiment.name), "progress", round(100 * share, 1), said)

    def _progress_of_trials(self, experiment: Experiment, history: HistoryView) -> Iterator[ArtifactContent]:
        """Yield the progress of running trials; that of a trial that has ended is deleted."""
        if self._outlook.step_count is None or self._outlook.trial_count == 1:
            return
        running = [name for name in history.newest if experiment.trial(name).phase is Phase.RUNNING]
        runs = {each.trial: each.owner for each in history.attempts}
        still = [name for name in self._followed if name in running]
        self._followed = [*still, *(name for name in running if name not in still)][:_TRIALS]
        for name in self._followed:
            yield self._progress_of_trial(experiment, name, (history.newest, runs.get(name)))

    def _progress_of_trial(
        self, experiment: Experiment, name: str, known: tuple[Mapping[str, StepReport], Owner | None]
    ) -> ArtifactContent:
        newest, owner = known
        trial, report = experiment.trial(name), newest.get(name)
        said = f"Trial {name} of {experiment.name}: {_said(trial, report, self._outlook)}"
        share = round(100 * share_of_trial(trial, report, self._outlook), 1)
        key = _trial_progress_key(experiment, name, self._target.uri)
        return ArtifactContent(key, "progress", share, said, owner.task_run if owner else None)


@contextmanager
def reported(reporter: Reporter, stop: threading.Event) -> Iterator[Reporter]:
    """Yield the reporter; at the end allow it 10 s for the final report, or 2 s if the process is to stop."""
    try:
        yield reporter
    except Superseded:
        reporter.leave()
        raise
    finally:
        reporter.close(_PATIENCE_WHEN_STOPPED if stop.is_set() else _PATIENCE)


def _trial_progress_key(experiment: Experiment, trial: str, uri: str) -> str:
    """Return a key that an experiment of the same name on another target does not have: its next run deletes it."""
    names = (experiment.name, trial)
    return f"{plain_key('progress', *names)}-{digest_of(json.dumps([uri, *names]).encode())[:6]}"


def _earlier(experiment: Experiment, uri: str) -> EarlierArtifacts | None:
    """Return what earlier runs may have left; None if this is the first one."""
    if experiment.epoch <= 1:
        return None
    kept = frozenset(artifact_key(kind, experiment.name) for kind in ("report", "progress"))
    of_trials = frozenset(_trial_progress_key(experiment, each, uri) for each in experiment.trials)
    prefix = plain_key("progress", experiment.name)
    return EarlierArtifacts(kept, of_trials - kept, f"{prefix}-")


def _age_of(experiment: Experiment, now: datetime) -> str:
    """Return the time of the report in words; empty if no trial runs, since then it does not change.

    With the date: a run that is killed leaves its report as it is.
    """
    if not any(each.phase is Phase.RUNNING for each in experiment.trials.values()):
        return ""
    return f"{now:%Y-%m-%d %H:%M:%S} UTC; refreshed at most every {format_duration(REFRESH_PERIOD)} until the run ends"


def _metrics_of(experiment: Experiment) -> Sequence[str]:
    objective = objective_in(experiment.settings)
    return objective.metrics if objective else ()


def _add(history: ExperimentHistory, news: Event | search_link.StepReported, at: datetime) -> None:
    if isinstance(news, search_link.StepReported):
        history.add_report(news.trial, news.report)
    else:
        history.add_event(news, at)


def _said(trial: Trial, report: StepReport | None, outlook: SearchEstimate) -> str:
    step = max(trial.step, report.step if report else 0)
    return f"step {step}{f' of {outlook.step_count}' if outlook.step_count else ''}, {trial.status}"


def link_to(owner: Owner) -> str | None:
    """Return the URL of a run in the Prefect UI; None if the run or the URL of the UI is unknown."""
    if owner.task_run is not None:
        return url_for("task-run", owner.task_run)
    return url_for("flow-run", owner.flow_run) if owner.flow_run is not None else None
