"""`pt.Syncer`, with only its three abstract methods too; the built-in one loses, repeats and tears no file."""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.artifact_sync import Syncer, SyncTimedOut, TargetSyncer
from prefect_tune.attempt.commit_worker import make_syncer
from prefect_tune.blocks import LocalTarget, SyncConfig
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidInput,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.storage.object_store import Buffer
from tests.fakes.artifacts import BUCKETS, FILES, REMOTE, Bucket, BucketTarget, download_files
from tests.fakes.checkpoints import read_files
from tests.fakes.trial_processes import wait_until


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Syncer, "_clock", staticmethod(clock))
    monkeypatch.setattr(Syncer, "_sleep", staticmethod(clock.sleep))
    return clock


class UserSyncer(pt.Syncer):
    """A user's syncer: its constructor does not call `super().__init__`."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.answer = True
        self.failures: list[Exception] = []

    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        self.calls.append(("up", local_dir, remote_dir, exclude))
        return self.answer

    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        self.calls.append(("down", remote_dir, local_dir, exclude))
        return self.answer

    def delete(self, remote_dir: str) -> bool:
        self.calls.append(("delete", remote_dir))
        return self.answer

    def retry(self) -> None:
        self.calls.append(("retry",))

    def wait(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


@pytest.mark.usefixtures("clock")
def test_a_syncer_of_the_users_needs_only_the_three_methods() -> None:
    syncer = UserSyncer()
    assert syncer.sync_up_if_needed("here", "there", ["*.tmp"]) is True
    assert syncer.sync_down_if_needed("there", "here") is True
    assert syncer.calls == [("up", "here", "there", ["*.tmp"]), ("down", "there", "here", None)]
    syncer.wait_or_retry()
    syncer.close()


def test_a_syncer_without_the_three_methods_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (pt.Syncer,), {"sync_up": None, "sync_down": None})()


def test_the_first_sync_is_always_due_and_the_next_after_the_period(clock: Clock) -> None:
    syncer = UserSyncer()
    syncer.sync_period = timedelta(seconds=10)
    assert syncer.last_sync_up_time == -math.inf
    assert syncer.sync_up_if_needed("a", "b") is True
    clock.now += 9.9
    assert syncer.sync_up_if_needed("a", "b") is None
    assert syncer.sync_down_if_needed("b", "a") is True  # each direction has its own period
    clock.now += 0.1
    assert syncer.sync_up_if_needed("a", "b") is True
    syncer.reset()
    assert syncer.sync_up_if_needed("a", "b") is True


@pytest.mark.usefixtures("clock")
def test_a_sync_that_was_refused_does_not_count() -> None:
    syncer = UserSyncer()
    syncer.answer = False
    assert syncer.sync_up_if_needed("a", "b") is False
    assert syncer.sync_up_if_needed("a", "b") is False
    syncer.answer = True
    assert syncer.sync_up_if_needed("a", "b") is True
    assert syncer.sync_up_if_needed("a", "b") is None


@pytest.mark.usefixtures("clock")
def test_a_sync_that_is_known_to_have_failed_does_not_count() -> None:
    syncer = UserSyncer()
    assert syncer.sync_up_if_needed("a", "b") is True
    syncer.failures = [OSError("lost")] * 9
    with pytest.raises(TuneError):
        syncer.wait_or_retry()
    assert syncer.sync_up_if_needed("a", "b") is True


def test_each_retry_is_waited_for_and_none_is_begun_for_nothing(clock: Clock) -> None:
    syncer = UserSyncer()
    syncer.failures = [StoreUnavailable(f"failure {number}") for number in range(9)]
    with pytest.raises(TuneError, match="3 retries too: failure 3") as failed:
        syncer.wait_or_retry(max_retries=3, backoff_s=2)
    assert str(failed.value.__cause__) == "failure 3"
    assert syncer.calls == [("retry",)] * 3
    assert len(clock.pauses) == 3  # no pause after the last failure
    assert len(syncer.failures) == 5


def test_pauses_grow_and_are_spread(clock: Clock) -> None:
    syncer = UserSyncer()
    for _ in range(20):
        syncer.failures = [StoreUnavailable("down")] * 6
        syncer.wait_or_retry(max_retries=6, backoff_s=5)
    for number, longest_pause in enumerate([5, 10, 20, 40, 60, 60]):
        pauses = clock.pauses[number::6]
        assert all(longest_pause / 2 <= pause <= longest_pause for pause in pauses)
        assert len(set(pauses)) > 1


def test_what_retrying_cannot_help_is_raised_at_once(clock: Clock) -> None:
    syncer = UserSyncer()
    syncer.failures = [StoreRefused("no such bucket")]
    with pytest.raises(StoreRefused):
        syncer.wait_or_retry()
    assert syncer.calls == []
    assert clock.pauses == []


@pytest.mark.parametrize(("retries", "backoff"), [(0, 5), (-1, 5), (3, -1), (3, math.nan)])
def test_numbers_that_make_no_sense_are_refused(retries: int, backoff: float) -> None:
    with pytest.raises(InvalidInput, match="max_retries"):
        UserSyncer().wait_or_retry(retries, backoff)


@pytest.mark.parametrize(
    ("period", "timeout"),
    [(-1, 10), (math.nan, 10), (math.inf, 10), (timedelta(seconds=-1), 10), (10, 0), (10, -5), (10, math.nan)],
)
def test_periods_and_timeouts_that_make_no_sense_are_refused(period: float, timeout: float) -> None:
    with pytest.raises(InvalidInput, match="sync_"):
        TargetSyncer(sync_period=period, sync_timeout=timeout)


def test_seconds_and_timedeltas_mean_the_same() -> None:
    assert TargetSyncer(sync_period=5).sync_period == TargetSyncer(sync_period=timedelta(seconds=5)).sync_period
    assert (pt.Syncer.sync_period, pt.Syncer.sync_timeout) == (timedelta(seconds=300), timedelta(seconds=1800))


@pytest.mark.parametrize(
    "good", [None, "", "file:///data", "/data", "s3://bucket/runs", "memory://runs", "gs://bucket"]
)
def test_a_directory_that_can_be_synced_to_is_answered_with_true(good: str | None) -> None:
    assert pt.Syncer.validate_upload_dir(good) is True


@pytest.mark.parametrize("bad", ["s4://bucket", "nosuch://x", "s3://"])
def test_a_directory_that_cannot_be_synced_to_is_an_error_that_says_why(bad: str) -> None:
    with pytest.raises(ValueError, match=bad.partition(":")[0]):
        pt.Syncer.validate_upload_dir(bad)


# ------------------------------------------------------------------------------------- the configured syncer


def test_the_configuration_says_who_syncs(tmp_path: Path) -> None:
    target, upload_dir = LocalTarget(path=str(tmp_path)), str(tmp_path)
    automatic = make_syncer(SyncConfig(sync_period_seconds=7, sync_timeout_seconds=9), target)
    assert isinstance(automatic, TargetSyncer)
    assert (automatic.sync_period, automatic.sync_timeout) == (timedelta(seconds=7), timedelta(seconds=9))
    assert make_syncer(SyncConfig(syncer=None), target) is None
    syncer = UserSyncer()
    syncer.answer = False
    copied = make_syncer(SyncConfig(upload_dir=upload_dir, syncer=syncer), target)
    assert isinstance(copied, UserSyncer)
    assert copied.answer is False
    imported = make_syncer(SyncConfig(upload_dir=upload_dir, syncer=f"{__name__}:UserSyncer"), target)
    assert type(imported).__name__ == "UserSyncer"


@pytest.mark.parametrize("name", ["no.such.module:Syncer", "json:nothing", "json:dumps"])
def test_a_syncer_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=name):
        make_syncer(SyncConfig(upload_dir=str(tmp_path), syncer=name), LocalTarget(path=str(tmp_path)))


def test_a_syncer_that_was_given_as_an_object_is_copied_for_each_attempt(tmp_path: Path) -> None:
    mine = UserSyncer()
    config, target = SyncConfig(upload_dir=str(tmp_path), syncer=mine), LocalTarget(path=str(tmp_path))
    first, second = (make_syncer(config, target) for _ in range(2))
    assert len({id(syncer) for syncer in (mine, first, second)}) == 3


class Locked(UserSyncer):
    """A syncer with a lock, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


LOCKED = Locked()


@pytest.mark.parametrize("syncer", [LOCKED, f"{__name__}:LOCKED"])
def test_a_syncer_that_cannot_be_copied_says_so_and_what_to_do(syncer: Syncer | str, tmp_path: Path) -> None:
    config = SyncConfig(upload_dir=str(tmp_path), syncer=syncer)
    with pytest.raises(InvalidInput, match=r"Locked.*cannot be copied.*lock.*__deepcopy__"):
        make_syncer(config, LocalTarget(path=str(tmp_path)))


# ----------------------------------------------------------------------------------- one sync after the other


def test_what_changes_while_a_sync_runs_is_uploaded_before_wait_returns(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    bucket.gate.clear()
    for other in FILES.keys() - {"log.txt"}:
        (local / other).unlink()  # the first write is of the old log
    syncer.sync_up(str(local), REMOTE)
    wait_until(lambda: bucket.writers > 0)
    (local / "log.txt").write_bytes(b"newest")
    assert syncer.sync_up(str(local), REMOTE) is True
    assert syncer.sync_up(str(local), REMOTE) is True
    assert len(syncer._queue) == 1  # equal to the one that waits
    bucket.gate.set()
    syncer.wait()
    assert download_files(bucket, tmp_path)["log.txt"] == b"newest"
    assert bucket.operations["replace"] == 2


def test_a_sync_that_takes_too_long_is_ended_and_never_followed_by_a_second_writer(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    syncer.sync_timeout = timedelta(seconds=0.3)
    bucket.gate.clear()
    for _ in range(3):
        (local / "log.txt").write_bytes(os.urandom(8))
        syncer.sync_up(str(local), REMOTE)
        with pytest.raises(TimeoutError, match="sync up of"):
            syncer.wait()
        assert bucket.writers == 0  # it has ended: nothing continues in the background
    bucket.gate.set()
    syncer.wait_or_retry(backoff_s=0)
    assert download_files(bucket, tmp_path) == read_files(local)


class _IgnoresDeadline(Bucket):
    """Breaks the contract of a store: its writes ignore the deadline."""

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        self.timeout = timedelta(minutes=1)
        super().replace(path, pieces)


def test_even_a_store_that_cannot_be_ended_gets_no_second_writer(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_tune.artifact_sync._GRACE_PERIOD", timedelta(0))
    BUCKETS["overdue"] = bucket = _IgnoresDeadline()
    bucket.gate.clear()
    for other in FILES.keys() - {"log.txt"}:
        (local / other).unlink()
    syncer = TargetSyncer(BucketTarget(name="overdue"), sync_timeout=0.2)
    syncer.sync_up(str(local), REMOTE)
    with pytest.raises(SyncTimedOut, match="no other sync begins"):
        syncer.wait()
    syncer.retry()
    with pytest.raises(SyncTimedOut):
        syncer.wait()
    assert bucket.writers_max == 1
    syncer.sync_timeout = timedelta(seconds=20)
    bucket.gate.set()
    syncer.wait_or_retry(backoff_s=0.2)


def test_where_no_thread_can_be_started_the_sync_has_failed_and_can_be_retried(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", _fail_to_start)
        syncer.sync_up(str(local), REMOTE)
        with pytest.raises(TuneError, match="can't start new thread"):
            syncer.wait(timeout=0)
    syncer.wait_or_retry(backoff_s=0)
    assert download_files(bucket, tmp_path) == FILES


def _fail_to_start(_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_waiting_no_time_is_not_waiting_for_ever(syncer: TargetSyncer, bucket: Bucket, local: Path) -> None:
    bucket.gate.clear()
    syncer.sync_up(str(local), REMOTE)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        syncer.wait(timeout=0)
    assert time.monotonic() - start < 1
    bucket.gate.set()
    syncer.wait()
    syncer.wait(timeout=0)  # nothing is under way


def test_a_delete_waits_for_the_upload_before_it(syncer: TargetSyncer, bucket: Bucket, local: Path) -> None:
    bucket.gate.clear()
    syncer.sync_up(str(local), REMOTE)
    wait_until(lambda: bucket.writers > 0)
    assert syncer.delete(REMOTE) is True
    bucket.gate.set()
    syncer.wait()
    assert bucket.objects == {}
    syncer.sync_up(str(local), REMOTE)
    syncer.wait()
    assert bucket.objects


def test_a_failure_is_raised_until_it_was_made_good(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    bucket.failures = [StoreUnavailable("down")]
    syncer.sync_up(str(local), REMOTE)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"sync up of .*: down") as failed:
            syncer.wait()
        assert isinstance(failed.value.__cause__, StoreUnavailable)
    syncer.retry()
    syncer.wait()
    assert download_files(bucket, tmp_path) == FILES


def test_a_sync_down_that_no_retry_can_help_is_told_once(syncer: TargetSyncer, bucket: Bucket, local: Path) -> None:
    syncer.sync_up(str(local), REMOTE)
    syncer.wait()
    bucket.objects[f"{REMOTE}/../log.txt"] = b"LINE\n"
    syncer.sync_down(REMOTE, str(local / "back"))
    with pytest.raises(CheckpointCorrupt, match="sync down of"):
        syncer.wait_or_retry(backoff_s=60)
    syncer.sync_up(str(local), REMOTE)
    syncer.wait_or_retry()


def test_a_sync_down_of_what_is_missing_is_raised_as_a_missing_file(
    syncer: TargetSyncer, local: Path, tmp_path: Path
) -> None:
    syncer.sync_down("absent", str(tmp_path / "back"))
    with pytest.raises(FileNotFoundError, match=r"sync down of absent to .*: there are no files") as missing:
        syncer.wait_or_retry(backoff_s=60)
    assert isinstance(missing.value, CheckpointNotFound)
    assert syncer.sync_up_if_needed(str(local), REMOTE) is True  # a missing folder causes no pause
    syncer.wait()


@pytest.mark.parametrize(("period", "pause"), [(0, 0), (1, 1), (300, 2)])
def test_after_a_failure_the_next_sync_waits_two_seconds_or_a_shorter_period(
    syncer: TargetSyncer, bucket: Bucket, local: Path, period: float, pause: float
) -> None:
    """Ray counts a failed sync for a whole period; without a pause, each report would start one."""
    syncer.sync_period = timedelta(seconds=period)
    syncer._clock = lambda: 100.0
    bucket.failures = [StoreUnavailable("down")]
    assert syncer.sync_up_if_needed(str(local), REMOTE) is True
    with pytest.raises(StoreUnavailable):
        syncer.wait()
    syncer._clock = lambda: 100.0 + max(pause - 0.1, 0)
    assert syncer.sync_up_if_needed(str(local), REMOTE) is (None if pause else True)
    syncer.wait_or_retry()
    syncer._clock = lambda: 500.0
    assert syncer.sync_up_if_needed(str(local), REMOTE) is True
    syncer.wait()


def test_an_error_of_any_kind_becomes_one_of_ours_with_its_cause(
    syncer: TargetSyncer, bucket: Bucket, local: Path
) -> None:
    bucket.failures = [KeyError("bug")]
    syncer.sync_up(str(local), REMOTE)
    with pytest.raises(TuneError, match="bug") as failed:
        syncer.wait()
    assert isinstance(failed.value.__cause__, KeyError)


def test_a_later_sync_makes_good_an_earlier_failure(syncer: TargetSyncer, bucket: Bucket, local: Path) -> None:
    bucket.failures = [StoreUnavailable("down")]
    syncer.sync_up(str(local), REMOTE)
    with pytest.raises(StoreUnavailable):
        syncer.wait()
    syncer.delete(REMOTE)  # a retried upload would restore the files
    syncer.wait()
    assert bucket.objects == {}


def test_a_retry_before_anything_was_asked_for_is_an_error(syncer: TargetSyncer) -> None:
    with pytest.raises(TuneError, match="no sync"):
        syncer.retry()


def test_a_directory_that_is_not_there_is_an_error_that_is_not_retried(syncer: TargetSyncer, tmp_path: Path) -> None:
    syncer.sync_up(str(tmp_path / "absent"), REMOTE)
    with pytest.raises(InvalidInput, match="absent"):
        syncer.wait_or_retry(backoff_s=60)


def test_a_closed_syncer_has_done_everything_and_takes_nothing_more(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    syncer.sync_up(str(local), REMOTE)
    syncer.close()
    assert download_files(bucket, tmp_path) == FILES
    with pytest.raises(InvalidInput, match="closed"):
        syncer.sync_up(str(local), REMOTE)
    syncer.close()


def test_a_pickled_syncer_keeps_its_settings_and_what_is_not_known_to_be_done(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    syncer.sync_period = timedelta(seconds=7)
    bucket.gate.clear()
    syncer.sync_up(str(local), REMOTE)
    copy = pickle.loads(pickle.dumps(syncer))
    assert (copy.sync_period, copy.sync_timeout) == (timedelta(seconds=7), timedelta(seconds=20))
    with pytest.raises(TuneError, match="it was not done when this syncer was copied"):
        copy.wait()
    bucket.gate.set()
    syncer.wait()
    copy.wait_or_retry(backoff_s=0)
    assert copy.sync_up_if_needed(str(local), REMOTE) is None
    assert download_files(bucket, tmp_path) == FILES
