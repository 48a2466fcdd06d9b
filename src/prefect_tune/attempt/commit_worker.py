"""The commit worker of an attempt: a thread that saves its checkpoints and writes its journal entries, in order.

`attempt/search_link.py` says how the entries are written. Where reports wait for the next one, that is written every
`sync_period_seconds`, and at once for a report that asks for a decision. The training loop waits for no entry: in
`runtime/session.py` it waits for decisions (`heed_milestone`) and for saves.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from datetime import timedelta
from pathlib import Path
from typing import Self

from prefect_tune.attempt.attempt_tasks import AttemptTasks
from prefect_tune.attempt.group_saves import FailedSave, GroupSave, merge, remove_directory
from prefect_tune.attempt.nodes.first_node import OtherNodes
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.search_link import TrialJournal
from prefect_tune.attempt.trial_artifacts import TrialArtifacts
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.attempt.usage_meter import UsageMeter
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.checkpoints.commit import Reverification, Save
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.errors import (
    CommitUnknown,
    InvalidInput,
    PartMissing,
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
    CheckpointRef,
    Committed,
    Finished,
    Outcome,
    Quarantined,
    Reported,
    Retired,
)
from prefect_tune.core.messages.process_messages import StepDone
from prefect_tune.core.operations.trial_gc import leftover
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.restore import checkpoints_with
from prefect_tune.core.shown_text import plural, shown_size, visible
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.usage_records import AttemptUse
from prefect_tune.core.values import Stamp, StepReport, flat
from prefect_tune.journal_access import new_write_id
from prefect_tune.storage_retries import READ_TIMEOUT, on_target
from prefect_tune.stores.local.staging import transfer_pool
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
    key, about = save.manifest.key, save.manifest.about
    new = CheckpointRef(
        step=key.step,
        sequence=key.sequence,
        metrics=about.metrics,
        trained_seconds=about.trained_seconds,
        size_bytes=save.manifest.size_bytes,
    )
    ending = retired_by_commit(trial, new, policy)
    retires = tuple(each.sequence for each in ending)
    committed = Committed(
        trial=trial.trial,
        checkpoint=new,
        retires=retires,
        sent_bytes=save.sent_bytes,
        upload_seconds=round(upload_seconds, 3),
    )
    stay = [key.trial.checkpoint_key(each) for each in trial.checkpoints if each.sequence not in retires]
    doomed = [key.trial.checkpoint_key(each) for each in ending if each.origin is None]
    return committed, _sharing_damage(target, save, stay, log), doomed


def _sharing_damage(
    target: StorageTarget, save: Save, live: Sequence[CheckpointKey], log: Log
) -> Sequence[Quarantined]:
    """Return events that quarantine the `live` checkpoints which refer to blobs that the save found damaged."""
    if not save.damaged:
        return []

    def look(store: ObjectStore) -> Mapping[CheckpointKey, str]:
        with transfer_pool() as transfers:
            return checkpoints_with(store, live, save.damaged, side_by_side=transfers)

    try:
        found = on_target(target, look)
    except TuneError as error:  # the new checkpoint is whole, and is committed
        log.warning("earlier checkpoints may share the damage; they are not checked now: %s", error)
        return []
    trial = save.manifest.trial
    return [Quarantined(trial=trial, sequence=key.sequence, reason=why) for key, why in found.items()]


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


_LOG_PERIOD = timedelta(seconds=10)
# Errors of a trial's checkpoint directory: the trainable caused them.
USERS_FAULT = (InvalidInput, StagedFilesChanged)


class CommitWorker:
    """Saves the checkpoints and journals the reports of one attempt.

    The attempt's thread queues reports and saves; a worker thread carries them out in that order, in the context
    of the task that created the worker, so that Prefect shows its task runs under that task. At the end of a `with`
    block, the thread ends after the queued work, whether or not `close` was called.
    """

    def __init__(
        self,
        spec: TrialSpec,
        term: int,
        journal: TrialJournal,
        artifacts: TrialArtifacts,
        tasks: AttemptTasks,
        log: Log,
        nodes: OtherNodes | None = None,
    ) -> None:
        self._spec = spec
        self._term = term
        self._tasks = tasks
        self._journal = journal
        self._artifacts = artifacts
        self._nodes = nodes
        self.log = log
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._synced_at = time.monotonic()
        self.outcome: Outcome | None = None
        """How the attempt has ended; once that is journaled, with what it has used."""
        self._commit_count = 0
        self._logged_at: float | None = None
        self._unlogged = 0
        self.code = ""
        """The digest of the trainable's source; empty until the trial has sent it."""
        self.meter: UsageMeter | None = None
        """Measures the attempt; None for one that is not measured."""
        self.asks_at: int | None = None
        """The step at which the trial waits for an answer to its journaled report."""
        self.error: BaseException | None = None
        """The error that ended the worker thread; nothing is written after it."""
        self._work.put(self._delete_leftovers)
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="commit-worker", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.put(None)

    def note(self, report: StepReport) -> None:
        """Have a report journaled with the next commit, or after `sync_period`."""
        trial = self._spec.trial.trial
        self._journal.report(Reported(trial=trial, report=report, asks=report.step == self.asks_at))

    def save(
        self, save: GroupSave, committed: Callable[[int], None], failed: Callable[[FailedSave], None] | None = None
    ) -> None:
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
            self._journal.flush()
            self._write_end()
        except TuneError as error:
            self.log.error("the attempt's end could not be journaled: %s", error)  # noqa: TRY400 - the target's error

    def _write_end(self) -> None:
        if self._journal.trial.phase is Phase.RUNNING and self.outcome is not None:
            self.outcome = self.outcome.model_copy(update={"use": self._use()})
            self._write([self.outcome])

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                work()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: `close` raises it in the attempt's thread
            self.error = error

    def _next(self) -> Callable[[], None] | None:
        """Return the next queued work; a sync of the reports if none arrives in time."""
        elapsed = timedelta(seconds=time.monotonic() - self._synced_at)
        try:
            return self._work.get(
                timeout=max(0.0, (self._journal.flush_period(self._spec.sync) - elapsed).total_seconds())
            )
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

    def _save(
        self, save: GroupSave, committed: Callable[[int], None], failed: Callable[[FailedSave], None] | None
    ) -> None:
        done = save.done
        directory = Path(done.checkpoint or "")
        merge(directory, save.parts)
        try:
            saved, doomed = self._committed(done, directory, save.nodes)
        except PartMissing as missing:
            if failed is None:
                raise
            failed(FailedSave(done, make_reason("part-missing", error=str(missing))))
            remove_directory(directory if done.moved else None)
            return
        committed(done.report.step)
        self._log_commit(saved)
        self._artifacts.after_commit()
        remove_directory(directory if done.moved else None)
        self._delete(doomed)

    def _log_commit(self, save: Save) -> None:
        """Log the first commit, and then one in ten seconds: a trainable may save at each of many short steps."""
        now = time.monotonic()
        if self._logged_at is not None and now - self._logged_at < _LOG_PERIOD.total_seconds():
            self._unlogged += 1
            return
        log_commit(save, self.log, self._unlogged)
        self._logged_at, self._unlogged = now, 0

    def _committed(self, done: StepDone, directory: Path, nodes: Sequence[int]) -> tuple[Save, Sequence[CheckpointKey]]:
        """Save the checkpoint, again each time another one of the trial is quarantined meanwhile; then the end counts.

        Returns the saved checkpoint, and the retired ones to delete, overtaken saves included.
        """
        overtaken, name = list[CheckpointKey](), self._spec.trial.trial
        while True:
            began = time.monotonic()
            if is_overtaken(self._journal.trial, self._journal.trial.next_sequence):
                self._write([Retired(trial=name, retires=())], up_to=0)
            saved = self._saved(done.report, directory, nodes)
            doomed = self._commit(saved, done, time.monotonic() - began)
            if not is_quarantined(self._journal.trial, saved.manifest.key):
                if done.finish_reason is not None:
                    self._write([Finished(trial=name, reason=done.finish_reason, use=self._use())], up_to=0)
                return saved, [*overtaken, *doomed]
            reason = "step %d was saved while a checkpoint was quarantined, and may share its damage: it is saved again"
            self.log.warning(reason, saved.manifest.step)
            # From this entry on no owner adopts or reuses the overtaken save, so it can be deleted.
            self._write([Retired(trial=name, retires=(saved.manifest.sequence,))], up_to=0)
            overtaken.append(saved.manifest.key)

    def _saved(self, report: StepReport, directory: Path, nodes: Sequence[int]) -> Save:
        trial = self._journal.trial
        key = CheckpointKey(trial=self._spec.trial, step=report.step, sequence=trial.next_sequence)
        reports = self._journal.unjournaled(report.step)
        about = about_checkpoint(self._spec.trial, trial, self._term, report, reports, new_write_id())
        if self.code:
            about = about.model_copy(update={"fingerprint": {**about.fingerprint, "code": self.code}})
        reverification = Reverification(self._commit_count, self._spec.sync.verify_reused_every)
        if self._nodes is None or not nodes:
            return self._tasks.save(key, directory, about, trial, reverification)
        with self._nodes.parts(key, trial, nodes) as parts:
            return self._tasks.save(key, directory, about, trial, reverification, parts)

    def _commit(self, save: Save, done: StepDone, upload_seconds: float) -> Sequence[CheckpointKey]:
        """Write the commit's entry, and return the checkpoints that it retires."""
        committed, quarantined, retired = commit_entry(
            self._spec.target, self._journal.trial, save, self._spec.retention, upload_seconds, self.log
        )
        if self.meter is not None:
            committed = committed.model_copy(update={"seconds": self.meter.seconds_at(done)})
        self._write((committed, *quarantined), up_to=save.manifest.step)
        self._commit_count += 1
        log_damage(save, quarantined, self.log)
        return retired

    def _use(self) -> AttemptUse | None:
        return self.meter.use() if self.meter is not None else None

    def _write(self, events: Sequence[AttemptEvent], *, up_to: int | None = None) -> None:
        """Write one entry: the queued reports up to step `up_to` (None: all), then `events`."""
        self._journal.write(events, up_to=up_to)
        self._synced_at = time.monotonic()

    def _delete_leftovers(self) -> None:
        """Delete what an earlier attempt retired and did not delete."""
        if self._journal.deletes_retired:
            self._delete(find_doomed(self._spec.target, self._spec.trial, self._journal.trial, self.log))

    def _delete(self, doomed: Sequence[CheckpointKey]) -> None:
        """Delete retired checkpoints. Raises `Superseded` if the experiment is being deleted, or was deleted."""
        if doomed and self._journal.deletes_retired:
            delete_retired(lambda: self._tasks.delete(self._journal.trial, doomed), self.log)
