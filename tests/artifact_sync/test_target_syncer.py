"""The built-in syncer: no file is lost, sent twice or torn, and it ends in time."""

from __future__ import annotations

import os
import pickle
import time
from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.artifact_sync.syncer import SyncTimedOut
from prefect_tune.artifact_sync.target_syncer import TargetSyncer
from prefect_tune.core.checkpoints.artifacts import newest_index
from prefect_tune.core.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    InvalidInput,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.storage.object_store import Buffer
from tests.fakes.artifacts import BUCKETS, FILES, REMOTE, Bucket, BucketTarget, fetched
from tests.fakes.checkpoints import files_in
from tests.fakes.stores.object_stores import until

# ----------------------------------------------------------------------------------- one sync after the other


def test_what_changes_while_a_sync_runs_is_uploaded_before_wait_returns(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    bucket.gate.clear()
    for other in FILES.keys() - {"log.txt"}:
        (local / other).unlink()  # so that the first write is of the old log
    syncer.sync_up(str(local), REMOTE)
    assert until(lambda: bucket.writers > 0)
    (local / "log.txt").write_bytes(b"newest")
    assert syncer.sync_up(str(local), REMOTE) is True
    assert syncer.sync_up(str(local), REMOTE) is True
    assert len(syncer._queue) == 1  # it equals the waiting one
    bucket.gate.set()
    syncer.wait()
    assert fetched(bucket, tmp_path)["log.txt"] == b"newest"
    index = newest_index(bucket, REMOTE)
    assert index
    assert index.number == 2


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
    assert fetched(bucket, tmp_path) == files_in(local)


class _Deaf(Bucket):
    """Breaks the contract of a store: its writes outlast every deadline."""

    def put(self, path: str, data: Buffer) -> None:
        self.timeout = timedelta(minutes=1)
        super().put(path, data)


def test_even_a_store_that_cannot_be_ended_gets_no_second_writer(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect_tune.artifact_sync.target_syncer._GRACE", timedelta(0))
    BUCKETS["deaf"] = bucket = _Deaf()
    bucket.gate.clear()
    (local / "big.bin").unlink()
    (local / "plots/loss.svg").unlink()
    syncer = TargetSyncer(BucketTarget(name="deaf"), sync_timeout=0.2)
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
    with monkeypatch.context() as full:
        full.setattr("threading.Thread.start", _refused)
        syncer.sync_up(str(local), REMOTE)
        with pytest.raises(TuneError, match="can't start new thread"):
            syncer.wait(timeout=0)
    syncer.wait_or_retry(backoff_s=0)
    assert fetched(bucket, tmp_path) == FILES


def _refused(_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_waiting_no_time_is_not_waiting_for_ever(syncer: TargetSyncer, bucket: Bucket, local: Path) -> None:
    bucket.gate.clear()
    syncer.sync_up(str(local), REMOTE)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        syncer.wait(timeout=0)
    assert time.monotonic() - begun < 1
    bucket.gate.set()
    syncer.wait()
    syncer.wait(timeout=0)  # nothing is under way


def test_a_delete_waits_for_the_upload_before_it(syncer: TargetSyncer, bucket: Bucket, local: Path) -> None:
    bucket.gate.clear()
    syncer.sync_up(str(local), REMOTE)
    assert until(lambda: bucket.writers > 0)
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
    assert fetched(bucket, tmp_path) == FILES


def test_a_sync_down_that_no_retry_can_help_is_told_once(syncer: TargetSyncer, bucket: Bucket, local: Path) -> None:
    syncer.sync_up(str(local), REMOTE)
    syncer.wait()
    path = next(path for path in bucket.objects if path.endswith("log.txt"))
    bucket.objects[path] = b"LINE\n"
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
    assert syncer.sync_up_if_needed(str(local), REMOTE) is True  # that is no reason to pause
    syncer.wait()


@pytest.mark.parametrize(("period", "pause"), [(0, 0), (1, 1), (300, 2)])
def test_after_a_failure_the_next_sync_waits_two_seconds_or_a_shorter_period(
    syncer: TargetSyncer, bucket: Bucket, local: Path, period: float, pause: float
) -> None:
    """Ray counts a sync that failed for a whole period; without any pause each report would begin one."""
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


def test_wait_or_retry_sends_what_failed_again(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    bucket.failures = [StoreUnavailable("down"), StoreUnavailable("still down")]
    syncer.sync_up(str(local), REMOTE)
    syncer.wait_or_retry(max_retries=3, backoff_s=0)
    assert fetched(bucket, tmp_path) == FILES


def test_a_later_sync_makes_good_an_earlier_failure(syncer: TargetSyncer, bucket: Bucket, local: Path) -> None:
    bucket.failures = [StoreUnavailable("down")]
    syncer.sync_up(str(local), REMOTE)
    with pytest.raises(StoreUnavailable):
        syncer.wait()
    syncer.delete(REMOTE)  # an upload that is retried after this would bring it back
    syncer.wait()
    assert bucket.objects == {}


def test_a_retry_before_anything_was_asked_for_is_an_error(syncer: TargetSyncer) -> None:
    with pytest.raises(TuneError, match="no sync"):
        syncer.retry()


def test_a_directory_that_is_not_there_is_an_error_that_is_not_retried(syncer: TargetSyncer, tmp_path: Path) -> None:
    syncer.sync_up(str(tmp_path / "absent"), REMOTE)
    with pytest.raises(InvalidInput, match="absent"):
        syncer.wait_or_retry(backoff_s=60)


def test_a_period_counts_from_the_last_success(syncer: TargetSyncer, bucket: Bucket, local: Path) -> None:
    syncer.sync_period = timedelta(seconds=100)
    bucket.failures = [StoreUnavailable("down")]
    assert syncer.sync_up_if_needed(str(local), REMOTE) is True
    with pytest.raises(StoreUnavailable):
        syncer.wait()
    assert syncer.sync_up_if_needed(str(local), REMOTE) is None  # not at once: the target is down
    syncer._clock = lambda: time.monotonic() + 10  # long before the period has passed
    assert syncer.sync_up_if_needed(str(local), REMOTE) is True
    syncer.wait()
    assert syncer.sync_up_if_needed(str(local), REMOTE) is None
    syncer._clock = lambda: time.monotonic() + 111  # a later day
    assert syncer.sync_up_if_needed(str(local), REMOTE) is True
    syncer.wait()


def test_a_closed_syncer_has_done_everything_and_takes_nothing_more(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    syncer.sync_up(str(local), REMOTE)
    syncer.close()
    assert fetched(bucket, tmp_path) == FILES
    with pytest.raises(InvalidInput, match="closed"):
        syncer.sync_up(str(local), REMOTE)
    syncer.close()


def test_a_pickled_syncer_keeps_its_settings_and_what_is_not_known_to_be_done(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    syncer.sync_period = timedelta(seconds=7)
    bucket.gate.clear()
    syncer.sync_up(str(local), REMOTE)
    there = pickle.loads(pickle.dumps(syncer))
    assert (there.sync_period, there.sync_timeout) == (timedelta(seconds=7), timedelta(seconds=20))
    with pytest.raises(TuneError, match="may not be done"):
        there.wait()
    bucket.gate.set()
    syncer.wait()
    there.wait_or_retry(backoff_s=0)
    assert there.sync_up_if_needed(str(local), REMOTE) is None
    assert fetched(bucket, tmp_path) == FILES
