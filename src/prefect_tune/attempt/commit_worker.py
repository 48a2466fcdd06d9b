"""The commit worker of an attempt: a thread that saves its checkpoints and writes its journal entries, in order.

`attempt/search_link.py` says how the entries are written. Where reports wait for the next one, that is written every
`sync_period_seconds`, and at once for a report that asks for a decision. The training loop waits for no entry: in
`runtime/session.py` it waits for decisions (`heed_milestone`) and for saves.

A trial whose last step has a checkpoint has finished with the entry after its commit: only then it is known that no
checkpoint was quarantined meanwhile, with which the last one may share its damage. Never: two files of one checkpoint
with one name and other bytes; an end that is journaled before a save that was handed over before it.
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
from prefect_tune.attempt.search_link import TrialJournal
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.attempt.usage_meter import UsageMeter
from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target
from prefect_tune.clock import new_write_id
from prefect_tune.core.checkpoints.commit import PartsOfSave, Reverification, Save
from prefect_tune.core.checkpoints.manifest import About
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
from prefect_tune.core.experiment.retention import Retention, retired_by_commit
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, is_overtaken, is_quarantined, newest_key
from prefect_tune.core.journal_events import (
    AttemptEvent,
    Committed,
    Finished,
    Outcome,
    Quarantined,
    Reported,
    Retired,
)
from prefect_tune.core.messages.process_messages import StepDone
from prefect_tune.core.operations.trial_gc import leftover
from prefect_tune.core.reasons import Reason, make_reason
from prefect_tune.core.restore import checkpoints_with, ref_of
from prefect_tune.core.shown_text import plural, shown_size, visible
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey, below
from prefect_tune.core.values import Stamp, StepReport, flat
from prefect_tune.storage_retries import READ_TIMEOUT, on_target
from prefect_tune.stores.local.staging import naming_unreadable
from prefect_tune.stores.posix_store import remove_tree
from prefect_tune.terminal.formatting import format_value

# The journal entry of a saved checkpoint: the commit, what it retires, and earlier checkpoints that share damage.

_METRICS = 3


def about_checkpoint(
    folder: TrialKey, trial: Trial, term: int, report: StepReport, reports: Sequence[StepReport], stamp: Stamp
) -> About:
    """Return the metadata of the checkpoint of `report`'s step; `reports` are those that are not journaled yet."""
    return About(
        attempt=trial.attempt,
        term=term,
        write_id=stamp.write_id,
        created_at=stamp.at,
        parent=parent.name if (parent := newest_key(folder, trial)) else None,
        metrics=report.metrics,
        trained_seconds=report.trained_seconds,
        fingerprint=trial.fingerprint,
        reports=tuple(reports),
    )


def commit_entry(
    target: StorageTarget, trial: Trial, save: Save, policy: Retention, upload_seconds: float, log: Log
) -> tuple[Committed, Sequence[Quarantined], Sequence[CheckpointKey]]:
    """Return what the journal records when `save` becomes a checkpoint of its trial, which keeps those of `policy`.

    That is the commit, then the quarantine of earlier checkpoints that refer to blobs which the save found damaged: for
    these, this reads the manifests of the trial's other checkpoints; if that fails, a warning says so, since the new
    checkpoint is whole. Last are the retired checkpoints, which may be deleted once the entry is written.
    """
    key, new = save.manifest.key, ref_of(save.manifest)
    ending = retired_by_commit(trial, new, policy)
    retires = tuple(ref.sequence for ref in ending)
    committed = Committed(
        trial=trial.trial,
        checkpoint=new,
        retires=retires,
        sent_bytes=save.sent_bytes,
        upload_seconds=round(upload_seconds, 3),
    )
    doomed = [key.trial.checkpoint_key(ref) for ref in ending if ref.origin is None]
    live = [key.trial.checkpoint_key(ref) for ref in trial.checkpoints if ref.sequence not in retires]
    sharing: Mapping[CheckpointKey, str] = {}
    try:
        if save.damaged:
            sharing = on_target(target, lambda store: checkpoints_with(store, live, save.damaged))
    except TuneError as error:
        log.warning("earlier checkpoints may share the damage; they are not checked now: %s", error)
    quarantined = [Quarantined(trial=trial.trial, sequence=at.sequence, reason=why) for at, why in sharing.items()]
    return committed, quarantined, doomed


def log_damage(save: Save, quarantined: Sequence[Quarantined], log: Log) -> None:
    """Log the damaged blobs that the save found; call it once the entry of the commit is written."""
    if save.damaged:
        log.error(
            "step %d: %s damaged on the target, and sent again; %d earlier checkpoints are quarantined: %s",
            save.manifest.step,
            plural(len(save.damaged), "blob that it would have reused is", "blobs that it would have reused are"),
            len(quarantined),
            "; ".join(save.damaged.values()),
        )


def log_commit(save: Save, log: Log, unlogged: int = 0) -> None:
    """Log a committed checkpoint with its first metrics and its size, and how many commits before it have no line."""
    size_bytes, metrics = save.manifest.size_bytes, save.manifest.about.metrics
    new = "" if save.sent_bytes >= size_bytes else f", {shown_size(save.sent_bytes)} of it new"
    named = "".join(f", {name} {format_value(value)}" for name, value in list(flat(metrics).items())[:_METRICS])
    others = f"; {plural(unlogged, 'other', 'others')} since the last line" if unlogged else ""
    log.info("step %d committed%s: %s%s%s", save.manifest.step, visible(named), shown_size(size_bytes), new, others)


def find_doomed(target: StorageTarget, folder: TrialKey, trial: Trial, log: Log) -> Sequence[CheckpointKey]:
    """Return what an earlier attempt retired and did not delete; nothing, with a warning, if the target fails now."""
    try:
        with target.open(timeout=READ_TIMEOUT) as store:
            return leftover(store, folder, trial)
    except TuneError as error:
        log.warning("retired checkpoints of earlier attempts are not deleted now: %s", error)
        return ()


def delete_retired(delete: Callable[[], object], log: Log) -> None:
    """Delete retired checkpoints. A failure only costs space: the next attempt deletes them, from the journal.

    Raises:
        Superseded: the experiment is being deleted, or was deleted.
    """
    try:
        delete()
    except Superseded:
        raise
    except TuneError as error:
        log.warning("retired checkpoints stay on the target until the next attempt: %s", error)


# The files of a checkpoint of several ranks.


@dataclass(frozen=True, slots=True)
class GroupSave:
    """A checkpoint with all its parts."""

    done: StepDone
    """The report of rank 0, with its directory."""
    parts: Mapping[int, Path]
    """The directories of other ranks, by rank."""
    nodes: tuple[int, ...] = ()
    """The other nodes that hold files of it."""


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A checkpoint that is not committed, since ranks did not add their part in time."""

    done: StepDone
    """The report of rank 0."""
    reason: Reason
    ranks: Sequence[int] = ()
    """Those that did not, where that is known."""

    @property
    def step(self) -> int:
        return self.done.report.step


def remove_directory(directory: str | Path | None) -> None:
    """Remove a directory of this machine, if there is one."""
    if directory is not None:
        remove_tree(directory)


def merge(directory: Path, parts: Mapping[int, Path]) -> None:
    """Move the files of all `parts` into the directory of rank 0; ranks may have written into one directory.

    Raises:
        InvalidInput: two ranks have files of one name with different bytes, or a file where another has a folder; or a
            file cannot be read.
        StagedFilesChanged: a part is not there any more.
    """

    def on_error(error: OSError) -> None:
        raise StagedFilesChanged(f"the part of a rank cannot be read: {error}") from error

    owners: dict[str, int] = {}
    with naming_unreadable(directory):
        for rank, part in parts.items():
            if directory.exists() and part.exists() and part.samefile(directory):
                continue
            for parent, folders, files in os.walk(part, onerror=on_error):
                for name in (*folders, *files):
                    source = Path(parent, name)
                    path = str(source.relative_to(part))
                    _move(source, directory / path, path, (owners.get(path, 0), rank))
                    owners.setdefault(path, rank)
                folders[:] = [name for name in folders if Path(parent, name).exists()]  # a link to a folder was moved
            remove_directory(part)


def _move(source: Path, target: Path, path: str, ranks: tuple[int, int]) -> None:
    """Move a file or a link, unless it is there already; make a folder, whose files follow."""
    is_folder = source.is_dir() and not source.is_symlink()
    if is_folder and (target.is_dir() or not os.path.lexists(target)):
        target.mkdir(exist_ok=True)
    elif not os.path.lexists(target):
        source.rename(target)
    elif source.is_dir() or target.is_dir() or not filecmp.cmp(source, target, shallow=False):
        first, second = ranks
        raise InvalidInput(
            f"{path}: ranks {first} and {second} saved different files of this name: save it on one rank, or put "
            "pt.get_trial().rank into the name"
        )


# The worker.

_LOG_PERIOD = timedelta(seconds=10)
# Errors of a trial's checkpoint directory: the trainable caused them.
USERS_FAULT = (InvalidInput, StagedFilesChanged)
OpenParts: TypeAlias = Callable[[CheckpointKey, Trial, Sequence[int]], AbstractContextManager[PartsOfSave]]
"""Has other nodes send their parts of a checkpoint of a trial in this state, and deletes the parts in the end."""


class AttemptTasks(Protocol):
    """What an attempt does through the tasks of `tasks/`, each with retries, a timeout and a task run to look at.

    Each raises `StoreUnavailable` or `CommitUnknown` once its retries have failed.
    """

    def save(
        self,
        key: CheckpointKey,
        directory: Path,
        about: About,
        before: Trial,
        reverification: Reverification,
        parts: PartsOfSave | None = None,
    ) -> Save:
        """Publish `directory` as the checkpoint `key`; `before` is the trial's state, whose blobs can be reused.

        Raises:
            PartMissing: a node did not add its part, of those that `parts` names.
        """
        ...

    def restore(self, key: CheckpointKey, destination: Path) -> Path:
        """Download a checkpoint into the new directory `destination`, and verify every byte.

        Raises:
            CheckpointNotFound, CheckpointCorrupt: it cannot be restored.
        """
        ...

    def delete(self, state: Trial, retired: Sequence[CheckpointKey]) -> None:
        """Delete checkpoints that the journal has retired; `state` is the trial after the entry that retired them."""
        ...


class CommitWorker:
    """Saves the checkpoints and journals the reports of one attempt.

    The attempt's thread queues reports and saves; a worker thread carries them out in that order, in the context
    of the task that created the worker, so that Prefect shows its task runs under that task. The end of a `with`
    block waits for the queued work, whether or not `close` was called: the directories that are saved outlive it.
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
        open_parts: OpenParts | None = None,
    ) -> None:
        self._spec = spec
        self._term = term
        self._journal = journal
        self._artifacts = artifacts
        self._tasks = tasks
        self.log = log
        self._meter = meter or UsageMeter()
        self._open_parts = open_parts
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._synced_at = time.monotonic()
        self.outcome: Outcome | None = None
        """How the attempt has ended; once that is journaled, with what it has used."""
        self._commit_count = 0
        self._logged_at: float | None = None
        self._unlogged = 0
        self.code = ""
        """The digest of the trainable's source; empty until the trial has sent it."""
        self.error: BaseException | None = None
        """The error that ended the worker thread; nothing is written after it."""
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="commit-worker", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.put(None)
        self._thread.join()

    def note(self, report: StepReport, *, asks: bool = False) -> None:
        """Have a report journaled with the next commit, or after `sync_period`.

        Args:
            asks: whether the trial waits for an answer that is given to the journaled report.
        """
        self._journal.report(Reported(trial=self._spec.trial.trial, report=report, asks=asks))

    def save(self, save: GroupSave, committed: Callable[[int], None], failed: Callable[[FailedSave], None]) -> None:
        """Queue the commit of a step's checkpoint; the worker thread then calls `committed` with the step.

        If a node did not add its part, the worker thread calls `failed` instead.
        """
        self._work.put(lambda: self._save(save, committed, failed))

    def flush(self) -> None:
        """Queue a journal entry of the reports so far: the search reads them there, and answers."""
        self._work.put(self._sync)

    def end(self, outcome: Outcome) -> None:
        """Queue the last entry: the remaining reports, then `outcome`, with what the attempt has used by then.

        It is not written if a committed checkpoint has finished the trial already.
        """
        self.outcome = outcome
        self._work.put(self._write_end)

    def close(self) -> None:
        """Sync the artifacts a last time, after the trial has stopped writing them, and wait for the worker thread.

        A checkpoint with invalid content does not raise here: it is a failure of the trial, recorded by its end.

        Raises:
            TuneError: the target failed, or another process owns the journal; the attempt's end is journaled if
                that is still possible.
        """
        self._work.put(self._artifacts.close)
        self._work.put(None)
        self._thread.join()
        error = self.error
        if error is not None and not isinstance(error, Superseded):
            self._end_all_the_same()
        self._artifacts.settle()
        if error is not None and not isinstance(error, USERS_FAULT):
            raise error

    def _end_all_the_same(self) -> None:
        """Try once more to write the pending entry and the attempt's end, after the worker thread has failed."""
        try:
            with suppress(SaveOvertaken):
                self._journal.flush()
            self._write_end()
        except TuneError as error:
            self.log.error("the attempt's end could not be journaled: %s", error)  # noqa: TRY400 - the target's error

    def _write_end(self) -> None:
        if self._journal.trial.phase is Phase.RUNNING and self.outcome is not None:
            self.outcome = self.outcome.model_copy(update={"use": self._meter.use()})
            self._write([self.outcome])

    def _run(self) -> None:
        try:
            if self._journal.deletes_retired:  # what an earlier attempt retired and did not delete
                self._delete(find_doomed(self._spec.target, self._spec.trial, self._journal.trial, self.log))
            while (work := self._next()) is not None:
                work()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: `close` raises it in the attempt's thread
            self.error = error

    def _next(self) -> Callable[[], None] | None:
        """Return the next queued work; a sync of the reports if none arrives in time."""
        elapsed = timedelta(seconds=time.monotonic() - self._synced_at)
        timeout = (self._journal.flush_period(self._spec.sync) - elapsed).total_seconds()
        try:
            return self._work.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return self._sync

    def _sync(self) -> None:
        """Journal the queued reports. If the target is unavailable or refuses, the next sync or commit writes them."""
        self._synced_at = time.monotonic()
        try:
            self._journal.flush()
        except (StoreUnavailable, StoreRefused, CommitUnknown) as error:
            self.log.warning("the reports could not be journaled now; retried with the next sync: %s", error)
        self._artifacts.after_report()

    def _save(self, save: GroupSave, committed: Callable[[int], None], failed: Callable[[FailedSave], None]) -> None:
        done, directory = save.done, Path(save.done.checkpoint or "")
        merge(directory, save.parts)
        try:
            saved, doomed = self._commit(done, directory, save.nodes)
        except PartMissing as missing:
            failed(FailedSave(done, make_reason("part-missing", error=str(missing))))
            remove_directory(directory if done.moved else None)
            return
        committed(done.report.step)
        # The first commit is logged, and then one in ten seconds: a trainable may save at each of many short steps.
        now = time.monotonic()
        if self._logged_at is not None and now - self._logged_at < _LOG_PERIOD.total_seconds():
            self._unlogged += 1
        else:
            log_commit(saved, self.log, self._unlogged)
            self._logged_at, self._unlogged = now, 0
        self._artifacts.after_commit()
        remove_directory(directory if done.moved else None)
        self._delete(doomed)

    def _commit(self, done: StepDone, directory: Path, nodes: Sequence[int]) -> tuple[Save, Sequence[CheckpointKey]]:
        """Save the checkpoint, again each time other checkpoints of the trial change meanwhile; then the end counts.

        Returns the saved checkpoint, and the retired ones to delete, overtaken saves included.
        """
        overtaken, name = list[CheckpointKey](), self._spec.trial.trial
        while True:
            began = time.monotonic()
            if is_overtaken(self._journal.trial, self._journal.trial.next_sequence):
                self._write([Retired(trial=name, retires=())], up_to=0)
            saved = self._publish(done.report, directory, nodes)
            seconds = time.monotonic() - began
            event, quarantined, retired = commit_entry(
                self._spec.target, self._journal.trial, saved, self._spec.retention, seconds, self.log
            )
            event = event.model_copy(update={"seconds": self._meter.seconds_at(done.seconds)})
            journaled_sequences: tuple[int, ...] = ()
            with suppress(SaveOvertaken):
                self._write((event, *quarantined), up_to=done.report.step)
                self._commit_count += 1
                log_damage(saved, quarantined, self.log)
                if not is_quarantined(self._journal.trial, saved.manifest.key):
                    if done.finish_reason is not None:
                        self._write([Finished(trial=name, reason=done.finish_reason, use=self._meter.use())], up_to=0)
                    return saved, [*overtaken, *retired]
                journaled_sequences = (saved.manifest.sequence,)
            warning = "step %d was saved while other checkpoints of the trial changed: it is saved again"
            self.log.warning(warning, saved.manifest.step)
            # From this entry on no owner adopts or reuses the overtaken save, so it can be deleted.
            self._write([Retired(trial=name, retires=journaled_sequences)], up_to=0)
            overtaken.append(saved.manifest.key)  # it has retired nothing

    def _publish(self, report: StepReport, directory: Path, nodes: Sequence[int]) -> Save:
        trial = self._journal.trial
        key = CheckpointKey(trial=self._spec.trial, step=report.step, sequence=trial.next_sequence)
        reports = self._journal.unjournaled(report.step)
        about = about_checkpoint(self._spec.trial, trial, self._term, report, reports, new_write_id())
        if self.code:
            about = about.model_copy(update={"fingerprint": {**about.fingerprint, "code": self.code}})
        reverification = Reverification(self._commit_count, self._spec.sync.verify_reused_every)
        opened = self._open_parts(key, trial, nodes) if self._open_parts is not None and nodes else nullcontext()
        with opened as parts:
            return self._tasks.save(key, directory, about, trial, reverification, parts)

    def _write(self, events: Sequence[AttemptEvent], *, up_to: int | None = None) -> None:
        """Write one entry: the queued reports up to step `up_to` (None: all), then `events`."""
        self._journal.write(events, up_to=up_to)
        self._synced_at = time.monotonic()

    def _delete(self, doomed: Sequence[CheckpointKey]) -> None:
        """Delete retired checkpoints. Raises `Superseded` if the experiment is being deleted, or was deleted."""
        if doomed and self._journal.deletes_retired:
            delete_retired(lambda: self._tasks.delete(self._journal.trial, doomed), self.log)


# The trial's own files, such as logs and plots. A resume does not depend on them: errors are logged as warnings.

_RETRIES = 2
_BACKOFF_SECONDS = 1.0


class TrialArtifacts:
    """Syncs the artifact directory of one attempt; does nothing if the specification has no syncer.

    Raises:
        InvalidInput: its syncer or upload target is invalid.
    """

    def __init__(self, spec: TrialSpec, directory: Path, log: Log) -> None:
        self._sync, self._directory, self._log = spec.sync, str(directory), log
        target = resolve_target(spec.sync.upload_dir or spec.target)
        self._syncer = syncer_for(spec.sync, target) if spec.sync.sync_artifacts else None
        # The default syncer has the target already; a user's syncer needs a whole URI.
        self._uri = None if spec.sync.syncer == "auto" else target.uri
        self._folder = spec.trial.artifacts
        self._remote = self._remote_of(self._folder)
        self._excludes = list(spec.sync.excludes)
        self._had_files = False
        if isinstance(self._syncer, TargetSyncer):
            self._syncer.warn = log.warning

    def begin(self, attempt: int) -> None:
        """Download the files of earlier attempts, so that logs are continued.

        If that fails, this attempt uses a folder of its own: its files would replace those of the same names.
        """
        if attempt == 1:
            if isinstance(self._syncer, TargetSyncer) and self._sync.upload_dir is not None:
                # What an experiment of this name on another target has left there.
                self._try(lambda syncer: syncer.delete(self._remote))
        elif not self._try(self._fetch):
            self._remote = self._remote_of(f"{self._folder}-{attempt}")
            self._log.warning("this attempt's artifacts go to %s, beside the earlier ones", self._remote)

    def after_commit(self) -> None:
        """Begin a sync; training does not wait for it."""
        if self._sync.sync_on_checkpoint:
            self._try(self._send)

    def after_report(self) -> None:
        """Begin a sync if the last one is `sync_period` ago."""
        self._try(lambda syncer: self._send(syncer, only_if_needed=True))

    def close(self) -> None:
        """Sync the files a last time, and wait for it."""
        self._try(self._send)
        self._try(lambda syncer: syncer.wait_or_retry(_RETRIES, _BACKOFF_SECONDS))

    def settle(self) -> None:
        """Wait for running syncs, before the directory is removed: a half-removed one must not be uploaded."""
        self._try(lambda syncer: syncer.close())

    def _remote_of(self, folder: str) -> str:
        return folder if self._uri is None else below(self._uri, folder)

    def _fetch(self, syncer: Syncer) -> None:
        with suppress(CheckpointNotFound):  # no earlier attempt has synced any
            syncer.sync_down(self._remote, self._directory, self._excludes)
            syncer.wait_or_retry(_RETRIES, _BACKOFF_SECONDS)

    def _send(self, syncer: Syncer, *, only_if_needed: bool = False) -> None:
        """Begin a sync; with the default syncer not before there is a first file, since most trials have none."""
        if isinstance(syncer, TargetSyncer) and not self._had_files:
            self._had_files = any(Path(self._directory).iterdir())
            if not self._had_files:
                return
        sync_up = syncer.sync_up_if_needed if only_if_needed else syncer.sync_up
        sync_up(self._directory, self._remote, self._excludes)

    def _try(self, act: Callable[[Syncer], object]) -> bool:
        """Call `act` if there is a syncer; on an error log a warning and return False."""
        try:
            if self._syncer is not None:
                act(self._syncer)
        except Exception as error:  # noqa: BLE001 - a user's syncer may raise anything, and stops no training
            self._log.warning("the trial's artifacts are not synced: %s: %s", type(error).__name__, error)
            return False
        return True


def syncer_for(config: SyncConfig, target: StorageTarget) -> Syncer | None:
    """Return the syncer of artifacts for one attempt, which must close it; None if `config.syncer` is None.

    Several attempts may run at once, and each closes its own syncer: one that the user has made is copied. The config's
    periods are passed only to a class that has the constructor of `Syncer`.

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
        expected = "'auto', 'package.module:Name' of a pt.Syncer or a class of them, a pt.Syncer or None"
        raise InvalidInput(f"syncer {config.syncer!r}: expected {expected}, found {syncer!r}")
    try:
        return copy.deepcopy(syncer)
    except Exception as error:
        kind = type(syncer).__name__
        raise InvalidInput(
            f"syncer: each attempt needs its own copy, and this {kind} cannot be copied ({error}). Name the class, "
            f"syncer='package.module:{kind}', create what cannot be copied inside its methods, or define __deepcopy__"
        ) from error
