"""Report and progress of a running experiment, published as Prefect artifacts while it runs."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial
from prefect_tune.core.journal.journal import entries_beyond
from prefect_tune.core.journal_events import Entry, Event, Owner
from prefect_tune.core.search_view import SearchSnapshot
from prefect_tune.core.shown_text import format_duration
from prefect_tune.core.values import StepReport, digest_of
from prefect_tune.monitoring.search_observer import SearchObserver, SearchRecorder
from prefect_tune.prefect_api.artifacts_and_assets import update_artifact
from prefect_tune.reporting.facts import drawn_trials, report_input_of
from prefect_tune.reporting.page import page_of
from prefect_tune.reporting.render import as_markdown
from prefect_tune.storage_retries import with_retries
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.terminal.progress_view import SearchEstimate, share_of_search, share_of_trial

# Publish Prefect artifacts from a background thread: create each once, update it in place, delete it in the end.

_FIRST = timedelta(seconds=2)
_LONGEST_PERIOD = timedelta(minutes=10)
_SHARE = 50
"""The pause after a round is at least this multiple of its duration: rounds take no more than 2 % of the time."""
_ANSWERS_WITHIN = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class ArtifactContent:
    """The content of one artifact."""

    key: str
    kind: Literal["markdown", "progress"]
    data: str | float
    description: str
    task_run: str | None = None
    """The id of a task run that shows it as well."""

    @property
    def identity(self) -> tuple[str, str | None]:
        """The key and the task run: these of an artifact never change."""
        return self.key, self.task_run


@dataclass(frozen=True, slots=True)
class EarlierArtifacts:
    """Artifacts that may exist already: earlier runs, or a killed process of this run, did not delete them."""

    kept: frozenset[str]
    """Keys with one artifact in each run: this process updates the artifact of its run."""
    deleted: frozenset[str]
    """Keys of artifacts that do not outlive their process."""
    prefix: str
    """The beginning of the keys in `deleted`; other experiments' keys may begin with it too."""


class ArtifactPublisher:
    """Publishes the result of `render` after 2 s, then at most once in each `period`, and once at the end. Best effort.

    Each flow run creates an artifact once and updates it in place: `create_markdown_artifact` would add a version
    each time. An artifact that `render` no longer returns is deleted.
    While the API is unreachable nothing is published and nothing fails; the next round tries again.
    """

    def __init__(
        self,
        render: Callable[[], Sequence[ArtifactContent]],
        period: timedelta,
        log: Log,
        earlier: EarlierArtifacts | None = None,
    ) -> None:
        self._render = render
        self._period = period
        self._log = log
        self._earlier = earlier
        self._flow_run = flow_run.id
        self._made: dict[tuple[str, str | None], UUID] = {}
        self._shown: dict[tuple[str, str | None], ArtifactContent] = {}
        self._news = threading.Event()
        self._closing = threading.Event()
        self._is_left = False
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="artifact-publisher", daemon=True
        )
        self._thread.start()

    def stir(self) -> None:
        """Mark the content as changed: the next round publishes it."""
        if not self._news.is_set():
            self._news.set()

    def conclude(self) -> None:
        """Start the last round, and do not wait for it."""
        self._closing.set()
        self._news.set()

    def close(self, patience: timedelta) -> None:
        """Run the last round, and wait up to `patience` for it."""
        self.conclude()
        self._thread.join(patience.total_seconds())

    def leave(self) -> None:
        """Publish nothing more: another process publishes these artifacts now."""
        self._is_left = True
        self.conclude()

    def _run(self) -> None:
        pause = _FIRST
        while not self._closing.wait(pause.total_seconds()):
            self._news.wait()
            self._news.clear()
            if self._closing.is_set():
                break
            began = time.monotonic()
            is_shown = self._round()
            cost = timedelta(seconds=time.monotonic() - began) if is_shown else timedelta(0)
            pause = max(self._period, min(_LONGEST_PERIOD, cost * _SHARE))
        if not self._is_left:
            self._round()

    def _round(self) -> bool:
        try:
            sheets = self._render()
        except Exception:  # noqa: BLE001  a failed report must not end the run; the next round tries again
            self._log.exception("the report could not be rendered; the next update tries again")
            return False
        try:
            with get_client(sync_client=True, httpx_settings={"timeout": _ANSWERS_WITHIN.total_seconds()}) as client:
                self._take_over(client)
                for sheet in sheets:
                    self._show(client, sheet)
                self._delete_all_but(client, {sheet.identity for sheet in sheets})
            return True
        except (PrefectException, HTTPError, OSError):
            self._news.set()  # the API is away: the next round tries again
        except Exception:  # noqa: BLE001  as above
            if not self._closing.is_set():  # else the flow has ended without this thread, and closed its client
                self._log.exception("the report could not be published; the next update tries again")
        return False

    def _take_over(self, client: SyncPrefectClient) -> None:
        """Delete what earlier processes left, and continue what this run has; reads nothing in a first run."""
        if self._earlier is None:
            return
        left = ArtifactFilter(key=ArtifactFilterKey(like_=f"{self._earlier.prefix}%"))
        for each in client.read_artifacts(artifact_filter=left, sort=ArtifactSort.CREATED_DESC):
            if each.key in self._earlier.deleted:
                _delete(client, each.id)
        if self._flow_run:
            own = ArtifactFilter(
                key=ArtifactFilterKey(any_=sorted(self._earlier.kept)),
                flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(self._flow_run)]),
            )
            self._made |= {(str(each.key), None): each.id for each in client.read_artifacts(artifact_filter=own)}
        self._earlier = None

    def _show(self, client: SyncPrefectClient, sheet: ArtifactContent) -> None:
        if self._shown.get(sheet.identity) == sheet:
            return
        made = self._made.get(sheet.identity)
        if made is None or not update_artifact(client, made, sheet.data, sheet.description):
            self._made[sheet.identity] = self._make(client, sheet)
        self._shown[sheet.identity] = sheet

    def _delete_all_but(self, client: SyncPrefectClient, current: Collection[tuple[str, str | None]]) -> None:
        for identity in [each for each in self._made if each not in current]:
            _delete(client, self._made[identity])
            del self._made[identity]
            self._shown.pop(identity, None)

    def _make(self, client: SyncPrefectClient, sheet: ArtifactContent) -> UUID:
        made = ArtifactCreate(
            key=sheet.key,
            type=sheet.kind,
            description=sheet.description,
            data=sheet.data,
            flow_run_id=UUID(self._flow_run) if self._flow_run else None,
            task_run_id=UUID(sheet.task_run) if sheet.task_run else None,
        )
        return client.create_artifact(made).id


def _delete(client: SyncPrefectClient, artifact: UUID) -> None:
    with suppress(ObjectNotFound):
        client.delete_artifact(artifact)


def artifact_key(*names: str) -> str:
    """Return an artifact key: lower-case letters, digits and dashes; other names get a digest that keeps them apart."""
    wanted, plain = "-".join(names), plain_key(*names)
    return plain if plain == wanted else f"{plain}-{digest_of(wanted.encode())[:6]}"


def plain_key(*names: str) -> str:
    """Return the names as an artifact key; different names may have the same one."""
    return re.sub(r"[^a-z0-9-]+", "-", "-".join(names).lower()).strip("-")


REFRESH_PERIOD = timedelta(seconds=15)
"""The shortest pause between two updates of a report that changes."""
_TIMEOUT = timedelta(minutes=5)
_PATIENCE = timedelta(seconds=10)
_PATIENCE_WHEN_STOPPED = timedelta(seconds=2)
_LONGEST_HISTORY = 20_000
"""Journal entries. Of a longer journal the earlier runs are not read: that would take a minute of CPU time."""
_TRIALS = 10
"""Trials with a progress artifact at a time; each costs the server about 15 ms per update."""


class Reporter(SearchObserver):
    """Has the artifact publisher's thread draw what the recorder knows, after each change."""

    def __init__(self, target: StorageTarget, recorder: SearchRecorder, outlook: SearchEstimate, log: Log) -> None:
        experiment = recorder.read().experiment
        self._target = target
        self._recorder = recorder
        self._outlook = outlook
        self._log = log
        self._begun_at = experiment.number
        self._lacks_earlier_runs = not recorder.read().is_whole
        if self._lacks_earlier_runs:
            recorder.await_earlier_entries()
        self._followed: Sequence[str] = ()
        self._publisher = ArtifactPublisher(self._artifacts, REFRESH_PERIOD, log, _earlier(experiment, target.uri))

    def applied(self, event: Event, experiment: Experiment) -> None:
        del event, experiment
        self._publisher.stir()

    def wrote(self, experiment: Experiment) -> None:
        del experiment
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

    # --------------------------------------------------------------------------------- in the publisher's thread

    def _artifacts(self) -> Sequence[ArtifactContent]:
        if self._lacks_earlier_runs:
            self._recorder.prepend(self._read_earlier_entries())
            self._lacks_earlier_runs = False
        snapshot = self._recorder.read(drawn_trials(self._recorder.read().experiment))
        experiment, now = snapshot.experiment, datetime.now(UTC)
        uri, expected = self._target.uri, self._outlook.trial_count
        report_input = report_input_of(snapshot, uri=uri, now=now, expected=expected, age=_age_of(experiment, now))
        page = page_of(report_input, link_to)
        description = f"Experiment {experiment.name} at {uri}"
        report = ArtifactContent(artifact_key("report", experiment.name), "markdown", as_markdown(page), description)
        return [report, *self._progress(snapshot), *self._progress_of_trials(snapshot)]

    def _read_earlier_entries(self) -> Iterable[Entry] | None:
        """Return the entries of earlier runs; None if they are too many, or cannot be read."""
        if self._begun_at > _LONGEST_HISTORY:
            return None
        key = self._recorder.read().experiment.key
        try:
            with self._target.open(timeout=_TIMEOUT) as store, transfer_pool() as transfers:
                entries = with_retries(lambda: entries_beyond(store, key, 0, side_by_side=transfers))
        except TuneError as error:
            self._log.warning("the report covers only this run, since earlier entries could not be read: %s", error)
            return None
        return (entry for entry in entries if entry.number <= self._begun_at)

    # ------------------------------------------------------------------------------------------------- progress

    def _progress(self, attempts: SearchSnapshot) -> Iterator[ArtifactContent]:
        """Yield the progress of the experiment, if its number of trials is known."""
        experiment = attempts.experiment
        if self._outlook.trial_count is None or not experiment.trials:
            return
        expected = max(self._outlook.trial_count, len(experiment.trials))  # an earlier run may have asked for more
        share = share_of_search(experiment.trials.values(), attempts.newest, self._outlook) or 0.0
        over = sum(each.phase in ENDED for each in experiment.trials.values())
        said = f"Experiment {experiment.name}: {over} of {expected} trials done"
        if expected == 1:
            trial = next(iter(experiment.trials.values()))
            said = f"Experiment {experiment.name}: {_said(trial, attempts.newest(trial.trial), self._outlook)}"
        yield ArtifactContent(artifact_key("progress", experiment.name), "progress", round(100 * share, 1), said)

    def _progress_of_trials(self, attempts: SearchSnapshot) -> Iterator[ArtifactContent]:
        """Yield the progress of running trials; that of a trial that has ended is deleted."""
        if self._outlook.step_count is None or self._outlook.trial_count == 1:
            return
        running = [name for name, each in attempts.running.items() if each.report]
        still = [name for name in self._followed if name in running]
        self._followed = [*still, *(name for name in running if name not in still)][:_TRIALS]
        for name in self._followed:
            yield self._progress_of_trial(attempts, name, attempts.running[name].owner)

    def _progress_of_trial(self, attempts: SearchSnapshot, name: str, owner: Owner | None) -> ArtifactContent:
        experiment, report = attempts.experiment, attempts.newest(name)
        trial = experiment.trial(name)
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
    if experiment.term <= 1:
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


def _said(trial: Trial, report: StepReport | None, outlook: SearchEstimate) -> str:
    step = max(trial.step, report.step if report else 0)
    return f"step {step}{f' of {outlook.step_count}' if outlook.step_count else ''}, {trial.status}"


def link_to(owner: Owner) -> str | None:
    """Return the URL of a run in the Prefect UI; None if the run or the URL of the UI is unknown."""
    if owner.task_run is not None:
        return url_for("task-run", owner.task_run)
    return url_for("flow-run", owner.flow_run) if owner.flow_run is not None else None
