"""Damaged checkpoints and checkpoints that crash are quarantined; the trial resumes from an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from prefect_tune.core.errors import ResumeFailed, TrialFailed
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.stores.posix_store import PosixStore
from tests.flows.interruptions.trouble import Trouble
from tests.flows.training import (
    digest_of_checkpoint,
    find_violations,
    flip_bit,
    overwrite,
    own_blobs,
    reference_training,
)
from tests.long_cases import long_after

_NAME = "troubled"
_MLP = "tests.trainables.numpy_mlp:NumpyMlp"


@pytest.fixture
def training(trouble: Trouble) -> Trouble:
    """A training of 15 steps with checkpoints of steps 5, 10 and 15."""
    trouble.trainable = _MLP
    trouble.run(steps=15, isolation="thread")
    return trouble


# --------------------------------------------------------------------------------------------------- damage


def _find_blob(trouble: Trouble, step: int) -> Path:
    return own_blobs(trouble.target, _NAME, step)[0]


def _find_manifest(trouble: Trouble, step: int) -> Path:
    (manifest,) = Path(trouble.target.path).rglob(f"{step:010d}-*/manifest.json")
    return manifest


_DAMAGE: dict[str, Callable[[Trouble, int], None]] = {
    "a flipped bit in a blob": lambda trouble, step: flip_bit(_find_blob(trouble, step)),
    "a blob cut short": lambda trouble, step: overwrite(path := _find_blob(trouble, step), path.read_bytes()[:-1]),
    "a missing blob": lambda trouble, step: _find_blob(trouble, step).unlink(),
    "a flipped bit in the manifest": lambda trouble, step: flip_bit(_find_manifest(trouble, step)),
    "an empty manifest": lambda trouble, step: overwrite(_find_manifest(trouble, step), b""),
    "a missing manifest": lambda trouble, step: _find_manifest(trouble, step).unlink(),
}


@pytest.mark.parametrize("damage", long_after(1, _DAMAGE))
@pytest.mark.parametrize(("damaged", "newest"), long_after(1, [([15], 10), ([15, 10], 5)]))
def test_damaged_checkpoints_are_put_aside_loudly_and_the_newest_whole_one_is_used(
    training: Trouble, damage: str, damaged: list[int], newest: int
) -> None:
    for step in damaged:
        _DAMAGE[damage](training, step)
    training.run(steps=20)
    assert training.steps_of("loaded") == [newest]
    assert len(training.trial.quarantined_sequences) == len(damaged)
    assert "quarantined step 15: cannot be restored" in training.warning_text()
    _require_identical(training, 20)


def test_when_all_checkpoints_are_damaged_nothing_is_started_afresh_however_often_it_is_tried(
    training: Trouble,
) -> None:
    for step in (5, 10, 15):
        _find_manifest(training, step).unlink()
    before = training.steps_of("begin")
    for _ in range(2):
        with pytest.raises(ResumeFailed, match="Nothing was restarted from zero"):
            training.run(steps=20, isolation="thread")
    assert training.steps_of("begin") == before
    assert training.trial.status is not Status.COMPLETED


def test_a_journal_that_was_altered_is_refused(training: Trouble) -> None:
    entries = sorted(Path(training.target.path).rglob("journal/*.json"))
    flip_bit(entries[len(entries) // 2])
    before = training.steps_of("begin")
    with pytest.raises(ResumeFailed, match="Nothing was started"):
        training.run(steps=20)
    assert training.steps_of("begin") == before


# --------------------------------------------------------------------------------------------------- poison


@pytest.mark.long
@pytest.mark.parametrize("failure", ["raise", pytest.param("segfault", marks=pytest.mark.deep)])
def test_a_checkpoint_that_kills_whoever_loads_it_is_put_aside_after_three_deaths(
    trouble: Trouble, failure: str
) -> None:
    trouble.run(steps=10)
    trouble.poison(10, failure)
    result = trouble.run(steps=20, failures=FailurePolicy(max_failures=5))
    assert result.step == 20
    assert trouble.steps_of("loaded") == [10, 10, 10, 5]
    assert "checkpoint quarantined" in trouble.warning_text()
    assert len(trouble.trial.quarantined_sequences) == 1


@pytest.mark.long
def test_deaths_by_the_machine_put_no_checkpoint_aside(trouble: Trouble) -> None:
    trouble.config |= {"fails": "kill", "place": "load", "at": 10, "times": 4}
    trouble.run(steps=10)
    trouble.run(steps=20)
    assert trouble.steps_of("loaded") == [10] * 5
    assert trouble.trial.quarantined_sequences == ()


@pytest.mark.long
def test_a_poison_checkpoint_does_not_outlive_the_users_budget(trouble: Trouble) -> None:
    trouble.run(steps=10)
    trouble.poison(10, "raise")
    with pytest.raises(TrialFailed, match="max_failures"):
        trouble.run(steps=20, failures=FailurePolicy(max_failures=1))
    assert trouble.steps_of("loaded") == [10, 10]


# ------------------------------------------------------------------------------------------------- retention


def _require_identical(trouble: Trouble, steps: int) -> None:
    reference, last = reference_training(steps), trouble.trial.checkpoints[-1]
    assert (trouble.trial.status, last.step) == (Status.COMPLETED, steps)
    assert digest_of_checkpoint(trouble.target, _NAME, last.step, last.sequence) == reference.files[steps]
    assert find_violations(trouble.target, _NAME, reference) == []


@pytest.mark.parametrize(
    ("retention", "steps"),
    long_after(
        1, [(Retention(last=2), [35, 40]), (Retention(every=15), [15, 30, 40]), (Retention(last=1, every=20), [20, 40])]
    ),
)
def test_retired_checkpoints_are_gone_from_the_target_and_live_ones_restore(
    trouble: Trouble, retention: Retention, steps: Sequence[int]
) -> None:
    trouble.trainable = _MLP
    trouble.run(steps=40, retention=retention, isolation="thread")
    assert [checkpoint.step for checkpoint in trouble.trial.checkpoints] == steps
    paths = Path(trouble.target.path).rglob("manifest.json")
    assert sorted(int(path.parent.name.partition("-")[0]) for path in paths) == steps
    _require_identical(trouble, 40)
    root, trial = Path(trouble.target.path), TrialKey(experiment=_NAME, generation=1, trial="trial")
    manifests = [read_manifest(PosixStore(root), trial.checkpoint_key(ref)) for ref in trouble.trial.checkpoints]
    needed = {root / path for manifest in manifests for path in manifest.blob_paths()}
    on_target = {path for path in Path(trouble.target.path).rglob("blobs/*") if path.is_file()}
    assert needed <= on_target
    assert len(on_target - needed) <= 3  # the next commit deletes what the last one retired
