"""Report and progress of a running experiment, published as Prefect artifacts while it runs."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from prefect_tune.core.journal.journal import history
from prefect_tune.core.journal_events import Entry, Event, Owner
from prefect_tune.core.search_view import SearchSnapshot
from prefect_tune.core.shown_text import format_duration
from prefect_tune.core.values import digest_of
from prefect_tune.monitoring.search_observer import SearchObserver, SearchRecorder
from prefect_tune.prefect_api.artifacts_and_assets import update_artifact
from prefect_tune.reporting.facts import drawn_trials, report_input_of
from prefect_tune.reporting.page import as_markdown, page_of
from prefect_tune.storage_retries import with_retries
from prefect_tune.terminal.progress_view import SearchEstimate, share_of_search, share_of_trial

# Publish Prefect artifacts from a background thread: create each once, update it in place, delete it in the end.

_FIRST = timedelta(seconds=2)
_MAX_PAUSE = timedelta(minutes=10)
_SHARE = 50
"""The pause after a round is at least this multiple of its duration: rounds take no more than 2 % of the time."""
_REQUEST_TIMEOUT = timedelta(seconds=30)


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
        self._flow_run = UUID(flow_run.id) if flow_run.id else None
        self._ids: dict[tuple[str, str | None], UUID] = {}
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
            is_published = self._publish()
            cost = timedelta(seconds=time.monotonic() - began) if is_published else timedelta(0)
            pause = max(self._period, min(_MAX_PAUSE, cost * _SHARE))
        if not self._is_left:
            self._publish()

    def _publish(self) -> bool:
        try:
            artifacts = self._render()
        except Exception:  # noqa: BLE001  a failed report must not end the run; the next round tries again
            self._log.exception("the report could not be rendered; the next update tries again")
            return False
        try:
            with get_client(sync_client=True, httpx_settings={"timeout": _REQUEST_TIMEOUT.total_seconds()}) as client:
                self._take_over(client)
                for artifact in artifacts:
                    self._show(client, artifact)
                current = {artifact.identity for artifact in artifacts}
                for identity in [identity for identity in self._ids if identity not in current]:
                    _delete(client, self._ids.pop(identity))
                    self._shown.pop(identity, None)
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
        for artifact in client.read_artifacts(artifact_filter=left, sort=ArtifactSort.CREATED_DESC):
            if artifact.key in self._earlier.deleted:
                _delete(client, artifact.id)
        if self._flow_run:
            own = ArtifactFilter(
                key=ArtifactFilterKey(any_=sorted(self._earlier.kept)),
                flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run]),
            )
            self._ids |= {(str(each.key), None): each.id for each in client.read_artifacts(artifact_filter=own)}
        self._earlier = None

    def _show(self, client: SyncPrefectClient, artifact: ArtifactContent) -> None:
        identity = artifact.identity
        if self._shown.get(identity) == artifact:
            return
        known = self._ids.get(identity)
        if known is None or not update_artifact(client, known, artifact.data, artifact.description):
            new = ArtifactCreate(
                key=artifact.key,
                type=artifact.kind,
                description=artifact.description,
                data=artifact.data,
                flow_run_id=self._flow_run,
                task_run_id=UUID(artifact.task_run) if artifact.task_run else None,
            )
            self._ids[identity] = client.create_artifact(new).id
        self._shown[identity] = artifact


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


# The report and the progress of an experiment as artifacts.

REFRESH_PERIOD = timedelta(seconds=15)
"""The shortest pause between two updates of a report that changes."""
_TIMEOUT = timedelta(minutes=5)
_END_TIMEOUT = timedelta(seconds=10)
_END_TIMEOUT_WHEN_STOPPED = timedelta(seconds=2)
_MAX_HISTORY = 20_000
"""Journal entries. Of a longer journal the earlier runs are not read: that would take a minute of CPU time."""
_MAX_TRIALS = 10
"""Trials with a progress artifact at a time; each costs the server about 15 ms per update."""


class Reporter(SearchObserver):
    """Has the artifact publisher's thread draw what the recorder knows, after each change."""

    def __init__(self, target: StorageTarget, recorder: SearchRecorder, outlook: SearchEstimate, log: Log) -> None:
        snapshot = recorder.read()
        experiment = snapshot.experiment
        self._target = target
        self._recorder = recorder
        self._outlook = outlook
        self._log = log
        self._begun_at = experiment.number
        self._lacks_earlier_runs = not snapshot.is_whole
        if self._lacks_earlier_runs:
            recorder.await_earlier_entries()
        self._followed: Sequence[str] = ()
        earlier = None
        if experiment.term > 1:  # else this is the first run
            kept = frozenset(artifact_key(kind, experiment.name) for kind in ("report", "progress"))
            of_trials = frozenset(_trial_progress_key(experiment, trial, target.uri) for trial in experiment.trials)
            prefix = plain_key("progress", experiment.name)
            earlier = EarlierArtifacts(kept, of_trials - kept, f"{prefix}-")
        self.publisher = ArtifactPublisher(self._artifacts, REFRESH_PERIOD, log, earlier)

    def applied(self, event: Event, experiment: Experiment) -> None:
        del event, experiment
        self.publisher.stir()

    def wrote(self, experiment: Experiment) -> None:
        del experiment
        self.publisher.stir()

    def conclude(self) -> None:
        """Start to publish the final report; return without waiting."""
        self.publisher.conclude()

    # --------------------------------------------------------------------------------- in the publisher's thread

    def _artifacts(self) -> Sequence[ArtifactContent]:
        if self._lacks_earlier_runs:
            self._recorder.prepend(self._read_earlier_entries())
            self._lacks_earlier_runs = False
        snapshot = self._recorder.read(drawn_trials(self._recorder.read().experiment))
        experiment, now, age = snapshot.experiment, datetime.now(UTC), ""
        if any(trial.phase is Phase.RUNNING for trial in experiment.trials.values()):
            # With the date: a run that is killed leaves its report as it is.
            period = format_duration(REFRESH_PERIOD)
            age = f"{now:%Y-%m-%d %H:%M:%S} UTC; refreshed at most every {period} until the run ends"
        uri, expected = self._target.uri, self._outlook.trial_count
        page = page_of(report_input_of(snapshot, uri=uri, now=now, links=link_to, expected=expected, age=age))
        description = f"Experiment {experiment.name} at {uri}"
        report = ArtifactContent(artifact_key("report", experiment.name), "markdown", as_markdown(page), description)
        return [report, *self._progress(snapshot), *self._progress_of_trials(snapshot)]

    def _read_earlier_entries(self) -> Iterable[Entry] | None:
        """Return the entries of earlier runs; None if they are too many, or cannot be read."""
        if self._begun_at > _MAX_HISTORY:
            return None
        key = self._recorder.read().experiment.key
        try:
            with self._target.open(timeout=_TIMEOUT) as store:
                entries = with_retries(lambda: history(store, key))
        except TuneError as error:
            self._log.warning("the report covers only this run, since earlier entries could not be read: %s", error)
            return None
        return (entry for entry in entries if entry.number <= self._begun_at)

    def _progress(self, snapshot: SearchSnapshot) -> Iterator[ArtifactContent]:
        """Yield the progress of the experiment, if its number of trials is known."""
        experiment, trials = snapshot.experiment, list(snapshot.experiment.trials.values())
        if self._outlook.trial_count is None or not trials:
            return
        expected = max(self._outlook.trial_count, len(trials))  # an earlier run may have asked for more
        if expected == 1:
            done = self._describe(trials[0], snapshot)
        else:
            done = f"{sum(trial.phase in ENDED for trial in trials)} of {expected} trials done"
        share = share_of_search(trials, snapshot.newest, self._outlook) or 0.0
        key = artifact_key("progress", experiment.name)
        yield ArtifactContent(key, "progress", round(100 * share, 1), f"Experiment {experiment.name}: {done}")

    def _progress_of_trials(self, snapshot: SearchSnapshot) -> Iterator[ArtifactContent]:
        """Yield the progress of running trials; that of a trial that has ended is deleted."""
        if self._outlook.step_count is None or self._outlook.trial_count == 1:
            return
        experiment = snapshot.experiment
        running = {name: attempt for name, attempt in snapshot.running.items() if attempt.report}
        still = [name for name in self._followed if name in running]
        self._followed = [*still, *(name for name in running if name not in still)][:_MAX_TRIALS]
        for name in self._followed:
            trial, owner = experiment.trial(name), running[name].owner
            yield ArtifactContent(
                _trial_progress_key(experiment, name, self._target.uri),
                "progress",
                round(100 * share_of_trial(trial, snapshot.newest(name), self._outlook), 1),
                f"Trial {name} of {experiment.name}: {self._describe(trial, snapshot)}",
                owner.task_run if owner else None,
            )

    def _describe(self, trial: Trial, snapshot: SearchSnapshot) -> str:
        report, steps = snapshot.newest(trial.trial), self._outlook.step_count
        step = max(trial.step, report.step if report else 0)
        return f"step {step}{f' of {steps}' if steps else ''}, {trial.status}"


@contextmanager
def reported(reporter: Reporter, stop: threading.Event) -> Iterator[Reporter]:
    """Yield the reporter; at the end allow it 10 s for the final report, or 2 s if the process is to stop."""
    try:
        yield reporter
    except Superseded:
        reporter.publisher.leave()
        raise
    finally:
        reporter.publisher.close(_END_TIMEOUT_WHEN_STOPPED if stop.is_set() else _END_TIMEOUT)


def _trial_progress_key(experiment: Experiment, trial: str, uri: str) -> str:
    """Return a key that an experiment of the same name on another target does not have: its next run deletes it."""
    names = (experiment.name, trial)
    return f"{plain_key('progress', *names)}-{digest_of(json.dumps([uri, *names]).encode())[:6]}"


def link_to(owner: Owner) -> str | None:
    """Return the URL of a run in the Prefect UI; None if the run or the URL of the UI is unknown."""
    if owner.task_run is not None:
        return url_for("task-run", owner.task_run)
    return url_for("flow-run", owner.flow_run) if owner.flow_run is not None else None
