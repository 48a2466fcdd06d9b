"""Messages between nodes: signed, in order, of one writer each."""

from __future__ import annotations

import pytest

from prefect_tune.core.errors import AlreadyExists, JournalCorrupt
from prefect_tune.core.messages.node_messages import (
    Arrived,
    NodeMessages,
    newest_attempt,
    node_messages_up_to,
    read_messages,
    write_messages,
)
from prefect_tune.core.storage.layout import NodesKey, numbered
from tests.core.driver import KEY
from tests.fakes.stores.memory_store import MemoryStore

NODES = NodesKey(trial=KEY, attempt=2)


def of(process: str) -> NodeMessages:
    return NodeMessages(write_id=process, has_read={"0": 3}, messages=(Arrived(host="here"),))


def test_what_a_node_writes_is_read_as_it_was_and_a_repeated_write_is_recognized() -> None:
    store = MemoryStore()
    for _ in range(2):
        write_messages(store, NODES, 1, 1, of("it"), "secret")
    found = read_messages(store, NODES, 1, 1, "secret")
    assert found is not None
    assert (found.messages, found.has_read) == ((Arrived(host="here"),), {"0": 3})
    assert read_messages(store, NODES, 1, 2, "secret") is None


def test_a_second_process_of_a_node_finds_its_place_taken() -> None:
    store = MemoryStore()
    write_messages(store, NODES, 1, 1, of("it"), "secret")
    with pytest.raises(AlreadyExists):
        write_messages(store, NODES, 1, 1, of("another"), "secret")


@pytest.mark.parametrize(("node", "number", "secret"), [(1, 1, "other"), (2, 1, "secret"), (1, 2, "secret")])
def test_what_was_not_signed_for_this_place_is_refused(node: int, number: int, secret: str) -> None:
    store = MemoryStore()
    write_messages(store, NODES, 1, 1, of("it"), "secret")
    moved = numbered(NODES.messages(node), number)
    store.objects[moved] = store.objects.pop(numbered(NODES.messages(1), 1))
    with pytest.raises(JournalCorrupt, match="expected the signature of a node of this attempt"):
        read_messages(store, NODES, node, number, secret)


def test_the_newest_attempt_is_the_one_that_is_joined_and_older_messages_are_found_to_be_deleted() -> None:
    store = MemoryStore()
    assert newest_attempt(store, KEY, 1) is None
    store.objects[f"{KEY.nodes}/notes.txt"] = b"of a person"
    for attempt in (2, 11):
        write_messages(store, NodesKey(trial=KEY, attempt=attempt), 0, 1, of("it"), "secret")
    assert newest_attempt(store, KEY, 3) == NodesKey(trial=KEY, attempt=11)
    assert newest_attempt(store, KEY, 12) is None
    assert [each.path for each in node_messages_up_to(store, KEY, 10)] == [numbered(NODES.messages(0), 1)]
