"""A trial's artifacts while two of its attempts live: those of the later attempt stay."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from prefect_tune.attempt.trial_artifacts import TrialArtifacts
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import SyncConfig
from prefect_tune.core.checkpoints.artifacts import ArtifactFile, ArtifactIndex, newest_index
from prefect_tune.core.errors import Superseded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events import Adopted, Event, Started, TrialAdded
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.journal_access import Opening, current_owner, new_write_id, open_journal
from prefect_tune.stores.local.artifact_transfer import Sent, Writer, send_artifacts
from tests.fakes.artifacts import REMOTE, Bucket, BucketTarget, Raced, fetched
from tests.fakes.checkpoints import files_in, write
from tests.fakes.searches.far_attempts import require_experiment
from tests.fakes.stores.memory_store import MemoryStore

TRIAL = TrialKey(experiment="e", generation=1, trial="t")
FIRST, SECOND = Writer(attempt=1), Writer(attempt=2)


@pytest.fixture
def stale(tmp_path: Path) -> Path:
    return write(tmp_path / "stale", {"log.txt": b"one"})


@pytest.fixture
def later(tmp_path: Path) -> Path:
    return write(tmp_path / "later", {"log.txt": b"one, two", "card.md": b"final"})


def test_what_a_later_attempt_has_shown_is_neither_replaced_nor_deleted(stale: Path, later: Path) -> None:
    store = MemoryStore()
    before = send_artifacts(store, REMOTE, stale, (), Sent(), writer=FIRST)
    send_artifacts(store, REMOTE, later, (), Sent(), writer=SECOND)
    there = dict(store.objects)
    (stale / "log.txt").write_bytes(b"one goes on")
    for known in (before, Sent()):
        with pytest.raises(Superseded, match="attempt 2 "):
            send_artifacts(store, REMOTE, stale, (), known, writer=FIRST)
    assert store.objects == there


def test_nor_does_a_race_for_the_number_replace_it(stale: Path, later: Path, tmp_path: Path) -> None:
    store = Raced()
    store.writer = SECOND
    before = send_artifacts(store, REMOTE, stale, (), Sent(), writer=FIRST)
    (stale / "log.txt").write_bytes(b"one goes on")
    store.rival = later
    with pytest.raises(Superseded):
        send_artifacts(store, REMOTE, stale, (), before, writer=FIRST)
    assert fetched(store, tmp_path) == files_in(later)


def test_an_attempt_that_has_changed_nothing_has_shown_it_all_the_same(stale: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    before = send_artifacts(store, REMOTE, stale, (), Sent(), writer=FIRST)
    send_artifacts(store, REMOTE, stale, (), Sent(), writer=SECOND)
    (stale / "log.txt").write_bytes(b"one goes on")
    with pytest.raises(Superseded):
        send_artifacts(store, REMOTE, stale, (), before, writer=FIRST)
    assert fetched(store, tmp_path) == {"log.txt": b"one"}


def test_who_syncs_by_hand_speaks_for_the_attempt_that_is_there(stale: Path, later: Path) -> None:
    store = MemoryStore()
    send_artifacts(store, REMOTE, stale, (), Sent(), writer=SECOND)
    send_artifacts(store, REMOTE, later, (), Sent())
    with pytest.raises(Superseded):
        send_artifacts(store, REMOTE, stale, (), Sent(), writer=FIRST)


def test_an_index_that_no_attempt_wrote_is_read_and_continued(stale: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    by_hand = ArtifactIndex(number=1, write_id="w", files=(ArtifactFile(path="empty"),))
    store.objects[f"{REMOTE}/index/0000000001.json"] = seal(by_hand)
    assert fetched(store, tmp_path) == {"empty": b""}
    send_artifacts(store, REMOTE, stale, (), Sent(), writer=FIRST)
    index = newest_index(store, REMOTE)
    assert index
    assert (index.number, index.attempt) == (2, 1)


# ---------------------------------------------------------------------------------------- within an attempt


@pytest.fixture
def spec(request: pytest.FixtureRequest, bucket: Bucket) -> TrialSpec:
    assert not bucket.objects
    target = BucketTarget(name=request.node.name)
    sync = SyncConfig(sync_period_seconds=0)
    return TrialSpec(
        target=target, trial=TRIAL, trainable="", stopper="", needs_curve=False, sync=sync, own_journal=True
    )


def attempt_in(spec: TrialSpec, directory: Path) -> TrialArtifacts:
    return TrialArtifacts(spec, directory, logging.getLogger("artifacts"))


def begin_journal(spec: TrialSpec) -> Experiment:
    started = Started(trial=TRIAL.trial, attempt=1, from_step=0, from_sequence=None)

    def first(_: Experiment) -> Sequence[Event]:
        return (Adopted(), TrialAdded(trial=TRIAL.trial, config={}), started)

    require_experiment(spec.target, spec.trial.of_experiment)
    return open_journal(spec.target, spec.journal, Opening(current_owner(), new_write_id(), first))


def test_an_attempt_that_is_taken_for_gone_leaves_the_files_of_the_one_that_has_finished(
    spec: TrialSpec, bucket: Bucket, stale: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = attempt_in(spec, stale)
    first.close()
    second = attempt_in(spec, tmp_path / "2")
    second.bring_back(2)
    write(tmp_path / "2", {"card.md": b"final"})
    second.close()
    (stale / "log.txt").write_bytes(b"one goes on")
    first.after_report()
    first.settle()
    assert fetched(bucket, tmp_path, TRIAL.artifacts) == {"log.txt": b"one", "card.md": b"final"}
    assert "Superseded" in caplog.text


def test_what_an_earlier_experiment_of_the_name_has_left_keeps_nobody_from_syncing(
    spec: TrialSpec, bucket: Bucket, stale: Path, later: Path, tmp_path: Path
) -> None:
    send_artifacts(bucket, TRIAL.artifacts, later, (), Sent(), writer=SECOND)
    begin_journal(spec)
    first = attempt_in(spec, stale)
    first.close()
    first.settle()
    assert fetched(bucket, tmp_path, TRIAL.artifacts) == {"log.txt": b"one"}
