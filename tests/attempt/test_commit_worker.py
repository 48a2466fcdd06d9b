"""Reports and checkpoints when the target refuses or fails, and checkpoints that cannot be saved."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from logging import getLogger
from pathlib import Path

import pytest

from prefect_tune.attempt import commit_worker as worker_module
from prefect_tune.attempt.attempt import make_attempt_started
from prefect_tune.attempt.commit_worker import CommitWorker, GroupSave
from prefect_tune.attempt.search_channel import OutboxJournal, WritingJournal
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import LocalTarget, StorageTarget, SyncConfig
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import CommitUnknown, InvalidInput, StoreRefused, StoreUnavailable, Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.journal.journal import acquire_ownership, append_events, load_experiment, read_entries
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointCommitted,
    CheckpointQuarantined,
    CheckpointsAdopted,
    CheckpointsRetired,
    Entry,
    Event,
    Owner,
    StepReported,
    TrialAdded,
    TrialFinished,
)
from prefect_tune.core.messages.process_messages import StepDone
from prefect_tune.core.operations.scrub import inspect_checkpoint, quarantine_in_journal
from prefect_tune.core.restore import make_adoption_events
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import Buffer, ObjectStore
from prefect_tune.core.values import StepReport, WriteStamp
from prefect_tune.journal_access import EntryWriter, JournalWriter
from prefect_tune.ownership import make_trial_entry_writer
from prefect_tune.stores.posix_store import PosixStore, make_root
from prefect_tune.tasks.experiments import write_stamped_entry
from tests.attempt.direct_tasks import DirectTasks
from tests.fakes.checkpoints import first_generation
from tests.fakes.trial_processes import wait_until

TRIAL = TrialKey(experiment="e", generation=1, trial="trial")


@dataclass
class InjectedErrors:
    """The errors that the target raises before and after it writes a path."""

    before_write: Callable[[str], TuneError | None] = lambda _path: None
    after_write: Callable[[str], TuneError | None] = lambda _path: None
    hidden: Sequence[str] = ()
    """The paths that cannot be read."""

    @staticmethod
    def raise_if(error: TuneError | None) -> None:
        if error is not None:
            raise error


INJECTED = InjectedErrors()


class _Store(PosixStore):
    def create(self, path: str, data: Buffer) -> None:
        INJECTED.raise_if(INJECTED.before_write(path))
        super().create(path, data)
        INJECTED.raise_if(INJECTED.after_write(path))

    def put(self, path: str, data: Buffer) -> None:
        INJECTED.raise_if(INJECTED.before_write(path))
        super().put(path, data)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        INJECTED.raise_if(StoreUnavailable("503") if path in INJECTED.hidden else None)
        return super().read(path, offset=offset, length=length)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            INJECTED.raise_if(INJECTED.before_write(f"delete {path}"))
        super().delete(paths)


class FaultyTarget(LocalTarget):
    """A folder that raises the injected errors."""

    _block_type_slug = "weathered-target"

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        assert timeout
        make_root(Path(self.path))
        yield _Store(Path(self.path))


@dataclass
class NoArtifacts:
    synced: int = 0

    def on_commit(self) -> None:
        self.synced += 1

    def on_report(self) -> None: ...

    def sync_and_wait(self) -> None: ...

    def close_syncer(self) -> None: ...


def write(target: StorageTarget, state: Experiment, events: Sequence[Event], stamp: WriteStamp | None) -> Experiment:
    """Write an entry without retries, which are the commit worker's."""
    return write_stamped_entry.fn(target, state, events, stamp or new_write_stamp())


@dataclass
class CommitHarness:
    """An experiment with one running trial, and the commit workers of its attempts."""

    spec: TrialSpec
    folder: Path
    committed: list[int] = field(default_factory=list)

    def start_attempt(self, writer: EntryWriter = write) -> CommitWorker:
        """Acquire the experiment, and start an attempt from its newest checkpoint."""
        events: list[Event] = [CheckpointsAdopted()]
        with self.spec.target.open(timeout=timedelta(minutes=1)) as store:
            owner = Owner(name="a test", host="here", pid=1)
            state = acquire_ownership(store, first_generation("e"), owner, new_write_stamp())
            if TRIAL.trial not in state.trials:
                events.append(TrialAdded(trial=TRIAL.trial, config={}))
            elif state.trial(TRIAL.trial).phase is Phase.RUNNING:
                events.append(make_attempt_ended(Cause.MACHINE, ""))
            state = append_events(store, state, events, new_write_stamp())
            state = append_events(store, state, [make_attempt_started(state.trial(TRIAL.trial))], new_write_stamp())
        journal = WritingJournal(TRIAL.trial, JournalWriter(self.spec.target, state, writer))
        tasks, log = DirectTasks(self.spec), getLogger("commits")
        return CommitWorker(self.spec, state.term, journal, NoArtifacts(), tasks, log)

    def save(
        self, commit_worker: CommitWorker, step: int, *, backbone: bytes = b"", finish_reason: str | None = None
    ) -> Path:
        directory = self.folder / f"step-{step}-{time.monotonic_ns()}"
        directory.mkdir()
        (directory / "weights").write_bytes(os.urandom(100))
        if backbone:
            (directory / "backbone").write_bytes(backbone)
        step_done = StepDone(report=make_report(step), checkpoint=str(directory), finish_reason=finish_reason)
        queue_step_save(commit_worker, step_done, self.committed.append)
        return directory

    def load_trial(self) -> Trial:
        with self.spec.target.open(timeout=timedelta(minutes=1)) as store:
            return load_experiment(store, first_generation("e")).trial(TRIAL.trial)

    def load_entries(self) -> Sequence[Entry]:
        with self.spec.target.open(timeout=timedelta(minutes=1)) as store:
            return read_entries(store, first_generation("e"))

    def read_reported_steps(self) -> list[int]:
        events = [event for entry in self.load_entries() for event in entry.events]
        return [event.report.step for event in events if isinstance(event, StepReported)]

    def count_blobs(self) -> int:
        return len(self._list_files(TRIAL.blobs_folder))

    def count_manifests(self) -> int:
        return len(self._list_files(TRIAL.checkpoints_folder))

    def _list_files(self, folder: str) -> list[Path]:
        return sorted(path for path in (self.folder / "target" / folder).rglob("*") if path.is_file())

    def list_live_keys(self) -> Sequence[CheckpointKey]:
        refs = self.load_trial().checkpoints
        return [CheckpointKey(trial=TRIAL, step=ref.step, sequence=ref.sequence) for ref in refs]

    def quarantine_oldest(self) -> None:
        """Quarantine the oldest checkpoint, like another writer."""
        with self.spec.target.open(timeout=timedelta(minutes=1)) as store:
            quarantine_in_journal(store, TRIAL.journal_key, {self.list_live_keys()[0]: "damaged"}, new_write_stamp())

    def rot_oldest_blob(self) -> None:
        oldest = min(self._list_files(TRIAL.blobs_folder), key=lambda path: path.stat().st_mtime_ns)
        oldest.chmod(0o644)
        oldest.write_bytes(b"X" * oldest.stat().st_size)


def make_report(step: int) -> StepReport:
    return StepReport(step=step, metrics={"loss": 1 / step})


@contextmanager
def before_final_retry(commit_worker: CommitWorker, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` after the commit worker's thread died and before the last retry of the end."""
    retry_end = commit_worker._retry_end

    def act_and_retry() -> None:
        act()
        retry_end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_worker, "_retry_end", act_and_retry)
        yield


def queue_step_save(commit_worker: CommitWorker, step_done: StepDone, committed: Callable[[int], None]) -> None:
    commit_worker.queue_report(step_done.report)
    commit_worker.queue_save(GroupSave(step_done, {}), committed, lambda _: None)


def make_attempt_ended(cause: Cause, message: str) -> AttemptEnded:
    return AttemptEnded(trial=TRIAL.trial, cause=cause, reason=message)


def end_attempt(commit_worker: CommitWorker) -> None:
    """End the attempt as a failure of the machine."""
    commit_worker.queue_end(make_attempt_ended(Cause.MACHINE, "away"))
    commit_worker.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[CommitHarness]:
    target = FaultyTarget(path=str(tmp_path / "target"))
    spec = TrialSpec(target=target, trial=TRIAL, trainable="", stopper="", needs_history=False)
    yield CommitHarness(spec, tmp_path)
    INJECTED.before_write = INJECTED.after_write = lambda _path: None
    INJECTED.hidden = ()


def test_a_trial_that_is_done_with_a_checkpoint_ends_in_the_entry_after_its_commit(harness: CommitHarness) -> None:
    commit_worker = harness.start_attempt()
    before = len(harness.load_entries())
    harness.save(commit_worker, 1, finish_reason="enough")
    commit_worker.queue_end(TrialFinished(trial=TRIAL.trial, reason="enough"))
    commit_worker.close()
    trial = harness.load_trial()
    assert (trial.phase, trial.reason, harness.committed) == (Phase.FINISHED, "enough", [1])
    events = [[type(event) for event in entry.events] for entry in harness.load_entries()[before:]]
    assert events == [[StepReported, CheckpointCommitted], [TrialFinished]]


def test_a_directory_that_cannot_be_saved_ends_the_attempt_in_the_journal_as_the_trials_failure(
    harness: CommitHarness,
) -> None:
    commit_worker = harness.start_attempt()
    directory = harness.folder / "handed-over"
    directory.mkdir()
    (directory / "latest").symlink_to("nothing")
    commit_worker.queue_report(make_report(1))
    queue_step_save(commit_worker, StepDone(report=make_report(2), checkpoint=str(directory)), harness.committed.append)
    wait_until(lambda: commit_worker.error)
    assert isinstance(commit_worker.error, InvalidInput)
    commit_worker.queue_end(make_attempt_ended(Cause.TRAINABLE, "its checkpoint cannot be saved"))
    commit_worker.close()
    state = harness.load_trial()
    assert (state.phase, state.trainable_failures, state.machine_failures) == (Phase.PENDING, 1, 0)
    assert state.reason == "its checkpoint cannot be saved"
    assert harness.committed == []
    assert harness.read_reported_steps() == [1, 2], "the last reports are journaled with the failure"


def test_a_target_that_refuses_a_save_ends_the_attempt_in_the_journal_and_is_raised(harness: CommitHarness) -> None:
    commit_worker = harness.start_attempt()
    INJECTED.before_write = lambda path: StoreRefused("AccessDenied") if "blobs" in path else None
    harness.save(commit_worker, 1)
    commit_worker.queue_end(make_attempt_ended(Cause.MACHINE, "not written"))
    with pytest.raises(StoreRefused):
        commit_worker.close()
    assert (harness.load_trial().phase, harness.load_trial().reason) == (Phase.PENDING, "not written")


def test_where_not_even_the_end_can_be_journaled_the_first_error_is_what_is_raised(harness: CommitHarness) -> None:
    commit_worker = harness.start_attempt()
    INJECTED.before_write = lambda path: StoreRefused("AccessDenied") if "blobs" in path else StoreUnavailable("503")
    harness.save(commit_worker, 1)
    commit_worker.queue_end(make_attempt_ended(Cause.MACHINE, "not written"))
    with pytest.raises(StoreRefused):
        commit_worker.close()
    INJECTED.before_write = lambda _path: None
    assert harness.load_trial().phase is Phase.RUNNING


@pytest.mark.parametrize("moment", ["before_write", "after_write"], ids=["not written", "written and not acknowledged"])
def test_an_end_that_is_journaled_at_the_second_try_is_journaled_once_and_nothing_else_is_said(
    harness: CommitHarness, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    """The target is available again after the retries of the last entry."""
    commit_worker = harness.start_attempt()
    paths: list[str] = []

    def fail_once(path: str) -> TuneError | None:
        paths.append(path)
        return CommitUnknown("no reply") if len(paths) == 1 else None

    setattr(INJECTED, moment, fail_once)
    INJECTED.hidden = paths
    commit_worker.queue_report(make_report(1))
    commit_worker.queue_end(TrialFinished(trial=TRIAL.trial, reason="enough"))
    with pytest.raises(CommitUnknown), before_final_retry(commit_worker, lambda: setattr(INJECTED, "hidden", ())):
        commit_worker.close()
    assert (harness.load_trial().phase, harness.read_reported_steps()) == (Phase.FINISHED, [1])
    assert "not journaled" not in caplog.text


def test_the_failure_of_an_attempt_waits_for_its_saves_whose_directories_are_removed_after_it(
    harness: CommitHarness,
) -> None:
    def write_slowly(_path: str) -> None:
        time.sleep(0.1)

    INJECTED.before_write = write_slowly
    with suppress(ZeroDivisionError), harness.start_attempt() as commit_worker:
        harness.save(commit_worker, 1)
        raise ZeroDivisionError
    assert harness.committed == [1]


def test_a_save_beside_which_another_task_deletes_an_older_checkpoint_is_saved_again(harness: CommitHarness) -> None:
    commit_worker = harness.start_attempt(make_trial_entry_writer(TRIAL.trial))
    harness.save(commit_worker, 1)
    wait_until(lambda: harness.committed == [1])

    def delete_first(path: str) -> None:
        if path.startswith(TRIAL.checkpoints_folder):
            INJECTED.after_write = lambda _path: None
            with harness.spec.target.open(timeout=timedelta(minutes=1)) as store:
                state = load_experiment(store, TRIAL.journal_key)
                retired = CheckpointsRetired(trial="trial", retired_sequences=(1,))
                append_events(store, state, [retired], new_write_stamp())

    INJECTED.after_write = delete_first
    harness.save(commit_worker, 2)
    end_attempt(commit_worker)
    assert (harness.committed, harness.read_reported_steps()) == ([1, 2], [1, 2])
    assert [key.step for key in harness.list_live_keys()] == [2]
    assert harness.count_manifests() == 2, "that of the overtaken save is deleted"


def find_damaged_steps(harness: CommitHarness) -> Sequence[int]:
    """Return the steps of the live checkpoints that are damaged."""
    with harness.spec.target.open(timeout=timedelta(minutes=1)) as store:
        return [key.step for key in harness.list_live_keys() if inspect_checkpoint(store, key).damage]


def test_a_save_that_shares_what_was_found_damaged_meanwhile_is_made_again_before_it_counts(
    harness: CommitHarness,
) -> None:
    harness.spec = replace(harness.spec, retention=Retention(last=2))
    commit_worker = harness.start_attempt()
    for step in (1, 2, 3):
        harness.save(commit_worker, step, backbone=b"frozen")
    wait_until(lambda: harness.committed == [1, 2, 3])
    harness.rot_oldest_blob()
    assert find_damaged_steps(harness) == [2, 3]
    harness.quarantine_oldest()
    for step in (4, 5, 6):
        harness.save(commit_worker, step, backbone=b"frozen")
    end_attempt(commit_worker)
    assert (commit_worker.error, harness.committed) == (None, [1, 2, 3, 4, 5, 6])
    assert [key.step for key in harness.list_live_keys()] == [5, 6]
    assert find_damaged_steps(harness) == []
    assert harness.read_reported_steps() == [1, 2, 3, 4, 5, 6]
    assert harness.count_manifests() == 2, "checkpoints that did not count are deleted"


def test_the_last_save_of_a_trial_is_made_again_too_before_the_trial_has_finished(harness: CommitHarness) -> None:
    commit_worker = harness.start_attempt()
    for step in (1, 2):
        harness.save(commit_worker, step, backbone=b"frozen")
    wait_until(lambda: harness.committed == [1, 2])
    harness.rot_oldest_blob()
    harness.quarantine_oldest()
    harness.save(commit_worker, 3, backbone=b"frozen", finish_reason="enough")
    commit_worker.queue_end(TrialFinished(trial=TRIAL.trial, reason="enough"))
    commit_worker.close()
    assert (harness.load_trial().phase, harness.committed) == (Phase.FINISHED, [1, 2, 3])
    assert harness.list_live_keys()[-1].step == 3
    assert 3 not in find_damaged_steps(harness)


def test_a_refused_deletion_stops_no_training_and_the_next_attempt_deletes(harness: CommitHarness) -> None:
    harness.spec = replace(harness.spec, retention=Retention(last=1))
    INJECTED.before_write = lambda path: StoreRefused("s3:DeleteObject") if path.startswith("delete") else None
    commit_worker = harness.start_attempt()
    for step in (1, 2, 3):
        harness.save(commit_worker, step)
    end_attempt(commit_worker)
    assert commit_worker.error is None
    assert harness.committed == [1, 2, 3]
    assert [checkpoint.step for checkpoint in harness.load_trial().checkpoints] == [3]
    assert harness.count_blobs() == 3
    INJECTED.before_write = lambda _path: None
    end_attempt(harness.start_attempt())
    assert harness.count_blobs() == 1


def test_a_listing_that_is_refused_at_the_begin_stops_no_training(
    harness: CommitHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Sequence[object]:
        raise StoreRefused("s3:ListBucket")

    monkeypatch.setattr(worker_module, "find_leftover_manifests", refuse)
    commit_worker = harness.start_attempt()
    harness.save(commit_worker, 1)
    end_attempt(commit_worker)
    assert (commit_worker.error, harness.committed) == (None, [1])


def test_what_an_attempt_on_another_machine_retires_is_left_to_the_owner(harness: CommitHarness) -> None:
    harness.spec = replace(harness.spec, retention=Retention(last=1))
    commit_worker = harness.start_attempt()
    trial = commit_worker._journal.trial.model_copy(update={"outbox": 1, "outbox_count": 1})
    commit_worker._journal = OutboxJournal(harness.spec.target, TRIAL, trial)
    for step in (1, 2):
        harness.save(commit_worker, step)
    commit_worker.close()
    assert [checkpoint.step for checkpoint in commit_worker._journal.trial.checkpoints] == [2]
    assert (harness.committed, harness.count_manifests()) == ([1, 2], 2)


def set_sync_period(harness: CommitHarness, seconds: float) -> None:
    harness.spec = replace(harness.spec, sync=SyncConfig(sync_period_seconds=seconds))


def test_reports_are_journaled_after_the_period_without_another_one(harness: CommitHarness) -> None:
    set_sync_period(harness, 0.2)
    commit_worker = harness.start_attempt()
    commit_worker.queue_report(make_report(1))
    commit_worker.queue_report(make_report(2))
    wait_until(lambda: harness.read_reported_steps() == [1, 2])
    assert harness.load_trial().phase is Phase.RUNNING
    end_attempt(commit_worker)


@pytest.mark.parametrize("error", [StoreUnavailable("503"), StoreRefused("ExpiredToken"), CommitUnknown("no reply")])
def test_reports_wait_for_a_target_that_is_away_or_refuses(harness: CommitHarness, error: TuneError) -> None:
    set_sync_period(harness, 0.05)
    commit_worker = harness.start_attempt()
    paths: list[str] = []

    def refuse(path: str) -> TuneError:
        paths.append(path)
        return error

    INJECTED.before_write = refuse
    commit_worker.queue_report(make_report(1))
    wait_until(lambda: len(paths) > 2)
    commit_worker.queue_report(make_report(2))
    INJECTED.before_write = lambda _path: None
    harness.save(commit_worker, 3)
    end_attempt(commit_worker)
    assert commit_worker.error is None
    assert harness.read_reported_steps() == [1, 2, 3]


def test_a_save_whose_entry_is_never_written_has_the_reports_that_could_not_be_journaled_before_it(
    harness: CommitHarness,
) -> None:
    set_sync_period(harness, 0.05)
    commit_worker = harness.start_attempt()
    paths: list[str] = []

    def refuse(path: str) -> TuneError | None:
        if "/journal/" not in path:
            return None
        paths.append(path)
        return StoreUnavailable("503")

    INJECTED.before_write = refuse
    commit_worker.queue_report(make_report(1))
    wait_until(lambda: paths)
    commit_worker.queue_report(make_report(2))
    harness.save(commit_worker, 3)
    wait_until(lambda: commit_worker.error)
    commit_worker.queue_end(make_attempt_ended(Cause.MACHINE, "away"))
    with pytest.raises(StoreUnavailable):
        commit_worker.close()
    INJECTED.before_write = lambda _path: None
    with harness.spec.target.open(timeout=timedelta(minutes=1)) as store:
        owner = Owner(name="the next", host="here", pid=2)
        state = acquire_ownership(store, first_generation("e"), owner, new_write_stamp())
        append_events(store, state, make_adoption_events(store, state), new_write_stamp())
    assert harness.read_reported_steps() == [1, 2, 3]
    assert [key.step for key in harness.list_live_keys()] == [3]


def test_the_report_at_which_a_trial_asks_says_so(harness: CommitHarness) -> None:
    commit_worker = harness.start_attempt()
    commit_worker.queue_report(make_report(1))
    commit_worker.queue_report(make_report(2), awaits_decision=True)
    commit_worker.queue_report(make_report(3))
    end_attempt(commit_worker)
    events = [event for entry in harness.load_entries() for event in entry.events]
    steps = {event.report.step: event.awaits_decision for event in events if isinstance(event, StepReported)}
    assert steps == {1: False, 2: True, 3: False}


def test_one_commit_in_a_period_has_a_line_with_its_metrics_and_the_count_of_those_without(
    harness: CommitHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "_LOG_INTERVAL", timedelta(days=1))
    caplog.set_level("INFO", logger="commits")
    commit_worker = harness.start_attempt()
    for step in (1, 2, 3):
        harness.save(commit_worker, step)
    wait_until(lambda: harness.committed == [1, 2, 3])
    monkeypatch.setattr(worker_module, "_LOG_INTERVAL", timedelta(0))
    for step in (4, 5):
        harness.save(commit_worker, step)
    end_attempt(commit_worker)
    assert [line for line in caplog.messages if " committed" in line] == [
        "step 1 committed, loss 1: 100 B",
        "step 4 committed, loss 0.25: 100 B; 2 others since the last line",
        "step 5 committed, loss 0.2: 100 B",
    ]


# Blobs that rot while training reuses them: damaged checkpoints are quarantined, and their bytes uploaded again.

VERIFY_INTERVAL = 3


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[CommitHarness, CommitWorker]]:
    """An attempt with two checkpoints that share a file whose blob has rotted."""
    target = FaultyTarget(path=str(tmp_path / "target"))
    sync = SyncConfig(verify_reused_every=VERIFY_INTERVAL)
    harness = CommitHarness(
        TrialSpec(target=target, trial=TRIAL, trainable="", stopper="", needs_history=False, sync=sync), tmp_path
    )
    commit_worker = harness.start_attempt()
    save_and_wait(harness, commit_worker, 1, 2)
    harness.rot_oldest_blob()
    yield harness, commit_worker
    commit_worker.queue_end(make_attempt_ended(Cause.MACHINE, "away"))
    with suppress(Superseded):  # the test has started another attempt
        commit_worker.close()


def save_and_wait(harness: CommitHarness, commit_worker: CommitWorker, *steps: int) -> None:
    for step in steps:
        harness.save(commit_worker, step, backbone=b"frozen")
    wait_until(lambda: commit_worker.error or harness.committed[-1:] == [steps[-1]], seconds=60)
    assert commit_worker.error is None


def test_what_shares_a_rotten_blob_is_put_aside_in_the_entry_that_commits_the_good_one(
    training: tuple[CommitHarness, CommitWorker],
) -> None:
    harness, commit_worker = training
    assert find_damaged_steps(harness) == [1, 2]
    save_and_wait(harness, commit_worker, *range(3, 3 + VERIFY_INTERVAL))
    assert find_damaged_steps(harness) == []
    (events,) = (
        entry.events
        for entry in harness.load_entries()
        if any(isinstance(event, CheckpointQuarantined) for event in entry.events)
    )
    committed = [event.checkpoint.step for event in events if isinstance(event, CheckpointCommitted)]
    quarantined = [event for event in events if isinstance(event, CheckpointQuarantined)]
    checkpoints = [record.checkpoint for record in harness.load_trial().quarantined_checkpoints]
    assert [event.sequence for event in quarantined] == [checkpoint.sequence for checkpoint in checkpoints]
    assert [checkpoint.step for checkpoint in checkpoints] == list(range(1, committed[0]))
    assert all("expected blake3" in event.reason for event in quarantined)
    assert [key.step for key in harness.list_live_keys()] == list(range(committed[0], 3 + VERIFY_INTERVAL))


def test_an_attempt_after_it_goes_on_from_a_whole_checkpoint_and_sends_no_damage(
    training: tuple[CommitHarness, CommitWorker],
) -> None:
    harness, commit_worker = training
    save_and_wait(harness, commit_worker, *range(3, 3 + VERIFY_INTERVAL))
    next_worker = harness.start_attempt()
    save_and_wait(harness, next_worker, 9, 10)
    next_worker.queue_end(make_attempt_ended(Cause.MACHINE, "away"))
    next_worker.close()
    assert find_damaged_steps(harness) == []
    assert {9, 10} <= {key.step for key in harness.list_live_keys()}


def test_what_retention_retires_in_that_entry_is_not_put_aside(training: tuple[CommitHarness, CommitWorker]) -> None:
    harness, commit_worker = training
    commit_worker._spec = replace(harness.spec, retention=Retention(last=1))
    save_and_wait(harness, commit_worker, *range(3, 3 + VERIFY_INTERVAL))
    assert (harness.load_trial().quarantined_checkpoints, find_damaged_steps(harness)) == ((), [])
    assert [key.step for key in harness.list_live_keys()] == [2 + VERIFY_INTERVAL]


def test_where_the_manifests_cannot_be_read_the_good_checkpoint_is_committed_all_the_same(
    training: tuple[CommitHarness, CommitWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, commit_worker = training

    def fail(*_: object) -> Callable[[], None]:
        raise StoreUnavailable("503")

    monkeypatch.setattr(worker_module, "with_store", fail)
    save_and_wait(harness, commit_worker, *range(3, 3 + VERIFY_INTERVAL))
    assert find_damaged_steps(harness)[:2] == [1, 2]
    assert 2 + VERIFY_INTERVAL not in find_damaged_steps(harness)
