"""Maintenance of trials while their owners run: crashes, late writes, concurrent operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from prefect_tune.core.errors import CheckpointCorrupt, JournalCorrupt
from prefect_tune.core.experiment import trial_transitions
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import min_reusable_sequence
from prefect_tune.core.journal.journal import load_experiment
from prefect_tune.core.journal_events import AttemptEnded, Cause, CheckpointsRetired, TrialFinished, TrialRequeued
from prefect_tune.core.messages.process_messages import ContinueTraining
from prefect_tune.core.messages.target_messages import send_answer
from prefect_tune.core.operations import trial_gc
from prefect_tune.core.operations.scrub import quarantine, reinstate
from prefect_tune.core.operations.trial_gc import (
    TrialGarbage,
    collect_experiment_garbage,
    plan_pruning,
    retire_unkept_checkpoints,
)
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import ListedObject, ObjectStore
from prefect_tune.core.values import WriteStamp
from tests.core.driver import BACKBONE, retried
from tests.core.protocol.exploring import die_everywhere, late_writes, meet_at_random, meet_dying, meet_in_every_order
from tests.core.protocol.meetings import (
    Act,
    Scene,
    clones,
    elsewhere_with_a_clone,
    owner_does,
    receives,
    resume,
    saves,
    saves_there,
    takes_over,
    with_a_clone,
    with_a_clone_that_is_over,
    without_a_clone,
)
from tests.core.protocol.mutate import break_lines
from tests.core.protocol.population import SEARCH, Search, promises_broken
from tests.fakes.stores.memory_files import load_files
from tests.fakes.stores.memory_store import MemoryStore
from tests.long_cases import deep_count

pytestmark = pytest.mark.usefixtures("tiny_blobs", "decoded_once")

Record = Callable[[str, object], None]
Before = Callable[[], Scene]

KEEPS = Retention(last=1)


def reopened(scene: Scene) -> Search:
    """Open the journal again; return its owner."""
    scene.search.open()
    return scene.search


def newest(scene: Scene, name: str = "s") -> CheckpointKey:
    return scene.search.key(name).checkpoint_key(scene.search.trial(name).checkpoints[-1])


# -------------------------------------------------------------------------------------------- operations


def garbage(store: ObjectStore, stamp: WriteStamp, *, deletes: bool) -> Sequence[TrialGarbage]:
    """Return the garbage of each trial; delete it, or write nothing."""
    state = load_experiment(store, SEARCH)
    return collect_experiment_garbage(store, state, stamp, dry_run=not deletes).trials


def looked(scene: Scene) -> Sequence[TrialGarbage]:
    return garbage(scene.store, scene.chronicle.stamp(), deletes=False)


def collects(scene: Scene) -> None:
    """Maintenance deletes the garbage of all trials."""
    stamp = scene.chronicle.stamp()
    retried(lambda: garbage(scene.store, stamp, deletes=True))


def prunes(scene: Scene) -> None:
    """Maintenance retires the checkpoints that a policy does not keep, and deletes them."""
    stamp = scene.chronicle.stamp()
    retried(lambda: retire_unkept_checkpoints(scene.store, SEARCH, KEEPS, stamp))
    collects(scene)


def doubts(scene: Scene) -> None:
    """Maintenance quarantines a checkpoint that it found damaged, and deletes garbage."""
    bad, stamp = {newest(scene): "doubted"}, scene.chronicle.stamp()
    retried(lambda: quarantine(scene.store, SEARCH, bad, stamp))
    collects(scene)


def doubts_and_trusts(scene: Scene) -> None:
    """The same; then the checkpoint is found undamaged and reinstated."""
    doubts(scene)
    stamp = scene.chronicle.stamp()
    retried(lambda: reinstate(scene.store, SEARCH, [newest(scene)], stamp))


def requeue(search: Search) -> None:
    """The ended trial continues."""
    search.append(TrialRequeued(trial="s", reason="more"))
    search.start("s")
    search.save("s")


# ------------------------------------------------------------------------------------------------- scenes


training = without_a_clone
"""A running trial; what it last retired is not deleted."""


def ended() -> Scene:
    """Trial s has ended with two checkpoints, a retired one, and the leftovers of a save that died; so have others."""
    return _end(without_a_clone())


def ended_and_cloned() -> Scene:
    """The same, and what s has retired was cloned."""
    return _end(with_a_clone())


def _end(scene: Scene) -> Scene:
    search = scene.search
    attempt = search.attempts["s"]
    attempt.retention = Retention()
    search.save("s")
    stray = CheckpointKey(trial=search.key("s"), step=9, sequence=search.trial("s").next_sequence)
    files = {"head": b"nobodys", "backbone": b"of its own, and of nobody else"}
    attempt.trial = search.trial("s")
    attempt.upload(stray, files)
    search.append(*(TrialFinished(trial=name, reason="enough") for name in ("s", "c", "d")))
    return scene


STORIES: Mapping[str, tuple[Before, Act]] = {
    "garbage of one that trains": (training, collects),
    "garbage of one that has ended": (ended, collects),
    "garbage that a clone needs": (with_a_clone, collects),
    "a clone that is over": (with_a_clone_that_is_over, collects),
    "garbage of one that trains elsewhere": (elsewhere_with_a_clone, collects),
    "those that have ended are pruned": (ended, prunes),
    "one that was cloned is pruned": (ended_and_cloned, prunes),
    "a checkpoint is put aside": (training, doubts),
    "one that trains elsewhere is put aside": (elsewhere_with_a_clone, doubts),
    "a checkpoint is reinstated": (training, doubts_and_trusts),
}
MEETINGS: Mapping[str, tuple[Before, Sequence[Act]]] = {
    "collects while it saves": (training, [collects, saves("s", 2)]),
    "collects while it is cloned": (training, [collects, clones("c")]),
    "collects while it is taken over": (with_a_clone, [collects, takes_over(resume("s"))]),
    "collects while another collects": (ended, [collects, collects]),
    "collects while it saves elsewhere": (elsewhere_with_a_clone, [collects, saves_there(times=2)]),
    "collects while its posts are received": (elsewhere_with_a_clone, [collects, receives("s"), saves_there()]),
    "prunes while it continues": (ended, [prunes, owner_does(requeue)]),
    "prunes while it is resumed": (ended, [prunes, takes_over(requeue)]),
    "puts aside while it saves": (training, [doubts, saves("s", 2)]),
    "puts aside while it saves elsewhere": (elsewhere_with_a_clone, [doubts, saves_there(times=2), receives("s")]),
    "puts aside while it is taken over": (training, [doubts, takes_over(resume("s")), saves("s")]),
    "reinstates while it saves": (training, [doubts_and_trusts, saves("s")]),
    "reinstates while another collects": (with_a_clone, [doubts_and_trusts, collects]),
}


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_maintenance_and_owners_in_many_orders_and_dying_break_no_promise(
    meeting: str, record_property: Record
) -> None:
    before, acts = MEETINGS[meeting]
    scene = before()
    explored = meet_at_random(scene, acts, range(1000, 1000 + deep_count(400)))
    points = at_writes
    if len(acts) == 3:  # three processes have too many orders of all their writes, with a new owner of all commits too
        points = at_entries_and_deletions if meeting == "puts aside while it is taken over" else at_commits
    for more in (
        meet_dying(scene, acts, range(deep_count(300))),
        meet_in_every_order(scene, acts, points, limit=20_000),
    ):
        explored.add(more)
    explored.require_kept(record_property, "orders of maintenance and owners")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("story", STORIES)
def test_maintenance_failing_in_every_way_or_late_breaks_no_promise(story: str, record_property: Record) -> None:
    before, act = STORIES[story]
    scene = before()
    explored = die_everywhere(scene, act)
    late = late_writes(scene, act, [None, 0, 2, 10])
    explored.add(late)
    explored.require_kept(record_property, "points explored, maintenance")


def at_writes(method: str, path: str) -> bool:
    del path
    return method in {"create", "delete"}


def at_entries_and_deletions(method: str, path: str) -> bool:
    return at_commits(method, path) and (method == "delete" or "/journal/" in path)


def at_commits(method: str, path: str) -> bool:
    return at_writes(method, path) and ("/journal/" in path or path.endswith("/manifest.json"))


# -------------------------------------------------------------------------------------------- outcomes


def test_what_a_look_finds_is_what_is_deleted_and_then_there_is_nothing_more() -> None:
    for scene in (training(), ended()):
        before = dict(scene.store.objects)
        seen = looked(scene)
        assert seen[0].checkpoints
        assert seen[0].orphan_bytes > 0
        assert scene.store.objects == before
        assert garbage(scene.store, scene.chronicle.stamp(), deletes=True) == seen
        assert looked(scene) == [TrialGarbage("s"), TrialGarbage("c"), TrialGarbage("d")]


def test_what_a_save_that_died_left_goes_once_its_trial_has_ended_and_not_before() -> None:
    scene = ended()
    strays = [path for path in scene.store.objects if "0000000009-" in path]
    assert strays
    collects(scene)
    assert not [path for path in strays if path in scene.store.objects]
    entries = len([path for path in scene.store.objects if "/journal/" in path])
    collects(scene)
    assert len([path for path in scene.store.objects if "/journal/" in path]) == entries, "no entry without a reason"


def test_an_ended_trial_is_listed_once() -> None:
    class Listing(MemoryStore):
        def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
            folders.append(prefix)
            return super().list(prefix, after=after)

    scene, folders = ended(), list[str]()
    assert garbage(Listing(scene.store.objects), scene.chronicle.stamp(), deletes=True)[0].orphan_count
    key = scene.search.key("s")
    assert [folders.count(folder) for folder in (key.checkpoints_folder, key.blobs_folder)] == [1, 1]


def test_one_entry_has_the_limits_of_all_trials() -> None:
    scene = without_a_clone()
    for name in ("s", "c"):
        if name == "c":
            scene.search.start(name)
        attempt = scene.search.attempts[name]
        attempt.trial = scene.search.trial(name)
        stray = CheckpointKey(trial=scene.search.key(name), step=9, sequence=attempt.trial.next_sequence)
        attempt.upload(stray, {"head": b"nobodys"})
        scene.search.append(TrialFinished(trial=name, reason="enough"))
    number = scene.search.state.entry_count
    collects(scene)
    state = load_experiment(scene.store, SEARCH)
    assert state.entry_count == number + 1
    assert [trial.collected_up_to for trial in state.trials.values()] == [
        scene.search.trial("s").next_sequence + 1,
        scene.search.trial("c").next_sequence + 1,
        0,
    ]


def test_pruning_keeps_the_newest_and_bytes_that_a_clone_has() -> None:
    scene = ended_and_cloned()
    assert len(scene.search.trial("s").checkpoints) == 2
    prunes(scene)
    assert [ref.step for ref in reopened(scene).trial("s").checkpoints] == [4]
    assert promises_broken(scene.store, scene.chronicle) == []

    scene = ended()
    prunes(scene)
    assert [ref.step for ref in reopened(scene).trial("s").checkpoints] == [3]


def test_nothing_is_pruned_while_a_trial_continues_here_or_elsewhere() -> None:
    scene = ended()
    search = scene.search
    assert [retirement.trial for retirement in plan_pruning(search.state, KEEPS)] == ["s"]
    search.append(TrialRequeued(trial="d", reason="more"))
    before = dict(scene.store.objects)
    assert retire_unkept_checkpoints(scene.store, SEARCH, KEEPS, scene.chronicle.stamp()) == ()
    search.launch("d").post(TrialFinished(trial="d", reason="enough"))
    search.receive("d")
    assert plan_pruning(search.state, KEEPS) == (), "its outbox is open"
    search.receive("d", closes=True)
    assert len(plan_pruning(search.state, KEEPS)) == 1
    assert before.items() <= scene.store.objects.items()


def test_the_suite_notices_when_a_trial_with_an_open_outbox_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    break_lines(monkeypatch, trial_gc.has_trial_ended, {" and trial.outbox is None": ""})
    with pytest.raises(AssertionError, match="its outbox is open"):
        test_nothing_is_pruned_while_a_trial_continues_here_or_elsewhere()


def test_the_best_trial_and_the_best_checkpoint_are_not_pruned() -> None:
    state = ended().search.state
    compared = state.model_copy(update={"settings": {"metric": "step", "mode": "max"}})
    assert plan_pruning(compared, KEEPS) == []
    metrics = ({"loss": 1.0}, {"loss": 2.0})
    refs = [
        ref.model_copy(update={"metrics": values})
        for ref, values in zip(state.trial("s").checkpoints, metrics, strict=True)
    ]
    trials = state.trials.with_trial(state.trial("s").model_copy(update={"checkpoints": tuple(refs)}))
    compared = state.model_copy(update={"settings": {"metric": "loss"}, "trials": trials})
    assert plan_pruning(compared, KEEPS) == []


def test_what_was_put_aside_is_gone_on_from_by_nobody_and_its_bytes_stay() -> None:
    scene = training()
    bad = newest(scene)
    blobs = {path for path in scene.store.objects if path in read_manifest(scene.store, bad).blob_paths()}
    doubts(scene)
    trial = reopened(scene).trial("s")
    assert trial.checkpoints == ()
    assert trial.lost_checkpoint_count == 1
    assert [each.reason for each in trial.quarantined_checkpoints] == ["doubted"]
    assert blobs <= set(scene.store.objects)
    assert min_reusable_sequence(trial) > trial.collected_up_to


def test_a_new_checkpoint_retires_what_was_put_aside_before_it() -> None:
    scene = training()
    bad = newest(scene)
    doubts(scene)
    search = reopened(scene)
    search.start("s")
    search.save("s")
    assert search.trial("s").quarantined_checkpoints == ()
    assert scene.store.size(bad.manifest_path) is None


def test_a_checkpoint_that_a_rule_keeps_and_was_put_aside_by_mistake_can_be_reinstated_after_any_save() -> None:
    scene = training()
    kept = newest(scene)
    doubts(scene)
    search = reopened(scene)
    search.retention = Retention(last=1, every=2)
    search.start("s")
    for _ in range(3):
        search.save("s")
    search.clear_away()
    assert scene.store.size(kept.manifest_path)
    reinstate(scene.store, SEARCH, [kept], scene.chronicle.stamp())
    assert kept.step in [ref.step for ref in reopened(scene).trial("s").checkpoints]
    assert promises_broken(scene.store, scene.chronicle) == []


def test_an_owner_that_has_restored_it_already_starts_from_what_a_guest_puts_aside() -> None:
    scene = training()
    search = scene.search
    search.append(AttemptEnded(trial="s", cause=Cause.MACHINE, reason="x"))
    doubts(scene)
    search.start("s")
    assert search.trial("s").step == 2
    search.save("s")
    assert [ref.step for ref in search.trial("s").checkpoints] == [3]


def test_of_what_is_aside_with_its_manifest_unreadable_all_that_it_may_name_stays() -> None:
    scene = training()
    bad = newest(scene)
    was = scene.store.objects[bad.manifest_path]
    named = read_manifest(scene.store, bad).blob_paths()
    scene.store.objects[bad.manifest_path] = b"torn"
    doubts(scene)
    reopened(scene).append(TrialFinished(trial="s", reason="enough"))
    collects(scene)
    assert named <= set(scene.store.objects)
    scene.store.objects[bad.manifest_path] = was
    reinstate(scene.store, SEARCH, [bad], scene.chronicle.stamp())
    reopened(scene)
    assert newest(scene) == bad
    assert promises_broken(scene.store, scene.chronicle) == []


def test_what_is_aside_is_not_deleted_whoever_asks() -> None:
    scene = training()
    bad = newest(scene)
    doubts(scene)
    search = reopened(scene)
    search.append(CheckpointsRetired(trial="s", retired_sequences=()))
    before = dict(scene.store.objects)
    key, trial = search.key("s"), search.trial("s")
    assert trial_gc.delete_retired_objects(scene.store, key, trial, [bad]) == 0
    assert trial_gc.find_orphan_blobs(scene.store, key, trial) == []
    assert scene.store.objects == before


def test_a_save_that_is_under_way_keeps_what_it_reuses_of_a_checkpoint_that_is_put_aside() -> None:
    scene = training()
    attempt = scene.search.attempts["s"]
    attempt.trial = scene.search.trial("s")
    new = CheckpointKey(trial=attempt.key, step=3, sequence=attempt.trial.next_sequence)
    files = {"backbone": BACKBONE, "head": b"new"}
    attempt.upload(new, files)
    doubts(scene)
    reopened(scene)
    assert newest(scene) == new  # its owner died before it could repeat the save
    assert load_files(scene.store, read_manifest(scene.store, new)) == files


def test_the_suite_notices_when_what_is_aside_is_taken_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    break_lines(
        monkeypatch,
        trial_gc._list_quarantined_blobs,
        {"return read_manifest(store, key).blob_paths()": "return frozenset()"},
    )
    with pytest.raises(CheckpointCorrupt):
        test_a_save_that_is_under_way_keeps_what_it_reuses_of_a_checkpoint_that_is_put_aside()


def test_the_suite_notices_when_an_owner_may_not_start_from_what_is_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    break_lines(
        monkeypatch, trial_transitions._apply_attempt_start, {"(*trial.checkpoints, *recent)": "trial.checkpoints"}
    )
    with pytest.raises(JournalCorrupt, match="cannot start"):
        test_an_owner_that_has_restored_it_already_starts_from_what_a_guest_puts_aside()


def test_of_an_experiment_that_is_not_there_nothing_is_put_aside_reinstated_or_pruned() -> None:
    scene = training()
    absent = JournalKey(experiment="nobodys", generation=1)
    key, stamp = CheckpointKey(trial=absent.trial_key("t"), step=1, sequence=1), scene.chronicle.stamp()
    before = dict(scene.store.objects)
    assert quarantine(scene.store, absent, {key: "damaged"}, stamp) == []
    assert reinstate(scene.store, absent, [key], stamp) == []
    assert retire_unkept_checkpoints(scene.store, absent, KEEPS, stamp) == []
    assert scene.store.objects == before


def test_with_a_live_manifest_unreadable_nothing_is_deleted_and_it_is_said_why() -> None:
    scene = training()
    scene.store.objects[newest(scene).manifest_path] = b"torn"
    before = dict(scene.store.objects)
    assert looked(scene)[0].damage is not None
    assert garbage(scene.store, scene.chronicle.stamp(), deletes=True)[0].damage is not None
    assert scene.store.objects == before


# -------------------------------------------------------------------------------- messages of other machines


def answered(scene: Scene, *attempts: int) -> None:
    """Write two answers for each attempt of the source, and two foreign files beside them."""
    key = scene.search.key("s")
    for attempt in attempts:
        for step in (0, 3):
            send_answer(scene.store, key, attempt, step, ContinueTraining(decision_step=4))
    scene.store.objects[f"{key.answers_folder}/README"] = b"foreign"
    scene.store.objects[f"{key.answers_folder}/1-3.json"] = b"foreign, too"


def answers_left(scene: Scene) -> list[int]:
    key = scene.search.key("s")
    return [n for n in range(1, 5) for step in (0, 3) if key.answer_path(n, step) in scene.store.objects]


def test_what_attempts_that_are_over_were_told_goes_and_what_the_present_one_is_told_stays() -> None:
    scene = training()
    collects(scene)
    reopened(scene).start("s")
    assert scene.search.trial("s").attempt == 2
    answered(scene, 1, 2, 3)
    before = dict(scene.store.objects)
    assert looked(scene)[0] == TrialGarbage("s", answer_count=2)
    assert scene.store.objects == before
    collects(scene)
    assert answers_left(scene) == [2, 2, 3, 3]
    assert len(before) - len(scene.store.objects) == 2, "foreign files stay"


def test_of_a_trial_that_has_ended_all_that_its_attempts_were_told_goes() -> None:
    scene = ended()
    answered(scene, 1, 2)
    assert garbage(scene.store, scene.chronicle.stamp(), deletes=True)[0].answer_count == 2
    assert set(answers_left(scene)) == {2}


def test_posts_that_were_received_go_but_for_the_first_and_the_end() -> None:
    scene = elsewhere_with_a_clone()
    search, key = scene.search, scene.search.key("s")
    posts = {path: scene.store.objects[path] for path in scene.store.objects if "/outbox/" in path}
    assert looked(scene)[0].answer_count == 0
    search.settle("s")
    scene.store.objects.update(posts)  # the owner died before it deleted them
    foreign = f"{key.outboxes_folder}/0000000001/README"
    scene.store.objects[foreign] = b""
    again = search.launch("s")
    again.begin_there()
    again.save_there()
    assert looked(scene)[0].answer_count == 2
    collects(scene)
    left = [path for path in scene.store.objects if "/outbox/" in path]
    last = max(int(path[-15:-5]) for path in posts) + 1
    assert sorted(left) == sorted(
        [key.post_path(1, 1), key.post_path(1, last), foreign, key.post_path(2, 1), key.post_path(2, 2)]
    )
