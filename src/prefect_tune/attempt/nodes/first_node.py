"""Node 0 of an attempt on several nodes: it waits for the others, and their ranks become channels like its own.

    here                                                there
    supervisor ◄─ channel of rank 2 ◄─┐                 ┌─► process of rank 2
                  channel of rank 3 ◄─┴─ TCP, secret ◄──┴─► process of rank 3
                  commit worker: send your parts ──► part on the target ──► manifest

Everything else is the attempt of one node: this one owns the journal, decides, and commits. A node that is lost is the
end of its ranks. Never: a rank of an earlier attempt; a wait for a node without a deadline.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Self

from prefect_tune.attempt.group_saves import PARTS_WITHIN
from prefect_tune.attempt.nodes.node_connection import NodeConnection, read_from
from prefect_tune.attempt.processes.process_channel import TrialChannel
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.rank_group import Placement, free_port
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.core.checkpoints.commit import PartsOfSave
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.trial_transitions import Trial, parent_of_next, reused_from
from prefect_tune.core.messages.node_messages import (
    Arrived,
    Begin,
    FromRank,
    GroupOver,
    NodeAddress,
    NodeMessage,
    NodeStopping,
    RankGone,
    SendPart,
    ToRank,
)
from prefect_tune.core.messages.process_messages import Start, ToTrial
from prefect_tune.core.messages.target_messages import node_objects_up_to
from prefect_tune.core.reasons import ProcessEnd, Reason, make_reason
from prefect_tune.core.resources import processes_on
from prefect_tune.core.shown_text import plural
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import CheckpointKey, NodesKey
from prefect_tune.core.storage.object_store import ObjectStore, create_or_recognize
from prefect_tune.core.values import digest_of
from prefect_tune.runtime.message_stream import MalformedMessage
from prefect_tune.storage_retries import on_target
from prefect_tune.stores.deadline import Deadline

_ALL_ARRIVE_WITHIN = timedelta(minutes=10)
"""How long the runs or tasks of the other nodes may take to begin: images are pulled, machines are started."""
_FEWER_AFTER = timedelta(minutes=2)
"""After which time an attempt begins with `min_nodes`."""
_LOOK_SECONDS = 0.1
_PAUSES_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5)
_REQUEST_TIMEOUT = timedelta(seconds=10)
_JOIN_TIMEOUT = timedelta(seconds=10)
_UNROUTED = ("192.0.2.1", 9)  # TEST-NET-1 (RFC 5737): choosing a route to it sends nothing


class NodesMissing(Exception):
    """Too few nodes have arrived in time, or the attempt was asked to stop while it waited for them."""

    def __init__(self, message: str, *, is_stopped: bool) -> None:
        super().__init__(message)
        self.is_stopped = is_stopped


class OtherNodes:
    """The other nodes of an attempt. Enter it, then call `begin`."""

    def __init__(
        self, spec: TrialSpec, start: Start, term: int, restored: CheckpointKey | None, secret: str, log: Log
    ) -> None:
        self._spec, self._start, self._term, self._restored, self._log = spec, start, term, restored, log
        self._secret = secret
        self._key = NodesKey(trial=spec.trial, attempt=start.attempt)
        self._joining = threading.Lock()
        self._has_begun = False
        self._arrived: dict[int, str] = {}
        self._connections: dict[int, NodeConnection] = {}
        self._lost: dict[int, Reason] = {}
        self._ranks: dict[int, _RemoteRank] = {}
        self.stop: Callable[[], None] = lambda: None
        """Called when the infrastructure asks a node to stop."""
        self.placement = Placement(processes=processes_on(spec.processes_per_trial, 1))

    def begin(self, stop: threading.Event) -> Sequence[TrialChannel]:
        """Wait for the nodes, and begin; return the channels to their ranks.

        Raises:
            NodesMissing: fewer than `min_nodes` arrived in time, or `stop` was set.
        """
        self.stop = stop.set
        self._log.info("waiting for %d other nodes of attempt %d", self._spec.nodes_per_trial - 1, self._key.attempt)
        self._wait(stop)
        with self._joining:
            self._has_begun = True
            present = sorted(self._connections.keys() - self._lost.keys())
        address, port = address_here(), free_port()
        self.placement = Placement(self.placement.processes, 1 + len(present), 0, (address, port))
        start = self._start.model_copy(update={"trainable": "", "stopper": "", "import_path": ()})
        nodes = (0, *present)
        self._send(
            Begin(nodes=nodes, address=address, port=port, term=self._term, start=start, restored=self._restored)
        )
        where = ", ".join(f"{node} ({self._arrived[node]})" for node in present)
        self._log.info("%s at %s: this one, and %s", plural(len(nodes), "node", "nodes"), address, where or "no other")
        for place, node in enumerate(present, 1):
            for rank in range(place * self.placement.processes, (place + 1) * self.placement.processes):
                self._ranks[rank] = _RemoteRank(self._connections[node], node, rank)
                if (reason := self._lost.get(node)) is not None:
                    self._ranks[rank].hang_up(_end_with_node(node, reason))
        return [*self._ranks.values()]

    def lost(self) -> Mapping[int, Reason]:
        """Return the nodes that are gone, with the reason."""
        return dict(self._lost)

    @contextmanager
    def parts(self, key: CheckpointKey, before: Trial, nodes: Sequence[int]) -> Iterator[PartsOfSave]:
        """Have the `nodes` send their parts of the checkpoint `key`, and delete the parts when the block is left.

        `before` is the trial's state. Leave the block when the checkpoint is committed, or given up.
        """
        parent, collected = parent_of_next(self._spec.trial, before), reused_from(before)
        self._send(SendPart(key=key, parent=parent, collected_up_to=collected))
        yield PartsOfSave(self._key, self._term, tuple(nodes), _waits, self.lost)
        paths = [self._key.part_path(key, node) for node in nodes]
        threading.Thread(target=copy_context().run, args=(self._delete, lambda _: paths), daemon=True).start()

    def __enter__(self) -> Self:
        """Listen for the nodes."""
        self._request = digest_of(self._secret.encode())
        on_target(self._spec.target, self._delete_earlier)
        host = address_here()
        try:
            self._listener = socket.create_server((host, 0))
        except OSError:  # the name of a service, for example
            self._listener = socket.create_server(("", 0))
        self._address = NodeAddress(host=host, port=self._listener.getsockname()[1], request=self._request)
        threading.Thread(target=copy_context().run, args=(self._accept,), name="accept-nodes", daemon=True).start()
        document = seal(self._address)
        on_target(self._spec.target, lambda store: create_or_recognize(store, self._key.address_path, document))
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks of all nodes, and delete what the nodes have left for one another."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._joining:
            self._has_begun = True
        self._send(GroupOver())
        for connection in self._connections.values():
            connection.close()
        for rank in self._ranks.values():
            rank.hang_up(ProcessEnd(reason=make_reason("attempt-over")))
        self._delete(
            lambda store: [each.path for each in node_objects_up_to(store, self._spec.trial, self._key.attempt)]
        )

    def _delete(self, paths_in: Callable[[ObjectStore], Sequence[str]]) -> None:
        """Delete these objects, if the target answers: else the end of the attempt, or the next one, does."""
        with suppress(TuneError), self._spec.target.open(timeout=_REQUEST_TIMEOUT) as store:
            store.delete(paths_in(store))

    def _delete_earlier(self, store: ObjectStore) -> None:
        """Delete what the nodes of earlier attempts have left."""
        left = [listed.path for listed in node_objects_up_to(store, self._spec.trial, self._key.attempt - 1)]
        if left:
            store.delete(left)

    def _send(self, message: NodeMessage) -> None:
        for connection in self._connections.values():
            connection.send(message)

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                link, _ = self._listener.accept()
                run = copy_context().run
                threading.Thread(target=run, args=(self._join, link), name="join-node", daemon=True).start()

    def _join(self, link: socket.socket) -> None:
        """Add the node that has connected, if it has the secret, and is expected."""
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _JOIN_TIMEOUT.seconds, 0))
        connection, key = Connection(link.detach()), self._address.connection_key(self._key, self._secret)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            arrived = read_from(connection).read(_JOIN_TIMEOUT)
        except (AuthenticationError, EOFError, OSError, MalformedMessage) as error:
            self._log.warning("refused a connection to node 0: %s: %s", type(error).__name__, error)
            connection.close()
            return
        with self._joining:
            expected = set() if self._has_begun else set(range(1, self._spec.nodes_per_trial)) - self._arrived.keys()
            node = arrived.node if isinstance(arrived, Arrived) else 0
            receive, lose = partial(self._receive, node), partial(self._lose, node)
            joined = NodeConnection(connection, node, receive, lose)
            if isinstance(arrived, Arrived) and node in expected:
                self._arrived[node], self._connections[node] = arrived.host, joined
                return
        joined.send(GroupOver())
        joined.close()

    def _wait(self, stop: threading.Event) -> None:
        most, least = self._spec.nodes_per_trial, self._spec.min_nodes or self._spec.nodes_per_trial
        all_within, fewer_after = Deadline.after(_ALL_ARRIVE_WITHIN), Deadline.after(_FEWER_AFTER)
        while (found := 1 + len(self._arrived.keys() - self._lost.keys())) < most:
            if stop.wait(_LOOK_SECONDS):
                raise NodesMissing("asked to stop while it waited for its nodes", is_stopped=True)
            if found >= least and not fewer_after.remaining_seconds:
                self._log.warning("%d of %d nodes have arrived: the attempt begins with these", found, most)
                return
            if (lost := dict(self._lost)) and most - len(lost) < least:
                raise NodesMissing("; ".join(map(str, lost.values())), is_stopped=False)
            if not all_within.remaining_seconds:
                within = _ALL_ARRIVE_WITHIN.total_seconds()
                raise NodesMissing(
                    f"{found} of {most} nodes arrived within {within:g} s, expected at least {least}: start more "
                    "workers, or pass a smaller max_concurrent_trials, nodes_per_trial or min_nodes",
                    is_stopped=False,
                )

    def _receive(self, node: int, message: NodeMessage) -> None:
        match message:
            case FromRank(rank=rank, message=sent) if rank in self._ranks:
                self._ranks[rank].deliver(sent.model_dump_json().encode())
            case RankGone(rank=rank, end=end) if rank in self._ranks:
                self._ranks[rank].hang_up(end)
            case NodeStopping():
                self._log.warning("node %d is asked to stop: the trial saves and ends", node)
                self.stop()
            case _:
                pass

    def _lose(self, node: int, reason: Reason) -> None:
        self._lost[node] = reason
        for rank in [*self._ranks.values()]:
            if rank.node == node:
                rank.hang_up(_end_with_node(node, reason))


def _end_with_node(node: int, error: Reason) -> ProcessEnd:
    return ProcessEnd(reason=make_reason("node-lost", node=node, error=error))


class _RemoteRank(TrialChannel):
    """The channel to a rank on another node, whose messages arrive on the connection of that node."""

    def __init__(self, connection: NodeConnection, node: int, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self.node = node
        self._there = Connection(theirs.detach())
        self._of_node, self._rank = connection, rank
        self._end: ProcessEnd | None = None
        super().__init__(Connection(ours.detach()), self)

    def tell(self, message: ToTrial) -> None:
        self._of_node.send(ToRank.model_validate({"rank": self._rank, "message": message}))

    def is_alive(self) -> bool:
        return self._end is None

    def end(self) -> ProcessEnd:
        """Return how it ended: its node ends it, when the attempt is over."""
        return self._end or ProcessEnd(reason=make_reason("rank-elsewhere", node=self.node))

    def deliver(self, message: bytes) -> None:
        """Hand a message of the rank to the supervisor."""
        with suppress(OSError):  # the attempt is over
            self._there.send_bytes(message)

    def hang_up(self, end: ProcessEnd) -> None:
        """Close the channel: the rank is gone."""
        self._end = self._end or end
        with suppress(OSError), socket.socket(fileno=os.dup(self._there.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)


def _waits() -> Callable[[], bool]:
    """Begin to wait for parts; return a function that waits a moment, or returns False once they are too late."""
    late, pauses = Deadline.after(PARTS_WITHIN), iter(_PAUSES_SECONDS)

    def wait() -> bool:
        time.sleep(next(pauses, _PAUSES_SECONDS[-1]))
        return late.remaining_seconds > 0

    return wait


def address_here() -> str:
    """Return where other nodes reach this one: at `MASTER_ADDR` if it is set, else at the address of its route out."""
    if given := os.environ.get("MASTER_ADDR"):
        return given
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_UNROUTED)
        return str(probe.getsockname()[0])
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"
