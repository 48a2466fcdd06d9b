"""Messages between the nodes of an attempt: numbered objects on the target, which is all that the nodes share.

    nodes/<attempt>/0000/0000000001.json    from node 0 to all others: who takes part, directives, parts to send
    nodes/<attempt>/0001/0000000001.json    from node 1 to node 0: it is there, what its ranks report, how they ended

An object holds the messages since the one before it; one without messages says that its writer is alive. One process
writes the objects of a node, each created if absent: a second process of that node finds its place taken. A reader
says in its own objects how far it has read, and the writer deletes up to there.

Each object is signed with a secret that the nodes have from their search, not from the target: who can write to the
target can neither lead ranks to another machine nor speak for one. No message names code, or holds a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hmac import compare_digest
from typing import Annotated, Literal, TypeAlias

from blake3 import blake3
from pydantic import Field

from prefect_tune.core.errors import JournalCorrupt, ObjectNotFound
from prefect_tune.core.messages.process_messages import (
    CheckpointSaved,
    Directive,
    FromTrial,
    Leave,
    Proceed,
    SaveFailed,
    Start,
    StopAndSave,
)
from prefect_tune.core.models import Message, Value, canonical_json
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import CheckpointKey, NodesKey, TrialKey, numbered
from prefect_tune.core.storage.object_store import Listed, ObjectStore, create_or_recognize

__all__ = [
    "Arrived",
    "Begin",
    "FromRank",
    "GroupOver",
    "NodeMessage",
    "NodeMessages",
    "NodeStopping",
    "RankGone",
    "SendPart",
    "ToRank",
    "newest_attempt",
    "node_messages_up_to",
    "read_messages",
    "write_messages",
]


class Arrived(Value):
    """A node is there, and waits for the beginning."""

    type: Literal["arrived"] = "arrived"
    host: Message
    """Its host name, for people."""


class Begin(Value):
    """The nodes are there: the attempt begins."""

    type: Literal["begin"] = "begin"
    nodes: tuple[int, ...]
    """Those that take part, node 0 first: their order gives the ranks."""
    address: str
    """Of node 0, where the ranks meet (`MASTER_ADDR`)."""
    port: int
    term: int
    """The owner's."""
    start: Start
    """What each rank receives; a node fills in the code, folders and ranks by itself."""
    restored: CheckpointKey | None
    """The checkpoint from which the attempt begins."""


class ToRank(Value):
    """A message for one rank."""

    type: Literal["to-rank"] = "to-rank"
    rank: int
    message: Annotated[
        Directive | CheckpointSaved | SaveFailed | StopAndSave | Proceed | Leave, Field(discriminator="type")
    ]


class FromRank(Value):
    """A message of one rank. The directory of a part stays on its node."""

    type: Literal["from-rank"] = "from-rank"
    rank: int
    message: FromTrial


class RankGone(Value):
    """The process of a rank has ended; it has sent no other message after those before this one."""

    type: Literal["rank-gone"] = "rank-gone"
    rank: int
    how: Message


class SendPart(Value):
    """Send the files of a step: a node that holds some adds its part to this checkpoint."""

    type: Literal["send-part"] = "send-part"
    key: CheckpointKey
    parent: CheckpointKey | None
    """The newest live checkpoint, whose bytes are not sent again."""
    collected_up_to: int
    """As in `commit.reusable`."""


class NodeStopping(Value):
    """The node is asked to stop, as by its infrastructure: the attempt saves and ends."""

    type: Literal["node-stopping"] = "node-stopping"


class GroupOver(Value):
    """The attempt is over: a node ends its processes."""

    type: Literal["over"] = "over"


NodeMessage: TypeAlias = Annotated[
    Arrived | Begin | ToRank | FromRank | RankGone | SendPart | NodeStopping | GroupOver, Field(discriminator="type")
]


class NodeMessages(Document):
    """The messages of a node since its last object."""

    format: Literal["prefect-tune/node-messages"] = "prefect-tune/node-messages"
    version: Literal[1] = 1
    write_id: str
    """Of the process that writes: tells it from another one of the same node."""
    has_read: Mapping[str, int]
    """By node, the number of its last object that was read."""
    messages: tuple[NodeMessage, ...]
    signature: str = ""

    def signed(self, secret: str, path: str) -> NodeMessages:
        """Return the messages with the signature that belongs to the object at `path`."""
        plain = canonical_json([path, self.model_copy(update={"signature": ""}).model_dump(mode="json")])
        signature = blake3(plain, key=blake3(secret.encode()).digest()).hexdigest()
        return self.model_copy(update={"signature": signature})


def write_messages(  # noqa: PLR0913, PLR0917 - where, and what: none follows from another
    store: ObjectStore, key: NodesKey, node: int, number: int, written: NodeMessages, secret: str
) -> None:
    """Create the object `number` (from 1) of a node, signed with `secret`.

    Raises:
        AlreadyExists: another process is this node.
        InvalidInput: a message cannot be stored as JSON.
        StoreUnavailable, StoreRefused, CommitUnknown: repeat it with the same arguments.
    """
    path = numbered(key.messages(node), number)
    create_or_recognize(store, path, seal(written.signed(secret, path)))


def read_messages(store: ObjectStore, key: NodesKey, node: int, number: int, secret: str) -> NodeMessages | None:
    """Return the object `number` of a node; None while there is none.

    Raises:
        JournalCorrupt: it is damaged, or no node that has `secret` wrote it.
    """
    path = numbered(key.messages(node), number)
    try:
        found = read_sealed(store, NodeMessages, path, JournalCorrupt)
    except ObjectNotFound:
        return None
    if not compare_digest(found.signature, found.signed(secret, path).signature):
        raise JournalCorrupt(f"{path}: expected the signature of a node of this attempt, found another one")
    return found


def newest_attempt(store: ObjectStore, trial: TrialKey, at_least: int) -> NodesKey | None:
    """Return the newest attempt of a trial, from number `at_least` on, of which node 0 has written."""
    attempts = {NodesKey.from_path(trial, each.path) for each in store.list(trial.nodes)}
    found = [each for each in attempts if each is not None and each.attempt >= at_least]
    return max(found, key=lambda each: each.attempt, default=None)


def node_messages_up_to(store: ObjectStore, trial: TrialKey, attempt: int) -> Sequence[Listed]:
    """Return what the nodes of attempts up to `attempt` wrote for one another: after an attempt no process reads it."""
    return [
        each
        for each in store.list(trial.nodes)
        if (key := NodesKey.from_path(trial, each.path)) is not None and key.attempt <= attempt
    ]
