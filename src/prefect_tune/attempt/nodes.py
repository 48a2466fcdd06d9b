"""An attempt on several nodes; each node is a flow run or task. They share a target, and connect to node 0 over TCP.

    node 0                                              another node
    supervisor ◄─ channel of rank 2 ◄─┐                 ┌─► process of rank 2
                  channel of rank 3 ◄─┴─ TCP, secret ◄──┴─► process of rank 3
                  commit worker: send your parts ──► part on the target ──► manifest

    NodeArrived ──► BeginAttempt ──► restore the same checkpoint ──► processes ══ messages both ways ══► GroupEnded

Node 0 waits for the other nodes and uses their ranks like local ranks, through channels. Only node 0 posts to the
outbox, receives answers, and commits. A node is lost, with all its ranks, when its connection closes or carries nothing
for `NODE_TIMEOUT`. Each message is one JSON document, validated when it is read.

No message from another node is unpickled. Node 0 accepts no rank of an earlier attempt, no second process of a node,
and no part that it has not requested. Each wait for a node has a time limit.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Self, TypeAlias

from prefect_tune.attempt.commit_worker import AttemptTasks, merge_rank_directories, remove_directory
from prefect_tune.attempt.processes.process_channel import (
    Placement,
    RankGroup,
    RankLostError,
    TrialChannel,
    find_free_port,
    open_rank_group,
)
from prefect_tune.attempt.processes.process_output import Log, make_rank_log
from prefect_tune.attempt.search_channel import SearchChannel
from prefect_tune.attempt.supervisor import PARTS_TIMEOUT
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec, get_absolute_sys_path
from prefect_tune.core.checkpoints.commit import ExpectedParts, find_reusable_bytes, send_part, send_part_failure
from prefect_tune.core.display_text import pluralize
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, min_reusable_sequence, parent_of_next_save
from prefect_tune.core.messages.process_messages import CheckpointPart, FromTrial, Start, ToTrial, TrainingEnded
from prefect_tune.core.messages.target_messages import (
    BeginAttempt,
    FromRank,
    GroupEnded,
    NodeAddress,
    NodeAlive,
    NodeArrived,
    NodeMessage,
    NodeStopping,
    RankExited,
    SendPart,
    ToRank,
    find_newest_address,
    list_node_objects,
    node_message_adapter,
)
from prefect_tune.core.reasons import ProcessEnd, Reason, make_reason
from prefect_tune.core.resources import compute_process_count
from prefect_tune.core.restore import read_manifest_or_none
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import CheckpointKey, NodesKey
from prefect_tune.core.storage.object_store import ObjectStore, create_idempotently
from prefect_tune.core.values import hash_bytes
from prefect_tune.journal_access import read_experiment
from prefect_tune.runtime.message_stream import MAX_TRIAL_MESSAGE_BYTES, MalformedMessage, MessageReader
from prefect_tune.storage_retries import with_store
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.scratch import ScratchDirectory
from prefect_tune.stores.local.staging import StagedFiles

HEARTBEAT_INTERVAL = timedelta(seconds=5)
"""The time after which a node sends a heartbeat if it has nothing else to send."""
NODE_TIMEOUT = timedelta(seconds=40)
_CLOSE_TIMEOUT = timedelta(seconds=20)
_ARRIVAL_TIMEOUT = timedelta(minutes=10)
"""How long the flow runs or tasks of other nodes may take to start, including image pulls and machine boots."""
_MIN_NODES_DELAY = timedelta(minutes=2)
"""The time after which `min_nodes` nodes are enough to start an attempt."""
_NODE_0_TIMEOUT = timedelta(minutes=15)
"""How long another node waits for node 0 to start."""
_REQUEST_TIMEOUT = timedelta(seconds=10)
_JOIN_TIMEOUT = timedelta(seconds=10)
_POLL_INTERVAL = timedelta(seconds=0.05)
_ARRIVAL_POLL_SECONDS, _ADDRESS_POLL_SECONDS = 0.1, 1.0
_PART_PAUSES_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5)
_ENVELOPE_BYTES = 1024
_TEST_ADDRESS = ("192.0.2.1", 9)  # in TEST-NET-1 (RFC 5737); a UDP `connect` finds the route, and sends nothing


# The connection between node 0 and another node.

_OnMessage: TypeAlias = Callable[[NodeMessage], None]


def _make_reader(connection: Connection) -> MessageReader[NodeMessage]:
    return MessageReader(connection, node_message_adapter, limit_bytes=MAX_TRIAL_MESSAGE_BYTES + _ENVELOPE_BYTES)


def _make_connection(sock: socket.socket) -> Connection:
    """Turn a socket into a connection. A read times out after 10 s, since the other side may hang or not be a node."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _JOIN_TIMEOUT.seconds, 0))
    return Connection(sock.detach())


class NodeConnection:
    """Sends queued messages to another node in a thread; a second thread passes received messages to `on_message`."""

    def __init__(
        self, connection: Connection, node: int, on_message: _OnMessage, on_lost: Callable[[Reason], None]
    ) -> None:
        self._connection, self._node, self._on_message, self._on_lost = connection, node, on_message, on_lost
        self._messages: queue.SimpleQueue[NodeMessage | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        with self._duplicate_socket() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sender = self._start_thread(self._send_messages)
        self._start_thread(self._read_messages)

    def send(self, message: NodeMessage) -> None:
        """Queue a message; it is dropped if the other node is gone."""
        self._messages.put(message)

    def close(self) -> None:
        """Ignore messages that arrive from now on; send the queued messages, for 20 s at most."""
        self._is_closing.set()
        self._messages.put(None)
        self._sender.join(_CLOSE_TIMEOUT.total_seconds())

    def _duplicate_socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._connection.fileno()))

    def _start_thread(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=copy_context().run, args=(work,), name=f"node-{self._node}", daemon=True)
        thread.start()
        return thread

    def _send_messages(self) -> None:
        with suppress(OSError):  # the reading thread gets the same error, and reports it
            while True:
                try:
                    message = self._messages.get(timeout=HEARTBEAT_INTERVAL.total_seconds())
                except queue.Empty:
                    message = NodeAlive()
                if message is None:
                    break
                self._connection.send_bytes(message.model_dump_json().encode())
            # Do not close yet, because a message that arrives after a close resets the connection, which loses data.
            with self._duplicate_socket() as sock:
                sock.shutdown(socket.SHUT_WR)

    def _read_messages(self) -> None:
        reader = _make_reader(self._connection)
        reason = make_reason("node-silent", node=self._node, seconds=NODE_TIMEOUT.total_seconds())
        try:
            with suppress(EOFError, OSError):
                while (message := reader.read(NODE_TIMEOUT)) is not None:
                    if not self._is_closing.is_set():
                        self._on_message(message)
        except MalformedMessage as error:
            reason = make_reason("node-unreadable", node=self._node, error=str(error))
        if not self._is_closing.is_set():
            self._on_lost(reason)
        self._messages.put(None)
        with suppress(OSError), self._duplicate_socket() as sock:
            sock.shutdown(socket.SHUT_RDWR)  # ends a blocked send
        self._sender.join()
        self._connection.close()


# Node 0.


class NodesMissingError(Exception):
    """Too few nodes arrived in time, or a stop was requested while the attempt waited for them."""

    def __init__(self, message: str, *, is_stop_requested: bool) -> None:
        super().__init__(message)
        self.is_stop_requested = is_stop_requested


class OtherNodes:
    """The nodes of an attempt besides node 0. Enter the context, then call `gather_nodes`."""

    def __init__(
        self, spec: TrialSpec, start: Start, term: int, restored: CheckpointKey | None, secret: str, log: Log
    ) -> None:
        self._spec, self._start, self._term = spec, start, term
        self._restored, self._secret, self._log = restored, secret, log
        self._key = NodesKey(trial=spec.trial, attempt=start.attempt)
        self._lock = threading.Lock()
        self._has_gathered = False
        self._hosts: dict[int, str] = {}
        self._connections: dict[int, NodeConnection] = {}
        self._lost_reasons: dict[int, Reason] = {}
        self._ranks: dict[int, _RemoteRankChannel] = {}
        self.request_stop: Callable[[], None] = lambda: None
        """Requests a stop of the attempt; called when another node has received a stop request (`NodeStopping`)."""
        self.placement = Placement(processes=compute_process_count(spec.processes_per_trial, 1))

    def __enter__(self) -> Self:
        """Start to accept nodes, and publish this node's address on the target."""
        host = find_local_address()
        try:
            self._listener = socket.create_server((host, 0))
        except OSError:  # `host` may be a name to which no socket can be bound, such as that of a Kubernetes service
            self._listener = socket.create_server(("", 0))
        request = hash_bytes(self._secret.encode())
        self._address = NodeAddress(host=host, port=self._listener.getsockname()[1], request=request)
        threading.Thread(target=copy_context().run, args=(self._accept_nodes,), name="accept", daemon=True).start()
        document = seal(self._address)
        try:
            with_store(self._spec.target, lambda store: create_idempotently(store, self._key.address_path, document))
        except BaseException:
            self._stop_listening()
            raise
        return self

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()

    def __exit__(self, *_: object) -> None:
        """End the ranks of all other nodes, and delete the objects that the nodes exchanged."""
        self._stop_listening()
        with self._lock:
            self._has_gathered = True
        self._broadcast(GroupEnded())
        for connection in self._connections.values():
            connection.close()
        for rank in self._ranks.values():
            rank.close(ProcessEnd(reason=make_reason("attempt-over")))
        trial, attempt = self._spec.trial, self._key.attempt
        self._delete_objects(lambda store: [listed.path for listed in list_node_objects(store, trial, attempt)])

    def gather_nodes(self, stop: threading.Event) -> Sequence[TrialChannel]:
        """Wait for the nodes, then start their ranks; return the channels to these ranks. Raises NodesMissingError."""
        self.request_stop = stop.set
        self._log.info("waiting for %d other nodes of attempt %d", self._spec.nodes_per_trial - 1, self._key.attempt)
        self._wait_for_nodes(stop)
        with self._lock:
            self._has_gathered = True
            present = sorted(self._connections.keys() - self._lost_reasons.keys())
        address, port = find_local_address(), find_free_port()
        self.placement = Placement(self.placement.processes, 1 + len(present), 0, (address, port))
        # Make the channels before the ranks start, because messages of a rank without a channel are dropped.
        for index, node in enumerate(present, 1):
            for rank in range(index * self.placement.processes, (index + 1) * self.placement.processes):
                self._ranks[rank] = _RemoteRankChannel(self._connections[node], node, rank)
                if (reason := self._lost_reasons.get(node)) is not None:
                    self._ranks[rank].on_node_lost(reason)
        start = self._start.model_copy(update={"trainable": "", "stopper": "", "import_path": ()})
        nodes, term, restored = (0, *present), self._term, self._restored
        self._broadcast(
            BeginAttempt(nodes=nodes, address=address, port=port, term=term, start=start, restored=restored)
        )
        others = ", ".join(f"{node} ({self._hosts[node]})" for node in present) or "no other node"
        self._log.info("%s at %s: this node, and %s", pluralize(len(nodes), "node", "nodes"), address, others)
        return [*self._ranks.values()]

    @contextmanager
    def requesting_parts(self, key: CheckpointKey, trial: Trial, nodes: Sequence[int]) -> Iterator[ExpectedParts]:
        """Request the parts of the checkpoint `key` from `nodes`; delete the parts when the block ends.

        `trial` is the trial's state before the save. End the block after the commit, or after the save has failed.
        """
        parent, collected = parent_of_next_save(self._spec.trial, trial), min_reusable_sequence(trial)
        self._broadcast(SendPart(key=key, parent=parent, collected_up_to=collected))

        def start_wait() -> Callable[[], bool]:
            deadline, pauses = Deadline.after(PARTS_TIMEOUT), iter(_PART_PAUSES_SECONDS)

            def pause_before_poll() -> bool:
                """Pause before the next poll; return whether time is left."""
                time.sleep(next(pauses, _PART_PAUSES_SECONDS[-1]))
                return deadline.remaining_seconds > 0

            return pause_before_poll

        yield ExpectedParts(self._key, self._term, tuple(nodes), start_wait, lambda: dict(self._lost_reasons))
        paths = [self._key.part_path(key, node) for node in nodes]
        threading.Thread(target=copy_context().run, args=(self._delete_objects, lambda _: paths), daemon=True).start()

    def _delete_objects(self, list_paths: Callable[[ObjectStore], Sequence[str]]) -> None:
        """Try once to delete objects. Any that remain are deleted at the end of this attempt or of a later attempt."""
        with suppress(TuneError), self._spec.target.open(timeout=_REQUEST_TIMEOUT) as store:
            store.delete(list_paths(store))

    def _broadcast(self, message: NodeMessage) -> None:
        for connection in self._connections.values():
            connection.send(message)

    def _accept_nodes(self) -> None:
        while self._listener.fileno() != -1:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # the listener is closed, or the process has no free file descriptor
                time.sleep(_ARRIVAL_POLL_SECONDS)
                continue
            threading.Thread(target=copy_context().run, args=(self._add_node, sock), name="join", daemon=True).start()

    def _add_node(self, sock: socket.socket) -> None:
        """Add the node that has connected, if it has the secret and is expected; reject it otherwise."""
        connection, key = _make_connection(sock), self._address.connection_key(self._key, self._secret)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            arrived = _make_reader(connection).read(_JOIN_TIMEOUT)
        except (AuthenticationError, EOFError, OSError, MalformedMessage) as error:
            self._log.warning("rejected a connection to node 0: %s: %s", type(error).__name__, error)
            connection.close()
            return
        with self._lock:
            expected = set() if self._has_gathered else set(range(1, self._spec.nodes_per_trial)) - self._hosts.keys()
            if isinstance(arrived, NodeArrived) and (node := arrived.node) in expected:
                on_message, on_lost = partial(self._on_node_message, node), partial(self._on_node_lost, node)
                self._hosts[node] = arrived.host
                self._connections[node] = NodeConnection(connection, node, on_message, on_lost)
                return
        # The node is too late, or another of its processes is connected already: ignore this connection from now on.
        rejected = NodeConnection(connection, 0, lambda _: None, lambda _: None)
        rejected.send(GroupEnded())
        rejected.close()

    def _wait_for_nodes(self, stop: threading.Event) -> None:
        all_nodes, min_nodes = self._spec.nodes_per_trial, self._spec.min_nodes or self._spec.nodes_per_trial
        deadline, fewer_after = Deadline.after(_ARRIVAL_TIMEOUT), Deadline.after(_MIN_NODES_DELAY)
        while (count := 1 + len(self._hosts.keys() - self._lost_reasons.keys())) < all_nodes:
            if stop.wait(_ARRIVAL_POLL_SECONDS):
                raise NodesMissingError("stop requested while the attempt waited for its nodes", is_stop_requested=True)
            if count >= min_nodes and not fewer_after.remaining_seconds:
                self._log.warning("the attempt starts with the %d of %d nodes that arrived", count, all_nodes)
                return
            if (lost := dict(self._lost_reasons)) and all_nodes - len(lost) < min_nodes:
                raise NodesMissingError("; ".join(map(str, lost.values())), is_stop_requested=False)
            if not deadline.remaining_seconds:
                seconds = _ARRIVAL_TIMEOUT.total_seconds()
                raise NodesMissingError(
                    f"{count} of {all_nodes} nodes arrived within {seconds:g} s, expected at least {min_nodes}: start "
                    "more workers, or pass a smaller max_concurrent_trials, nodes_per_trial or min_nodes",
                    is_stop_requested=False,
                )

    def _on_node_message(self, node: int, message: NodeMessage) -> None:
        match message:
            case FromRank(rank=rank, message=sent) if rank in self._ranks:
                self._ranks[rank].forward_message(sent.model_dump_json().encode())
            case RankExited(rank=rank, end=end) if rank in self._ranks:
                self._ranks[rank].close(end)
            case NodeStopping():
                self._log.warning("node %d received a stop request, so the trial saves and ends", node)
                self.request_stop()
            case _:
                pass

    def _on_node_lost(self, node: int, reason: Reason) -> None:
        self._lost_reasons[node] = reason
        for rank in [*self._ranks.values()]:
            if rank.node == node:
                rank.on_node_lost(reason)


class _RemoteRankChannel(TrialChannel):
    """The channel to a rank on another node; the rank's messages arrive through the connection to that node."""

    def __init__(self, connection: NodeConnection, node: int, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self.node = node
        self._far_end = Connection(theirs.detach())
        self._node_connection, self._rank = connection, rank
        self._end: ProcessEnd | None = None
        super().__init__(Connection(ours.detach()), self)

    def send(self, message: ToTrial) -> None:
        self._node_connection.send(ToRank.model_validate({"rank": self._rank, "message": message}))

    def is_alive(self) -> bool:
        return self._end is None

    def end(self) -> ProcessEnd:
        """Return how the rank ended. Do not end its process: the other node does this when the attempt is over."""
        return self._end or ProcessEnd(reason=make_reason("rank-elsewhere", node=self.node))

    def forward_message(self, message: bytes) -> None:
        """Pass a message of the rank to the supervisor."""
        with suppress(OSError):  # the supervisor no longer reads once the attempt is over
            self._far_end.send_bytes(message)

    def on_node_lost(self, reason: Reason) -> None:
        """Close the channel because the node, and so this rank, is gone."""
        self.close(ProcessEnd(reason=make_reason("node-lost", node=self.node, error=reason)))

    def close(self, end: ProcessEnd) -> None:
        """Close the channel because the rank is gone; `end` says how the rank ended."""
        self._end = self._end or end
        with suppress(OSError), socket.socket(fileno=os.dup(self._far_end.fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)


def find_local_address() -> str:
    """Return the address for other nodes to connect to: `MASTER_ADDR` if set, else the IP of the default route."""
    if configured := os.environ.get("MASTER_ADDR"):
        return configured
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_TEST_ADDRESS)
        return str(probe.getsockname()[0])
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


# Another node.


def train_node(
    spec: TrialSpec, request: AttemptRequest, node: int, channel: SearchChannel, tasks: AttemptTasks, log: Log
) -> Reason:
    """Train the ranks of a node other than node 0 until the attempt is over; return why this training ended."""
    channel.start_polling()
    connected = _connect_to_node_0(spec, request, channel.run_stop)
    if isinstance(connected, Reason):
        return connected
    return _WorkerNode(spec, request, *connected, node, channel, tasks, log).run()


def _connect_to_node_0(
    spec: TrialSpec, request: AttemptRequest, stop: threading.Event
) -> tuple[NodesKey, Connection] | Reason:
    """Connect to node 0 of the requested attempt or of a later attempt. If that fails, return why."""
    deadline, reachable_until = Deadline.after(_NODE_0_TIMEOUT), None
    first_attempt, poll_count = max(1, request.attempt), 0
    while deadline.remaining_seconds:
        newest = with_store(spec.target, lambda store: find_newest_address(store, spec.trial, first_attempt))
        if newest is not None:
            key, address = newest
            with suppress(AuthenticationError, EOFError, OSError):
                return key, _open_connection(address, address.connection_key(key, request.secret))
            reachable_until = reachable_until or Deadline.after(NODE_TIMEOUT)
            if not reachable_until.remaining_seconds:
                return make_reason("node-silent", node=0, seconds=NODE_TIMEOUT.total_seconds())
        if poll_count % 10 == 9 and _has_attempt_ended(spec, request):
            return make_reason("node-not-needed")
        poll_count += 1
        if stop.wait(_ADDRESS_POLL_SECONDS):
            return make_reason("stopped-before-start")
    return make_reason("node-0-late", seconds=_NODE_0_TIMEOUT.total_seconds())


def _open_connection(address: NodeAddress, key: bytes) -> Connection:
    """Connect; authenticate both sides with the key. Raises AuthenticationError, EOFError or OSError."""
    sock = socket.create_connection((address.host, address.port), _JOIN_TIMEOUT.total_seconds())
    sock.settimeout(None)
    connection = _make_connection(sock)
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return connection


def _has_attempt_ended(spec: TrialSpec, request: AttemptRequest) -> bool:
    """Read the journal; return whether the requested attempt is over. Return False if the target fails."""
    try:
        trial = read_experiment(spec.target, spec.trial.journal_key).trials.get(spec.trial.trial)
    except TuneError:
        return False
    return trial is not None and (
        trial.attempt > request.attempt or (trial.attempt == request.attempt and trial.phase is not Phase.RUNNING)
    )


class _WorkerNode:
    """A node other than node 0, which trains its own ranks, and forwards messages between these ranks and node 0."""

    def __init__(
        self,
        spec: TrialSpec,
        request: AttemptRequest,
        key: NodesKey,
        connection: Connection,
        node: int,
        channel: SearchChannel,
        tasks: AttemptTasks,
        log: Log,
    ) -> None:
        self._spec, self._request, self._key, self._connection, self._node = spec, request, key, connection, node
        self._channel, self._tasks, self._log = channel, tasks, log
        self._inbox: queue.SimpleQueue[NodeMessage | Reason] = queue.SimpleQueue()  # a `Reason` says why node 0 is lost
        self._end_reason: Reason | None = None
        self._is_stop_forwarded = False
        self._first_rank = 0
        self._term = 0
        self._part_directories: dict[int, dict[int, Path]] = {}
        """Maps a step, and then a rank, to the directory of the files that the rank saved at that step."""
        self._merged_directories: dict[int, Path] = {}
        self._part_lock = threading.Lock()

    def run(self) -> Reason:
        self._node_0 = NodeConnection(self._connection, 0, self._inbox.put, self._inbox.put)
        try:
            self._node_0.send(NodeArrived(node=self._node, host=socket.gethostname()))
            while self._end_reason is None:
                match self._take_message(_POLL_INTERVAL):
                    case BeginAttempt() as begin:
                        self._run_ranks(begin)
                    case GroupEnded():
                        self._end_reason = make_reason("node-not-needed")
                    case _:
                        self._forward_stop_request()
        finally:
            self._node_0.close()
        return self._end_reason

    def _take_message(self, timeout: timedelta) -> NodeMessage | None:
        try:
            message = self._inbox.get(timeout=timeout.total_seconds())
        except queue.Empty:
            return None
        if not isinstance(message, Reason):
            return message
        self._end_reason = message
        return None

    def _forward_stop_request(self) -> None:
        if self._channel.run_stop.is_set() and not self._is_stop_forwarded:
            self._is_stop_forwarded = True
            self._node_0.send(NodeStopping())

    def _run_ranks(self, begin: BeginAttempt) -> None:
        index, processes = begin.nodes.index(self._node), compute_process_count(self._spec.processes_per_trial, 1)
        placement = Placement(processes, len(begin.nodes), index, (begin.address, begin.port))
        self._first_rank, self._term = placement.first_rank, begin.term
        with ScratchDirectory("staging", "artifacts") as scratch, ExitStack() as opened:
            try:
                restored = None
                if begin.restored is not None:
                    restored = str(self._tasks.restore_checkpoint(begin.restored, scratch / "restored"))
                local = {  # the code to run comes from this node's own parameters, never from node 0
                    "trainable": self._spec.trainable,
                    "stopper": self._spec.stopper,
                    "import_path": get_absolute_sys_path(),
                    "directory": str(scratch / "artifacts"),
                    "staging": str(scratch / "staging"),
                    "restored_directory": restored,
                }
                start = begin.start.model_copy(update=local)
                group = opened.enter_context(open_rank_group(start, placement, self._open_process))
            except (TuneError, OSError) as error:
                self._end_reason = make_reason("node-not-started", node=self._node, error=str(error))
                for rank in range(self._first_rank, self._first_rank + processes):
                    self._node_0.send(RankExited(rank=rank, end=ProcessEnd(reason=self._end_reason)))
                return
            self._forward_messages(group)
            group.end_all_ranks()

    def _open_process(self, start: Start) -> AbstractContextManager[TrialChannel]:
        return self._channel.open_process(start, make_rank_log(self._log, start.rank.rank), self._request.environment)

    def _forward_messages(self, group: RankGroup) -> None:
        """Forward messages in both directions until the attempt is over."""
        while self._end_reason is None:
            try:
                if (received := group.receive(_POLL_INTERVAL)) is not None:
                    self._forward_to_node_0(group, *received)
            except RankLostError as error:
                invalid_use = ProcessEnd(reason=make_reason("invalid-use", text=str(error)))
                end = group.end_rank(error.rank) if error.is_gone else invalid_use
                self._node_0.send(RankExited(rank=self._first_rank + error.rank, end=end))
            self._forward_stop_request()
            while self._end_reason is None and (message := self._take_message(timedelta(0))) is not None:
                match message:
                    case ToRank(rank=rank, message=to_trial) if 0 <= rank - self._first_rank < group.world_size:
                        group.send_to_rank(rank - self._first_rank, to_trial)
                    case SendPart() as wanted:
                        # Upload in a daemon thread, because an unresponsive target must not delay this node's end.
                        threading.Thread(target=copy_context().run, args=(self._send_part, wanted), daemon=True).start()
                    case GroupEnded():
                        self._end_reason = make_reason("attempt-over")
                    case _:
                        pass

    def _forward_to_node_0(self, group: RankGroup, local_rank: int, message: FromTrial) -> None:
        rank = self._first_rank + local_rank
        if isinstance(message, CheckpointPart) and message.directory is not None:
            self._part_directories.setdefault(message.step, {})[rank] = Path(message.directory)
            message = message.model_copy(update={"directory": None, "node": self._node})
        if isinstance(message, TrainingEnded):
            group.stop_receiving(local_rank)
        self._node_0.send(FromRank(rank=rank, message=message))

    def _send_part(self, wanted: SendPart) -> None:
        """Upload this node's files of a step. If there are none, do nothing, because node 0 then expects no part."""
        step, sender = wanted.key.step, (self._key, self._node, self._term)
        with self._part_lock:
            if step not in self._part_directories and step not in self._merged_directories:
                return
            try:
                if step not in self._merged_directories:
                    directories = self._part_directories.pop(step)
                    first, *others = sorted(directories)
                    merge_rank_directories(directories[first], {rank: directories[rank] for rank in others})
                    self._merged_directories[step] = directories[first]
                directory, timeout = self._merged_directories[step], self._spec.sync.sync_timeout
                with_store(self._spec.target, lambda store: _upload_part(store, wanted, directory, sender), timeout)
            except TuneError as error:
                if self._end_reason:
                    return  # the files are gone, because the scratch directory is being removed
                self._log.warning("the part of step %d could not be uploaded: %s", step, error)
                reason = f"{type(error).__name__}: {error}"
                try:
                    with_store(self._spec.target, lambda store: send_part_failure(store, wanted.key, sender, reason))
                except TuneError as second_error:  # node 0 then waits for the part until its deadline
                    self._log.warning("could not tell node 0 of the missing part of step %d: %s", step, second_error)
            for earlier in [merged for merged in self._merged_directories if merged < step]:
                remove_directory(self._merged_directories.pop(earlier))


def _upload_part(store: ObjectStore, wanted: SendPart, directory: Path, sender: tuple[NodesKey, int, int]) -> None:
    parent = read_manifest_or_none(store, wanted.parent)
    reuse = find_reusable_bytes(store, wanted.key.trial, parent, wanted.collected_up_to)
    send_part(store, wanted.key, StagedFiles(directory), sender=sender, reuse=reuse)
