"""Later checkpoints do not inherit damage that maintenance found, even if their owner does not know of it yet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefect_tune.core.errors import CheckpointCorrupt, SaveOvertaken
from prefect_tune.core.experiment import experiment
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import newest_key, parent_of_next
from prefect_tune.core.journal_events import CheckpointRef, Committed, Quarantined, Reported
from prefect_tune.core.operations.scrub import quarantine, read_one, reinstate
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.values import StepReport
from tests.core.protocol.mutate import break_lines
from tests.core.protocol.population import Chronicle, Member, begin_experiment, own
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")


@pytest.fixture
def member() -> Member:
    """An owner that saved three checkpoints with a shared backbone; two are live."""
    owner = Member(MemoryStore(), Chronicle(), own("e", "s"), "s", retention=Retention(last=2))
    begin_experiment(owner.store, owner.journal)
    owner.open()
    owner.start()
    for _ in range(3):
        owner.save()
    return owner


def keys(member: Member) -> list[CheckpointKey]:
    return [
        CheckpointKey(trial=member.key, step=each.step, sequence=each.sequence) for each in member.trial.checkpoints
    ]


def damage(member: Member, key: CheckpointKey) -> str | None:
    return read_one(member.store, key, side_by_side=map).damage


def rots(member: Member) -> None:
    """Alter a blob that all checkpoints share."""
    manifest = read_manifest(member.store, keys(member)[-1])
    backbone = next(each for each in manifest.files if each.path == "backbone")
    path = manifest.blob_path(backbone.chunks[0].blob)
    assert isinstance(member.store, MemoryStore)
    member.store.objects[path] = b"X" * len(member.store.objects[path])


def maintains(member: Member, *found: CheckpointKey) -> None:
    """Maintenance quarantines the checkpoints that it found damaged."""
    reasons = dict.fromkeys(found, "damaged")
    quarantine(member.store, member.key, reasons, member.chronicle.stamp(), side_by_side=map)


@pytest.mark.parametrize("found", [[0, 1], [0], [1]], ids=["all of them", "the older", "the newer"])
def test_what_is_saved_after_damage_was_found_is_whole_though_the_owner_has_not_heard_of_it(
    member: Member, found: list[int]
) -> None:
    rots(member)
    live = keys(member)
    maintains(member, *(live[each] for each in found))
    for _ in range(3):
        member.save()
        assert damage(member, keys(member)[-1]) is None
    assert [damage(member, key) for key in keys(member)] == [None, None]
    assert [key.step for key in keys(member)] == [5, 6]


def test_what_was_committed_just_before_damage_was_found_is_not_saved_upon(member: Member) -> None:
    rots(member)
    bad = keys(member)
    member.save()  # committed with the same damaged backbone, before the damage was found
    maintains(member, *(key for key in bad if key in keys(member)))
    member.save()
    member.save()
    assert [damage(member, key) for key in keys(member)] == [None, None]


def overtaken_commit(member: Member) -> None:
    """Journal a save that was begun before a checkpoint was quarantined."""
    begun = CheckpointRef(step=4, sequence=member.experiment.number)
    maintains(member, keys(member)[0])
    report = Reported(trial="s", report=StepReport(step=4, metrics={}))
    member.append([report, Committed(trial="s", checkpoint=begun)])


def test_a_save_that_a_guest_has_overtaken_is_not_committed_and_nothing_is_written(member: Member) -> None:
    before = member.experiment
    with pytest.raises(SaveOvertaken, match="step 4"):
        overtaken_commit(member)
    assert member.experiment is before
    member.open()
    assert [each.step for each in member.trial.checkpoints] == [3]


def test_the_suite_notices_when_a_save_that_was_overtaken_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    break_lines(monkeypatch, experiment.following, {"_require_not_overtaken(experiment, entry)": "pass"})
    owner = Member(MemoryStore(), Chronicle(), own("e", "s"), "s", retention=Retention(last=2))
    begin_experiment(owner.store, owner.journal)
    owner.open()
    owner.start()
    for _ in range(3):
        owner.save()
    overtaken_commit(owner)
    assert owner.trial.step == 4


@pytest.mark.parametrize("does", [rots, lambda _: None], ids=["rotten", "whole"])
def test_what_is_older_than_one_that_was_quarantined_is_not_saved_upon(
    member: Member, does: Callable[[Member], None]
) -> None:
    does(member)
    bad, before = keys(member)[-1], keys(member)[0]
    member.append([Quarantined(trial="s", sequence=bad.sequence, reason="damaged")])
    assert newest_key(member.key, member.trial) == before
    assert parent_of_next(member.key, member.trial) is None
    member.save()
    assert parent_of_next(member.key, member.trial) == keys(member)[-1]
    assert damage(member, keys(member)[-1]) is None


def test_what_is_reinstated_is_saved_upon_again(member: Member) -> None:
    maintains(member, *keys(member))
    member.append([Reported(trial="s", report=StepReport(step=4, metrics={}))])
    assert parent_of_next(member.key, member.trial) is None
    aside = [each.checkpoint for each in member.trial.quarantined_checkpoints]
    back = [CheckpointKey(trial=member.key, step=each.step, sequence=each.sequence) for each in aside]
    reinstate(member.store, member.key, back, member.chronicle.stamp(), side_by_side=map)
    member.append([Reported(trial="s", report=StepReport(step=5, metrics={}))])
    assert parent_of_next(member.key, member.trial) == back[-1]


def test_a_damaged_checkpoint_is_what_these_tests_see(member: Member) -> None:
    rots(member)
    with pytest.raises(CheckpointCorrupt):
        member.start()
