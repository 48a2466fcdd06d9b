"""Messages between the nodes of an attempt, and where node 0 receives them.

    nodes/<attempt>/address.json    the address of node 0
    each other node ◄══ TCP ══► node 0: one JSON document each, no pickle

Both sides of a connection prove that they have a secret of their search, which is not on the target, and have read the
same address: who can write to the target can neither lead ranks to another machine nor speak for one. No message names
code.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from prefect_tune.core.errors import JournalCorrupt, UnknownVersion
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
from prefect_tune.core.reasons import ProcessEnd
from prefect_tune.core.storage.documents import Document, read_sealed
from prefect_tune.core.storage.layout import CheckpointKey, NodesKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Message, Value, canonical_json


class Arrived(Value):
    """The first message of a node: it is there, and waits for the beginning."""

    type: Literal["arrived"] = "arrived"
    node: int
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
    end: ProcessEnd


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


class NodeAlive(Value):
    """Sent by each node when there is nothing else to send for a while."""

    type: Literal["alive"] = "alive"


class GroupOver(Value):
    """The attempt is over: a node ends its processes."""

    type: Literal["over"] = "over"


_NodeMessage: TypeAlias = (
    Arrived | Begin | ToRank | FromRank | RankGone | SendPart | NodeStopping | NodeAlive | GroupOver
)
NodeMessage: TypeAlias = Annotated[_NodeMessage, Field(discriminator="type")]
node_message: TypeAdapter[_NodeMessage] = TypeAdapter(NodeMessage)


class NodeAddress(Document):
    """Where node 0 of an attempt waits for the others."""

    format: Literal["prefect-tune/node-address"] = "prefect-tune/node-address"
    version: Literal[1] = 1
    host: str
    port: int
    request: str
    """A digest of the secret: tells whether it is of the same request."""

    def connection_key(self, key: NodesKey, secret: str) -> bytes:
        """Return what both sides of a connection prove to have: with another address it is another key."""
        return canonical_json([secret, key.folder, self.host, self.port])


def newest_address(store: ObjectStore, trial: TrialKey, at_least: int) -> tuple[NodesKey, NodeAddress] | None:
    """Return the newest attempt from number `at_least` on, and where its node 0 waits; None if that cannot be read."""
    keys = [NodesKey.from_path(trial, listed.path) for listed in store.list(trial.nodes)]
    newest = max((key for key in keys if key is not None), key=lambda key: key.attempt, default=None)
    if newest is None or newest.attempt < at_least:
        return None
    with suppress(JournalCorrupt, UnknownVersion):
        if (address := read_sealed(store, NodeAddress, newest.address_path, JournalCorrupt)) is not None:
            return newest, address
    return None
