"""Damaged checkpoints, and checkpoints that crash: quarantined with an error; the trial resumes from the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from prefect_tune.core.errors import ResumeFailed, TrialFailed
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.stores.posix_store import PosixStore
from tests.flows.interruptions.trouble import Trouble
from tests.flows.training import bytes_of_checkpoint, flip, overwrite, own_blobs, undisturbed, violations
from tests.long_cases import long_after

_NAME = "troubled"
_MLP = "tests.trainables.numpy_mlp:NumpyMlp"


@pytest.fixture
def trained(trouble: Trouble) -> Trouble:
    """A real training that ended at step 15, with checkpoints of steps 5, 10 and 15."""
    trouble.trainable = _MLP
    trouble.run(steps=15, isolation="thread")
    return trouble


# --------------------------------------------------------------------------------------------------- damage


def _blob(trouble: Trouble, step: int) -> Path:
    return own_blobs(trouble.target, _NAME, step)[0]


def _cut(path: Path) -> None:
    overwrite(path, path.read_bytes()[:-1])


def _manifest(trouble: Trouble, step: int) -> Path:
    (found,) = Path(trouble.target.path).rglob(f"{step:010d}-*/manifest.json")
    return found


_DAMAGE: dict[str, Callable[[Trouble, int], None]] = {
    "a flipped bit in a blob": lambda trouble, step: flip(_blob(trouble, step)),
    "a blob cut short": lambda trouble, step: _cut(_blob(trouble, step)),
    "a missing blob": lambda trouble, step: _blob(trouble, step).unlink(),
    "a flipped bit in the manifest": lambda trouble, step: flip(_manifest(trouble, step)),
    "an empty manifest": lambda trouble, step: overwrite(_manifest(trouble, step), b""),
    "a missing manifest": lambda trouble, step: _manifest(trouble, step).unlink(),
}


@pytest.mark.parametrize("damage", long_after(1, _DAMAGE))
@pytest.mark.parametrize(("damaged", "newest"), long_after(1, [([15], 10), ([15, 10], 5)]))
def test_damaged_checkpoints_are_put_aside_loudly_and_the_newest_whole_one_is_used(
    trained: Trouble, damage: str, damaged: list[int], newest: int
) -> None:
    for step in damaged:
        _DAMAGE[damage](trained, step)
    trained.run(steps=20)
    assert trained.acts("loaded") == [newest]
    assert len(trained.trial.quarantined_sequences) == len(damaged)
    assert "quarantined step 15: cannot be restored" in trained.loudly()
    _require_identical(trained, 20)


def test_when_all_checkpoints_are_damaged_nothing_is_started_afresh_however_often_it_is_tried(
    trained: Trouble,
) -> None:
    for step in (5, 10, 15):
        _manifest(trained, step).unlink()
    begun = trained.acts("begin")
    for _ in range(2):
        with pytest.raises(ResumeFailed, match="Nothing was restarted from zero"):
            trained.run(steps=20, isolation="thread")
    assert trained.acts("begin") == begun
    assert trained.trial.status is not Status.COMPLETED


def test_a_journal_that_was_altered_is_refused(trained: Trouble) -> None:
    entries = sorted(Path(trained.target.path).rglob("journal/*.json"))
    flip(entries[len(entries) // 2])
    begun = trained.acts("begin")
    with pytest.raises(ResumeFailed, match="Nothing was started"):
        trained.run(steps=20)
    assert trained.acts("begin") == begun


# --------------------------------------------------------------------------------------------------- poison


@pytest.mark.long
@pytest.mark.parametrize("way", ["raise", pytest.param("segfault", marks=pytest.mark.deep)])
def test_a_checkpoint_that_kills_whoever_loads_it_is_put_aside_after_three_deaths(trouble: Trouble, way: str) -> None:
    trouble.run(steps=10)
    trouble.poison(10, way)
    result = trouble.run(steps=20, failures=FailurePolicy(max_failures=5))
    assert result.step == 20
    assert trouble.acts("loaded") == [10, 10, 10, 5]
    assert "checkpoint quarantined" in trouble.loudly()
    assert len(trouble.trial.quarantined_sequences) == 1


@pytest.mark.long
def test_deaths_by_the_machine_put_no_checkpoint_aside(trouble: Trouble) -> None:
    trouble.config |= {"fails": "kill", "place": "load", "at": 10, "times": 4}
    trouble.run(steps=10)
    trouble.run(steps=20)
    assert trouble.acts("loaded") == [10] * 5
    assert trouble.trial.quarantined_sequences == ()


@pytest.mark.long
def test_a_poison_checkpoint_does_not_outlive_the_users_budget(trouble: Trouble) -> None:
    trouble.run(steps=10)
    trouble.poison(10, "raise")
    with pytest.raises(TrialFailed, match="max_failures"):
        trouble.run(steps=20, failures=FailurePolicy(max_failures=1))
    assert trouble.acts("loaded") == [10, 10]


# ------------------------------------------------------------------------------------------------- retention


def _require_identical(trouble: Trouble, steps: int) -> None:
    truth = undisturbed(steps)
    assert trouble.trial.status is Status.COMPLETED
    last = trouble.trial.checkpoints[-1]
    assert last.step == steps
    assert bytes_of_checkpoint(trouble.target, _NAME, last.step, last.sequence) == truth.files[steps]
    assert violations(trouble.target, _NAME, truth) == []


@pytest.mark.parametrize(
    ("retention", "stay"),
    long_after(
        1,
        [
            (Retention(last=2), [35, 40]),
            (Retention(every=15), [15, 30, 40]),
            (Retention(last=1, every=20), [20, 40]),
        ],
    ),
)
def test_retired_checkpoints_are_gone_from_the_target_and_live_ones_restore(
    trouble: Trouble, retention: Retention, stay: Sequence[int]
) -> None:
    trouble.trainable = _MLP
    trouble.run(steps=40, retention=retention, isolation="thread")
    assert [each.step for each in trouble.trial.checkpoints] == stay
    manifests = Path(trouble.target.path).rglob("manifest.json")
    assert sorted(int(path.parent.name.partition("-")[0]) for path in manifests) == stay
    _require_identical(trouble, 40)
    needed = {path for step in stay for path in _blobs(trouble, step)}
    on_target = {path for path in Path(trouble.target.path).rglob("blobs/*") if path.is_file()}
    assert needed <= on_target
    assert len(on_target - needed) <= 3  # what the last commit retired may wait for the next one


def _blobs(trouble: Trouble, step: int) -> Sequence[Path]:
    root = Path(trouble.target.path)
    (ref,) = (each for each in trouble.trial.checkpoints if each.step == step)
    key = CheckpointKey(trial=TrialKey(experiment=_NAME, generation=1, trial="trial"), step=step, sequence=ref.sequence)
    return [root / path for path in read_manifest(PosixStore(root), key).blob_paths()]
