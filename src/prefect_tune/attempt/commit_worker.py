"""The commit worker of an attempt: a thread that saves the attempt's checkpoints and journals its events, in order.

The thread writes entries with `attempt/search_channel.py`. Queued reports are written every `sync_period_seconds` or
more often, and immediately if a report needs a decision. The training loop never waits for a journal entry, only for
decisions and saves (`runtime/session.py`).

If the last step has a checkpoint, an entry after the commit's entry finishes the trial. If another checkpoint was
quarantined during the save, the new one is saved again first, because both may share the damage. The end of an attempt
is never journaled before a save that precedes it. Ranks cannot save different files of the same name.
"""

from __future__ import annotations

import copy
import filecmp
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Protocol, Self, TypeAlias

from prefect_tune.artifact_sync import Syncer, TargetSyncer
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.search_channel import TrialJournal
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.attempt.usage_meter import UsageMeter
from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.checkpoints.commit import ExpectedParts, Reverification, SaveResult
from prefect_tune.core.checkpoints.manifest import CheckpointMetadata
from prefect_tune.core.display_text import format_size, make_visible, pluralize
from prefect_tune.core.errors import (
    CheckpointNotFound,
    CommitUnknown,
    InvalidInput,
    PartMissing,
    SaveOvertaken,
    StagedFilesChanged,
    StoreRefused,
    StoreUnavailable,
    Superseded,
    TuneError,
)
from prefect_tune.core.experiment.retention import Retention, find_checkpoints_to_retire
from prefect_tune.core.experiment.trial_transitions import (
    Phase,
    Trial,
    is_quarantined_checkpoint,
    newest_checkpoint_key,
    predates_quarantine,
)
from prefect_tune.core.journal_events import (
    AttemptEvent,
    CheckpointCommitted,
    CheckpointQuarantined,
    CheckpointsRetired,
    Outcome,
    StepReported,
    TrialFinished,
)
from prefect_tune.core.messages.process_messages import StepDone
from prefect_tune.core.operations.trial_gc import find_leftover_manifests
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.restore import find_damaged_checkpoints, make_checkpoint_ref
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey, join_uri
from prefect_tune.core.values import StepReport, WriteStamp, flatten
from prefect_tune.storage_retries import READ_TIMEOUT, with_store
from prefect_tune.stores.local.staging import converting_read_errors
from prefect_tune.stores.posix_store import remove_tree
from prefect_tune.terminal.formatting import format_value

# The journal entry of a saved checkpoint: the commit, the retired checkpoints, and the quarantined checkpoints.

_MAX_METRICS = 3


def make_checkpoint_metadata(
    folder: TrialKey, trial: Trial, term: int, report: StepReport, reports: Sequence[StepReport], stamp: WriteStamp
) -> CheckpointMetadata:
    """Return the metadata of the checkpoint of `report`; `reports` are the reports that are not yet journaled."""
    return CheckpointMetadata(
        attempt=trial.attempt,
        term=term,
        write_id=stamp.write_id,
        created_at=stamp.at,
        parent=parent.name if (parent := newest_checkpoint_key(folder, trial)) else None,
        metrics=report.metrics,
        trained_seconds=report.trained_seconds,
        fingerprint=trial.fingerprint,
        reports=tuple(reports),
    )


def make_commit_events(
    target: StorageTarget, trial: Trial, save: SaveResult, retention: Retention, upload_seconds: float, log: Log
) -> tuple[CheckpointCommitted, Sequence[CheckpointQuarantined], Sequence[CheckpointKey]]:
    """Return the events that commit `save`, and the checkpoints to delete once these events are journaled.

    If the save has found damaged blobs, the events also quarantine the earlier checkpoints that use these blobs. To
    find such checkpoints, the function reads the manifests of the trial's other checkpoints. A failed read is only
    logged as a warning, because the new checkpoint is complete. `retention` says which checkpoints are retired.
    """
    key, new = save.manifest.key, make_checkpoint_ref(save.manifest)
    retired = find_checkpoints_to_retire(trial, new, retention)
    sequences, seconds = tuple(ref.sequence for ref in retired), round(upload_seconds, 3)
    committed = CheckpointCommitted(
        trial=trial.id, checkpoint=new, retired_sequences=sequences, sent_bytes=save.sent_bytes, upload_seconds=seconds
    )
    to_delete = [key.trial.checkpoint_key(ref) for ref in retired if ref.origin is None]
    live = [key.trial.checkpoint_key(ref) for ref in trial.checkpoints if ref.sequence not in sequences]
    reasons: Mapping[CheckpointKey, str] = {}
    try:
        if save.damaged_blobs:
            reasons = with_store(target, lambda store: find_damaged_checkpoints(store, live, save.damaged_blobs))
    except TuneError as error:
        log.warning("earlier checkpoints may share the damage, but could not be checked: %s", error)
    name, damaged = trial.id, reasons.items()
    quarantined = [CheckpointQuarantined(trial=name, sequence=at.sequence, reason=reason) for at, reason in damaged]
    return committed, quarantined, to_delete


def log_damage(save: SaveResult, quarantined: Sequence[CheckpointQuarantined], log: Log) -> None:
    """Log the damaged blobs that the save found. Call this after the commit is journaled."""
    if save.damaged_blobs:
        log.error(
            "step %d: %s damaged on the target; uploaded again. %d earlier checkpoints are quarantined: %s",
            save.manifest.step,
            pluralize(len(save.damaged_blobs), "blob to be reused is", "blobs to be reused are"),
            len(quarantined),
            "; ".join(save.damaged_blobs.values()),
        )


def log_commit(save: SaveResult, log: Log, suppressed_count: int = 0) -> None:
    """Log a commit with its first metrics, its size, and the number of earlier commits that were not logged."""
    size_bytes, metrics = save.manifest.size_bytes, save.manifest.metadata.metrics
    new = "" if save.sent_bytes >= size_bytes else f", {format_size(save.sent_bytes)} of it new"
    named = "".join(f", {name} {format_value(value)}" for name, value in list(flatten(metrics).items())[:_MAX_METRICS])
    others = f"; {pluralize(suppressed_count, 'other', 'others')} since the last line" if suppressed_count else ""
    log.info("step %d committed%s: %s", save.manifest.step, make_visible(named), format_size(size_bytes) + new + others)


def find_leftover_checkpoints(target: StorageTarget, key: TrialKey, trial: Trial, log: Log) -> Sequence[CheckpointKey]:
    """Return retired or uncommitted checkpoints that earlier attempts left; on an error, warn and return `()`."""
    try:
        with target.open(timeout=READ_TIMEOUT) as store:
            return find_leftover_manifests(store, key, trial)
    except TuneError as error:
        log.warning("retired checkpoints of earlier attempts could not be deleted: %s", error)
        return ()


def delete_or_warn(delete: Callable[[], object], log: Log) -> None:
    """Delete retired checkpoints with `delete`; only warn of an error, because the next attempt deletes the rest.

    Raises:
        Superseded: the experiment is being deleted, or was deleted.
    """
    try:
        delete()
    except Superseded:
        raise
    except TuneError as error:
        log.warning("retired checkpoints remain on the target until the next attempt: %s", error)


# A checkpoint to which several ranks add files.


@dataclass(frozen=True, slots=True)
class GroupSave:
    """A checkpoint to save, to which all ranks have added their parts."""

    done: StepDone
    """The report of rank 0, with the directory of its files."""
    parts: Mapping[int, Path]
    """The directories with the files of the other ranks, by rank."""
    nodes: tuple[int, ...] = ()
    """The nodes besides node 0 that hold files of the checkpoint."""


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A checkpoint that was not committed because ranks did not add their parts in time."""

    done: StepDone
    """The report of rank 0."""
    reason: Reason
    ranks: Sequence[int] = ()
    """The ranks without a part, if known."""

    @property
    def step(self) -> int:
        return self.done.report.step


def remove_directory(directory: str | Path | None) -> None:
    """Remove a local directory if it exists; do nothing for None."""
    if directory is not None:
        remove_tree(directory)


def merge_rank_directories(directory: Path, parts: Mapping[int, Path]) -> None:
    """Move the files of all `parts` into the directory of rank 0; ranks may share one directory.

    Raises:
        InvalidInput: two ranks have different files, or a file and a folder, of the same name; or a file is unreadable.
        StagedFilesChanged: a part no longer exists.
    """

    def on_error(error: OSError) -> None:
        raise StagedFilesChanged(f"the part of a rank cannot be read: {error}") from error

    owners: dict[str, int] = {}
    with converting_read_errors(directory):
        for rank, part in parts.items():
            if directory.exists() and part.exists() and part.samefile(directory):
                continue
            for parent, folders, files in os.walk(part, onerror=on_error):
                for name in (*folders, *files):
                    source = Path(parent, name)
                    path = str(source.relative_to(part))
                    if not _move_path(source, directory / path):
                        raise InvalidInput(
                            f"{path}: ranks {owners.get(path, 0)} and {rank} saved different files of this name: save "
                            "it on one rank only, or put pt.get_trial().rank into the name"
                        )
                    owners.setdefault(path, rank)
                folders[:] = [name for name in folders if Path(parent, name).exists()]  # do not walk into moved links
            remove_directory(part)


def _move_path(source: Path, target: Path) -> bool:
    """Move a file or a link, or create a folder. Return False if `target` exists with other content."""
    is_folder = source.is_dir() and not source.is_symlink()
    if is_folder and (target.is_dir() or not os.path.lexists(target)):
        target.mkdir(exist_ok=True)
    elif not os.path.lexists(target):
        source.rename(target)
    else:
        return not source.is_dir() and not target.is_dir() and filecmp.cmp(source, target, shallow=False)
    return True


# The worker.

_LOG_INTERVAL = timedelta(seconds=10)
# Errors that the trainable causes with the files in its checkpoint directory.
TRAINABLE_ERRORS = (InvalidInput, StagedFilesChanged)
RequestParts: TypeAlias = Callable[[CheckpointKey, Trial, Sequence[int]], AbstractContextManager[ExpectedParts]]
"""Requests the parts of a checkpoint from given nodes; the end of the `with` block deletes the parts on the target."""


class AttemptTasks(Protocol):
    """The operations of an attempt that are Prefect tasks (`tasks/`), with retries, a timeout and a visible task run.

    Each operation raises `StoreUnavailable` or `CommitUnknown` when all its retries have failed.
    """

    def save_checkpoint(
        self,
        key: CheckpointKey,
        directory: Path,
        metadata: CheckpointMetadata,
        before: Trial,
        reverification: Reverification,
        parts: ExpectedParts | None = None,
    ) -> SaveResult:
        """Publish `directory` as the checkpoint `key`; reuse blobs of `before`, the trial's state before the save.

        Raises:
            PartMissing: a node that `parts` names did not add its part.
        """

    def restore_checkpoint(self, key: CheckpointKey, destination: Path) -> Path:
        """Restore a checkpoint to a new directory; verify every byte. Raises CheckpointNotFound, CheckpointCorrupt."""

    def delete_checkpoints(self, state: Trial, retired: Sequence[CheckpointKey]) -> None:
        """Delete checkpoints that the journal has retired; `state` is the trial after the entry that retires them."""


class CommitWorker:
    """Saves the checkpoints and journals the reports of one attempt.

    The attempt's thread queues reports and saves; a worker thread processes them in order. The worker thread runs in
    the context of the task that created the worker, so that Prefect shows the saves under that task. The end of a
    `with` block waits for the queued work, even without `close`, so the directories to save must exist until then.
    """

    def __init__(
        self,
        spec: TrialSpec,
        term: int,
        journal: TrialJournal,
        artifacts: TrialArtifacts,
        tasks: AttemptTasks,
        log: Log,
        meter: UsageMeter | None = None,
        request_parts: RequestParts | None = None,
    ) -> None:
        self._spec, self._term, self._journal, self._artifacts = spec, term, journal, artifacts
        self._tasks, self.log, self._meter = tasks, log, meter or UsageMeter()
        self._request_parts = request_parts
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._last_write_at = time.monotonic()
        self.outcome: Outcome | None = None
        """How the attempt ended; includes the resource usage once the end is journaled."""
        self._commit_count = 0
        self._last_log_at: float | None = None
        self._suppressed_log_count = 0
        self.source_digest = ""
        """The digest of the trainable's source; empty until the trial sends it."""
        self.error: BaseException | None = None
        """The error that ended the worker thread; the thread writes nothing after it."""
        run = copy_context().run
        self._thread = threading.Thread(target=run, args=(self._process_queue,), name="commit-worker", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.put(None)
        self._thread.join()

    def queue_report(self, report: StepReport, *, awaits_decision: bool = False) -> None:
        """Queue a report for the next commit or sync; `awaits_decision` says whether the trial waits for a decision."""
        trial = self._spec.trial.trial
        self._journal.add_report(StepReported(trial=trial, report=report, awaits_decision=awaits_decision))

    def queue_save(
        self, save: GroupSave, on_committed: Callable[[int], None], on_failed: Callable[[FailedSave], None]
    ) -> None:
        """Queue the commit of a checkpoint. The worker calls `on_committed`, or `on_failed` if a part is missing."""
        self._work.put(lambda: self._process_save(save, on_committed, on_failed))

    def queue_flush(self) -> None:
        """Queue a journal entry with the reports so far, so that the search can read them and decide."""
        self._work.put(self._sync_reports)

    def queue_end(self, outcome: Outcome) -> None:
        """Queue the last entry: the remaining reports, then `outcome` with the resource usage of the attempt.

        The entry is not written if an entry after a commit has already finished the trial.
        """
        self.outcome = outcome
        self._work.put(self._write_end)

    def close(self) -> None:
        """Sync the artifacts a last time and wait for the worker thread. The trial must not write artifacts any more.

        Invalid checkpoint content raises no error here, because it is journaled as a failure of the trial.

        Raises:
            TuneError: the target failed, or another process owns the journal; the end may be journaled anyway.
        """
        self._work.put(self._artifacts.sync_and_wait)
        self._work.put(None)
        self._thread.join()
        error = self.error
        if error is not None and not isinstance(error, Superseded):
            self._retry_end()
        self._artifacts.close_syncer()
        if error is not None and not isinstance(error, TRAINABLE_ERRORS):
            raise error

    def _retry_end(self) -> None:
        """After an error of the worker thread, try once more to write the pending entry and the attempt's end."""
        try:
            with suppress(SaveOvertaken):
                self._journal.flush()
            self._write_end()
        except TuneError as error:
            self.log.error("the attempt's end could not be journaled: %s", error)  # noqa: TRY400 - the target's error

    def _write_end(self) -> None:
        if self._journal.trial.phase is Phase.RUNNING and self.outcome is not None:
            self.outcome = self.outcome.model_copy(update={"usage": self._meter.get_usage()})
            self._write_entry([self.outcome])

    def _process_queue(self) -> None:
        try:
            if self._journal.deletes_retired:  # delete checkpoints that earlier attempts left
                spec, trial = self._spec, self._journal.trial
                self._delete_retired(find_leftover_checkpoints(spec.target, spec.trial, trial, self.log))
            while (work := self._take_next_work()) is not None:
                work()
        except BaseException as error:  # noqa: BLE001 - `close` raises it in the attempt's thread
            self.error = error

    def _take_next_work(self) -> Callable[[], None] | None:
        """Return the next queued work; if none arrives before the next sync is due, return that sync."""
        elapsed = timedelta(seconds=time.monotonic() - self._last_write_at)
        timeout = (self._journal.get_flush_interval(self._spec.sync) - elapsed).total_seconds()
        try:
            return self._work.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return self._sync_reports

    def _sync_reports(self) -> None:
        """Journal the queued reports. If the target is unavailable or refuses them, the next sync or commit retries."""
        self._last_write_at = time.monotonic()
        try:
            self._journal.flush()
        except (StoreUnavailable, StoreRefused, CommitUnknown) as error:
            self.log.warning("reports could not be journaled; the next sync retries: %s", error)
        self._artifacts.on_report()

    def _process_save(
        self, save: GroupSave, on_committed: Callable[[int], None], on_failed: Callable[[FailedSave], None]
    ) -> None:
        done, directory = save.done, Path(save.done.checkpoint or "")
        merge_rank_directories(directory, save.parts)
        try:
            saved, to_delete = self._commit_checkpoint(save, directory)
        except PartMissing as missing:
            on_failed(FailedSave(done, make_reason("part-missing", error=str(missing))))
            remove_directory(directory if done.is_owned_by_supervisor else None)
            return
        on_committed(done.report.step)
        # Log the first commit, then at most one in 10 s, because a trainable with short steps may save at every step.
        now = time.monotonic()
        if self._last_log_at is not None and now - self._last_log_at < _LOG_INTERVAL.total_seconds():
            self._suppressed_log_count += 1
        else:
            log_commit(saved, self.log, self._suppressed_log_count)
            self._last_log_at, self._suppressed_log_count = now, 0
        self._artifacts.on_commit()
        remove_directory(directory if done.is_owned_by_supervisor else None)
        self._delete_retired(to_delete)

    def _commit_checkpoint(self, save: GroupSave, directory: Path) -> tuple[SaveResult, Sequence[CheckpointKey]]:
        """Save and commit the checkpoint; save it again whenever other checkpoints of the trial change during the save.

        If the report has a `finish_reason`, journal the end of the trial after the commit. Return the last save, and
        the checkpoints to delete: those that its commit retired, and those that this call saved before it.
        """
        done, overtaken, name = save.done, list[CheckpointKey](), self._spec.trial.trial
        while True:
            start = time.monotonic()
            if predates_quarantine(self._journal.trial, self._journal.trial.next_sequence):
                self._write_entry([CheckpointsRetired(trial=name, retired_sequences=())], up_to=0)
            saved = self._upload_checkpoint(done.report, directory, save.nodes)
            seconds = time.monotonic() - start
            event, quarantined, retired = make_commit_events(
                self._spec.target, self._journal.trial, saved, self._spec.retention, seconds, self.log
            )
            event = event.model_copy(update={"seconds": self._meter.add_startup_seconds(done.seconds)})
            journaled_sequences: tuple[int, ...] = ()
            with suppress(SaveOvertaken):
                self._write_entry((event, *quarantined), up_to=done.report.step)
                self._commit_count += 1
                log_damage(saved, quarantined, self.log)
                if not is_quarantined_checkpoint(self._journal.trial, saved.manifest.key):
                    if done.finish_reason is not None:
                        finished = TrialFinished(trial=name, reason=done.finish_reason, usage=self._meter.get_usage())
                        self._write_entry([finished], up_to=0)
                    return saved, [*overtaken, *retired]
                journaled_sequences = (saved.manifest.sequence,)
            warning = "other checkpoints of the trial changed while step %d was saved, so it is saved again"
            self.log.warning(warning, saved.manifest.step)
            # After this entry, no owner adopts this checkpoint or reuses its blobs, so it can be deleted.
            self._write_entry([CheckpointsRetired(trial=name, retired_sequences=journaled_sequences)], up_to=0)
            overtaken.append(saved.manifest.key)  # do not add `retired`: the journal has not retired these

    def _upload_checkpoint(self, report: StepReport, directory: Path, nodes: Sequence[int]) -> SaveResult:
        trial = self._journal.trial
        key = CheckpointKey(trial=self._spec.trial, step=report.step, sequence=trial.next_sequence)
        reports = self._journal.list_unjournaled_reports(report.step)
        metadata = make_checkpoint_metadata(self._spec.trial, trial, self._term, report, reports, new_write_stamp())
        if self.source_digest:
            metadata = metadata.model_copy(update={"fingerprint": {**metadata.fingerprint, "code": self.source_digest}})
        reverification = Reverification(self._commit_count, self._spec.sync.verify_reused_every)
        requested = self._request_parts(key, trial, nodes) if self._request_parts and nodes else nullcontext()
        with requested as parts:
            return self._tasks.save_checkpoint(key, directory, metadata, trial, reverification, parts)

    def _write_entry(self, events: Sequence[AttemptEvent], *, up_to: int | None = None) -> None:
        """Write one entry: the queued reports up to step `up_to` (all reports if None), then `events`."""
        self._journal.write(events, up_to=up_to)
        self._last_write_at = time.monotonic()

    def _delete_retired(self, retired: Sequence[CheckpointKey]) -> None:
        """Delete retired checkpoints, unless the owner deletes them. Raises Superseded like `delete_or_warn`."""
        if retired and self._journal.deletes_retired:
            delete_or_warn(lambda: self._tasks.delete_checkpoints(self._journal.trial, retired), self.log)


# The trial's artifacts, such as logs and plots. A resume does not need them, so errors are logged as warnings.

_MAX_RETRIES = 2
_BACKOFF_SECONDS = 1.0


class TrialArtifacts:
    """Syncs the artifact directory of one attempt. Does nothing if the sync configuration has no syncer.

    Raises:
        InvalidInput: the syncer or the upload target is invalid.
    """

    def __init__(self, spec: TrialSpec, directory: Path, log: Log) -> None:
        self._config, self._directory, self._log = spec.sync, str(directory), log
        target = resolve_target(spec.sync.upload_dir or spec.target)
        self._syncer = make_syncer(spec.sync, target) if spec.sync.sync_artifacts else None
        # The default syncer knows the target; a user's syncer needs a complete URI.
        self._target_uri = None if spec.sync.syncer == "auto" else target.uri
        self._folder = spec.trial.artifacts_folder
        self._remote_folder = self._make_remote_path(self._folder)
        self._excludes = list(spec.sync.excludes)
        self._had_files = False
        if isinstance(self._syncer, TargetSyncer):
            self._syncer.warn = log.warning

    def prepare(self, attempt: int) -> None:
        """Download the artifacts of earlier attempts, so that the trial appends to their logs.

        If the download fails, this attempt uses a separate folder, and does not overwrite the earlier files.
        """
        if attempt == 1:
            if isinstance(self._syncer, TargetSyncer) and self._config.upload_dir is not None:
                # Delete what an experiment of the same name on another target may have left in `upload_dir`.
                self._call_syncer(lambda syncer: syncer.delete(self._remote_folder))
        elif not self._call_syncer(self._download):
            self._remote_folder = self._make_remote_path(f"{self._folder}-{attempt}")
            self._log.warning("the artifacts of this attempt are uploaded to %s instead", self._remote_folder)

    def on_commit(self) -> None:
        """Start a sync in the background if `sync_on_checkpoint` is set."""
        if self._config.sync_on_checkpoint:
            self._call_syncer(self._start_upload)

    def on_report(self) -> None:
        """Start a sync in the background if the last one is at least `sync_period` ago."""
        self._call_syncer(lambda syncer: self._start_upload(syncer, only_if_needed=True))

    def sync_and_wait(self) -> None:
        """Sync the files a last time, and wait for the sync."""
        self._call_syncer(self._start_upload)
        self._call_syncer(lambda syncer: syncer.wait_or_retry(_MAX_RETRIES, _BACKOFF_SECONDS))

    def close_syncer(self) -> None:
        """Wait for running syncs. Call this before the directory is removed, so that the last sync is complete."""
        self._call_syncer(lambda syncer: syncer.close())

    def _make_remote_path(self, folder: str) -> str:
        return folder if self._target_uri is None else join_uri(self._target_uri, folder)

    def _download(self, syncer: Syncer) -> None:
        with suppress(CheckpointNotFound):  # raised if no earlier attempt has synced files
            syncer.sync_down(self._remote_folder, self._directory, self._excludes)
            syncer.wait_or_retry(_MAX_RETRIES, _BACKOFF_SECONDS)

    def _start_upload(self, syncer: Syncer, *, only_if_needed: bool = False) -> None:
        """Start a sync; do not start the default syncer before a file exists, because most trials have no artifacts."""
        if isinstance(syncer, TargetSyncer) and not self._had_files:
            self._had_files = any(Path(self._directory).iterdir())
            if not self._had_files:
                return
        sync_up = syncer.sync_up_if_needed if only_if_needed else syncer.sync_up
        sync_up(self._directory, self._remote_folder, self._excludes)

    def _call_syncer(self, call: Callable[[Syncer], object]) -> bool:
        """Call `call` with the syncer, if there is one; on an error, log a warning and return False."""
        try:
            if self._syncer is not None:
                call(self._syncer)
        except Exception as error:  # noqa: BLE001 - no error of a user's syncer may stop the training
            self._log.warning("artifacts could not be synced: %s: %s", type(error).__name__, error)
            return False
        return True


def make_syncer(config: SyncConfig, target: StorageTarget) -> Syncer | None:
    """Return an attempt's artifact syncer, which the attempt must close; return None if `config.syncer` is None.

    Each attempt gets its own copy of a user's syncer, since several attempts may run at once. `sync_period` and
    `sync_timeout` are passed only to a class that inherits the constructor of `Syncer`.

    Raises:
        InvalidInput: `config.syncer` is not a syncer, cannot be imported, or cannot be copied.
    """
    syncer = config.syncer
    if syncer is None:
        return None
    if syncer == "auto":
        return TargetSyncer(target, sync_period=config.sync_period, sync_timeout=config.sync_timeout)
    if isinstance(syncer, str):
        name = syncer
        module, _, attribute = name.partition(":")
        try:
            syncer = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as missing:
            raise InvalidInput(f"syncer {name!r}: cannot be imported: {missing}") from missing
        if isinstance(syncer, type) and issubclass(syncer, Syncer):
            periods = (config.sync_period, config.sync_timeout) if syncer.__init__ is Syncer.__init__ else ()
            try:
                return syncer(*periods)
            except TypeError as error:
                raise InvalidInput(f"syncer {name!r}: cannot be constructed without arguments: {error}") from error
    if not isinstance(syncer, Syncer):
        expected = "'auto', 'package.module:Name' of a pt.Syncer or a subclass, a pt.Syncer or None"
        raise InvalidInput(f"syncer {config.syncer!r}: expected {expected}, found {syncer!r}")
    try:
        return copy.deepcopy(syncer)
    except Exception as error:
        kind = type(syncer).__name__
        raise InvalidInput(
            f"syncer: each attempt needs its own copy, and this {kind} cannot be copied ({error}). Pass the class as "
            f"syncer='package.module:{kind}', let its methods create what cannot be copied, or define __deepcopy__"
        ) from error
