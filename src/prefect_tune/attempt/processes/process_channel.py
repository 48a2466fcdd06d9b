"""The processes of one attempt: their environment, the channel to each, and all of them by rank.

a single process          channel of rank 0
processes_per_trial=N     channels of ranks 0 to N-1, each a process of the pool
nodes_per_trial=M         those of node 0, then channels to the ranks of the other nodes (`attempt/nodes.py`)
a launcher in a trial     channel of the trial's own process (`OWN`), and one of each rank that has joined
"""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

from prefect_tune.attempt.processes.process_output import Log, TrialOutput
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
from prefect_tune.linux import command_of, poll_readable
from prefect_tune.runtime.message_stream import FROM_TRIAL_BYTES, MalformedMessage, MessageReader
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.scratch import ScratchDirectory

_NOW = timedelta(0)
_EXIT_TIMEOUT = timedelta(seconds=5)
_TERM_TIMEOUT = timedelta(seconds=0.5)
_GROUP_POLL_SECONDS = 0.02
_JOIN_BYTES = 64 * 1024

# The environment variables of a trial's process. Those of a slot are set by the executors; those that a trial sets for
# its children, in `runtime`. A value of one trial is no part of `AttemptRequest.environment`: no two would share an
# import.

# Libraries read these variables once: when they are imported, or when they first compute. A process with other values
# serves no trial of this one.
READ_ONCE = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HABANA_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "HIP_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NEURON_RT_NUM_CORES",
    "NEURON_RT_VISIBLE_CORES",
    "OMP_NUM_THREADS",
    "ONEAPI_DEVICE_SELECTOR",
    "OPENBLAS_NUM_THREADS",
    "ROCR_VISIBLE_DEVICES",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


def of_interpreter(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables with which an interpreter starts: what it prints is read line by line."""
    return {**variables, "PYTHONUNBUFFERED": "1"}


def interpreter_flags() -> list[str]:
    """Return the flags with which this interpreter was started, such as `-O` and `-W`, for another one."""
    flags: list[str] = vars(subprocess)["_args_from_interpreter_flags"]()  # which leaves out most of `-X`
    options = sys._xoptions.items()  # noqa: SLF001 - it is documented
    return [*flags, *(f"-X{name}" if value is True else f"-X{name}={value}" for name, value in options)]


def command_of_trials(module: str, descriptor: int) -> list[str]:
    """Return the command that starts a program of trials: its numbers, then what its trials find in `sys.argv`.

    The numbers are a descriptor, and this process.
    """
    program = getattr(sys.modules["__main__"].__spec__, "name", "").partition(".")[0]
    arguments = sys.argv[:1] if program in ("prefect", "prefect_tune") else sys.argv  # these are not for trials
    flags = [*interpreter_flags(), "-u", "-P", "-X", "faulthandler"]
    return [sys.executable, *flags, "-m", module, str(descriptor), str(os.getpid()), *arguments]


AS_IT_IS: Mapping[str, str] = MappingProxyType({})
"""No variables besides this process's own."""


# The channel to one process, and the kinds of processes.


class ProcessHandle(Protocol):
    """The process, or the thread of this process, that trains."""

    def is_alive(self) -> bool: ...

    def end(self) -> ProcessEnd:
        """End it now, and return how it ended."""
        ...


class TrialChannel:
    """The connection to a running attempt. Call `receive` from one thread, `tell` from any."""

    def __init__(self, connection: Connection, body: ProcessHandle, output: TrialOutput | None = None) -> None:
        """Args: output: of its process. Default: that is logged elsewhere."""
        self.connection, self._output = connection, output
        """What to wait for until a message arrives."""
        self._reader = _reader_of(connection)
        self._body = body
        self._sending = threading.Lock()
        self.has_begun = False
        """Whether the process has begun the attempt: what it does then is the trainable's, its import included."""

    def go_over_to(self, connection: Connection, body: ProcessHandle, output: TrialOutput) -> None:
        """Switch to another process."""
        with self._sending:
            self.connection, self._reader, self._body = connection, _reader_of(connection), body
            self._output = output
            self.has_begun = False

    def tell(self, message: ToTrial) -> None:
        """Send a message; if the trial is gone the message is dropped, and `receive` raises."""
        with self._sending, suppress(OSError):  # the trial is gone, or the channel was just closed
            self.connection.send_bytes(message.model_dump_json().encode())

    def receive(self, patience: timedelta) -> FromTrial | None:
        """Return the next message; None if none arrives within `patience`.

        Raises:
            EOFError: the trial is gone, and all its messages have been received.
            MalformedMessage: its process, or a child of it, wrote invalid bytes; nothing more can be read.
        """
        try:
            message = self._reader.read(patience)
            if message is None and not self._body.is_alive():
                # A child of the trial may hold the socket open: then only the process's death shows that it is gone.
                message = self._reader.read(_NOW)
                if message is None:
                    raise EOFError("the trial is gone")
        except OSError as gone:  # it was killed in the middle of a message
            raise EOFError("the trial is gone") from gone
        except MalformedMessage as error:
            raise MalformedMessage(
                f"the channel of the trial's process: {error}. Only that process and its children can write there: "
                "look for code that writes to a file descriptor that it did not open (os.write, os.fdopen)"
            ) from None
        if isinstance(message, StartReceived):
            self.has_begun = True
            return TrialChannel.receive(self, patience)
        return message

    def end(self) -> ProcessEnd:
        """End the trial and its descendants; return how its process ended."""
        return self._body.end()

    def last_output(self) -> str:
        """Return the last lines that the trial has printed; empty if it has no output of its own."""
        return self._output.last_lines() if self._output else ""


def _reader_of(connection: Connection) -> MessageReader[FromTrial | StartReceived]:
    return MessageReader(connection, from_trial, limit_bytes=FROM_TRIAL_BYTES)


@contextmanager
def trial_in_place(start: Start, _log: Log) -> Iterator[TrialChannel]:
    """Train in a thread of this process, for notebooks and debuggers. The thread cannot be ended from outside."""
    from prefect_tune.runtime.processes.trial_process import train

    ours, theirs = socket.socketpair()
    inside = Connection(theirs.detach())

    def run() -> None:
        with inside:
            train(inside)

    thread = threading.Thread(target=run, name=f"trial-{start.trial}", daemon=True)
    with Connection(ours.detach()) as connection:
        channel = TrialChannel(connection, _Thread(thread))
        thread.start()  # first: a long start message is written only as fast as the thread reads it
        channel.tell(start)
        yield channel


class _Thread:
    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> ProcessEnd:
        self._thread.join(_EXIT_TIMEOUT.total_seconds())
        return ProcessEnd(reason=make_reason("thread-runs" if self.is_alive() else "thread-ended"))


class SupervisedProcess(ABC):
    """A process for trials, as its supervisor controls it."""

    def __init__(self, output: int, connection: Connection | None, closed: ExitStack) -> None:
        """Args: closed: what is closed when it has stopped."""
        self.output = output
        """Descriptor of the pipe that carries its stdout and stderr."""
        self._connection, self._closed = connection, closed
        self.was_killed = False
        """Whether `stop` killed it, since it did not exit by itself in time."""
        self._temporary_files = ExitStack()

    @property
    def connection(self) -> Connection:
        """The channel to a trial's process; a template has none."""
        if self._connection is None:
            raise ValueError("a template has no channel")
        return self._connection

    def make_temporary_directory(self) -> Path:
        """Return a new empty directory; earlier ones stay until the process ends, since it may still use them."""
        return self._temporary_files.enter_context(ScratchDirectory())

    def is_alive(self) -> bool:
        return self._wait_for_end(_NOW) is None

    def stop(self, timeout: timedelta | None) -> int:
        """Give the process `timeout` to exit by itself, then kill it and its descendants; return its exit code.

        With None it has no limit. A negative code is the negated number of the signal that killed it. Its temporary
        files stay: a save of them may be under way.
        """
        if (code := self._wait_for_end(timeout)) is None:
            self.was_killed = True
            code = self._kill()
        self._closed.close()
        return code

    def end(self, timeout: timedelta | None = _EXIT_TIMEOUT) -> int:
        """Stop the process, then remove its temporary files."""
        code = self.stop(timeout)
        self._temporary_files.close()
        return code

    @abstractmethod
    def _wait_for_end(self, timeout: timedelta | None) -> int | None:
        """Return its exit code; None if it has not ended within `timeout`."""

    @abstractmethod
    def _kill(self) -> int:
        """Kill it; return its exit code."""


class StartedProcess(SupervisedProcess):
    """A process that was started, in a session of its own, where trials are not forked: on systems other than Linux.

    It ends with its supervisor, and what it leaves in its process group ends with it; what it has started in another
    group lives on.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it with these variables."""
        with ExitStack() as undo:
            ours, theirs = socket.socketpair()
            connection = undo.enter_context(Connection(ours.detach()))
            output, their_output = os.pipe()
            undo.callback(os.close, output)
            with theirs, os.fdopen(their_output, "wb"):
                self._child = subprocess.Popen(
                    command_of_trials("prefect_tune.runtime.processes.trial_process", theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=their_output,
                    stderr=subprocess.STDOUT,
                    env=of_interpreter(environment),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            undo.callback(self._end_group)
            super().__init__(output, connection, undo.pop_all())

    def _wait_for_end(self, timeout: timedelta | None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._child.wait(None if timeout is None else timeout.total_seconds())
        return None

    def _kill(self) -> int:
        self._child.kill()
        code = self._wait_for_end(_EXIT_TIMEOUT)
        return -signal.SIGKILL if code is None else code  # in a system call that nothing interrupts, it ends later

    def _end_group(self) -> None:
        """End what is left in its process group: SIGTERM at once, SIGKILL after 0.5 s, as a subreaper does."""
        deadline = Deadline.after(_TERM_TIMEOUT)
        with suppress(ProcessLookupError, PermissionError):  # nothing is left; on macOS, nothing but zombies
            os.killpg(self._child.pid, signal.SIGTERM)
            while deadline.remaining_seconds:
                time.sleep(_GROUP_POLL_SECONDS)
                os.killpg(self._child.pid, 0)
            os.killpg(self._child.pid, signal.SIGKILL)


OWN_SIGNALS = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"})
"""The signals that the trainable or its libraries cause; SIGKILL comes from outside the process."""


def make_process_end(code: int, output: str) -> ProcessEnd:
    """Return how a process ended: by its exit code (negative: a signal's number), with its last output."""
    if code >= 0:
        return ProcessEnd(exit_code=code, output=output)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"  # a real-time one has none
    return ProcessEnd(signal=name, output=output)


# The channels of an attempt, by rank.

OWN: Final = -1
"""In place of a rank: the trial's own process, whose launcher has started the ranks."""
_Source: TypeAlias = "Connection | socket.socket"
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
        # `multiprocessing.connection.wait` takes some ten times as long to begin.
        by_number: dict[int, _Source] = {each.fileno(): each for each in (*sources, *arriving)}
        ready = [by_number[number] for number in poll_readable(by_number, patience)]
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
                dead = {each for each in self._open if each in self._pids and not command_of(self._pids[each])}
                if command_of(self._pids.get(rank, 0)):  # while it still exits, a launcher has ended none of these
                    self.died_by_themselves |= dead
            if message is not None:
                return rank, message
        return None

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

    start: Start
    """The start message of the trial's own process; that of a rank has its rank in addition."""

    def __init__(self, directory: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(directory / "ranks"))
        self.socket.listen()
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
        for connection in (*self._arriving, *self._taken_in):
            connection.close()


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
    # One process has an address where `torch.distributed` meets too, and no other variable of ranks.
    address, port = placement.meeting_place or (_LOOPBACK, free_port(_LOOPBACK))
    place = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    with ExitStack() as opened:
        if placement.world_size > 1:
            here = [opened.enter_context(open_channel(each)) for each in _starts(start, placement, place)]
            group = RankGroup([*here, *elsewhere], None, placement.node_count, len(here))
            opened.callback(group.close)
            yield group
            return
        variables = {} if "MASTER_ADDR" in os.environ else place  # the user's own
        start = start.model_copy(update={"rank": start.rank.model_copy(update={"variables": variables})})
        directory = opened.enter_context(ScratchDirectory())
        joins, ranks_at = None, ""
        with suppress(OSError):  # a file system without sockets: no launcher of the trial can have ranks
            joins, ranks_at = _Joins(directory), str(directory / "ranks")
            opened.callback(joins.close)
        start = start.model_copy(update={"ranks_at": ranks_at})
        if joins is not None:
            joins.start = start
        group = RankGroup([opened.enter_context(open_channel(start))], joins)
        opened.callback(group.close)
        yield group


def _starts(start: Start, placement: Placement, place: Mapping[str, str]) -> Iterator[Start]:
    """Yield the start message of each rank of this node, with what `torch.distributed` and frameworks read."""
    for local_rank in range(placement.processes):
        rank = placement.first_rank + local_rank
        variables = {  # under torchrun's names
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(placement.world_size),
            "LOCAL_WORLD_SIZE": str(placement.processes),
            "GROUP_RANK": str(placement.node),
            "GROUP_WORLD_SIZE": str(placement.node_count),
            **place,
        }
        named = Rank(rank=rank, world_size=placement.world_size, local_rank=local_rank, variables=variables)
        yield start.model_copy(update={"rank": named, "waits": False})


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
