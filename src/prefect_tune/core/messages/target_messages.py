"""Messages between processes that share nothing but the target: objects on it, which survive the processes.

- the nodes of an attempt write to one another;
- a search replies to its trials on other machines;
- any process asks a running experiment to stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hmac import compare_digest
from typing import Annotated, Literal, TypeAlias

from blake3 import blake3
from pydantic import Field

from prefect_tune.core.errors import AlreadyExists, JournalCorrupt, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import ENDED
from prefect_tune.core.journal_events import StopAsked
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
from prefect_tune.core.reasons import AnyReason, ProcessEnd, Reason, make_reason
from prefect_tune.core.storage.documents import Document, read_sealed, seal
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, NodesKey, TrialKey, numbered
from prefect_tune.core.storage.object_store import Listed, ObjectStore, create_or_recognize
from prefect_tune.core.values import Message, TrialId, Value, canonical_json

# Messages between the nodes of an attempt: numbered objects on the target, which is all that the nodes share.
#
#     nodes/<attempt>/0000/0000000001.json    from node 0 to all others: who takes part, directives, parts to send
#     nodes/<attempt>/0001/0000000001.json    from node 1 to node 0: it is there, what its ranks report, how they ended
#
# An object holds the messages since the one before it; one without messages says that its writer is alive. One process
# writes the objects of a node, each created if absent: a second process of that node finds its place taken. A reader
# says in its own objects how far it has read, and the writer deletes up to there.
#
# Each object is signed with a secret that the nodes have from their search, not from the target: who can write to the
# target can neither lead ranks to another machine nor speak for one. No message names code, or holds a pickle.


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


class GroupOver(Value):
    """The attempt is over: a node ends its processes."""

    type: Literal["over"] = "over"


NodeMessage: TypeAlias = Annotated[
    Arrived | Begin | ToRank | FromRank | RankGone | SendPart | NodeStopping | GroupOver, Field(discriminator="type")
]


class NodeMessages(Document):
    """The messages of a node since its last object."""

    format: Literal["prefect-tune/node-messages"] = "prefect-tune/node-messages"
    version: Literal[2] = 2
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

    def is_signed(self, secret: str, path: str) -> bool:
        """Whether a node that has `secret` wrote them for the object at `path`."""
        return compare_digest(self.signature, self.signed(secret, path).signature)


def write_messages(
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
    written = read_sealed(store, NodeMessages, path, JournalCorrupt)
    if written is not None and not written.is_signed(secret, path):
        raise JournalCorrupt(f"{path}: expected the signature of a node of this attempt, found another one")
    return written


def is_signed_with(store: ObjectStore, path: str, secret: str) -> bool:
    """Whether the object at `path` is there, and a node that has `secret` wrote it."""
    try:
        written = read_sealed(store, NodeMessages, path, JournalCorrupt)
    except (JournalCorrupt, UnknownVersion):
        return False
    return written is not None and written.is_signed(secret, path)


def newest_attempt(store: ObjectStore, trial: TrialKey, at_least: int, secret: str) -> NodesKey | None:
    """Return the newest attempt from number `at_least` on whose node 0 has `secret` and waits for others."""
    attempts = {NodesKey.from_path(trial, each.path) for each in store.list(trial.nodes)}
    found = [each for each in attempts if each is not None and each.attempt >= at_least]
    newest_first = sorted(found, key=lambda each: -each.attempt)
    return next((each for each in newest_first if is_signed_with(store, numbered(each.messages(0), 1), secret)), None)


def node_messages_up_to(store: ObjectStore, trial: TrialKey, attempt: int) -> Sequence[Listed]:
    """Return what the nodes of attempts up to `attempt` wrote for one another: after an attempt no process reads it."""
    return [
        each
        for each in store.list(trial.nodes)
        if (key := NodesKey.from_path(trial, each.path)) is not None and key.attempt <= attempt
    ]


# Replies of the search to trials on other machines.

UNASKED = 0
"""The step number of a message that the trial did not ask for."""


class TrialReply(Document):
    """A reply as it is stored on the target."""

    format: Literal["prefect-tune/answer"] = "prefect-tune/answer"
    version: Literal[2] = 2
    answer: Annotated[Proceed | Leave | StopAndSave, Field(discriminator="type")]


def answer(store: ObjectStore, trial: TrialKey, attempt: int, step: int, said: Proceed | Leave | StopAndSave) -> None:
    """Reply to an attempt that asks at `step`. The first reply counts: it was journaled before it was written.

    A message to stop, at step `UNASKED`, may also come from an external process when no owner is left to journal it.
    """
    try:
        create_or_recognize(store, trial.answer_path(attempt, step), seal(TrialReply(answer=said)))
    except AlreadyExists:
        return  # an earlier owner has sent the reply that the journal holds


def read_answer(store: ObjectStore, trial: TrialKey, attempt: int, step: int) -> Proceed | Leave | StopAndSave | None:
    """Return the reply to the attempt at `step`; None while there is none.

    Raises:
        JournalCorrupt: the reply is damaged.
    """
    reply = read_sealed(store, TrialReply, trial.answer_path(attempt, step), JournalCorrupt)
    return reply.answer if reply else None


def take_back(store: ObjectStore, trial: TrialKey, attempt: int) -> None:
    """Delete an earlier owner's unasked message, before an attempt is started or found running.

    The message was for the earlier owner's run only, or is in the experiment's journal and is sent again.
    """
    path = trial.answer_path(attempt, UNASKED)
    if store.size(path) is not None:
        store.delete([path])


def answers_up_to(store: ObjectStore, trial: TrialKey, attempt: int) -> Sequence[Listed]:
    """Return the replies to attempts of `trial` up to `attempt`; after the end of an attempt no process reads them."""
    return [each for each in store.list(trial.answers) if 0 < _attempt_of(trial, each.path) <= attempt]


def _attempt_of(trial: TrialKey, path: str) -> int:
    """Return the attempt that the reply at `path` is for; 0 for a foreign file."""
    attempt, _, step = path.removeprefix(f"{trial.answers}/").removesuffix(".json").partition("-")
    if not all(each.isascii() and each.isdecimal() for each in (attempt, step)):
        return 0
    return int(attempt) if trial.answer_path(int(attempt), int(step)) == path else 0


# Stop requests from other processes to a running experiment: numbered objects on the target.
#
# The owner reads the number after the last one in its journal, so that a poll costs one read. It journals the write
# id of a request before it acts on it, and deletes the object after that. The requesting process finds that id in the
# journal. If the journal holds another id for its number, its request is lost: the number of a deleted request can be
# taken again, and the owner does not read that object.


class StopRequest(Document):
    """A request to save and end: one trial, for good; or the whole experiment, for its present owner."""

    format: Literal["prefect-tune/stop-request"] = "prefect-tune/stop-request"
    version: Literal[2] = 2
    write_id: str
    at: str
    reason: AnyReason
    term: int
    """The number of the owner that is asked to end the experiment; later owners continue it. Ignored for a trial."""
    trial: TrialId | None = None
    """None for the whole experiment."""
    unreadable: bool = False
    """Whether this stands for an object that cannot be read; never set on a target."""


def ask(store: ObjectStore, experiment: Experiment, request: StopRequest) -> int:
    """Write `request` for the experiment's owner, and return its number. Idempotent by its write id.

    Args:
        experiment: the present state of its journal.

    Raises:
        CommitUnknown: the target did not say whether it wrote.
    """
    number = len(experiment.stop_requests) + 1
    while True:
        try:
            create_or_recognize(store, experiment.key.request_path(number), seal(request))
        except AlreadyExists:
            number += 1
        else:
            return number


def is_journaled(experiment: Experiment, request: StopRequest) -> bool:
    """Return whether the experiment's owner has journaled the request."""
    return request.write_id in experiment.stop_requests


def is_lost(experiment: Experiment, request: StopRequest, number: int) -> bool:
    """Return whether no owner will read the request under this number, so that it has to be written again."""
    return len(experiment.stop_requests) >= number and not is_journaled(experiment, request)


def read_request(store: ObjectStore, experiment: JournalKey, number: int) -> StopRequest | None:
    """Return request `number`; None where there is none. An unreadable one has `unreadable` set, and is refused."""
    try:
        return read_sealed(store, StopRequest, experiment.request_path(number), JournalCorrupt)
    except (JournalCorrupt, UnknownVersion) as error:
        return StopRequest(
            write_id=f"unreadable-{number}",
            at="",
            reason=make_reason("stop-unreadable", error=str(error)),
            term=0,
            unreadable=True,
        )


def stop_event(experiment: Experiment, request: StopRequest) -> StopAsked:
    """Return the journal's event for a request: what is stopped, or why it is refused."""
    refused = _refusal_reason(experiment, request)
    trial = None if refused is not None else request.trial
    return StopAsked(trial=trial, reason=request.reason, request=request.write_id, refused=refused)


def _refusal_reason(experiment: Experiment, request: StopRequest) -> Reason | None:
    if request.unreadable:
        return make_reason("request-unreadable")
    if request.write_id in experiment.stop_requests:
        return make_reason("request-repeated")
    if request.trial is None:
        if request.term == experiment.term:
            return None
        return make_reason("request-outdated", owner=request.term, successor=experiment.term)
    if request.trial not in experiment.trials:
        return make_reason("request-without-trial", trial=request.trial)
    trial = experiment.trial(request.trial)
    if trial.phase not in ENDED:
        return None
    return make_reason("request-for-ended-trial", trial=request.trial, status=trial.status.value)
