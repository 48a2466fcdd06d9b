"""Node 0 of an attempt on several nodes: it waits for the others, and their ranks become channels like its own.

    here                                             there
    supervisor ◄─ channel of rank 2 ◄─┐              ┌─► process of rank 2
                  channel of rank 3 ◄─┤  the target  ├─► process of rank 3
                                      └─ messages ◄──┘
                  commit worker: send your parts ──►    part ──► manifest

Everything else is the attempt of one node: this one owns the journal, decides, and commits. A node that is lost is the
end of its ranks. Never: a rank of an earlier attempt; a wait for a node without a deadline.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Self

from prefect_tune.attempt.group_saves import PARTS_WITHIN
from prefect_tune.attempt.nodes.node_stream import NodeReader, NodeWriter
from prefect_tune.attempt.processes.process_channel import TrialChannel
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.rank_group import Placement, free_port
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.core.checkpoints.parts import PartsOfSave
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.trial_transitions import Trial, parent_of_next, reused_from
from prefect_tune.core.messages.process_messages import Start, to_trial
from prefect_tune.core.messages.target_messages import (
    Arrived,
    Begin,
    FromRank,
    GroupOver,
    NodeMessage,
    NodeStopping,
    RankGone,
    SendPart,
    ToRank,
    is_signed_with,
    node_messages_up_to,
)
from prefect_tune.core.reasons import ProcessEnd, Reason, make_reason
from prefect_tune.core.resources import processes_on
from prefect_tune.core.shown_text import plural
from prefect_tune.core.storage.layout import CheckpointKey, NodesKey, numbered
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.runtime.message_stream import MessageReader
from prefect_tune.storage_retries import on_target
from prefect_tune.stores.deadline import Deadline

_ALL_ARRIVE_WITHIN = timedelta(minutes=10)
"""How long the runs or tasks of the other nodes may take to begin: images are pulled, machines are started."""
_FEWER_AFTER = timedelta(minutes=2)
"""After which time an attempt begins with `min_nodes`."""
_LOOK_SECONDS = 0.1
_PAUSES_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5)
_READ_WITHIN = timedelta(seconds=10)
_TO_RANK_BYTES = 64 * 1024**2
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
        self._had_these = False
        self._arrived: dict[int, str] = {}
        self._lost: dict[int, Reason] = {}
        self._present: Sequence[int] = (0,)
        self._sent_seconds: dict[int, float] = {}
        """By node, in the last save to which several sent files."""
        self._ranks: dict[int, _RankElsewhere] = {}
        self._readers: dict[int, NodeReader] = {}
        self.stop: Callable[[], None] = lambda: None
        """Called when the infrastructure asks a node to stop."""
        self.placement = Placement(processes=processes_on(spec.processes_per_trial, 1))

    def begin(self, stop: threading.Event) -> Sequence[TrialChannel]:
        """Wait for the nodes, and begin; return the channels to their ranks.

        Raises:
            NodesMissing: fewer than `min_nodes` arrived in time, or `stop` was set.
        """
        self.stop = stop.set
        spec, others = self._spec, range(1, self._spec.nodes_per_trial)
        for node in others:
            hears, loses = partial(self._hear, node), partial(self._lose, node)
            self._readers[node] = NodeReader(spec.target, self._key, node, self._writer, hears, loses)
        self._log.info("waiting for %s of attempt %d", plural(len(others), "node", "nodes"), self._key.attempt)
        self._wait(stop)
        present = [each for each in others if each in self._arrived and each not in self._lost]
        for absent in set(others).difference(present):
            self._readers.pop(absent).close()
            self._writer.read_up_to.pop(absent, None)
        address, port = address_here(), free_port()
        self.placement = Placement(self.placement.processes, 1 + len(present), 0, (address, port))
        nodes = self._present = (0, *present)
        start = self._start.model_copy(update={"trainable": "", "stopper": "", "import_path": ()})
        self._writer.send(
            Begin(nodes=nodes, address=address, port=port, term=self._term, start=start, restored=self._restored)
        )
        where = ", ".join(f"{each} ({self._arrived[each]})" for each in present)
        self._log.info("%s at %s: this one, and %s", plural(len(nodes), "node", "nodes"), address, where or "no other")
        return [self._channel(node, rank) for node, rank in self._ranks_of(present)]

    def known_up_to(self) -> float:
        """Return until when it is known of each node that it was alive; a lost one is known to be gone."""
        seen = [each.seen_at for node, each in self._readers.items() if node not in self._lost]
        return min(seen, default=math.inf)

    @property
    def sending(self) -> Sequence[float]:
        """How many seconds each node took in the last save until its files were on the target; 0 if it had none."""
        return [self._sent_seconds.get(each, 0.0) for each in self._present]

    def lost(self) -> Mapping[int, Reason]:
        """Return the nodes that are gone, with the reason."""
        return dict(self._lost)

    @contextmanager
    def parts(self, key: CheckpointKey, before: Trial, nodes: Sequence[int]) -> Iterator[PartsOfSave]:
        """Have the `nodes` send their parts of the checkpoint `key`, and delete the parts when the block is left.

        `before` is the trial's state. Leave the block when the checkpoint is committed, or given up.
        """
        parent, collected = parent_of_next(self._spec.trial, before), reused_from(before)
        self._writer.send(SendPart(key=key, parent=parent, collected_up_to=collected))
        began, self._sent_seconds = time.monotonic(), {}

        def arrived(node: int) -> None:
            self._sent_seconds[node] = time.monotonic() - began

        def waits() -> Callable[[], bool]:
            arrived(0)
            return _waits()

        yield PartsOfSave(self._key, self._term, tuple(nodes), waits, self.lost, arrived)
        for node in nodes:
            self._writer.delete(self._key.part_path(key, node))

    def __enter__(self) -> Self:
        """Begin to write. Raises NodesMissing: a task runner repeats what began an earlier attempt, with its nodes."""
        on_target(self._spec.target, self._delete_earlier)
        if self._had_these:
            raise NodesMissing("its worker is gone, and the other nodes with it: all begin again", is_stopped=False)
        self._writer = NodeWriter(self._spec.target, self._key, 0, self._secret, self._log)
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks of all nodes, and delete the messages once the nodes have read that."""
        self._writer.send(GroupOver())
        self._writer.close()
        read_until = Deadline.after(_READ_WITHIN)
        while not self._writer.is_read and read_until.remaining_seconds and len(self._lost) < len(self._readers):
            time.sleep(_LOOK_SECONDS)
        for each in self._readers.values():
            each.close()
        for rank in self._ranks.values():
            rank.hang_up(ProcessEnd(reason=make_reason("attempt-over")))
        with suppress(TuneError), self._spec.target.open(timeout=_READ_WITHIN) as store:  # the next attempt does it
            store.delete([each.path for each in node_messages_up_to(store, self._spec.trial, self._key.attempt)])

    def _delete_earlier(self, store: ObjectStore) -> None:
        """Delete what earlier attempts have left; note whether one of them had the nodes of this one."""
        left = [each.path for each in node_messages_up_to(store, self._spec.trial, self._key.attempt - 1)]
        firsts = {numbered(key.messages(0), 1) for each in left if (key := NodesKey.from_path(self._spec.trial, each))}
        # Noted before it is deleted, and kept: this is repeated if the answer of the deletion is lost.
        self._had_these |= any(is_signed_with(store, each, self._secret) for each in firsts)
        if left:
            store.delete(left)

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

    def _ranks_of(self, nodes: Sequence[int]) -> Sequence[tuple[int, int]]:
        each_has = self.placement.processes
        return [(node, place * each_has + local) for place, node in enumerate(nodes, 1) for local in range(each_has)]

    def _channel(self, node: int, rank: int) -> TrialChannel:
        elsewhere = self._ranks[rank] = _RankElsewhere(node, rank, self._writer)
        if (why := self._lost.get(node)) is not None:
            elsewhere.hang_up(_lost_with_node(node, why))
        return TrialChannel(elsewhere.here, elsewhere)

    def _hear(self, node: int, message: NodeMessage) -> None:
        match message:
            case Arrived(host=host):
                self._arrived[node] = host
            case FromRank(rank=rank, message=told) if rank in self._ranks:
                self._ranks[rank].deliver(told.model_dump_json().encode())
            case RankGone(rank=rank, end=end) if rank in self._ranks:
                self._ranks[rank].hang_up(end)
            case NodeStopping():
                self._log.warning("node %d is asked to stop: the trial saves and ends", node)
                self.stop()
            case _:
                pass

    def _lose(self, node: int, why: Reason) -> None:
        self._lost[node] = why
        for each in self._ranks.values():
            if each.node == node:
                each.hang_up(_lost_with_node(node, why))


def _lost_with_node(node: int, error: Reason) -> ProcessEnd:
    return ProcessEnd(reason=make_reason("node-lost", node=node, error=error))


class _RankElsewhere:
    """The far end of the channel of a rank on another node; for the channel, it is the process of that rank."""

    def __init__(self, node: int, rank: int, writer: NodeWriter) -> None:
        ours, theirs = socket.socketpair()
        self.node = node
        self.here = Connection(ours.detach())
        """The supervisor's end."""
        self._there = Connection(theirs.detach())
        self._rank, self._writer = rank, writer
        self._end: ProcessEnd | None = None
        threading.Thread(target=self._pass_on, name=f"rank-{rank}", daemon=True).start()

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

    def _pass_on(self) -> None:
        reader = MessageReader(self._there, to_trial, limit_bytes=_TO_RANK_BYTES)
        with suppress(EOFError, OSError):
            while True:
                if (message := reader.read()) is not None:
                    self._writer.send(ToRank(rank=self._rank, message=message))


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
