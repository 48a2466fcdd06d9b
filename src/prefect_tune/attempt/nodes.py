"""An attempt on several nodes: one flow run or task each, which share the target and a TCP connection to node 0.

    node 0                                              another node
    supervisor ◄─ channel of rank 2 ◄─┐                 ┌─► process of rank 2
                  channel of rank 3 ◄─┴─ TCP, secret ◄──┴─► process of rank 3
                  commit worker: send your parts ──► part on the target ──► manifest

    node 0 ──► arrived ──► begin ──► restores the same checkpoint ──► processes ══ messages both ways ══► over

Node 0 waits for the others, whose ranks become channels like its own: it posts to the outbox, decides, and commits. The
others post nothing. A node that is lost is the end of its ranks: its connection was closed, or has carried nothing
for `SILENCE_TIMEOUT`. Each message is one JSON document, validated as it is read.

Never: `recv`, which unpickles; a rank of an earlier attempt, or a second process of one node; a wait for a node without
a deadline; a part that node 0 has not asked for.
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
from typing import Self

from prefect_tune.attempt.commit_worker import AttemptTasks, merge, remove_directory
from prefect_tune.attempt.processes.process_channel import (
    Placement,
    RankEnded,
    RankGroup,
    TrialChannel,
    free_port,
    rank_group,
)
from prefect_tune.attempt.processes.process_output import Log, rank_log
from prefect_tune.attempt.search_link import SearchLink
from prefect_tune.attempt.supervisor import PARTS_WITHIN
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec, import_path
from prefect_tune.core.checkpoints.commit import PartsOfSave, refuse_part, reusable, send_part
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, parent_of_next, reused_from
from prefect_tune.core.messages.process_messages import FromTrial, Part, Start, ToTrial, TrialEnded
from prefect_tune.core.messages.target_messages import (
    Arrived,
    Begin,
    FromRank,
    GroupOver,
    NodeAddress,
    NodeAlive,
    NodeMessage,
    NodeStopping,
    RankGone,
    SendPart,
    ToRank,
    newest_address,
    node_message,
    node_objects_up_to,
)
from prefect_tune.core.reasons import ProcessEnd, Reason, make_reason
from prefect_tune.core.resources import processes_on
from prefect_tune.core.restore import manifest_if_readable
from prefect_tune.core.shown_text import plural
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.layout import CheckpointKey, NodesKey
from prefect_tune.core.storage.object_store import ObjectStore, create_or_recognize
from prefect_tune.core.values import digest_of
from prefect_tune.journal_access import read_experiment
from prefect_tune.runtime.message_stream import FROM_TRIAL_BYTES, MalformedMessage, MessageReader
from prefect_tune.storage_retries import on_target
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.scratch import ScratchDirectory
from prefect_tune.stores.local.staging import StagedFiles

ALIVE_INTERVAL = timedelta(seconds=5)
"""How often a node says that it is alive."""
SILENCE_TIMEOUT = timedelta(seconds=40)
_CLOSE_TIMEOUT = timedelta(seconds=20)
_ALL_ARRIVE_WITHIN = timedelta(minutes=10)
"""How long the runs or tasks of the other nodes may take to begin: images are pulled, machines are started."""
_FEWER_AFTER = timedelta(minutes=2)
"""After which time an attempt begins with `min_nodes`."""
_FIRST_NODE_WITHIN = timedelta(minutes=15)
"""How long node 0 may take to begin after another node."""
_REQUEST_TIMEOUT = timedelta(seconds=10)
_JOIN_TIMEOUT = timedelta(seconds=10)
_TICK = timedelta(seconds=0.05)
_ARRIVAL_POLL_SECONDS, _ADDRESS_POLL_SECONDS = 0.1, 1.0
_PART_PAUSES_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5)
_ENVELOPE_BYTES = 1024
_UNROUTED = ("192.0.2.1", 9)  # TEST-NET-1 (RFC 5737): choosing a route to it sends nothing


# The connection between node 0 and another node.


def _reader_of(connection: Connection) -> MessageReader[NodeMessage]:
    return MessageReader(connection, node_message, limit_bytes=FROM_TRIAL_BYTES + _ENVELOPE_BYTES)


def _make_connection(link: socket.socket) -> Connection:
    """Return the connection of a socket. Each read of it has 10 s: the other side may be stopped, or no node."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _JOIN_TIMEOUT.seconds, 0))
    return Connection(link.detach())


class NodeConnection:
    """Sends messages to another node in order, and hands over those that arrive, each in a thread."""

    def __init__(
        self, connection: Connection, node: int, receive: Callable[[NodeMessage], None], lose: Callable[[Reason], None]
    ) -> None:
        self._connection, self._node, self._receive, self._lose = connection, node, receive, lose
        self._messages: queue.SimpleQueue[NodeMessage | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        with self._open_socket() as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sender = self._start(self._send_messages)
        self._start(self._read_messages)

    def send(self, message: NodeMessage) -> None:
        """Queue a message; if the other node is gone it is dropped."""
        self._messages.put(message)

    def close(self) -> None:
        """Send what is queued, for 20 s at most, and hand over nothing more."""
        self._is_closing.set()
        self._messages.put(None)
        self._sender.join(_CLOSE_TIMEOUT.total_seconds())

    def _open_socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._connection.fileno()))

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=copy_context().run, args=(work,), name=f"node-{self._node}", daemon=True)
        thread.start()
        return thread

    def _send_messages(self) -> None:
        with suppress(OSError):  # the reader sees it too
            while True:
                try:
                    message = self._messages.get(timeout=ALIVE_INTERVAL.total_seconds())
                except queue.Empty:
                    message = NodeAlive()
                if message is None:
                    break
                self._connection.send_bytes(message.model_dump_json().encode())
            # The other side reads what was sent, and closes: if this side did, what still arrives would discard that.
            with self._open_socket() as link:
                link.shutdown(socket.SHUT_WR)

    def _read_messages(self) -> None:
        reader = _reader_of(self._connection)
        reason = make_reason("node-silent", node=self._node, seconds=SILENCE_TIMEOUT.total_seconds())
        try:
            while (message := reader.read(SILENCE_TIMEOUT)) is not None:
                if not self._is_closing.is_set():
                    self._receive(message)
        except (EOFError, OSError):
            pass
        except MalformedMessage as error:
            reason = make_reason("node-unreadable", node=self._node, error=str(error))
        if not self._is_closing.is_set():
            self._lose(reason)
        self._messages.put(None)
        with suppress(OSError), self._open_socket() as link:
            link.shutdown(socket.SHUT_RDWR)  # ends a send that waits
        self._sender.join()
        self._connection.close()


# Node 0.


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

    def __enter__(self) -> Self:
        """Listen for the nodes."""
        host = address_here()
        try:
            self._listener = socket.create_server((host, 0))
        except OSError:  # the name of a service, for example
            self._listener = socket.create_server(("", 0))
        request = digest_of(self._secret.encode())
        self._address = NodeAddress(host=host, port=self._listener.getsockname()[1], request=request)
        threading.Thread(target=copy_context().run, args=(self._accept,), name="accept-nodes", daemon=True).start()
        document = seal(self._address)
        try:
            on_target(self._spec.target, lambda store: create_or_recognize(store, self._key.address_path, document))
        except BaseException:
            self._stop_listening()
            raise
        return self

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def __exit__(self, *_: object) -> None:
        """End the ranks of all nodes, and delete what the nodes have left for one another."""
        self._stop_listening()
        with self._joining:
            self._has_begun = True
        self._send(GroupOver())
        for connection in self._connections.values():
            connection.close()
        for rank in self._ranks.values():
            rank.hang_up(ProcessEnd(reason=make_reason("attempt-over")))
        trial, attempt = self._spec.trial, self._key.attempt
        self._delete(lambda store: [listed.path for listed in node_objects_up_to(store, trial, attempt)])

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
        # Before a node begins: what it sends for a rank that is not known here is dropped.
        for place, node in enumerate(present, 1):
            for rank in range(place * self.placement.processes, (place + 1) * self.placement.processes):
                self._ranks[rank] = _RemoteRank(self._connections[node], node, rank)
                if (reason := self._lost.get(node)) is not None:
                    self._ranks[rank].lose_node(reason)
        self._send(
            Begin(nodes=nodes, address=address, port=port, term=self._term, start=start, restored=self._restored)
        )
        where = ", ".join(f"{node} ({self._arrived[node]})" for node in present)
        self._log.info("%s at %s: this one, and %s", plural(len(nodes), "node", "nodes"), address, where or "no other")
        return [*self._ranks.values()]

    @contextmanager
    def parts(self, key: CheckpointKey, before: Trial, nodes: Sequence[int]) -> Iterator[PartsOfSave]:
        """Have the `nodes` send their parts of the checkpoint `key`, and delete the parts when the block is left.

        `before` is the trial's state. Leave the block when the checkpoint is committed, or given up.
        """
        parent, collected = parent_of_next(self._spec.trial, before), reused_from(before)
        self._send(SendPart(key=key, parent=parent, collected_up_to=collected))

        def begin_to_wait() -> Callable[[], bool]:
            late, pauses = Deadline.after(PARTS_WITHIN), iter(_PART_PAUSES_SECONDS)

            def wait() -> bool:
                """Wait a moment; return False once the parts are too late."""
                time.sleep(next(pauses, _PART_PAUSES_SECONDS[-1]))
                return late.remaining_seconds > 0

            return wait

        yield PartsOfSave(self._key, self._term, tuple(nodes), begin_to_wait, lambda: dict(self._lost))
        paths = [self._key.part_path(key, node) for node in nodes]
        threading.Thread(target=copy_context().run, args=(self._delete, lambda _: paths), daemon=True).start()

    def _delete(self, paths_in: Callable[[ObjectStore], Sequence[str]]) -> None:
        """Delete these objects, if the target answers: else the end of the attempt, or the next one, does."""
        with suppress(TuneError), self._spec.target.open(timeout=_REQUEST_TIMEOUT) as store:
            store.delete(paths_in(store))

    def _send(self, message: NodeMessage) -> None:
        for connection in self._connections.values():
            connection.send(message)

    def _accept(self) -> None:
        while self._listener.fileno() != -1:
            try:
                link, _ = self._listener.accept()
            except OSError:  # it was closed, or no descriptor is free at this moment
                time.sleep(_ARRIVAL_POLL_SECONDS)
                continue
            run = copy_context().run
            threading.Thread(target=run, args=(self._join, link), name="join-node", daemon=True).start()

    def _join(self, link: socket.socket) -> None:
        """Add the node that has connected, if it has the secret, and is expected."""
        connection, key = _make_connection(link), self._address.connection_key(self._key, self._secret)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            arrived = _reader_of(connection).read(_JOIN_TIMEOUT)
        except (AuthenticationError, EOFError, OSError, MalformedMessage) as error:
            self._log.warning("refused a connection to node 0: %s: %s", type(error).__name__, error)
            connection.close()
            return
        with self._joining:
            expected = set() if self._has_begun else set(range(1, self._spec.nodes_per_trial)) - self._arrived.keys()
            if isinstance(arrived, Arrived) and (node := arrived.node) in expected:
                receive, lose = partial(self._receive, node), partial(self._lose, node)
                self._arrived[node] = arrived.host
                self._connections[node] = NodeConnection(connection, node, receive, lose)
                return
        # What a second process of a node sends, and its end, are not those of the node.
        refused = NodeConnection(connection, 0, lambda _: None, lambda _: None)
        refused.send(GroupOver())
        refused.close()

    def _wait(self, stop: threading.Event) -> None:
        most, least = self._spec.nodes_per_trial, self._spec.min_nodes or self._spec.nodes_per_trial
        all_within, fewer_after = Deadline.after(_ALL_ARRIVE_WITHIN), Deadline.after(_FEWER_AFTER)
        while (count := 1 + len(self._arrived.keys() - self._lost.keys())) < most:
            if stop.wait(_ARRIVAL_POLL_SECONDS):
                raise NodesMissing("asked to stop while it waited for its nodes", is_stopped=True)
            if count >= least and not fewer_after.remaining_seconds:
                self._log.warning("%d of %d nodes have arrived: the attempt begins with these", count, most)
                return
            if (lost := dict(self._lost)) and most - len(lost) < least:
                raise NodesMissing("; ".join(map(str, lost.values())), is_stopped=False)
            if not all_within.remaining_seconds:
                within = _ALL_ARRIVE_WITHIN.total_seconds()
                raise NodesMissing(
                    f"{count} of {most} nodes arrived within {within:g} s, expected at least {least}: start more "
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
                rank.lose_node(reason)


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

    def lose_node(self, reason: Reason) -> None:
        """Close the channel: the node of the rank is gone."""
        self.hang_up(ProcessEnd(reason=make_reason("node-lost", node=self.node, error=reason)))

    def hang_up(self, end: ProcessEnd) -> None:
        """Close the channel: the rank is gone."""
        self._end = self._end or end
        with suppress(OSError), socket.socket(fileno=os.dup(self._there.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)


def address_here() -> str:
    """Return where other nodes reach this one: at `MASTER_ADDR` if it is set, else at the address of its route out."""
    if configured := os.environ.get("MASTER_ADDR"):
        return configured
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_UNROUTED)
        return str(probe.getsockname()[0])
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


# Another node.


def train_node(
    spec: TrialSpec, request: AttemptRequest, node: int, link: SearchLink, tasks: AttemptTasks, log: Log
) -> Reason:
    """Train the ranks of a node until the attempt is over; return why it is."""
    link.watch()
    joined = _connect(spec, request, link.stop)
    if isinstance(joined, Reason):
        return joined
    return _OtherNode(spec, request, *joined, node, link, tasks, log).run()


def _connect(spec: TrialSpec, request: AttemptRequest, stop: threading.Event) -> tuple[NodesKey, Connection] | Reason:
    """Connect to node 0 of the requested attempt, or of a later one; or return why there will be none."""
    until, reachable_until = Deadline.after(_FIRST_NODE_WITHIN), None
    at_least, looks = max(1, request.attempt), 0
    while until.remaining_seconds:
        found = on_target(spec.target, lambda store: newest_address(store, spec.trial, at_least))
        if found is not None:
            key, address = found
            with suppress(AuthenticationError, EOFError, OSError):
                return key, _connect_to(address, address.connection_key(key, request.secret))
            reachable_until = reachable_until or Deadline.after(SILENCE_TIMEOUT)
            if not reachable_until.remaining_seconds:
                return make_reason("node-silent", node=0, seconds=SILENCE_TIMEOUT.total_seconds())
        if looks % 10 == 9 and _is_over(spec, request):
            return make_reason("node-not-needed")
        looks += 1
        if stop.wait(_ADDRESS_POLL_SECONDS):
            return make_reason("stopped-before-start")
    return make_reason("node-0-late", seconds=_FIRST_NODE_WITHIN.total_seconds())


def _connect_to(address: NodeAddress, key: bytes) -> Connection:
    """Return a connection both of whose sides have the key. Raises AuthenticationError, EOFError, OSError."""
    link = socket.create_connection((address.host, address.port), _JOIN_TIMEOUT.total_seconds())
    link.settimeout(None)
    connection = _make_connection(link)
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return connection


def _is_over(spec: TrialSpec, request: AttemptRequest) -> bool:
    try:
        trial = read_experiment(spec.target, spec.trial.of_experiment).trials.get(spec.trial.trial)
    except TuneError:
        return False
    return trial is not None and (
        trial.attempt > request.attempt or (trial.attempt == request.attempt and trial.phase is not Phase.RUNNING)
    )


class _OtherNode:
    def __init__(
        self,
        spec: TrialSpec,
        request: AttemptRequest,
        key: NodesKey,
        connection: Connection,
        node: int,
        link: SearchLink,
        tasks: AttemptTasks,
        log: Log,
    ) -> None:
        self._spec, self._request, self._key, self._node = spec, request, key, node
        self._link, self._tasks, self._log = link, tasks, log
        self._connection = connection
        self._inbox: queue.SimpleQueue[NodeMessage | Reason] = queue.SimpleQueue()  # a reason: node 0 is lost
        self._over: Reason | None = None
        self._stop_was_asked = False
        self._first_rank = 0
        self._term = 0
        self._parts: dict[int, dict[int, Path]] = {}
        """The directories of each step, by rank."""
        self._merged: dict[int, Path] = {}
        self._sending = threading.Lock()

    def run(self) -> Reason:
        self._node_0 = NodeConnection(self._connection, 0, self._inbox.put, self._inbox.put)
        try:
            self._node_0.send(Arrived(node=self._node, host=socket.gethostname()))
            while self._over is None:
                match self._next(_TICK):
                    case Begin() as begin:
                        self._train(begin)
                    case GroupOver():
                        self._over = make_reason("node-not-needed")
                    case _:
                        self._pass_on_stop()
        finally:
            self._node_0.close()
        return self._over

    def _next(self, timeout: timedelta) -> NodeMessage | None:
        try:
            message = self._inbox.get(timeout=timeout.total_seconds())
        except queue.Empty:
            return None
        if not isinstance(message, Reason):
            return message
        self._over = message
        return None

    def _pass_on_stop(self) -> None:
        if self._link.stop.is_set() and not self._stop_was_asked:
            self._stop_was_asked = True
            self._node_0.send(NodeStopping())

    def _train(self, begin: Begin) -> None:
        place, processes = begin.nodes.index(self._node), processes_on(self._spec.processes_per_trial, 1)
        placement = Placement(processes, len(begin.nodes), place, (begin.address, begin.port))
        self._first_rank, self._term = placement.first_rank, begin.term
        with ScratchDirectory("staging", "artifacts") as scratch, ExitStack() as opened:
            try:
                restored = None
                if begin.restored is not None:
                    restored = str(self._tasks.restore(begin.restored, scratch / "restored"))
                here = {  # the code is that of this node's own parameters: nothing on the target chooses it
                    "trainable": self._spec.trainable,
                    "stopper": self._spec.stopper,
                    "import_path": import_path(),
                    "directory": str(scratch / "artifacts"),
                    "staging": str(scratch / "staging"),
                    "restored": restored,
                }
                start = begin.start.model_copy(update=here)
                group = opened.enter_context(rank_group(start, placement, self._open_process))
            except (TuneError, OSError) as error:
                self._over = make_reason("node-not-started", node=self._node, error=str(error))
                for rank in range(self._first_rank, self._first_rank + processes):
                    self._node_0.send(RankGone(rank=rank, end=ProcessEnd(reason=self._over)))
                return
            self._serve(group)
            group.end_all()

    def _open_process(self, start: Start) -> AbstractContextManager[TrialChannel]:
        return self._link.process(start, rank_log(self._log, start.rank.rank), self._request.environment)

    def _serve(self, group: RankGroup) -> None:
        """Pass messages on, both ways, until the attempt is over."""
        while self._over is None:
            try:
                if (received := group.receive(_TICK)) is not None:
                    self._pass_on(group, *received)
            except RankEnded as ended:
                broken = ProcessEnd(reason=make_reason("invalid-use", text=str(ended)))
                end = group.end(ended.rank) if ended.is_gone else broken
                self._node_0.send(RankGone(rank=self._first_rank + ended.rank, end=end))
            self._pass_on_stop()
            while self._over is None and (message := self._next(timedelta(0))) is not None:
                match message:
                    case ToRank(rank=rank, message=to_trial) if 0 <= rank - self._first_rank < group.world_size:
                        group.tell_rank(rank - self._first_rank, to_trial)
                    case SendPart() as wanted:
                        # A daemon: the end of this node does not wait for a target that does not answer.
                        send = threading.Thread(target=copy_context().run, args=(self._send_part, wanted), daemon=True)
                        send.start()
                    case GroupOver():
                        self._over = make_reason("attempt-over")
                    case _:
                        pass

    def _pass_on(self, group: RankGroup, local_rank: int, message: FromTrial) -> None:
        rank = self._first_rank + local_rank
        if isinstance(message, Part) and message.directory is not None:
            self._parts.setdefault(message.step, {})[rank] = Path(message.directory)
            message = message.model_copy(update={"directory": None, "node": self._node})
        if isinstance(message, TrialEnded):
            group.leave(local_rank)
        self._node_0.send(FromRank(rank=rank, message=message))

    def _send_part(self, wanted: SendPart) -> None:
        """Send the files of a step; without any of that step here, nothing is expected of this node."""
        step, of = wanted.key.step, (self._key, self._node, self._term)
        with self._sending:
            if step not in self._parts and step not in self._merged:
                return
            try:
                if step not in self._merged:
                    directories = self._parts.pop(step)
                    first, *others = sorted(directories)
                    merge(directories[first], {rank: directories[rank] for rank in others})
                    self._merged[step] = directories[first]
                directory, within = self._merged[step], timedelta(seconds=self._spec.sync.sync_timeout_seconds)
                on_target(self._spec.target, lambda store: _send(store, wanted, directory, of), within)
            except TuneError as error:
                if self._over:
                    return  # its files are being removed
                self._log.warning("the part of step %d was not sent: %s", step, error)
                reason = f"{type(error).__name__}: {error}"
                try:
                    on_target(self._spec.target, lambda store: refuse_part(store, wanted.key, of, reason))
                except TuneError as untold:  # node 0 waits until its deadline
                    self._log.warning("node 0 does not know that there is no part of step %d: %s", step, untold)
            for earlier in [merged for merged in self._merged if merged < step]:
                remove_directory(self._merged.pop(earlier))


def _send(store: ObjectStore, wanted: SendPart, directory: Path, of: tuple[NodesKey, int, int]) -> None:
    parent = manifest_if_readable(store, wanted.parent)
    reuse = reusable(store, wanted.key.trial, parent, wanted.collected_up_to)
    send_part(store, wanted.key, StagedFiles(directory), of=of, reuse=reuse)
