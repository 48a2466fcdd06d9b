"""`kill -9` of real processes at random moments of a real training: no acknowledged checkpoint is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prefect_tune.blocks import StorageTarget
from tests.flows.driver import Drivers
from tests.flows.interruptions.killing import Campaign, Victim, redone
from tests.long_cases import long_after
from tests.trainables.witness import Act

Struck = Callable[[Campaign, int], None]


@pytest.fixture
def struck(capsys: pytest.CaptureFixture[str]) -> Struck:
    """Run a campaign, print its figures, and require that nothing was violated."""

    def strike(campaign: Campaign, kills: int) -> None:
        figures = campaign.run(kills)
        with capsys.disabled():
            print(f"\n  {figures}")
        assert not campaign.violations, "\n".join(campaign.violations)

    return strike


@pytest.fixture(params=["local", "s3"])
def target(request: pytest.FixtureRequest) -> StorageTarget:
    chosen: StorageTarget = request.getfixturevalue(f"{request.param}_target")
    return chosen


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("target", "victim", "kills"),
    long_after(1, [("s3", "flow", 2), ("local", "trial", 2), ("s3", "machine", 2)]),
    indirect=["target"],
)
def test_a_training_that_is_killed_ends_bit_identical_and_loses_at_most_an_interval(
    victim: Victim, kills: int, target: StorageTarget, drivers: Drivers, tmp_path: Path, struck: Struck
) -> None:
    struck(Campaign(drivers, target, tmp_path, victim, seed=1), kills)


@pytest.mark.timeout(400)
def test_a_kill_during_an_overlapping_upload_loses_only_that_upload(
    drivers: Drivers, local_target: StorageTarget, tmp_path: Path, struck: Struck
) -> None:
    struck(Campaign(drivers, local_target, tmp_path, "flow", seed=2, commit="async"), 2)


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_a_function_trainable_that_is_killed_ends_bit_identical(
    drivers: Drivers, local_target: StorageTarget, tmp_path: Path, struck: Struck
) -> None:
    train = "tests.trainables.numpy_mlp:train"
    struck(Campaign(drivers, local_target, tmp_path, "flow", seed=3, trainable=train), 2)


@pytest.mark.deep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("victim", ["flow", "trial", "machine"])
@pytest.mark.parametrize("commit", ["sync", "async"])
def test_many_kills_change_nothing_either(
    commit: str, victim: Victim, target: StorageTarget, drivers: Drivers, tmp_path: Path, struck: Struck
) -> None:
    assert commit in ("sync", "async")
    struck(Campaign(drivers, target, tmp_path, victim, seed=100, commit=commit), 20)  # type: ignore[arg-type]  # checked above


def _acts(*lines: str) -> list[Act]:
    return [Act(int(pid), act, int(step)) for pid, act, step in (line.split() for line in lines)]


def test_the_judge_sees_an_acknowledged_save_that_was_not_gone_on_from() -> None:
    before = _acts("1 begin 1", "1 trained 1", "1 saving 1", "1 begin 2", "1 trained 2")
    assert redone([*before, *_acts("2 loaded 1", "2 begin 2")], uncertain=0) == ([1], [])
    lost, wrong = redone([*before, *_acts("2 begin 1")], uncertain=0)
    assert lost == [2]
    assert wrong == ["resumed from step 0, and step 1 was acknowledged"]
    assert redone([*before, *_acts("2 begin 1")], uncertain=1) == ([2], [])
