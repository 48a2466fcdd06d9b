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
from prefect_tune.core.messages.target_messages import write_answer
from prefect_tune.core.operations import trial_gc
from prefect_tune.core.operations.scrub import quarantine_in_journal, reinstate_in_journal
from prefect_tune.core.operations.trial_gc import (
    TrialGarbage,
    collect_experiment_garbage,
    plan_retirements,
    retire_unkept_checkpoints,
)
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import ListedObject, ObjectStore
from prefect_tune.core.values import WriteStamp
from tests.core.driver import BACKBONE, retry
from tests.core.protocol.exploring import delay_writes, die_everywhere, run_all_orders, run_crashing, run_random
from tests.core.protocol.meetings import (
    Act,
    Scene,
    clone_act,
    clone_scene,
    owner_act,
    plain_scene,
    receive_act,
    remote_clone_scene,
    remote_save_act,
    resume,
    save_act,
    stale_clone_scene,
    takeover_act,
)
from tests.core.protocol.mutate import break_lines
from tests.core.protocol.population import SEARCH, Search, find_broken_promises
from tests.fakes.stores.memory_files import load_files
from tests.fakes.stores.memory_store import MemoryStore
from tests.long_cases import deep_count

pytestmark = pytest.mark.usefixtures("tiny_blobs", "decode_cache")

Record = Callable[[str, object], None]
Before = Callable[[], Scene]

KEEP_ONE = Retention(last=1)


def reopen(scene: Scene) -> Search:
    """Acquire the experiment again; return its owner."""
    scene.search.open()
    return scene.search


def newest_key(scene: Scene, name: str = "s") -> CheckpointKey:
    return scene.search.key(name).checkpoint_key(scene.search.trial(name).checkpoints[-1])


# -------------------------------------------------------------------------------------------- operations


def collect_garbage(store: ObjectStore, stamp: WriteStamp, *, deletes: bool) -> Sequence[TrialGarbage]:
    """Return the garbage of each trial; delete it, or write nothing."""
    return collect_experiment_garbage(store, load_experiment(store, SEARCH), stamp, dry_run=not deletes).trials


def inspect_garbage(scene: Scene) -> Sequence[TrialGarbage]:
    return collect_garbage(scene.store, scene.chronicle.stamp(), deletes=False)


def collect_all(scene: Scene) -> None:
    """Delete the garbage of all trials."""
    stamp = scene.chronicle.stamp()
    retry(lambda: collect_garbage(scene.store, stamp, deletes=True))


def prune(scene: Scene) -> None:
    """Retire the checkpoints that a policy does not keep, and delete them."""
    stamp = scene.chronicle.stamp()
    retry(lambda: retire_unkept_checkpoints(scene.store, SEARCH, KEEP_ONE, stamp))
    collect_all(scene)


def quarantine_newest(scene: Scene) -> None:
    """Quarantine a checkpoint, and delete the garbage."""
    reasons, stamp = {newest_key(scene): "doubted"}, scene.chronicle.stamp()
    retry(lambda: quarantine_in_journal(scene.store, SEARCH, reasons, stamp))
    collect_all(scene)


def reinstate_newest(scene: Scene) -> None:
    """Do the same; then reinstate the checkpoint, which is undamaged."""
    quarantine_newest(scene)
    stamp = scene.chronicle.stamp()
    retry(lambda: reinstate_in_journal(scene.store, SEARCH, [newest_key(scene)], stamp))


def requeue(search: Search) -> None:
    """Continue the ended trial."""
    search.append(TrialRequeued(trial="s", reason="more"))
    search.start("s")
    search.save("s")


# ------------------------------------------------------------------------------------------------- scenes


def final_scene() -> Scene:
    """All trials have ended: s has two checkpoints, a retired one, and the leftovers of a killed save."""
    return _end_trials(plain_scene())


def final_clone_scene() -> Scene:
    """Return the same, with a clone of what s has retired."""
    return _end_trials(clone_scene())


def _end_trials(scene: Scene) -> Scene:
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
    "garbage of one that trains": (plain_scene, collect_all),
    "garbage of one that has ended": (final_scene, collect_all),
    "garbage that a clone needs": (clone_scene, collect_all),
    "a clone that is over": (stale_clone_scene, collect_all),
    "garbage of one that trains elsewhere": (remote_clone_scene, collect_all),
    "those that have ended are pruned": (final_scene, prune),
    "one that was cloned is pruned": (final_clone_scene, prune),
    "a checkpoint is put aside": (plain_scene, quarantine_newest),
    "one that trains elsewhere is put aside": (remote_clone_scene, quarantine_newest),
    "a checkpoint is reinstated": (plain_scene, reinstate_newest),
}
MEETINGS: Mapping[str, tuple[Before, Sequence[Act]]] = {
    "collects while it saves": (plain_scene, [collect_all, save_act("s", 2)]),
    "collects while it is cloned": (plain_scene, [collect_all, clone_act("c")]),
    "collects while it is taken over": (clone_scene, [collect_all, takeover_act(resume("s"))]),
    "collects while another collects": (final_scene, [collect_all, collect_all]),
    "collects while it saves elsewhere": (remote_clone_scene, [collect_all, remote_save_act(times=2)]),
    "collects while its posts are received": (remote_clone_scene, [collect_all, receive_act("s"), remote_save_act()]),
    "prunes while it continues": (final_scene, [prune, owner_act(requeue)]),
    "prunes while it is resumed": (final_scene, [prune, takeover_act(requeue)]),
    "puts aside while it saves": (plain_scene, [quarantine_newest, save_act("s", 2)]),
    "puts aside while it saves elsewhere": (
        remote_clone_scene,
        [quarantine_newest, remote_save_act(times=2), receive_act("s")],
    ),
    "puts aside while it is taken over": (plain_scene, [quarantine_newest, takeover_act(resume("s")), save_act("s")]),
    "reinstates while it saves": (plain_scene, [reinstate_newest, save_act("s")]),
    "reinstates while another collects": (clone_scene, [reinstate_newest, collect_all]),
}


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_maintenance_and_owners_in_many_orders_and_dying_break_no_promise(
    meeting: str, record_property: Record
) -> None:
    before, acts = MEETINGS[meeting]
    scene = before()
    explored = run_random(scene, acts, range(1000, 1000 + deep_count(400)))
    points = at_writes
    if len(acts) == 3:  # three processes have too many orders of all their writes, with a new owner of all commits too
        points = at_entries_and_deletions if meeting == "puts aside while it is taken over" else at_commits
    for exploration in (
        run_crashing(scene, acts, range(deep_count(300))),
        run_all_orders(scene, acts, points, limit=20_000),
    ):
        explored.add(exploration)
    explored.require_kept(record_property, "orders of maintenance and owners")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("story", STORIES)
def test_maintenance_failing_in_every_way_or_late_breaks_no_promise(story: str, record_property: Record) -> None:
    before, act = STORIES[story]
    scene = before()
    explored = die_everywhere(scene, act)
    explored.add(delay_writes(scene, act, [None, 0, 2, 10]))
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
    for scene in (plain_scene(), final_scene()):
        before = dict(scene.store.objects)
        expected = inspect_garbage(scene)
        assert expected[0].checkpoints
        assert expected[0].orphan_bytes > 0
        assert scene.store.objects == before
        assert collect_garbage(scene.store, scene.chronicle.stamp(), deletes=True) == expected
        assert inspect_garbage(scene) == [TrialGarbage("s"), TrialGarbage("c"), TrialGarbage("d")]


def test_what_a_save_that_died_left_goes_once_its_trial_has_ended_and_not_before() -> None:
    scene = final_scene()
    strays = [path for path in scene.store.objects if "0000000009-" in path]
    assert strays
    collect_all(scene)
    assert not [path for path in strays if path in scene.store.objects]
    entries = len([path for path in scene.store.objects if "/journal/" in path])
    collect_all(scene)
    assert len([path for path in scene.store.objects if "/journal/" in path]) == entries, "no entry without a reason"


def test_an_ended_trial_is_listed_once() -> None:
    class Listing(MemoryStore):
        def list(self, prefix: str, *, after: str = "") -> Sequence[ListedObject]:
            folders.append(prefix)
            return super().list(prefix, after=after)

    scene, folders = final_scene(), list[str]()
    assert collect_garbage(Listing(scene.store.objects), scene.chronicle.stamp(), deletes=True)[0].orphan_count
    key = scene.search.key("s")
    assert [folders.count(folder) for folder in (key.checkpoints_folder, key.blobs_folder)] == [1, 1]


def test_one_entry_has_the_limits_of_all_trials() -> None:
    scene = plain_scene()
    for name in ("s", "c"):
        if name == "c":
            scene.search.start(name)
        attempt = scene.search.attempts[name]
        attempt.trial = scene.search.trial(name)
        stray = CheckpointKey(trial=scene.search.key(name), step=9, sequence=attempt.trial.next_sequence)
        attempt.upload(stray, {"head": b"nobodys"})
        scene.search.append(TrialFinished(trial=name, reason="enough"))
    number = scene.search.state.entry_count
    collect_all(scene)
    state = load_experiment(scene.store, SEARCH)
    assert state.entry_count == number + 1
    assert [trial.collected_up_to for trial in state.trials.values()] == [
        scene.search.trial("s").next_sequence + 1,
        scene.search.trial("c").next_sequence + 1,
        0,
    ]


def test_pruning_keeps_the_newest_and_bytes_that_a_clone_has() -> None:
    scene = final_clone_scene()
    assert len(scene.search.trial("s").checkpoints) == 2
    prune(scene)
    assert [ref.step for ref in reopen(scene).trial("s").checkpoints] == [4]
    assert find_broken_promises(scene.store, scene.chronicle) == []

    scene = final_scene()
    prune(scene)
    assert [ref.step for ref in reopen(scene).trial("s").checkpoints] == [3]


def test_nothing_is_pruned_while_a_trial_continues_here_or_elsewhere() -> None:
    scene = final_scene()
    search = scene.search
    assert [retirement.trial for retirement in plan_retirements(search.state, KEEP_ONE)] == ["s"]
    search.append(TrialRequeued(trial="d", reason="more"))
    before = dict(scene.store.objects)
    assert retire_unkept_checkpoints(scene.store, SEARCH, KEEP_ONE, scene.chronicle.stamp()) == ()
    search.launch("d").post(TrialFinished(trial="d", reason="enough"))
    search.receive("d")
    assert plan_retirements(search.state, KEEP_ONE) == (), "its outbox is open"
    search.receive("d", closes=True)
    assert len(plan_retirements(search.state, KEEP_ONE)) == 1
    assert before.items() <= scene.store.objects.items()


def test_the_suite_notices_when_a_trial_with_an_open_outbox_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    break_lines(monkeypatch, trial_gc.may_still_save, {" or trial.outbox is not None": ""})
    with pytest.raises(AssertionError, match="its outbox is open"):
        test_nothing_is_pruned_while_a_trial_continues_here_or_elsewhere()


def test_the_best_trial_and_the_best_checkpoint_are_not_pruned() -> None:
    state = final_scene().search.state
    compared = state.model_copy(update={"settings": {"metric": "step", "mode": "max"}})
    assert plan_retirements(compared, KEEP_ONE) == []
    metrics = ({"loss": 1.0}, {"loss": 2.0})
    refs = [
        ref.model_copy(update={"metrics": values})
        for ref, values in zip(state.trial("s").checkpoints, metrics, strict=True)
    ]
    trials = state.trials.with_trial(state.trial("s").model_copy(update={"checkpoints": tuple(refs)}))
    compared = state.model_copy(update={"settings": {"metric": "loss"}, "trials": trials})
    assert plan_retirements(compared, KEEP_ONE) == []


def test_what_was_put_aside_is_gone_on_from_by_nobody_and_its_bytes_stay() -> None:
    scene = plain_scene()
    bad = newest_key(scene)
    blobs = {path for path in scene.store.objects if path in read_manifest(scene.store, bad).blob_paths()}
    quarantine_newest(scene)
    trial = reopen(scene).trial("s")
    assert trial.checkpoints == ()
    assert trial.lost_checkpoint_count == 1
    assert [quarantined.reason for quarantined in trial.quarantined_checkpoints] == ["doubted"]
    assert blobs <= set(scene.store.objects)
    assert min_reusable_sequence(trial) > trial.collected_up_to


def test_a_new_checkpoint_retires_what_was_put_aside_before_it() -> None:
    scene = plain_scene()
    bad = newest_key(scene)
    quarantine_newest(scene)
    search = reopen(scene)
    search.start("s")
    search.save("s")
    assert search.trial("s").quarantined_checkpoints == ()
    assert scene.store.size(bad.manifest_path) is None


def test_a_checkpoint_that_a_rule_keeps_and_was_put_aside_by_mistake_can_be_reinstated_after_any_save() -> None:
    scene = plain_scene()
    kept = newest_key(scene)
    quarantine_newest(scene)
    search = reopen(scene)
    search.retention = Retention(last=1, every=2)
    search.start("s")
    for _ in range(3):
        search.save("s")
    search.delete_leftovers()
    assert scene.store.size(kept.manifest_path)
    reinstate_in_journal(scene.store, SEARCH, [kept], scene.chronicle.stamp())
    assert kept.step in [ref.step for ref in reopen(scene).trial("s").checkpoints]
    assert find_broken_promises(scene.store, scene.chronicle) == []


def test_an_owner_that_has_restored_it_already_starts_from_what_a_guest_puts_aside() -> None:
    scene = plain_scene()
    search = scene.search
    search.append(AttemptEnded(trial="s", cause=Cause.MACHINE, reason="x"))
    quarantine_newest(scene)
    search.start("s")
    assert search.trial("s").step == 2
    search.save("s")
    assert [ref.step for ref in search.trial("s").checkpoints] == [3]


def test_of_what_is_aside_with_its_manifest_unreadable_all_that_it_may_name_stays() -> None:
    scene = plain_scene()
    bad = newest_key(scene)
    original = scene.store.objects[bad.manifest_path]
    named = read_manifest(scene.store, bad).blob_paths()
    scene.store.objects[bad.manifest_path] = b"torn"
    quarantine_newest(scene)
    reopen(scene).append(TrialFinished(trial="s", reason="enough"))
    collect_all(scene)
    assert named <= set(scene.store.objects)
    scene.store.objects[bad.manifest_path] = original
    reinstate_in_journal(scene.store, SEARCH, [bad], scene.chronicle.stamp())
    reopen(scene)
    assert newest_key(scene) == bad
    assert find_broken_promises(scene.store, scene.chronicle) == []


def test_what_is_aside_is_not_deleted_whoever_asks() -> None:
    scene = plain_scene()
    bad = newest_key(scene)
    quarantine_newest(scene)
    search = reopen(scene)
    search.append(CheckpointsRetired(trial="s", retired_sequences=()))
    before = dict(scene.store.objects)
    key, trial = search.key("s"), search.trial("s")
    assert trial_gc.delete_retired_objects(scene.store, key, trial, [bad]) == 0
    assert trial_gc.find_orphan_blobs(scene.store, key, trial) == []
    assert scene.store.objects == before


def test_a_save_that_is_under_way_keeps_what_it_reuses_of_a_checkpoint_that_is_put_aside() -> None:
    scene = plain_scene()
    attempt = scene.search.attempts["s"]
    attempt.trial = scene.search.trial("s")
    new = CheckpointKey(trial=attempt.key, step=3, sequence=attempt.trial.next_sequence)
    files = {"backbone": BACKBONE, "head": b"new"}
    attempt.upload(new, files)
    quarantine_newest(scene)
    reopen(scene)
    assert newest_key(scene) == new  # its owner died before it could repeat the save
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
    scene = plain_scene()
    absent = JournalKey(experiment="nobodys", generation=1)
    key, stamp = CheckpointKey(trial=absent.trial_key("t"), step=1, sequence=1), scene.chronicle.stamp()
    before = dict(scene.store.objects)
    assert quarantine_in_journal(scene.store, absent, {key: "damaged"}, stamp) == []
    assert reinstate_in_journal(scene.store, absent, [key], stamp) == []
    assert retire_unkept_checkpoints(scene.store, absent, KEEP_ONE, stamp) == []
    assert scene.store.objects == before


def test_with_a_live_manifest_unreadable_nothing_is_deleted_and_it_is_said_why() -> None:
    scene = plain_scene()
    scene.store.objects[newest_key(scene).manifest_path] = b"torn"
    before = dict(scene.store.objects)
    assert inspect_garbage(scene)[0].damage is not None
    assert collect_garbage(scene.store, scene.chronicle.stamp(), deletes=True)[0].damage is not None
    assert scene.store.objects == before


# -------------------------------------------------------------------------------- messages of other machines


def write_answers(scene: Scene, *attempts: int) -> None:
    """Write two answers for each attempt of the source, and two foreign files beside them."""
    key = scene.search.key("s")
    for attempt in attempts:
        for step in (0, 3):
            write_answer(scene.store, key, attempt, step, ContinueTraining(milestone=4))
    scene.store.objects[f"{key.answers_folder}/README"] = b"foreign"
    scene.store.objects[f"{key.answers_folder}/1-3.json"] = b"foreign, too"


def list_answered_attempts(scene: Scene) -> list[int]:
    key = scene.search.key("s")
    return [n for n in range(1, 5) for step in (0, 3) if key.answer_path(n, step) in scene.store.objects]


def test_what_attempts_that_are_over_were_told_goes_and_what_the_present_one_is_told_stays() -> None:
    scene = plain_scene()
    collect_all(scene)
    reopen(scene).start("s")
    assert scene.search.trial("s").attempt == 2
    write_answers(scene, 1, 2, 3)
    before = dict(scene.store.objects)
    assert inspect_garbage(scene)[0] == TrialGarbage("s", message_count=2)
    assert scene.store.objects == before
    collect_all(scene)
    assert list_answered_attempts(scene) == [2, 2, 3, 3]
    assert len(before) - len(scene.store.objects) == 2, "foreign files stay"


def test_of_a_trial_that_has_ended_all_that_its_attempts_were_told_goes() -> None:
    scene = final_scene()
    write_answers(scene, 1, 2)
    assert collect_garbage(scene.store, scene.chronicle.stamp(), deletes=True)[0].message_count == 2
    assert set(list_answered_attempts(scene)) == {2}


def test_posts_that_were_received_go_but_for_the_first_and_the_end() -> None:
    scene = remote_clone_scene()
    search, key = scene.search, scene.search.key("s")
    posts = {path: scene.store.objects[path] for path in scene.store.objects if "/outbox/" in path}
    assert inspect_garbage(scene)[0].message_count == 0
    search.fence_off("s")
    scene.store.objects.update(posts)  # the owner died before it deleted them
    foreign = f"{key.outboxes_folder}/0000000001/README"
    scene.store.objects[foreign] = b""
    attempt = search.launch("s")
    attempt.post_start()
    attempt.post_save()
    assert inspect_garbage(scene)[0].message_count == 2
    collect_all(scene)
    remaining = [path for path in scene.store.objects if "/outbox/" in path]
    last = max(int(path[-15:-5]) for path in posts) + 1
    assert sorted(remaining) == sorted(
        [key.post_path(1, 1), key.post_path(1, last), foreign, key.post_path(2, 1), key.post_path(2, 2)]
    )
