"""Clones and attempts on other machines: crashes, late writes, late deletions, concurrent owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest

from prefect_tune.core.errors import JournalCorrupt, Superseded
from prefect_tune.core.experiment import experiment, trial_transitions
from prefect_tune.core.journal import outbox
from prefect_tune.core.journal_events import CheckpointCloned, CheckpointOrigin, CheckpointRef, TrialFinished
from prefect_tune.core.operations import trial_gc
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey
from tests.core.protocol.exploring import delay_writes, die_everywhere, run_all_orders, run_crashing, run_random
from tests.core.protocol.meetings import (
    Act,
    Scene,
    clone_act,
    clone_scene,
    delete_retired_late,
    plain_scene,
    receive_act,
    remote_clone_scene,
    remote_save_act,
    remote_scene,
    resume,
    save_act,
    stale_clone_scene,
    takeover_act,
)
from tests.core.protocol.mutate import Mutant
from tests.core.protocol.population import Search, find_broken_promises
from tests.fakes.stores.dying_store import Failure
from tests.fakes.stores.memory_files import load_files
from tests.long_cases import deep_count

pytestmark = pytest.mark.usefixtures("tiny_blobs", "decode_cache")

Record = Callable[[str, object], None]
Before = Callable[[], Scene]


def newest_key(scene: Scene, name: str) -> CheckpointKey:
    search = scene.search
    return search.key(name).checkpoint_key(search.trial(name).checkpoints[-1])


def read_newest(scene: Scene, name: str) -> Mapping[str, bytes]:
    return load_files(scene.store, read_manifest(scene.store, newest_key(scene, name)))


# --------------------------------------------------------------------------------------------- one clone


def test_a_clone_is_one_entry_and_no_object() -> None:
    scene = plain_scene()
    before = dict(scene.store.objects)
    scene.search.clone("c", "s")
    (entry,) = set(scene.store.objects) - set(before)
    assert entry == scene.search.journal.entry_path(scene.search.state.entry_count)
    assert newest_key(scene, "c") == newest_key(scene, "s")


def test_what_its_source_retires_stays_as_long_as_the_clone_does() -> None:
    scene = clone_scene()
    search, origin, kept = scene.search, newest_key(scene, "c"), read_newest(scene, "c")
    search.delete_checkpoints(scene.to_delete)
    search.save("s")
    search.delete_leftovers()
    assert read_newest(scene, "c") == kept

    search.save("c")  # retires the clone
    assert scene.store.size(origin.manifest_path) is None
    assert search.trial("s").clones == ()


def test_a_clone_of_a_clone_is_held_where_the_bytes_are() -> None:
    scene = clone_scene()
    search = scene.search
    search.clone("d", "c")
    search.save("c")
    assert [clone.trial for clone in search.trial("s").clones] == ["d"]
    assert find_broken_promises(scene.store, scene.chronicle) == []
    search.start("d")
    search.save("d")
    assert search.trial("s").clones == ()


def test_a_trial_may_clone_back_what_it_has_retired_itself() -> None:
    scene = clone_scene()
    search, origin = scene.search, newest_key(scene, "c")
    search.end("s")
    search.clone("s", "c")
    assert newest_key(scene, "s") == origin
    search.delete_checkpoints(scene.to_delete)
    search.start("s")
    search.save("c")
    assert read_newest(scene, "s")
    search.save("s")
    assert scene.store.size(origin.manifest_path) is None


def test_what_is_no_checkpoint_any_more_cannot_be_cloned() -> None:
    scene = plain_scene()
    search, retired = scene.search, scene.search.trial("s").checkpoints[-1]
    search.save_only("s")
    origin = CheckpointOrigin(trial="s", step=retired.step, sequence=retired.sequence)
    copy = CheckpointRef(step=retired.step, sequence=search.trial("c").next_sequence, origin=origin)
    before = dict(scene.store.objects)
    with pytest.raises(JournalCorrupt, match="it is no longer a checkpoint"):
        search.append(CheckpointCloned(trial="c", checkpoint=copy, source="s"))
    assert scene.store.objects == before


def test_a_clone_trains_at_least_one_step() -> None:
    search = plain_scene().search
    (checkpoint,) = search.trial("s").checkpoints
    assert trial_transitions.find_clonable_checkpoint(search.trial("s"), checkpoint.step + 1) == checkpoint
    assert trial_transitions.find_clonable_checkpoint(search.trial("s"), checkpoint.step) is None
    assert trial_transitions.find_clonable_checkpoint(search.trial("c")) is None
    search.append(TrialFinished(trial="s", reason="enough"))
    assert trial_transitions.find_clonable_checkpoint(search.trial("s")) is None


# ------------------------------------------------------------------------------- attempts on other machines


def test_what_an_attempt_elsewhere_has_posted_is_found_by_the_next_owner() -> None:
    scene = remote_scene()
    new = Search(scene.store, scene.chronicle, owner="new")
    new.open()
    assert len(new.receive("s")) == 2
    assert [ref.step for ref in new.trial("s").checkpoints] == [3]
    assert new.trial("s").outbox is not None
    assert [path for path in scene.store.objects if "/outbox/" in path] == [new.key("s").post_path(1, 1)]


def test_a_closed_outbox_ends_its_attempt_and_takes_no_post_twice() -> None:
    scene = remote_scene()
    scene.search.receive("s", closes=True)
    assert scene.search.trial("s").outbox is None
    with pytest.raises(Superseded, match="first has ended this attempt"):
        scene.remote["s"].post_save()
    assert find_broken_promises(scene.store, scene.chronicle) == []


def test_a_second_process_with_the_same_request_finds_that_another_one_trains_it() -> None:
    scene = remote_scene()
    launched = scene.search.launch("c")
    twin = launched.with_store(scene.store, scene.chronicle)
    launched.post_start()
    with pytest.raises(Superseded, match="another process trains this attempt"):
        twin.post_start()


def test_an_outbox_is_used_once() -> None:
    scene = remote_scene()
    scene.search.fence_off("s")
    attempt = scene.search.launch("s")
    assert attempt.trial.outbox == 2
    attempt.post_start()
    attempt.post_save()
    scene.search.receive("s")
    assert scene.search.trial("s").checkpoints[-1].step == 4


# ------------------------------------------------------------------------------------------ crashes

STORIES: Mapping[str, tuple[Before, Act]] = {
    "a trial clones": (plain_scene, clone_act("c")),
    "a trial clones a clone": (clone_scene, clone_act("d", "c")),
    "a clone is trained on, and retired": (clone_scene, save_act("c")),
    "a clone is trained on for long": (clone_scene, save_act("c", 2)),
    "the source deletes what it retired": (plain_scene, delete_retired_late),
    "the source deletes what a clone needed": (stale_clone_scene, delete_retired_late),
    "the source continues": (clone_scene, save_act("s", 2)),
    "the search is resumed": (stale_clone_scene, takeover_act(resume("s"))),
    "an attempt elsewhere saves": (remote_scene, remote_save_act()),
    "its posts are received": (remote_clone_scene, receive_act("s")),
    "its outbox is closed": (remote_scene, receive_act("s", closes=True)),
    "the search is resumed, and goes on with it": (remote_clone_scene, takeover_act(lambda new: new.receive("s"))),
    "the search is resumed, and fences it off": (remote_clone_scene, takeover_act(resume("s"))),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "story", ["a trial clones", "the source deletes what a clone needed", "an attempt elsewhere saves"]
)
def test_with_each_write_late_or_lost_it_breaks_no_promise(story: str, record_property: Record) -> None:
    before, act = STORIES[story]
    delay_writes(before(), act, [None, 3]).require_kept(record_property, "points explored, clones and outboxes")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("story", STORIES)
def test_failing_at_every_operation_in_every_way_it_breaks_no_promise(story: str, record_property: Record) -> None:
    before, act = STORIES[story]
    explored = die_everywhere(before(), act)
    explored.add(delay_writes(before(), act, [None, 0, 1, 2, 5, 10, 20]))
    explored.require_kept(record_property, "points explored, clones and outboxes")


# ------------------------------------------------------------------------------------------- concurrency

MEETINGS: Mapping[str, tuple[Before, Sequence[Act]]] = {
    "a zombie clones": (plain_scene, [clone_act("c"), takeover_act(resume("s"))]),
    "a zombie saves the source": (clone_scene, [save_act("s"), takeover_act(resume("c"))]),
    "a zombie saves the clone": (clone_scene, [save_act("c"), takeover_act(resume("s"))]),
    "a zombie deletes late": (stale_clone_scene, [delete_retired_late, takeover_act(resume("c"))]),
    "two take over": (stale_clone_scene, [takeover_act(resume("s")), takeover_act(resume("c"))]),
    "posts while the owner receives": (remote_clone_scene, [remote_save_act(), receive_act("s")]),
    "posts while the owner closes": (remote_scene, [remote_save_act(), receive_act("s", closes=True)]),
    "posts while the owner clones": (remote_scene, [remote_save_act(), clone_act("d")]),
    "posts while another owner closes": (remote_scene, [remote_save_act(times=2), takeover_act(resume("s"))]),
    "two close while it posts": (
        remote_clone_scene,
        [remote_save_act(), receive_act("s", closes=True), takeover_act(resume("s"))],
    ),
    "two receive": (remote_clone_scene, [receive_act("s"), takeover_act(lambda new: new.receive("s"))]),
}


def at_creates_and_deletes(method: str, path: str) -> bool:
    """Switch at creations and deletions, and before the end of an outbox is looked for."""
    return method in {"create", "delete"} or (method == "read" and "/outbox/" in path)


def at_outbox_operations(_method: str, path: str) -> bool:
    """Switch at what is done with posts and ends of outboxes."""
    return "/outbox/" in path


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "meeting",
    [
        pytest.param("posts while the owner closes", marks=pytest.mark.long),
        pytest.param("a zombie deletes late", marks=pytest.mark.deep),
        pytest.param("posts while the owner receives", marks=pytest.mark.deep),
    ],
)
def test_in_every_order_of_their_writes_they_break_no_promise(meeting: str, record_property: Record) -> None:
    before, acts = MEETINGS[meeting]
    explored = run_all_orders(before(), acts, at_creates_and_deletes, limit=20_000)
    explored.require_kept(record_property, "orders of clones, posts and owners, every one")


def test_a_post_between_the_look_at_an_outbox_and_its_end_is_not_lost(record_property: Record) -> None:
    before, acts = MEETINGS["posts while the owner closes"]
    explored = run_all_orders(before(), acts, at_outbox_operations, limit=20_000)
    explored.require_kept(record_property, "orders of posts and the end of their outbox, every one")


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_in_many_orders_and_dying_they_break_no_promise(meeting: str, record_property: Record) -> None:
    before, acts = MEETINGS[meeting]
    explored = run_random(before(), acts, range(1000, 1000 + deep_count(500)))
    explored.add(run_crashing(before(), acts, range(deep_count(500))))
    explored.require_kept(record_property, "orders of clones, posts and owners, at random")


# --------------------------------------------------------------------------------------------- mutants


def interleave_meeting(meeting: str) -> Sequence[str]:
    before, acts = MEETINGS[meeting]
    return run_all_orders(before(), acts, at_creates_and_deletes, limit=20_000, enough=1).broken


def crash_story(story: str) -> Sequence[str]:
    before, act = STORIES[story]
    return die_everywhere(before(), act, [Failure.CRASH_BEFORE, Failure.REPLY_LOST], enough=1).broken


MUTANTS: Mapping[str, Mutant] = {
    "delete what clones need": Mutant(
        partial(crash_story, "the source continues"),
        {trial_transitions.is_deletable_checkpoint: {" or is_kept_by_clones(state, key)": ""}},
    ),
    "count nothing as needed by clones": Mutant(
        partial(crash_story, "the source continues"),
        {trial_gc._find_reachable_blobs: {"for clone in state.clones": "for clone in ()"}},
    ),
    "forget a clone while it lives": Mutant(
        partial(crash_story, "a trial clones"),
        {experiment._update_clone_lists: {"(*source.clones, clone)": "source.clones"}},
    ),
    "remember a clone for ever": Mutant(
        partial(crash_story, "a clone is trained on, and retired"),
        {experiment._update_clone_lists: {"for origin, clone in old - new:": "for origin, clone in ():"}},
    ),
    "delete posts before their entry": Mutant(
        partial(crash_story, "its posts are received"),
        {
            Search.receive: {
                "events: list[Event] = []": "events = []; "
                "delete_posts(self.store, [(key, outbox, n) for n in range(2, trial.last_post + len(posts) + 1)])"
            }
        },
    ),
    "close without a look": Mutant(
        partial(interleave_meeting, "posts while the owner closes"),
        {outbox.close_outbox: {"races += 1 ": "return ClosedOutbox(posts, damage) "}},
    ),
    "post over the end": Mutant(
        partial(interleave_meeting, "posts while the owner closes"),
        {outbox.write_post: {"create_idempotently(store, path, seal(post))": "store.put(path, seal(post))"}},
    ),
    "adopt a save that its outbox may still hand over": Mutant(
        partial(interleave_meeting, "posts while another owner closes"),
        {Search.fence_off: {"self.receive(name, closes=True)": "self.state.trial(name)"}},
    ),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(name: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    MUTANTS[name].require_noticed(monkeypatch, record_property)
