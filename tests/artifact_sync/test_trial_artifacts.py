"""Errors with a trial's artifacts are reported; they stop no trial and delete no file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.artifact_sync import Syncer, TargetSyncer
from prefect_tune.attempt import commit_worker
from prefect_tune.attempt.commit_worker import TrialArtifacts
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import LocalTarget, StorageTarget, SyncConfig
from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.storage.layout import TrialKey
from tests.fakes.artifacts import BUCKETS, Bucket, BucketTarget, download_files
from tests.fakes.checkpoints import write_files
from tests.fakes.trial_processes import wait_until

TRIAL = TrialKey(experiment="e", generation=1, trial="t")
LOG = logging.getLogger("artifacts")


class FlakyBucket(Bucket):
    """A bucket whose reads fail while it `is_unavailable`."""

    is_unavailable = False

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if self.is_unavailable:
            raise StoreUnavailable(f"503 for {path}")
        return super().read(path, offset=offset, length=length)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_worker, "_BACKOFF_SECONDS", 0.0)


def make_spec(target: StorageTarget, sync: SyncConfig | None = None) -> TrialSpec:
    return TrialSpec(
        target=target, trial=TRIAL, trainable="", stopper="", needs_history=False, sync=sync or SyncConfig()
    )


def make_attempt(spec: TrialSpec, directory: Path) -> TrialArtifacts:
    directory.mkdir()
    return TrialArtifacts(spec, directory, LOG)


def finish(attempt: TrialArtifacts) -> None:
    attempt.sync_and_wait()
    attempt.close_syncer()


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> FlakyBucket:
    bucket = BUCKETS[request.node.name] = FlakyBucket()
    return bucket


@pytest.fixture
def spec(request: pytest.FixtureRequest, bucket: FlakyBucket, tmp_path: Path) -> TrialSpec:
    """A specification whose first attempt left the file `log-1`."""
    assert not bucket.objects
    spec = make_spec(BucketTarget(name=request.node.name))
    first = make_attempt(spec, tmp_path / "1")
    (tmp_path / "1" / "log-1").write_text("one")
    finish(first)
    return spec


def test_an_attempt_goes_on_with_what_the_one_before_left(spec: TrialSpec, bucket: FlakyBucket, tmp_path: Path) -> None:
    second = make_attempt(spec, tmp_path / "2")
    second.prepare(2)
    (tmp_path / "2" / "log-2").write_text("two")
    finish(second)
    assert download_files(bucket, tmp_path, TRIAL.artifacts_folder) == {"log-1": b"one", "log-2": b"two"}


def test_what_could_not_be_brought_back_is_not_deleted_and_the_new_files_go_beside_it(
    spec: TrialSpec, bucket: FlakyBucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = make_attempt(spec, tmp_path / "2")
    bucket.is_unavailable = True
    second.prepare(2)
    bucket.is_unavailable = False
    (tmp_path / "2" / "log-2").write_text("two")
    second.on_commit()
    finish(second)
    assert download_files(bucket, tmp_path, TRIAL.artifacts_folder) == {"log-1": b"one"}
    assert download_files(bucket, tmp_path, f"{TRIAL.artifacts_folder}-2") == {"log-2": b"two"}
    assert "of this attempt are uploaded to" in caplog.text


def test_an_attempt_asks_nothing_of_the_target_before_it_has_a_file(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bucket = BUCKETS[request.node.name] = Bucket()
    attempt = make_attempt(make_spec(BucketTarget(name=request.node.name)), tmp_path / "1")
    attempt.prepare(1)
    attempt.on_commit()
    attempt.on_report()
    attempt.sync_and_wait()
    assert not bucket.operations
    assert bucket.timeout == Bucket().timeout  # it was never opened
    (log := tmp_path / "1" / "log").write_text("late")
    attempt.sync_and_wait()
    assert download_files(bucket, tmp_path, TRIAL.artifacts_folder) == {"log": b"late"}
    log.unlink()
    finish(attempt)
    assert bucket.objects == {}


def test_the_last_sync_has_ended_when_the_attempt_ends(spec: TrialSpec, bucket: FlakyBucket, tmp_path: Path) -> None:
    attempt = make_attempt(spec, tmp_path / "2")
    (tmp_path / "2" / "log-1").write_text("last line")
    bucket.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(attempt.sync_and_wait)
        wait_until(lambda: bucket.writers > 0)
        assert not closing.done()
        bucket.gate.set()
        closing.result()
    assert bucket.objects == {f"{TRIAL.artifacts_folder}/log-1": b"last line"}


def test_an_attempt_that_is_taken_for_dead_deletes_no_file_of_its_successor_and_nothing_else(
    spec: TrialSpec, bucket: FlakyBucket, tmp_path: Path
) -> None:
    others = {
        f"{TRIAL.blobs_folder}/part": b"1",
        f"{TRIAL.checkpoints_folder}/x/manifest.json": b"2",
        "e/1/journal/3.json": b"3",
    }
    bucket.objects |= others
    first = make_attempt(spec, tmp_path / "2")
    (tmp_path / "2" / "log-1").write_text("one, once more")
    first.sync_and_wait()
    second = make_attempt(spec, tmp_path / "3")
    second.prepare(3)
    (tmp_path / "3" / "log-2").write_text("two")
    second.sync_and_wait()
    (tmp_path / "2" / "log-1").write_text("one goes on")
    first.sync_and_wait()
    (tmp_path / "2" / "log-1").unlink()
    (tmp_path / "2" / "log-0").write_text("and on")
    first.sync_and_wait()
    written = {f"{TRIAL.artifacts_folder}/log-0": b"and on", f"{TRIAL.artifacts_folder}/log-2": b"two"}
    assert bucket.objects == {**others, **written}


def log_after_last_report(config: Mapping[str, object]) -> None:
    trial = pt.get_trial()
    directory = trial.new_checkpoint_dir()
    (directory / "step").write_text("1")
    pt.report({"loss": 1.0}, checkpoint=pt.Checkpoint.from_directory(directory))
    write_files(trial.directory, {"tensorboard/events": b"%d" % config["number"]})  # type: ignore[str-format]  # it is one


@pytest.mark.usefixtures("no_prefect_server")
def test_what_a_trial_writes_last_is_a_plain_file_which_goes_with_its_experiment(tmp_path: Path) -> None:
    options = {"target": str(tmp_path), "experiment": "e", "isolation": "thread"}
    pt.durable_trainable(log_after_last_report, {"number": 7}, **options)
    (events,) = tmp_path.glob("e/1/trials/*/artifacts/tensorboard/events")
    assert events.read_bytes() == b"7"
    pt.delete_experiment("e", target=str(tmp_path))
    assert not events.exists()
    write_files(events.parent, {"events": b"of an attempt that was paused"})
    pt.maintain(str(tmp_path))
    assert not events.exists()


def test_what_a_deleted_experiment_left_elsewhere_is_not_taken_for_the_trials(tmp_path: Path) -> None:
    sync = SyncConfig(upload_dir=str(tmp_path / "elsewhere"))
    deleted = make_attempt(make_spec(LocalTarget(path=str(tmp_path / "deleted")), sync), tmp_path / "0")
    (tmp_path / "0" / "log").write_text("old")
    deleted.prepare(1)
    finish(deleted)
    spec = make_spec(LocalTarget(path=str(tmp_path / "target")), sync)
    first = make_attempt(spec, tmp_path / "1")
    first.prepare(1)
    finish(first)
    second = make_attempt(spec, tmp_path / "2")
    second.prepare(2)
    assert list((tmp_path / "2").iterdir()) == []


CALLS: list[tuple[str, list[str] | None]] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


class RecordingSyncer(Syncer):
    """Records the calls of the syncers of all attempts."""

    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        del local_dir
        CALLS.append((f"up {remote_dir}", exclude))
        return True

    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        del local_dir
        CALLS.append((f"down {remote_dir}", exclude))
        return True

    def delete(self, remote_dir: str) -> bool:
        raise OSError(remote_dir)


def test_artifacts_go_up_at_each_commit_and_after_the_period_without_what_is_excluded(tmp_path: Path) -> None:
    sync = SyncConfig(syncer=RecordingSyncer(), upload_dir="s3://bucket/up", artifact_excludes=("*.tmp",))
    attempt = make_attempt(make_spec(LocalTarget(path=str(tmp_path / "target")), sync), tmp_path / "1")
    attempt.prepare(2)
    attempt.on_commit()
    attempt.on_commit()
    attempt.on_report()
    attempt.on_report()
    remote = f"s3://bucket/up/{TRIAL.artifacts_folder}"
    assert [call for call, _ in CALLS] == [f"down {remote}", f"up {remote}", f"up {remote}", f"up {remote}"]
    assert all("*.tmp" in (exclude or ()) and "./rank_*" in (exclude or ()) for _, exclude in CALLS)


@pytest.mark.parametrize(("options", "count"), [({"sync_artifacts": False}, 0), ({"sync_on_checkpoint": False}, 1)])
def test_artifacts_stay_behind_or_wait_for_the_period_where_that_is_said(
    options: dict[str, bool], count: int, tmp_path: Path
) -> None:
    sync = SyncConfig(syncer=RecordingSyncer(), upload_dir="s3://bucket/up").model_copy(update=options)
    attempt = make_attempt(make_spec(LocalTarget(path=str(tmp_path / "target")), sync), tmp_path / "1")
    for _ in range(3):
        attempt.on_report()
        attempt.on_commit()
    assert len(CALLS) == count


class FailingSyncer(Syncer):
    """A user's syncer whose calls all fail."""

    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        raise RuntimeError(f"not up: {local_dir} {remote_dir} {exclude}")

    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        raise KeyError(f"not down: {local_dir} {remote_dir} {exclude}")

    def delete(self, remote_dir: str) -> bool:
        raise OSError(remote_dir)

    def close(self) -> None:
        raise ValueError("nor closed")


def test_a_syncer_of_the_users_that_raises_anything_stops_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sync = SyncConfig(syncer=FailingSyncer(), upload_dir=str(tmp_path / "up"), sync_period_seconds=0)
    attempt = make_attempt(make_spec(LocalTarget(path=str(tmp_path / "target")), sync), tmp_path / "1")
    attempt.prepare(2)
    attempt.on_commit()
    attempt.on_report()
    finish(attempt)
    messages = [record.getMessage() for record in caplog.records if record.name == LOG.name]
    assert sum("RuntimeError: not up" in message for message in messages) == 3
    assert sum("KeyError" in message for message in messages) == 1
    assert sum("ValueError: nor closed" in message for message in messages) == 1


def test_a_syncer_that_was_given_as_an_object_syncs_every_attempt_of_every_trial(tmp_path: Path) -> None:
    sync = SyncConfig(syncer=TargetSyncer(), upload_dir=f"file://{tmp_path}/up")
    spec = make_spec(LocalTarget(path=str(tmp_path / "target")), sync)
    other_trial = TrialKey(experiment="e", generation=1, trial="neighbor")
    neighbor = make_attempt(replace(spec, trial=other_trial), tmp_path / "neighbor")
    for number in (1, 2):
        attempt = make_attempt(spec, tmp_path / f"{number}")
        attempt.prepare(number)
        (tmp_path / f"{number}" / f"log-{number}").write_text("")
        finish(attempt)
    (tmp_path / "neighbor" / "log").write_text("")
    finish(neighbor)
    with LocalTarget(path=str(tmp_path / "up")).open(timeout=timedelta(minutes=1)) as store:
        assert download_files(store, tmp_path, TRIAL.artifacts_folder) == {"log-1": b"", "log-2": b""}
        assert download_files(store, tmp_path, "e/1/trials/neighbor/artifacts") == {"log": b""}
