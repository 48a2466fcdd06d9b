"""Maintenance of trials while their owners run: crashes, late writes, concurrent operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from prefect_tune.core.errors import CheckpointCorrupt, JournalCorrupt
from prefect_tune.core.experiment import trial_transitions
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, reused_from
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Event,
    Finished,
    Paused,
    Pinned,
    Requeued,
    Retired,
)
from prefect_tune.core.messages.process_messages import Proceed
from prefect_tune.core.messages.target_messages import answer
from prefect_tune.core.operations import checkpoint_gc
from prefect_tune.core.operations.scrub import quarantine, reinstate
from prefect_tune.core.operations.trial_gc import Collected, collect_from, look_for_garbage, prune
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from tests.core.driver import BACKBONE, retried
from tests.core.protocol.meetings import (
    Act,
    Scene,
    clones,
    die_everywhere,
    late_writes,
    meet_at_random,
    meet_dying,
    meet_in_every_order,
    or_superseded,
    saves,
    takes_over,
    with_a_clone,
    with_a_clone_that_is_over,
    without_a_clone,
)
from tests.core.protocol.mutate import break_lines
from tests.core.protocol.population import Member, newest, own, promises_broken
from tests.fakes.stores.dying_store import WRITES, Way
from tests.fakes.stores.memory_files import restored

pytestmark = pytest.mark.usefixtures("tiny_blobs")

Record = Callable[[str, object], None]
Before = Callable[[JournalKey, JournalKey], Scene]

SOURCE, CLONE = own("e", "s"), own("e", "c")
KEEPS = Retention(last=1)


def reopened(scene: Scene, name: str = "s") -> Member:
    """Open the trial's journal again; return its owner."""
    scene.members[name].open()
    return scene.members[name]


# -------------------------------------------------------------------------------------------- operations


def collects(name: str = "s") -> Act:
    """Maintenance deletes the garbage of a trial."""

    def act(scene: Scene, store: ObjectStore) -> None:
        key = scene.members[name].key
        retried(lambda: collect_from(store, key, scene.chronicle.stamp(), side_by_side=map))

    return act


def prunes(scene: Scene, store: ObjectStore) -> None:
    """Maintenance retires the checkpoints that a policy does not keep, and deletes them."""
    key = scene.members["s"].key
    retried(lambda: prune(store, key, KEEPS, scene.chronicle.stamp(), side_by_side=map))
    collects()(scene, store)


def doubts(scene: Scene, store: ObjectStore) -> None:
    """Maintenance quarantines a checkpoint that it found damaged, and deletes garbage."""
    member = scene.members["s"]
    stamp = scene.chronicle.stamp()
    retried(lambda: quarantine(store, member.key, {newest(member): "doubted"}, stamp, side_by_side=map))
    collects()(scene, store)


def doubts_and_trusts(scene: Scene, store: ObjectStore) -> None:
    """The same; then the checkpoint is found undamaged and reinstated."""
    doubts(scene, store)
    member = scene.members["s"]
    retried(lambda: reinstate(store, member.key, [newest(member)], scene.chronicle.stamp(), side_by_side=map))


def given_up_only_there(scene: Scene) -> Trial:
    """The trial in the experiment's journal: errored, with all entries of its own journal absorbed."""
    of = scene.members["s"]
    update = {"own_journal": True, "phase": Phase.ERRORED, "absorbed": of.experiment.number}
    return of.trial.model_copy(update=update)


def prunes_given_up(scene: Scene, store: ObjectStore) -> None:
    """Maintenance prunes a trial that has ended in the experiment's journal only."""
    key, known = scene.members["s"].key, given_up_only_there(scene)
    retried(lambda: prune(store, key, KEEPS, scene.chronicle.stamp(), side_by_side=map, known=known))
    retried(lambda: collect_from(store, key, scene.chronicle.stamp(), side_by_side=map, known=known))


def goes_on(scene: Scene, store: ObjectStore) -> None:
    """The owner requeues the ended trial and continues it."""
    member = scene.members["s"].on(store, scene.chronicle)
    member.append([Requeued(trial="s", reason="more")])
    member.start()
    member.save()


def resumes(scene: Scene, store: ObjectStore) -> None:
    """Another owner requeues the ended trial and continues it."""
    old = scene.members["s"]
    new = Member(store, scene.chronicle, old.journal, "s", owner=f"new {scene.chronicle.stamps}")
    new.open()
    new.append([Requeued(trial="s", reason="more")])
    new.start()
    new.save()


# ------------------------------------------------------------------------------------------------- scenes


def training(source: JournalKey, clone: JournalKey) -> Scene:
    """A running trial, which has not deleted what it last retired."""
    return without_a_clone(source, clone)


def ended(source: JournalKey, clone: JournalKey) -> Scene:
    """An ended trial with two checkpoints, a retired one, and the leftovers of a save that died."""
    return _left(source, clone, Finished(trial="s", reason="enough"))


def _left(source: JournalKey, clone: JournalKey, last: Event) -> Scene:
    scene = without_a_clone(source, clone)
    member = scene.members["s"]
    member.retention = Retention()
    member.save()
    stray = CheckpointKey(trial=member.key, step=9, sequence=member.experiment.number)
    member._commit(stray, {"head": b"nobodys", "backbone": b"of its own, and of nobody else"}, member._about(9))
    member.append([last])
    member.retention = KEEPS
    return scene


def given_up(source: JournalKey, clone: JournalKey) -> Scene:
    """The same, but in its own journal the trial waits for a retry."""
    return _left(source, clone, AttemptEnded(trial="s", cause=Cause.USER, reason="raised"))


def not_resumed(source: JournalKey, clone: JournalKey) -> Scene:
    """The same, but in its own journal the trial is paused."""
    return _left(source, clone, Paused(trial="s", reason="rung"))


def ended_and_cloned(source: JournalKey, clone: JournalKey) -> Scene:
    """The same, and the older checkpoint was cloned."""
    scene = with_a_clone(source, clone)
    member = scene.members["s"]
    member.retention = Retention()
    member.save()
    member.append([Finished(trial="s", reason="enough")])
    member.retention = KEEPS
    return scene


STORIES: Mapping[str, tuple[Before, Act]] = {
    "garbage of one that trains": (training, collects()),
    "garbage of one that has ended": (ended, collects()),
    "garbage that a clone needs": (with_a_clone, collects()),
    "a clone that is over": (with_a_clone_that_is_over, collects("c")),
    "one that has ended is pruned": (ended, prunes),
    "one that was cloned is pruned": (ended_and_cloned, prunes),
    "one that was given up is pruned": (given_up, prunes_given_up),
    "a checkpoint is put aside": (training, doubts),
    "a checkpoint is reinstated": (training, doubts_and_trusts),
}
MEETINGS: Mapping[str, tuple[Before, Sequence[Act]]] = {
    "collects while it saves": (training, [collects(), saves("s", 2)]),
    "collects while it is cloned": (training, [collects(), clones("c")]),
    "collects while it is taken over": (with_a_clone, [collects(), takes_over("s")]),
    "collects while another collects": (ended, [collects(), collects()]),
    "prunes while it continues": (ended, [prunes, goes_on]),
    "prunes while it is resumed": (ended, [prunes, resumes]),
    "prunes while it is cloned": (ended, [prunes, clones("c")]),
    "prunes what was given up while it is resumed": (given_up, [prunes_given_up, resumes]),
    "puts aside while it saves": (training, [doubts, saves("s", 2)]),
    "puts aside while it is taken over": (training, [doubts, takes_over("s"), or_superseded(saves("s"))]),
    "reinstates while it saves": (training, [doubts_and_trusts, saves("s")]),
    "reinstates while another collects": (with_a_clone, [doubts_and_trusts, collects()]),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("story", STORIES)
def test_maintenance_killed_at_every_write_breaks_no_promise(story: str, record_property: Record) -> None:
    before, act = STORIES[story]
    explored = die_everywhere(before(SOURCE, CLONE), act, [Way.TORN, Way.REPLY_LOST], only=WRITES)
    explored.record(record_property, "points explored, maintenance")
    assert explored.broken == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_maintenance_and_owners_in_drawn_orders_break_no_promise(meeting: str, record_property: Record) -> None:
    before, acts = MEETINGS[meeting]
    explored = meet_at_random(before(SOURCE, CLONE), acts, range(3))
    explored.record(record_property, "orders of maintenance and owners")
    assert explored.broken == []


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_maintenance_and_owners_in_many_orders_and_dying_break_no_promise(
    meeting: str, record_property: Record
) -> None:
    before, acts = MEETINGS[meeting]
    scene = before(SOURCE, CLONE)
    explored = meet_at_random(scene, acts, range(1000, 1400))
    points = at_writes if len(acts) == 2 else at_commits  # three processes have too many orders of all their writes
    for more in (meet_dying(scene, acts, range(300)), meet_in_every_order(scene, acts, points, limit=20_000)):
        explored.add(more)
    explored.record(record_property, "orders of maintenance and owners")
    assert explored.broken == []


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("story", STORIES)
def test_maintenance_failing_in_every_way_or_late_breaks_no_promise(story: str, record_property: Record) -> None:
    before, act = STORIES[story]
    scene = before(SOURCE, CLONE)
    explored = die_everywhere(scene, act)
    late = late_writes(scene, act, [None, 0, 2, 10])
    explored.add(late)
    explored.record(record_property, "points explored, maintenance")
    assert explored.broken == []


def at_writes(method: str, path: str) -> bool:
    del path
    return method in {"create", "delete"}


def at_commits(method: str, path: str) -> bool:
    return at_writes(method, path) and ("/journal/" in path or path.endswith("/manifest.json"))


# -------------------------------------------------------------------------------------------- outcomes


def test_what_a_look_finds_is_what_is_deleted_and_then_there_is_nothing_more() -> None:
    scene = training(SOURCE, CLONE)
    key = scene.members["s"].key
    seen = look_for_garbage(scene.store, key, side_by_side=map)
    before = dict(scene.store.objects)
    assert seen.checkpoints == (1,)
    assert seen.orphan_bytes > 0
    assert scene.store.objects == before
    assert collect_from(scene.store, key, scene.chronicle.stamp(), side_by_side=map) == seen
    assert look_for_garbage(scene.store, key, side_by_side=map) == Collected("s")


def test_what_a_save_that_died_left_goes_once_its_trial_has_ended_and_not_before() -> None:
    scene = ended(SOURCE, CLONE)
    key = scene.members["s"].key
    strays = [path for path in scene.store.objects if "0000000009-" in path]
    assert strays
    collects()(scene, scene.store)
    assert not [path for path in strays if path in scene.store.objects]
    entries = len([path for path in scene.store.objects if "/journal/" in path])
    collects()(scene, scene.store)
    assert len([path for path in scene.store.objects if "/journal/" in path]) == entries, "no entry without a reason"
    assert look_for_garbage(scene.store, key, side_by_side=map) == Collected("s")


def test_pruning_keeps_the_newest_and_what_is_pinned_or_cloned() -> None:
    scene = ended_and_cloned(SOURCE, CLONE)
    member = scene.members["s"]
    assert len(member.trial.checkpoints) == 2
    prunes(scene, scene.store)
    assert [each.step for each in reopened(scene).trial.checkpoints] == [4]
    assert promises_broken(scene.store, scene.chronicle, scene.journals) == []

    scene = ended(SOURCE, CLONE)
    member = scene.members["s"]
    member.append([Pinned(trial="s", sequence=member.trial.checkpoints[0].sequence)])
    prunes(scene, scene.store)
    assert [each.step for each in reopened(scene).trial.checkpoints] == [2, 3]


def test_a_trial_that_goes_on_is_not_pruned() -> None:
    scene = ended(SOURCE, CLONE)
    scene.members["s"].append([Requeued(trial="s", reason="more")])
    assert prune(scene.store, scene.members["s"].key, KEEPS, scene.chronicle.stamp(), side_by_side=map) == ()
    assert len(reopened(scene).trial.checkpoints) == 2


def test_what_was_put_aside_is_gone_on_from_by_nobody_and_its_bytes_stay() -> None:
    scene = training(SOURCE, CLONE)
    bad = newest(scene.members["s"])
    blobs = {path for path in scene.store.objects if path in read_manifest(scene.store, bad).blob_paths()}
    doubts(scene, scene.store)
    member = reopened(scene)
    assert member.trial.checkpoints == ()
    assert member.trial.lost_checkpoints == 1
    assert [each.reason for each in member.trial.quarantined_checkpoints] == ["doubted"]
    assert blobs <= set(scene.store.objects)
    assert reused_from(member.trial) > member.trial.collected_up_to


def test_a_new_checkpoint_retires_what_was_put_aside_before_it() -> None:
    scene = training(SOURCE, CLONE)
    bad = newest(scene.members["s"])
    doubts(scene, scene.store)
    member = reopened(scene)
    member.save_and_clear_all()
    assert member.trial.quarantined_checkpoints == ()
    assert scene.store.size(bad.manifest_path) is None


def test_a_checkpoint_that_a_rule_keeps_and_was_put_aside_by_mistake_can_be_reinstated_after_any_save() -> None:
    scene = training(SOURCE, CLONE)
    kept = newest(scene.members["s"])
    doubts(scene, scene.store)
    member = reopened(scene)
    member.retention = Retention(last=1, every=2)
    member.save_and_clear_all()
    for _ in range(2):
        member.save()
    member.clear_away()
    assert scene.store.size(kept.manifest_path)
    reinstate(scene.store, member.key, [kept], scene.chronicle.stamp(), side_by_side=map)
    assert kept.step in [each.step for each in reopened(scene).trial.checkpoints]
    assert promises_broken(scene.store, scene.chronicle, scene.journals) == []


def test_an_owner_that_has_restored_it_already_starts_from_what_a_guest_puts_aside() -> None:
    scene = training(SOURCE, CLONE)
    member = scene.members["s"]
    member.append([AttemptEnded(trial="s", cause=Cause.MACHINE, reason="x")])
    doubts(scene, scene.store)
    member.start()
    assert member.trial.step == 2
    member.save()
    assert [each.step for each in member.trial.checkpoints] == [3]


def test_of_what_is_aside_with_its_manifest_unreadable_all_that_it_may_name_stays() -> None:
    scene = training(SOURCE, CLONE)
    member = scene.members["s"]
    bad = newest(member)
    was = scene.store.objects[bad.manifest_path]
    named = read_manifest(scene.store, bad).blob_paths()
    scene.store.objects[bad.manifest_path] = b"torn"
    doubts(scene, scene.store)
    reopened(scene).append([Finished(trial="s", reason="enough")])
    collects()(scene, scene.store)
    assert named <= set(scene.store.objects)
    scene.store.objects[bad.manifest_path] = was
    reinstate(scene.store, member.key, [bad], scene.chronicle.stamp(), side_by_side=map)
    assert newest(reopened(scene)) == bad
    assert promises_broken(scene.store, scene.chronicle, scene.journals) == []


def test_what_is_aside_is_not_deleted_whoever_asks() -> None:
    scene = training(SOURCE, CLONE)
    bad = newest(scene.members["s"])
    doubts(scene, scene.store)
    member = reopened(scene)
    member.append([Retired(trial="s", retires=())])
    before = dict(scene.store.objects)
    assert checkpoint_gc.collect(scene.store, member.key, member.trial, [bad], side_by_side=map) == 0
    assert checkpoint_gc.orphans(scene.store, member.key, member.trial, side_by_side=map) == []
    assert scene.store.objects == before


def test_a_save_that_is_under_way_keeps_what_it_reuses_of_a_checkpoint_that_is_put_aside() -> None:
    scene = training(SOURCE, CLONE)
    member = scene.members["s"]
    new = CheckpointKey(trial=member.key, step=3, sequence=member.experiment.number)
    files = {"backbone": BACKBONE, "head": b"new"}
    member._commit(new, files, member._about(3))
    doubts(scene, scene.store)
    assert newest(reopened(scene)) == new  # its owner died before it could repeat the save
    assert restored(scene.store, read_manifest(scene.store, new)) == files


def test_the_suite_notices_when_what_is_aside_is_taken_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    break_lines(
        monkeypatch,
        checkpoint_gc._quarantined_blobs,
        {"return read_manifest(store, trial.checkpoint_key(ref)).blob_paths()": "return frozenset()"},
    )
    with pytest.raises(CheckpointCorrupt):
        test_a_save_that_is_under_way_keeps_what_it_reuses_of_a_checkpoint_that_is_put_aside()


def test_the_suite_notices_when_an_owner_may_not_start_from_what_is_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    break_lines(monkeypatch, trial_transitions._started, {"(*trial.checkpoints, *unknown)": "trial.checkpoints"})
    with pytest.raises(JournalCorrupt, match="cannot start"):
        test_an_owner_that_has_restored_it_already_starts_from_what_a_guest_puts_aside()


def test_of_a_trial_that_is_not_there_nothing_is_put_aside_reinstated_or_collected() -> None:
    scene = training(SOURCE, CLONE)
    absent = TrialKey(experiment="nobodys", generation=1, trial="t")
    key, stamp = CheckpointKey(trial=absent, step=1, sequence=1), scene.chronicle.stamp()
    before = dict(scene.store.objects)
    assert quarantine(scene.store, absent, {key: "damaged"}, stamp, side_by_side=map) == []
    assert reinstate(scene.store, absent, [key], stamp, side_by_side=map) == []
    assert look_for_garbage(scene.store, absent, side_by_side=map) == Collected("t")
    assert collect_from(scene.store, absent, stamp, side_by_side=map) == Collected("t")
    assert scene.store.objects == before


def test_with_a_live_manifest_unreadable_nothing_is_deleted_and_it_is_said_why() -> None:
    scene = training(SOURCE, CLONE)
    member = scene.members["s"]
    scene.store.objects[newest(member).manifest_path] = b"torn"
    before = dict(scene.store.objects)
    assert look_for_garbage(scene.store, member.key, side_by_side=map).damage is not None
    assert collect_from(scene.store, member.key, scene.chronicle.stamp(), side_by_side=map).damage is not None
    assert scene.store.objects == before


def answered(scene: Scene, *attempts: int) -> None:
    """Write two answers for each attempt of the source, and two foreign files beside them."""
    key = scene.members["s"].key
    for attempt in attempts:
        for step in (0, 3):
            answer(scene.store, key, attempt, step, Proceed(milestone=4))
    scene.store.objects[f"{key.answers}/README"] = b"foreign"
    scene.store.objects[f"{key.answers}/1-3.json"] = b"foreign, too"


def answers_left(scene: Scene) -> list[int]:
    key = scene.members["s"].key
    return [n for n in range(1, 5) for step in (0, 3) if key.answer_path(n, step) in scene.store.objects]


def test_what_attempts_that_are_over_were_told_goes_and_what_the_present_one_is_told_stays() -> None:
    scene = training(SOURCE, CLONE)
    member = scene.members["s"]
    collects()(scene, scene.store)
    takes_over("s")(scene, scene.store)
    reopened(scene).start()
    assert member.trial.attempt == 2
    answered(scene, 1, 2, 3)
    before = dict(scene.store.objects)
    assert look_for_garbage(scene.store, member.key, side_by_side=map) == Collected("s", answer_count=2)
    assert scene.store.objects == before
    stamp = scene.chronicle.stamp()
    assert collect_from(scene.store, member.key, stamp, side_by_side=map) == Collected("s", answer_count=2)
    assert answers_left(scene) == [2, 2, 3, 3]
    assert len(before) - len(scene.store.objects) == 2, "foreign files stay"


@pytest.mark.parametrize("over", [ended, given_up], ids=["in its own journal", "in the experiment's alone"])
def test_of_a_trial_that_has_ended_all_that_its_attempts_were_told_goes(over: Before) -> None:
    scene = over(SOURCE, CLONE)
    member = scene.members["s"]
    answered(scene, *range(1, member.trial.attempt + 2))
    known = given_up_only_there(scene)
    found = collect_from(scene.store, member.key, scene.chronicle.stamp(), side_by_side=map, known=known)
    assert found.answer_count == 2 * member.trial.attempt
    assert set(answers_left(scene)) == {member.trial.attempt + 1}
