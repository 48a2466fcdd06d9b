"""Blobs that rot while a training reuses them: damaged checkpoints are quarantined and their bytes uploaded again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from prefect_tune.attempt import commit_worker as module
from prefect_tune.attempt.commit_worker import CommitWorker
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import SyncConfig
from prefect_tune.core.errors import StoreUnavailable, Superseded
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.journal_events import Cause, Committed, Quarantined
from tests.attempt.test_commit_worker import (
    TRIAL,
    CommitHarness,
    FaultyTarget,
    damaged,
    ended,
)
from tests.fakes.trial_processes import until

EVERY = 3


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[CommitHarness, CommitWorker]]:
    """An attempt with two checkpoints that share a file whose blob has rotted."""
    target = FaultyTarget(path=str(tmp_path / "target"))
    sync = SyncConfig(verify_reused_every=EVERY)
    harness = CommitHarness(
        TrialSpec(target=target, trial=TRIAL, trainable="", stopper="", needs_curve=False, sync=sync), tmp_path
    )
    commit_worker = harness.attempt()
    saves(harness, commit_worker, 1, 2)
    harness.rot_oldest_blob()
    yield harness, commit_worker
    commit_worker.end(ended(Cause.MACHINE, "away"))
    with suppress(Superseded):  # tests that begin another attempt
        commit_worker.close()


def saves(harness: CommitHarness, commit_worker: CommitWorker, *steps: int) -> None:
    for step in steps:
        harness.save(commit_worker, step, backbone=b"frozen")
    until(lambda: commit_worker.error or harness.committed[-1:] == [steps[-1]], seconds=60)
    assert commit_worker.error is None


def test_what_shares_a_rotten_blob_is_put_aside_in_the_entry_that_commits_the_good_one(
    training: tuple[CommitHarness, CommitWorker],
) -> None:
    harness, commit_worker = training
    assert damaged(harness) == [1, 2]
    saves(harness, commit_worker, *range(3, 3 + EVERY))
    assert damaged(harness) == []
    found = [entry.events for entry in harness.entries() if any(isinstance(each, Quarantined) for each in entry.events)]
    assert len(found) == 1
    committed = [each.checkpoint.step for each in found[0] if isinstance(each, Committed)]
    aside = [each for each in found[0] if isinstance(each, Quarantined)]
    assert [each.sequence for each in aside] == [
        each.checkpoint.sequence for each in harness.state().quarantined_checkpoints
    ]
    assert [each.checkpoint.step for each in harness.state().quarantined_checkpoints] == list(range(1, committed[0]))
    assert all("expected blake3" in each.reason for each in aside)
    assert [key.step for key in harness.live()] == list(range(committed[0], 3 + EVERY))


def test_an_attempt_after_it_goes_on_from_a_whole_checkpoint_and_sends_no_damage(
    training: tuple[CommitHarness, CommitWorker],
) -> None:
    harness, commit_worker = training
    saves(harness, commit_worker, *range(3, 3 + EVERY))
    again = harness.attempt()
    saves(harness, again, 9, 10)
    again.end(ended(Cause.MACHINE, "away"))
    again.close()
    assert damaged(harness) == []
    assert {9, 10} <= {key.step for key in harness.live()}


def test_what_retention_retires_in_that_entry_is_not_put_aside(training: tuple[CommitHarness, CommitWorker]) -> None:
    harness, commit_worker = training
    commit_worker._spec = replace(harness.plan, retention=Retention(last=1))
    saves(harness, commit_worker, *range(3, 3 + EVERY))
    assert (harness.state().quarantined_checkpoints, damaged(harness)) == ((), [])
    assert [key.step for key in harness.live()] == [2 + EVERY]


def test_where_the_manifests_cannot_be_read_the_good_checkpoint_is_committed_all_the_same(
    training: tuple[CommitHarness, CommitWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, commit_worker = training

    def away(*_: object) -> Callable[[], None]:
        raise StoreUnavailable("503")

    monkeypatch.setattr(module, "on_target", away)
    saves(harness, commit_worker, *range(3, 3 + EVERY))
    assert damaged(harness)[:2] == [1, 2]
    assert 2 + EVERY not in damaged(harness)
