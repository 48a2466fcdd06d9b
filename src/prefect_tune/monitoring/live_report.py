"""Publish the report and the progress of a running experiment as Prefect artifacts."""

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
from prefect_tune.core.display_text import format_duration
from prefect_tune.core.errors import Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED_PHASES, Phase, Trial
from prefect_tune.core.journal.journal import read_entries
from prefect_tune.core.journal_events import Entry, Event, Owner
from prefect_tune.core.search_view import SearchSnapshot
from prefect_tune.core.values import hash_bytes
from prefect_tune.monitoring.search_observer import SearchObserver, SearchRecorder
from prefect_tune.prefect_api.artifacts_and_assets import update_artifact
from prefect_tune.reporting.facts import make_report_input, select_curve_trials
from prefect_tune.reporting.page import make_page, render_markdown
from prefect_tune.storage_retries import with_retries
from prefect_tune.terminal.progress_view import SearchExtent, compute_search_completion, compute_trial_completion

# Publish Prefect artifacts from a background thread: create each once, update it in place, delete it when obsolete.

_FIRST_DELAY = timedelta(seconds=2)
_MAX_PAUSE = timedelta(minutes=10)
_PAUSE_FACTOR = 50
"""The pause after a successful round is this multiple of the round's duration, `period` or more, up to `_MAX_PAUSE`."""
_REQUEST_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class ArtifactContent:
    """The content of one artifact."""

    key: str
    kind: Literal["markdown", "progress"]
    data: str | float
    description: str
    task_run: str | None = None
    """The id of a task run that also shows the artifact."""

    @property
    def identity(self) -> tuple[str, str | None]:
        """The key and the task run, which never change during the life of an artifact."""
        return self.key, self.task_run


@dataclass(frozen=True, slots=True)
class EarlierArtifacts:
    """Artifacts that earlier runs, or a killed process of this run, may have left."""

    keys_to_update: frozenset[str]
    """Keys of artifacts that each run creates for itself. This process updates those of its own run."""
    keys_to_delete: frozenset[str]
    """Keys of artifacts that this process deletes."""
    key_prefix: str
    """The prefix of the keys in `keys_to_delete`; keys of other experiments may have the same prefix."""


class ArtifactPublisher:
    """Publishes the result of `render` in rounds: after 2 s, then at most once per `period`, and once at the end.

    Each flow run creates an artifact once and updates it in place, because `create_markdown_artifact` would add a
    version each time. An artifact that `render` no longer returns is deleted.
    If the API is unreachable, no error is raised, and the next round tries again.
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
        self._published: dict[tuple[str, str | None], ArtifactContent] = {}
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._is_superseded = False
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run_publisher,), name="artifact-publisher", daemon=True
        )
        self._thread.start()

    def notify_change(self) -> None:
        """Record that the content has changed, so that the next round publishes it."""
        if not self._changed.is_set():
            self._changed.set()

    def begin_final_round(self) -> None:
        """Start the final round, and return without waiting for it."""
        self._closing.set()
        self._changed.set()

    def close(self, timeout: timedelta) -> None:
        """Run the final round, and wait up to `timeout` for it."""
        self.begin_final_round()
        self._thread.join(timeout.total_seconds())

    def stop_publishing(self) -> None:
        """Stop without a final round, because another process publishes these artifacts now."""
        self._is_superseded = True
        self.begin_final_round()

    def _run_publisher(self) -> None:
        pause = _FIRST_DELAY
        while not self._closing.wait(pause.total_seconds()):
            self._changed.wait()
            self._changed.clear()
            if self._closing.is_set():
                break
            began = time.monotonic()
            is_published = self._publish_artifacts()
            duration = timedelta(seconds=time.monotonic() - began) if is_published else timedelta(0)
            pause = max(self._period, min(_MAX_PAUSE, duration * _PAUSE_FACTOR))
        if not self._is_superseded:
            self._publish_artifacts()

    def _publish_artifacts(self) -> bool:
        try:
            artifacts = self._render()
        except Exception:  # noqa: BLE001  a failed report must not end the run; the next round retries
            self._log.exception("the report could not be rendered; retried with the next update")
            return False
        try:
            with get_client(sync_client=True, httpx_settings={"timeout": _REQUEST_TIMEOUT.total_seconds()}) as client:
                self._reconcile_earlier_artifacts(client)
                for artifact in artifacts:
                    self._publish_artifact(client, artifact)
                current = {artifact.identity for artifact in artifacts}
                for identity in [identity for identity in self._ids if identity not in current]:
                    _delete_artifact(client, self._ids.pop(identity))
                    self._published.pop(identity, None)
            return True
        except (PrefectException, HTTPError, OSError):
            self._changed.set()  # the API is unreachable, so the next round must retry
        except Exception:  # noqa: BLE001  see above
            if not self._closing.is_set():  # at the end, errors are normal, because the flow has closed the client
                self._log.exception("the report could not be published; retried with the next update")
        return False

    def _reconcile_earlier_artifacts(self, client: SyncPrefectClient) -> None:
        """In the first round, delete leftover artifacts, and find the artifacts of this run that are to be updated."""
        if self._earlier is None:
            return
        leftovers = ArtifactFilter(key=ArtifactFilterKey(like_=f"{self._earlier.key_prefix}%"))
        for artifact in client.read_artifacts(artifact_filter=leftovers, sort=ArtifactSort.CREATED_DESC):
            if artifact.key in self._earlier.keys_to_delete:
                _delete_artifact(client, artifact.id)
        if self._flow_run:
            own = ArtifactFilter(
                key=ArtifactFilterKey(any_=sorted(self._earlier.keys_to_update)),
                flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run]),
            )
            artifacts = client.read_artifacts(artifact_filter=own)
            self._ids |= {(str(artifact.key), None): artifact.id for artifact in artifacts}
        self._earlier = None

    def _publish_artifact(self, client: SyncPrefectClient, artifact: ArtifactContent) -> None:
        identity = artifact.identity
        if self._published.get(identity) == artifact:
            return
        artifact_id = self._ids.get(identity)
        if artifact_id is None or not update_artifact(client, artifact_id, artifact.data, artifact.description):
            new = ArtifactCreate(
                key=artifact.key,
                type=artifact.kind,
                description=artifact.description,
                data=artifact.data,
                flow_run_id=self._flow_run,
                task_run_id=UUID(artifact.task_run) if artifact.task_run else None,
            )
            self._ids[identity] = client.create_artifact(new).id
        self._published[identity] = artifact


def _delete_artifact(client: SyncPrefectClient, artifact: UUID) -> None:
    with suppress(ObjectNotFound):
        client.delete_artifact(artifact)


def make_artifact_key(*names: str) -> str:
    """Return the artifact key of `names`; if `slugify` changes the names, the key ends with a digest to stay unique."""
    name, slug = "-".join(names), slugify(*names)
    return slug if slug == name else f"{slug}-{hash_bytes(name.encode())[:6]}"


def slugify(*names: str) -> str:
    """Return an artifact key of lower-case letters, digits and dashes; different names may get the same key."""
    return re.sub(r"[^a-z0-9-]+", "-", "-".join(names).lower()).strip("-")


# Publish the report and the progress of an experiment as Prefect artifacts.

MIN_REFRESH_INTERVAL = timedelta(seconds=15)
"""The minimum pause between two updates of the report."""
_TIMEOUT = timedelta(minutes=5)
_END_TIMEOUT = timedelta(seconds=10)
_END_TIMEOUT_WHEN_STOPPED = timedelta(seconds=2)
_MAX_HISTORY_ENTRIES = 20_000
"""If earlier runs wrote more entries than this, the report omits them, because reading so many takes a minute."""
_MAX_TRIAL_ARTIFACTS = 10
"""The maximum number of trials that have a progress artifact at a time, since each update costs the server 15 ms."""


class ReportObserver(SearchObserver):
    """Publishes the report and the progress after each change, in the thread of an `ArtifactPublisher`."""

    def __init__(self, target: StorageTarget, recorder: SearchRecorder, extent: SearchExtent, log: Log) -> None:
        snapshot = recorder.read_search_snapshot()
        experiment = snapshot.experiment
        self._target = target
        self._recorder = recorder
        self._extent = extent
        self._log = log
        self._last_earlier_entry = experiment.entry_count
        self._lacks_earlier_runs = not snapshot.is_complete
        if self._lacks_earlier_runs:
            recorder.expect_earlier_entries()
        self._displayed_trials: Sequence[str] = ()
        earlier = None
        if experiment.term > 1:  # an earlier run may have left artifacts
            kept = frozenset(make_artifact_key(kind, experiment.name) for kind in ("report", "progress"))
            trial_keys = frozenset(
                _make_progress_artifact_key(experiment, trial, target.uri) for trial in experiment.trials
            )
            prefix = slugify("progress", experiment.name)
            earlier = EarlierArtifacts(kept, trial_keys - kept, f"{prefix}-")
        self.publisher = ArtifactPublisher(self._render_artifacts, MIN_REFRESH_INTERVAL, log, earlier)

    def on_event(self, event: Event, experiment: Experiment) -> None:
        del event, experiment
        self.publisher.notify_change()

    def on_entry_written(self, experiment: Experiment) -> None:
        del experiment
        self.publisher.notify_change()

    def begin_final_report(self) -> None:
        """Start publishing the final report, and return without waiting."""
        self.publisher.begin_final_round()

    # ----------------------------------------------------------------------------- run in the publisher's thread

    def _render_artifacts(self) -> Sequence[ArtifactContent]:
        if self._lacks_earlier_runs:
            self._recorder.prepend_entries(self._read_earlier_entries())
            self._lacks_earlier_runs = False
        drawn = select_curve_trials(self._recorder.read_search_snapshot().experiment)
        snapshot = self._recorder.read_search_snapshot(drawn)
        experiment, now, age = snapshot.experiment, datetime.now(UTC), ""
        if any(trial.phase is Phase.RUNNING for trial in experiment.trials.values()):
            # Show the date too, because the last report of a killed run may be read days later.
            period = format_duration(MIN_REFRESH_INTERVAL)
            age = f"{now:%Y-%m-%d %H:%M:%S} UTC; refreshed at most every {period} until the run ends"
        uri, count = self._target.uri, self._extent.trial_count
        facts = make_report_input(snapshot, uri=uri, now=now, run_url=make_run_url, expected_trial_count=count, age=age)
        key, description = make_artifact_key("report", experiment.name), f"Experiment {experiment.name} at {uri}"
        report = ArtifactContent(key, "markdown", render_markdown(make_page(facts)), description)
        return [report, *self._render_search_progress(snapshot), *self._render_trial_progress(snapshot)]

    def _read_earlier_entries(self) -> Iterable[Entry] | None:
        """Return the entries of earlier runs; None if there are too many entries, or if reading them fails."""
        if self._last_earlier_entry > _MAX_HISTORY_ENTRIES:
            return None
        key = self._recorder.read_search_snapshot().experiment.key
        try:
            with self._target.open(timeout=_TIMEOUT) as store:
                entries = with_retries(lambda: read_entries(store, key))
        except TuneError as error:
            self._log.warning("the report covers only this run, because earlier entries could not be read: %s", error)
            return None
        return (entry for entry in entries if entry.number <= self._last_earlier_entry)

    def _render_search_progress(self, snapshot: SearchSnapshot) -> Iterator[ArtifactContent]:
        """Yield the progress of the experiment; yield nothing if the number of trials is unknown."""
        experiment, trials = snapshot.experiment, list(snapshot.experiment.trials.values())
        if self._extent.trial_count is None or not trials:
            return
        expected = max(self._extent.trial_count, len(trials))  # an earlier run may have requested more trials
        if expected == 1:
            done = self._describe_trial_progress(trials[0], snapshot)
        else:
            done = f"{sum(trial.phase in ENDED_PHASES for trial in trials)} of {expected} trials done"
        share = compute_search_completion(trials, snapshot.get_newest_report, self._extent) or 0.0
        key = make_artifact_key("progress", experiment.name)
        yield ArtifactContent(key, "progress", round(100 * share, 1), f"Experiment {experiment.name}: {done}")

    def _render_trial_progress(self, snapshot: SearchSnapshot) -> Iterator[ArtifactContent]:
        """Yield the progress of up to 10 running trials; nothing if there is one trial or no maximum of steps."""
        if self._extent.max_steps is None or self._extent.trial_count == 1:
            return
        experiment = snapshot.experiment
        running = {name: attempt for name, attempt in snapshot.running.items() if attempt.report}
        kept = [name for name in self._displayed_trials if name in running]
        self._displayed_trials = [*kept, *(name for name in running if name not in kept)][:_MAX_TRIAL_ARTIFACTS]
        for name in self._displayed_trials:
            trial, owner = experiment.trial(name), running[name].owner
            yield ArtifactContent(
                _make_progress_artifact_key(experiment, name, self._target.uri),
                "progress",
                round(100 * compute_trial_completion(trial, snapshot.get_newest_report(name), self._extent), 1),
                f"Trial {name} of {experiment.name}: {self._describe_trial_progress(trial, snapshot)}",
                owner.task_run if owner else None,
            )

    def _describe_trial_progress(self, trial: Trial, snapshot: SearchSnapshot) -> str:
        report, steps = snapshot.get_newest_report(trial.id), self._extent.max_steps
        step = max(trial.step, report.step if report else 0)
        return f"step {step}{f' of {steps}' if steps else ''}, {trial.status}"


@contextmanager
def publishing_report(observer: ReportObserver, stop: threading.Event) -> Iterator[ReportObserver]:
    """Yield `observer`; on exit, wait up to 10 s for the final report, or up to 2 s if `stop` is set."""
    try:
        yield observer
    except Superseded:
        observer.publisher.stop_publishing()
        raise
    finally:
        observer.publisher.close(_END_TIMEOUT_WHEN_STOPPED if stop.is_set() else _END_TIMEOUT)


def _make_progress_artifact_key(experiment: Experiment, trial: str, uri: str) -> str:
    """Return the key of a trial's progress artifact, with a digest of the target, the experiment and the trial."""
    names = (experiment.name, trial)
    return f"{slugify('progress', *names)}-{hash_bytes(json.dumps([uri, *names]).encode())[:6]}"


def make_run_url(owner: Owner) -> str | None:
    """Return the URL of the owner's run in the Prefect UI; None if the run or the UI's URL is unknown."""
    if owner.task_run is not None:
        return url_for("task-run", owner.task_run)
    return url_for("flow-run", owner.flow_run) if owner.flow_run is not None else None
