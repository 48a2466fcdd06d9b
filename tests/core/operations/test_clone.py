"""Clones, and the claims that keep their bytes: crashes, late writes, concurrent operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest

from prefect_tune.core.errors import AlreadyCommitted, CheckpointCorrupt, CheckpointNotFound
from prefect_tune.core.experiment import trial_transitions
from prefect_tune.core.journal import journal
from prefect_tune.core.operations import checkpoint_gc
from prefect_tune.core.operations import clone as cloning
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import JournalKey
from tests.core.protocol.meetings import (
    Act,
    Scene,
    clear_late,
    clone_of_the_clone,
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
from tests.core.protocol.mutate import Mutant
from tests.core.protocol.population import Member, newest, own, promises_broken
from tests.fakes.stores.dying_store import Way
from tests.fakes.stores.memory_files import restored

pytestmark = pytest.mark.usefixtures("tiny_blobs")

Record = Callable[[str, object], None]
Before = Callable[[JournalKey, JournalKey], Scene]

SOURCE, CLONE = own("e", "s"), own("e", "c")
ELSEWHERE = own("fork", "c")


def bytes_of(scene: Scene, member: Member) -> Mapping[str, bytes]:
    return restored(scene.store, read_manifest(scene.store, newest(member)))


# --------------------------------------------------------------------------------------------- one clone


@pytest.mark.parametrize("into", [CLONE, ELSEWHERE], ids=["same experiment", "another experiment"])
def test_a_clone_holds_what_its_source_held_and_copies_none_of_it(into: JournalKey) -> None:
    scene = without_a_clone(SOURCE, into)
    source, copy = scene.members["s"], scene.members["c"]
    blobs = [path for path in scene.store.objects if "/blobs/" in path]
    copy.clone(source.key)
    assert bytes_of(scene, copy) == bytes_of(scene, source)
    assert [path for path in scene.store.objects if "/blobs/" in path] == blobs


def test_cloning_twice_is_cloning_once() -> None:
    scene = without_a_clone(SOURCE, CLONE)
    found, copy = newest(scene.members["s"]), scene.members["c"]
    stamp = scene.chronicle.stamp()
    first = copy._clone(found, stamp)
    before = dict(scene.store.objects)
    assert copy._clone(found, stamp) == first
    assert scene.store.objects == before


def test_what_its_source_retires_stays_as_long_as_the_clone_does() -> None:
    scene = with_a_clone(SOURCE, CLONE)
    source, copy = scene.members["s"], scene.members["c"]
    kept = bytes_of(scene, copy)
    source.clear(scene.doomed)
    source.open()
    source.save_and_clear_all()
    assert bytes_of(scene, copy) == kept

    copy.save()  # retires the clone, and thereby releases the claim
    assert not [key for key in scene.doomed if scene.store.size(key.manifest_path)]
    source.open()
    assert source.trial.claims == ()


def test_a_clone_of_a_clone_is_held_where_the_bytes_are() -> None:
    scene = with_a_clone(SOURCE, CLONE)
    scene.members["d"].clone(scene.members["c"].key)
    scene.members["c"].save()
    scene.members["s"].open()
    assert [claim.clone.trial.trial for claim in scene.members["s"].trial.claims] == ["d"]
    assert promises_broken(scene.store, scene.chronicle, scene.journals) == []


def test_a_claim_whose_clone_was_never_journaled_ends_with_its_owner() -> None:
    scene = without_a_clone(SOURCE, CLONE)
    source, copy = scene.members["s"], scene.members["c"]
    copy._clone(newest(source), scene.chronicle.stamp())  # then the owner dies
    doomed = source.save_only()
    source.clear(doomed)
    assert scene.store.size(doomed[0].manifest_path), "its owner may still journal it"
    takes_over("c")(scene, scene.store)
    source.clear(doomed)
    assert scene.store.size(doomed[0].manifest_path) is None


def test_what_is_no_checkpoint_any_more_cannot_be_cloned() -> None:
    scene = without_a_clone(SOURCE, CLONE)
    source, copy = scene.members["s"], scene.members["c"]
    gone = newest(source)
    source.save_only()
    with pytest.raises(CheckpointNotFound, match="cannot be cloned"):
        copy._clone(gone, scene.chronicle.stamp())
    with pytest.raises(CheckpointNotFound, match="no checkpoint that could be cloned"):
        source.clone(copy.key)


def test_another_checkpoint_of_that_step_is_not_taken_for_the_clone() -> None:
    scene = without_a_clone(SOURCE, CLONE)
    copy = scene.members["c"]
    stamp = scene.chronicle.stamp()
    copy._clone(newest(scene.members["s"]), stamp)
    other = scene.join("o", own("e", "o"))
    other.start()
    other.save()
    other.save()
    with pytest.raises(AlreadyCommitted):
        copy._clone(newest(other), stamp)


def test_a_manifest_that_refers_to_bytes_of_another_trial_is_not_cloned(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = without_a_clone(SOURCE, CLONE)
    source = scene.members["s"]
    manifest = read_manifest(scene.store, newest(source))
    stray = [each.model_copy(update={"path": each.path.replace("trials/s/", "trials/x/")}) for each in manifest.blobs]
    stray_manifest = manifest.model_copy(update={"blobs": tuple(stray)})
    monkeypatch.setattr(cloning, "read_manifest", lambda _store, _key: stray_manifest)
    with pytest.raises(CheckpointCorrupt, match="bytes of another trial"):
        scene.members["c"]._clone(newest(source), scene.chronicle.stamp())


# ------------------------------------------------------------------------------------------ crashes

STORIES: Mapping[str, tuple[Before, Act]] = {
    "a trial clones": (without_a_clone, clones("c")),
    "a trial clones a clone": (with_a_clone, clone_of_the_clone),
    "a clone is trained on, and retired": (with_a_clone, saves("c")),
    "a clone is trained on for long": (with_a_clone, saves("c", 2)),
    "the source deletes what it retired": (without_a_clone, clear_late),
    "the source deletes what a clone needed": (with_a_clone_that_is_over, clear_late),
    "the source continues": (with_a_clone, saves("s", 2)),
    "the source is resumed": (with_a_clone, takes_over("s")),
    "the clone is resumed": (with_a_clone_that_is_over, takes_over("c")),
}
ESSENTIAL = [
    "a trial clones",
    "a clone is trained on, and retired",
    "the source deletes what a clone needed",
    "the clone is resumed",
]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("story", ESSENTIAL)
def test_killed_at_every_operation_it_breaks_no_promise(story: str, record_property: Record) -> None:
    before, act = STORIES[story]
    explored = die_everywhere(before(SOURCE, CLONE), act, [Way.CRASH_BEFORE])
    explored.record(record_property, "points explored, clones")
    assert explored.broken == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("story", ["a trial clones", "the source deletes what a clone needed"])
def test_with_each_write_late_or_lost_it_breaks_no_promise(story: str, record_property: Record) -> None:
    before, act = STORIES[story]
    explored = late_writes(before(SOURCE, CLONE), act, [None, 3])
    explored.record(record_property, "points explored, clones")
    assert explored.broken == []


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("into", [CLONE, ELSEWHERE], ids=["same experiment", "another experiment"])
@pytest.mark.parametrize("story", STORIES)
def test_failing_at_every_operation_in_every_way_it_breaks_no_promise(
    story: str, into: JournalKey, record_property: Record
) -> None:
    before, act = STORIES[story]
    scene = before(SOURCE, into)
    explored = die_everywhere(scene, act)
    late = late_writes(scene, act, [None, 0, 1, 2, 5, 10, 20])
    explored.add(late)
    explored.record(record_property, "points explored, clones")
    assert explored.broken == []


# ------------------------------------------------------------------------------------------- concurrency

MEETINGS: Mapping[str, tuple[Before, Sequence[Act]]] = {
    "clones while the source saves": (without_a_clone, [clones("c"), saves("s")]),
    "clones while the source deletes": (without_a_clone, [clones("c"), clear_late]),
    "clones a clone while that is retired": (with_a_clone, [clone_of_the_clone, saves("c")]),
    "is retired while the source saves": (with_a_clone, [saves("c"), saves("s")]),
    "is retired while the source is resumed": (with_a_clone, [saves("c"), takes_over("s")]),
    "is resumed while the source deletes": (with_a_clone_that_is_over, [takes_over("c"), clear_late]),
    "is taken over while it clones": (without_a_clone, [or_superseded(clones("c")), takes_over("c")]),
    "two clone while the source saves": (without_a_clone, [clones("c"), clones("d"), saves("s")]),
}


def at_creates_and_deletes(method: str, path: str) -> bool:
    del path
    return method in {"create", "delete"}


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("meeting", ["clones while the source saves", "is resumed while the source deletes"])
def test_in_every_order_of_their_writes_they_break_no_promise(meeting: str, record_property: Record) -> None:
    before, acts = MEETINGS[meeting]
    explored = meet_in_every_order(before(SOURCE, CLONE), acts, at_creates_and_deletes, limit=20_000)
    explored.record(record_property, "orders of clones and their sources")
    assert explored.broken == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_in_drawn_orders_of_everything_they_break_no_promise(meeting: str, record_property: Record) -> None:
    before, acts = MEETINGS[meeting]
    explored = meet_at_random(before(SOURCE, CLONE), acts, range(10))
    explored.record(record_property, "orders of clones and their sources")
    assert explored.broken == []


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("meeting", MEETINGS)
def test_in_many_orders_and_dying_they_break_no_promise(meeting: str, record_property: Record) -> None:
    before, acts = MEETINGS[meeting]
    scene = before(SOURCE, CLONE)
    explored = meet_at_random(scene, acts, range(1000, 1500))
    dying = meet_dying(scene, acts, range(500))
    explored.add(dying)
    explored.record(record_property, "orders of clones and their sources")
    assert explored.broken == []


# --------------------------------------------------------------------------------------------- mutants


def meets(meeting: str) -> Sequence[str]:
    before, acts = MEETINGS[meeting]
    return meet_in_every_order(before(SOURCE, CLONE), acts, at_creates_and_deletes, limit=20_000, enough=1).broken


def dies(story: str) -> Sequence[str]:
    before, act = STORIES[story]
    return die_everywhere(before(SOURCE, CLONE), act, [Way.CRASH_BEFORE, Way.REPLY_LOST], enough=1).broken


_CLAIM = "append_as_guest(store, journal, events, stamp, side_by_side=side_by_side)"
MUTANTS: Mapping[str, Mutant] = {
    "clone without a claim": Mutant(partial(meets, "clones while the source saves"), {cloning.clone: {_CLAIM: "pass"}}),
    "claim what is retired": Mutant(
        partial(meets, "clones while the source saves"),
        {
            cloning._claimed: {
                "if trial is None or not (is_live(trial, origin) or is_held(trial, origin)):": "if False:"
            },
            trial_transitions._claims: {"if not (is_live(trial, claim) or is_held(trial, claim)):": "if False:"},
        },
    ),
    "delete what clones need": Mutant(
        partial(dies, "the source continues"), {trial_transitions.is_collectable: {" and not is_held(state, key)": ""}}
    ),
    "count nothing as needed by clones": Mutant(
        partial(dies, "the source continues"),
        {checkpoint_gc._reachable: {"*state.claims": ""}},
    ),
    "release a clone that is live": Mutant(
        partial(dies, "the source is resumed"),
        {
            cloning._is_over: {
                "if trial is not None and is_live(trial, claim.clone):": "if False:",
                "return trial is not None and not is_acceptable(trial, claim.clone.sequence)": "return True",
            },
            trial_transitions.is_collectable: {"not is_held(state, key) and ": ""},
        },
    ),
    "release a clone that may still be journaled": Mutant(
        partial(meets, "clones while the source saves"),
        {
            cloning._is_over: {
                "return trial is not None and not is_acceptable(trial, claim.clone.sequence)": "return True"
            }
        },
    ),
    "never release": Mutant(
        partial(dies, "a clone is trained on, and retired"),
        {cloning._released: {"if each.clone in clones": "if False"}},
    ),
    "a guest supersedes": Mutant(
        partial(meets, "clones while the source saves"),
        {journal._after_guest: {'if entry.writer != "guest" or': "if True or"}},
    ),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(name: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    MUTANTS[name].require_noticed(monkeypatch, record_property)
