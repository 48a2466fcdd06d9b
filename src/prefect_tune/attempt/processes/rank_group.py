"""The processes of one attempt, by rank.

a single process          channel of rank 0
processes_per_trial=N     channels of ranks 0 to N-1, each a process of the pool
nodes_per_trial=M         those of node 0, then channels to the ranks of the other nodes (`attempt.nodes`)
a launcher in a trial     channel of the trial's own process (`OWN`), and one of each rank that has joined
"""

from __future__ import annotations

import math
import os
import random
import select
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TypeAlias

from prefect_tune.attempt.processes.process_channel import TrialChannel
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.messages.process_messages import (
    FromTrial,
    Join,
    Rank,
    Refused,
    Start,
    StartReceived,
    ToTrial,
    TrialEnded,
    from_trial,
)
from prefect_tune.core.reasons import ProcessEnd, make_reason
from prefect_tune.core.shown_text import readable
from prefect_tune.runtime.message_stream import MalformedMessage, MessageReader
from prefect_tune.runtime.processes.linux import command_of
from prefect_tune.runtime.ranks import reached
from prefect_tune.stores.local.scratch import ScratchDirectory

OWN: Final = -1
"""In place of a rank: the trial's own process, whose launcher has started the ranks."""
_Source: TypeAlias = "Connection | socket.socket"
_NOW = timedelta(0)
_JOIN_BYTES = 64 * 1024
# Below the ports that the kernel gives to clients: none of them takes it between this choice and rank 0's use.
_PORTS = range(20_000, 32_000)
_LOOPBACK = "127.0.0.1"


class RankEnded(Exception):
    """The process of a rank is gone, or wrote invalid bytes."""

    def __init__(self, rank: int, error: EOFError | MalformedMessage) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.is_gone = isinstance(error, EOFError)


class RankGroup:
    """The channels to the processes of an attempt. Call `receive` from one thread, `tell` from any."""

    def __init__(
        self,
        channels: Sequence[TrialChannel],
        joins: _Joins | None = None,
        node_count: int = 1,
        ranks_here: float = math.inf,
    ) -> None:
        self.node_count = node_count
        self._ranks_here = ranks_here
        self._channels = dict(enumerate(channels))
        self._open = dict(self._channels)
        self._joins = joins
        self.is_led = False
        """Whether the trial's own process is rank 0 of ranks that a launcher in it has started."""
        self._pids: dict[int, int] = {}
        """The processes of the ranks that have joined."""
        self.died_by_themselves: set[int] = set()
        """The ranks of a launcher that were dead before it could end them because another had failed."""
        self._outboxes: dict[int, _Outbox] = {}
        self._outputs: dict[int, str] = {}
        """The last output of ranks on other nodes whose processes have died."""
        self._served = 0
        self._watch = _Watch()
        self._for_later: list[ToTrial] = []
        self.world_size = len(channels)
        """The number of ranks."""

    @property
    def is_launched(self) -> bool:
        """Whether a launcher in the trial has started the ranks."""
        return OWN in self._channels

    def is_here(self, rank: int) -> bool:
        """Whether the process of a rank is on this machine: the first ranks are, and those of a launcher."""
        return rank < self._ranks_here

    @property
    def open_ranks(self) -> frozenset[int]:
        """The ranks from which messages may still come, and `OWN`."""
        return frozenset(self._open)

    def tell(self, message: ToTrial) -> None:
        """Send a message to rank 0; if it is gone the message is dropped."""
        self._channels[0 if 0 in self._channels else OWN].tell(message)

    def tell_rank(self, rank: int, message: ToTrial) -> None:
        """Send a message to a rank, without waiting; if it is gone the message is dropped."""
        self._outbox(rank).put(message)

    def tell_others(self, message: ToTrial) -> None:
        """Send a message to all ranks but the first, also to those that join later."""
        ranks = [each for each in self._channels if each > 0]
        for rank in ranks:
            self._outbox(rank).put(message)
        if len(ranks) < self.world_size - 1:
            self._for_later.append(message)

    def receive(self, patience: timedelta) -> tuple[int, FromTrial] | None:
        """Return the next message with its rank; None if none arrives within `patience`. A `Join` was answered.

        Raises:
            RankEnded: a rank is gone, and all its messages have been received; or it wrote invalid bytes.
        """
        sources = {each.connection: rank for rank, each in self._open.items()}
        arriving = [] if self._joins is None else self._joins.sources
        ready = self._watch.ready([*sources, *arriving], patience)
        if self._joins is not None and (arrived := self._joins.next_of(ready)) is not None:
            return self._take_in(*arrived, self._joins.start)
        self._served += 1  # each rank in its turn: none waits while another sends
        in_turn = [sources[each] for each in ready if each in sources] if ready else [*self._open]
        # A launcher fails after the rank that made it fail: what it says is never received before that.
        for rank in sorted(in_turn, key=lambda each: (each == OWN, (each - self._served) % self.world_size)):
            try:
                message = self._open[rank].receive(_NOW)
            except (EOFError, MalformedMessage) as error:
                self.leave(rank)
                raise RankEnded(rank, error) from None
            if isinstance(message, Join):
                self._let_lead(rank, message)
                return 0, message
            if isinstance(message, TrialEnded) and message.raised and self.is_launched:
                self._note_deaths_before(rank)
            if message is not None:
                return rank, message
        return None

    def _note_deaths_before(self, failed: int) -> None:
        """Note which ranks are dead while the one that has failed still exits: a launcher has not ended these."""
        dead = {rank for rank in self._open if rank in self._pids and not command_of(self._pids[rank])}
        if command_of(self._pids.get(failed, 0)):
            self.died_by_themselves |= dead

    def _let_lead(self, rank: int, join: Join) -> None:
        """The trial's own process is rank 0; others may have joined before.

        Raises:
            InvalidInput: another process is rank 0.
        """
        if rank == OWN and 0 in self._channels:
            raise InvalidInput(f"rank 0 of {self.world_size}: this trial has another process of it already")
        self._channels[0], self._open[0] = self._channels.pop(rank), self._open.pop(rank)
        self.world_size, self.is_led = join.rank.world_size, True

    def _outbox(self, rank: int) -> _Outbox:
        """Return the queue of messages to a rank, which may not read for long: nothing waits for it."""
        return self._outboxes.setdefault(rank, _Outbox(self._channels[rank]))

    def _take_in(self, join: Join, connection: Connection, start: Start) -> tuple[int, Join] | None:
        """Add a rank that a launcher has started, or refuse it."""
        rank, channel = join.rank, TrialChannel(connection, _JoinedRank(join.pid))
        if OWN not in self._channels and not self.is_led:
            self._channels = {OWN: self._channels.pop(0)}
            self._open = {OWN: self._open.pop(0)} if 0 in self._open else {}
            self.world_size = rank.world_size
        elif rank.rank in self._channels or rank.world_size != self.world_size:
            found = "another process of it" if rank.world_size == self.world_size else f"{self.world_size} ranks"
            channel.tell(Refused(why=f"rank {rank.rank} of {rank.world_size}: this trial has {found} already"))
            return None
        self._channels[rank.rank] = self._open[rank.rank] = channel
        self._pids[rank.rank] = join.pid
        for message in (start.model_copy(update={"rank": rank}), *(self._for_later if rank.rank else ())):
            self._outbox(rank.rank).put(message)
        return rank.rank, join

    def leave(self, rank: int) -> None:
        """Receive nothing more from a rank: it has sent its end."""
        self._open.pop(rank, None)

    def end(self, rank: int = 0) -> ProcessEnd:
        """End the process of a rank, and its descendants; return how it ended."""
        end = self._channels[rank].end()
        if end.output and not self._channels[rank].last_output():  # of a process on another node
            self._outputs[rank] = end.output
        return end

    def end_all(self) -> None:
        """End the processes of all ranks."""
        for each in self._channels.values():
            each.end()

    def last_output(self) -> str:
        """Return the last lines that the processes have printed, of several with their ranks."""
        outputs: dict[int, str] = {}
        for rank, channel in self._channels.items():
            if output := channel.last_output() or self._outputs.get(rank, ""):
                outputs[rank] = output
        named = (output if len(outputs) == 1 else f"rank {rank}:\n{output}" for rank, output in outputs.items())
        return readable("\n".join(named))

    @property
    def missing_ranks(self) -> Sequence[int]:
        """The ranks of a launcher that have not joined; none before the first has."""
        return [each for each in range(self.world_size) if each not in self._channels] if self._joins else []

    def close(self) -> None:
        """Send nothing more."""
        for each in self._outboxes.values():
            each.put(None)


class _Watch:
    """Waits for the same few connections again and again: `multiprocessing.connection.wait` begins anew each time."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: Collection[int] = ()

    def ready(self, watched: Sequence[_Source], patience: timedelta) -> list[_Source]:
        """Return which can be read, or are closed by their other side, after at most `patience`."""
        by_number = {each.fileno(): each for each in watched}
        if by_number.keys() != self._watched:
            poll = select.poll()
            for number in by_number:
                poll.register(number, select.POLLIN)
            self._poll, self._watched = poll, by_number.keys()
        return [by_number[number] for number, _ in self._poll.poll(max(0.0, patience / timedelta(milliseconds=1)))]


class _Outbox:
    """Messages to a rank, sent by a thread: a full pipe blocks that thread only. It ends with `None`."""

    def __init__(self, channel: TrialChannel) -> None:
        self._messages: SimpleQueue[ToTrial | None] = SimpleQueue()
        self.put = self._messages.put
        threading.Thread(target=self._send, args=(channel,), name="tune-outbox", daemon=True).start()

    def _send(self, channel: TrialChannel) -> None:
        while (message := self._messages.get()) is not None:
            channel.tell(message)


class _JoinedRank:
    """The process of a rank that a launcher has started. It ends with the trial's own process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def is_alive(self) -> bool:
        return True  # its connection shows that it is gone

    def end(self) -> ProcessEnd:
        return ProcessEnd(reason=make_reason("rank-vanished", process=self._pid))


class _Joins:
    """Where ranks join that a launcher in the trial has started."""

    def __init__(self, directory: Path, start: Start) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        with reached(directory / "ranks") as path:
            self.socket.bind(path)
        self.socket.listen()
        self.start = start
        """The start message of the trial's own process; that of a rank has its rank in addition."""
        self._arriving: dict[Connection, MessageReader[FromTrial | StartReceived]] = {}
        self._taken_in: list[Connection] = []

    @property
    def sources(self) -> Sequence[Connection | socket.socket]:
        """What is ready when a process connects, or says who it is."""
        return [self.socket, *self._arriving]

    def next_of(self, ready: Collection[object]) -> tuple[Join, Connection] | None:
        """Accept a process that connects; return one that has said which rank it is, with its connection."""
        if self.socket in ready:
            connection = Connection(self.socket.accept()[0].detach())
            self._arriving[connection] = MessageReader(connection, from_trial, limit_bytes=_JOIN_BYTES)
        for connection in [each for each in self._arriving if each in ready]:
            try:
                message = self._arriving[connection].read(_NOW)
            except (EOFError, OSError, MalformedMessage):
                self._arriving.pop(connection)
                connection.close()
                continue
            if isinstance(message, Join):
                self._arriving.pop(connection)
                self._taken_in.append(connection)
                return message, connection
        return None

    def close(self) -> None:
        """Close the socket, and the connections of all ranks."""
        self.socket.close()
        for each in (*self._arriving, *self._taken_in):
            each.close()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks of this node are among all: each node has the same number of processes."""

    processes: int = 1
    node_count: int = 1
    node: int = 0
    """The place of this node among those that take part."""
    meeting_place: tuple[str, int] | None = None
    """Address and port of rank 0; None for one node."""

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.processes * self.node_count

    @property
    def first_rank(self) -> int:
        """The first rank of this node."""
        return self.processes * self.node


@contextmanager
def rank_group(
    start: Start,
    placement: Placement,
    open_channel: Callable[[Start], AbstractContextManager[TrialChannel]],
    elsewhere: Sequence[TrialChannel] = (),
) -> Iterator[RankGroup]:
    """Open the processes of an attempt, each with its rank, and end them when the block is left.

    `elsewhere` are the channels to ranks of other nodes.
    """
    with ExitStack() as opened:
        if placement.world_size > 1:
            here = [opened.enter_context(open_channel(each)) for each in _starts(start, placement)]
            group = RankGroup([*here, *elsewhere], None, placement.node_count, len(here))
            opened.callback(group.close)
            yield group
            return
        place = {} if "MASTER_ADDR" in os.environ else _variables_of(_meeting_place())  # the user's own
        start = start.model_copy(update={"rank": start.rank.model_copy(update={"variables": place})})
        directory = opened.enter_context(ScratchDirectory())
        joins = None
        with suppress(OSError):  # a file system without sockets: no launcher of the trial can have ranks
            joins = _Joins(directory, start := start.model_copy(update={"ranks_at": str(directory / "ranks")}))
            opened.callback(joins.close)
        if joins is None:
            start = start.model_copy(update={"ranks_at": ""})
        group = RankGroup([opened.enter_context(open_channel(start))], joins)
        opened.callback(group.close)
        yield group


def _starts(start: Start, placement: Placement) -> Iterator[Start]:
    """Yield the start message of each rank of this node."""
    place = _variables_of(placement.meeting_place or _meeting_place())
    for each in range(placement.processes):
        rank = Rank(rank=placement.first_rank + each, world_size=placement.world_size, local_rank=each)
        named = rank.model_copy(update={"variables": {**_variables(rank, placement), **place}})
        yield start.model_copy(update={"rank": named, "waits": False})


def _meeting_place() -> tuple[str, int]:
    """Return where `torch.distributed` meets; one process has it too, and no other variable of ranks."""
    return _LOOPBACK, free_port(_LOOPBACK)


def _variables_of(meeting_place: tuple[str, int]) -> Mapping[str, str]:
    address, port = meeting_place
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def _variables(rank: Rank, placement: Placement) -> Mapping[str, str]:
    """Return what `torch.distributed` and frameworks read, under torchrun's names."""
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.local_rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_WORLD_SIZE": str(placement.processes),
        "GROUP_RANK": str(placement.node),
        "GROUP_WORLD_SIZE": str(placement.node_count),
    }


def free_port(address: str = "") -> int:
    """Return a port that no process of this machine has at `address` (empty: any address).

    Raises:
        OSError: there is none, in 100 tries.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as tried:
            try:
                tried.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError("no free port for the ranks of a trial, in 100 tries")
