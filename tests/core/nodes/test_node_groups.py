"""Checkpoints of several nodes: after the death of any node, no checkpoint lacks a part, and none is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from prefect_tune.core.checkpoints import commit
from prefect_tune.core.checkpoints.commit import (
    ExpectedParts,
    ReusableBytes,
    merge_parts,
    send_files,
    send_part,
    send_part_failure,
)
from prefect_tune.core.checkpoints.manifest import CheckpointMetadata, Manifest
from prefect_tune.core.errors import CheckpointCorrupt, InvalidInput, PartMissing, StoreUnavailable
from prefect_tune.core.messages.target_messages import list_node_objects
from prefect_tune.core.storage.layout import CheckpointKey, NodesKey
from prefect_tune.core.storage.object_store import Buffer
from tests.core.driver import KEY, Files, Witness, check_recovery
from tests.core.nodes.node_groups import commit_step, make_expired_deadline, make_group, run_nodes, send_part_of
from tests.core.protocol.exploring import run_all_orders, run_random
from tests.core.protocol.matrix import ObjectWorld, die_before_entry, fail_everywhere, run_fresh
from tests.core.protocol.mutate import Mutant
from tests.core.protocol.owners import at_decisions, take_over, take_over_and_save
from tests.fakes.stores.memory_files import MemoryFiles, load_files
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs", "decode_cache")

Record = Callable[[str, object], None]
SAVE = CheckpointKey(trial=KEY, step=4, sequence=7)
NODES = NodesKey(trial=KEY, attempt=2)
TERM = 3


@pytest.mark.long
@pytest.mark.parametrize("nodes", [2, pytest.param(4, marks=pytest.mark.deep)])
@pytest.mark.parametrize("before", [None, run_nodes(2), die_before_entry], ids=["new", "grouped", "single"])
def test_no_failure_at_any_request_of_any_node_breaks_a_promise(
    nodes: int, before: Callable[..., None] | None, record_property: Record
) -> None:
    explored = fail_everywhere(ObjectWorld, run_nodes(nodes), before=before)
    explored.require_kept(record_property, "points explored, several nodes")


@pytest.mark.long
def test_one_node_continues_what_several_saved(record_property: Record) -> None:
    explored = fail_everywhere(ObjectWorld, run_fresh, before=run_nodes(2))
    explored.require_kept(record_property, "points explored, several nodes")


@pytest.mark.parametrize("new_owner", [take_over, take_over_and_save], ids=["taken over", "saves too"])
def test_in_every_order_of_what_others_can_see_nodes_and_a_new_owner_break_no_promise(
    new_owner: Callable[..., None], record_property: Record
) -> None:
    acts = [commit_step, send_part_of(1), new_owner]
    explored = run_all_orders(make_group(2), acts, at_decisions, limit=60_000)
    explored.require_kept(record_property, "orders of nodes and owners, every one")


@pytest.mark.long
def test_in_random_orders_of_everything_that_four_nodes_and_new_owners_do_they_break_no_promise(
    record_property: Record,
) -> None:
    acts = [commit_step, send_part_of(1), send_part_of(2), send_part_of(3), take_over_and_save, take_over_and_save]
    explored = run_random(make_group(4), acts, range(60))
    explored.require_kept(record_property, "orders of nodes and owners, at random")


def test_a_part_without_a_manifest_is_found_when_its_attempt_is_over() -> None:
    group = make_group(2)
    send_part_of(1)(group)
    paths = {node_object.path for node_object in list_node_objects(group.store, KEY, group.trial.attempt)}
    save = SAVE.model_copy(update={"step": group.pending[-1].step, "sequence": group.experiment.entry_count})
    assert paths == {group.nodes.part_path(save, 1)}
    assert not list_node_objects(group.store, KEY, group.trial.attempt - 1)


# ------------------------------------------------------------------------------------------------------- one save


def send_node_part(store: MemoryStore, node: int, files: Files, nodes: NodesKey = NODES, term: int = TERM) -> None:
    send_part(store, SAVE, MemoryFiles(files), sender=(nodes, node, term), reuse=ReusableBytes())


def join_parts(store: MemoryStore, first: Files, *nodes: int, **options: object) -> Files:
    """Merge the parts of nodes with the files of node 0; return the files of the checkpoint."""
    metadata = CheckpointMetadata(attempt=2, term=TERM, write_id="w", created_at="")
    manifest = Manifest(**send_files(store, SAVE, MemoryFiles(first), reuse=ReusableBytes()), metadata=metadata)
    fields = {"get_lost_nodes": dict, **options}
    expected = ExpectedParts(NODES, TERM, nodes, make_expired_deadline, **fields)  # type: ignore[arg-type]  # one field
    return load_files(store, merge_parts(store, expected, manifest))


def test_the_files_of_all_nodes_make_one_checkpoint_and_shared_bytes_are_stored_once() -> None:
    store = MemoryStore()
    send_node_part(store, 1, {"shared": b"same", "b/1": b"one"})
    send_node_part(store, 2, {"shared": b"same", "b/2": b"two", "empty": b""})
    files = join_parts(store, {"shared": b"same", "a": b"zero"}, 1, 2)
    assert files == {"shared": b"same", "a": b"zero", "b/1": b"one", "b/2": b"two", "empty": b""}


def test_two_files_of_one_name_are_an_error_that_names_both_nodes() -> None:
    store = MemoryStore()
    send_node_part(store, 1, {"model": b"1"})
    send_node_part(store, 2, {"model": b"2"})
    with pytest.raises(InvalidInput, match="model: nodes 1 and 2 saved different files of this name"):
        join_parts(store, {}, 1, 2)
    with pytest.raises(InvalidInput, match=r"do not form one directory: .*'model/x' is below a file"):
        join_parts(store, {"model/x": b""}, 1)


def test_a_save_without_the_part_of_a_node_says_which_one_and_why() -> None:
    store = MemoryStore()
    send_node_part(store, 1, {"b": b"1"})
    with pytest.raises(PartMissing, match="node 2, 3 did not add its part in time"):
        join_parts(store, {"a": b""}, 1, 2, 3)
    with pytest.raises(PartMissing, match="node 2 is gone"):
        join_parts(store, {"a": b""}, 1, 2, get_lost_nodes=lambda: {2: "is gone", 1: "is gone, but its part is there"})
    send_part_failure(store, SAVE, (NODES, 2, TERM), "its disk is full")
    with pytest.raises(PartMissing, match="node 2 cannot add its part: its disk is full"):
        join_parts(store, {"a": b""}, 1, 2)


@pytest.mark.parametrize(
    ("nodes", "term", "node"),
    [
        pytest.param(NodesKey(trial=KEY, attempt=1), TERM, 1, id="another attempt"),
        pytest.param(NODES, TERM - 1, 1, id="another owner"),
        pytest.param(NODES, TERM, 2, id="another node"),
    ],
)
def test_a_part_that_is_not_of_this_save_is_never_taken(nodes: NodesKey, term: int, node: int) -> None:
    store = MemoryStore()
    send_node_part(store, node, {"b": b"1"}, nodes, term)
    store.objects[NODES.part_path(SAVE, 1)] = store.objects.pop(nodes.part_path(SAVE, node))
    with pytest.raises(CheckpointCorrupt, match="expected the part of"):
        join_parts(store, {"a": b""}, 1)


def test_a_part_whose_bytes_are_gone_is_never_committed() -> None:
    store = MemoryStore()
    send_node_part(store, 1, {"b": b"1"})
    for path in [path for path in store.objects if "/blobs/" in path]:
        del store.objects[path]
    with pytest.raises(StoreUnavailable, match="the target has nothing"):
        join_parts(store, {"a": b""}, 1)


# -------------------------------------------------------------------------------------------------------- mutants


class ForgetfulStore(MemoryStore):
    """A store that acknowledges a put of a shard without writing it."""

    def put(self, path: str, data: Buffer) -> None:
        if bytes(data[:1]) != b"\1":
            super().put(path, data)


def explore_failures() -> Sequence[str]:
    return fail_everywhere(ObjectWorld, run_nodes(2), enough=1).broken


def forget_shard() -> Sequence[str]:
    store, witness = ForgetfulStore(), Witness()
    try:
        run_nodes(2)(store, witness)
    except StoreUnavailable:
        return []
    return check_recovery(store, witness, 3)


def merge_different_bytes() -> Sequence[str]:
    try:
        test_two_files_of_one_name_are_an_error_that_names_both_nodes()
    except pytest.fail.Exception as missing:
        return [str(missing)]
    return []


def meet_new_owners() -> Sequence[str]:
    acts = [commit_step, send_part_of(1), take_over_and_save]
    return run_random(make_group(2), acts, range(100), enough=1).broken


MUTANTS = {
    "the manifest before the last part": Mutant(
        explore_failures, {commit.merge_parts: {"in wanted.node_numbers if": "in wanted.node_numbers[:-1] if"}}
    ),
    "no look at what a node sent": Mutant(
        forget_shard,
        {
            commit.merge_parts: {"require_blobs_stored(": "len and (lambda *_: 0)("},
            commit.send_files: {"require_blobs_stored(": "(lambda *_: 0)("},
        },
    ),
    "the last file of a name counts": Mutant(
        merge_different_bytes,
        {commit._add_parts_to_manifest: {"if _list_chunk_digests(other) != _list_chunk_digests(file):": "if False:"}},
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(name: str, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    MUTANTS[name].require_noticed(monkeypatch, record_property)


@pytest.mark.long
@pytest.mark.parametrize("finder", [forget_shard, merge_different_bytes, meet_new_owners])
def test_what_notices_them_finds_nothing_wrong_with_the_package(finder: Callable[[], Sequence[str]]) -> None:
    assert list(finder()) == []
