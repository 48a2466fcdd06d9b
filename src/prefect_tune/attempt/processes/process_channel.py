"""The processes of one attempt: their environment, the channel to each process, and the group of all channels.

a single process          channel of rank 0
processes_per_trial=N     channels of ranks 0 to N-1, each a process of the pool
nodes_per_trial=M         channels of the ranks of node 0, then of the other nodes (`attempt/nodes.py`)
a launcher in a trial     channel of the parent process (`PARENT_RANK`), and of each rank that has joined
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
from prefect_tune.core.display_text import make_storable
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.messages.process_messages import (
    FromTrial,
    JoinRejected,
    RankInfo,
    RankJoined,
    Start,
    StartReceived,
    ToTrial,
    TrainingEnded,
    from_trial_adapter,
)
from prefect_tune.core.reasons import ProcessEnd, make_reason
from prefect_tune.linux import get_cmdline, poll_readable
from prefect_tune.runtime.message_stream import MAX_TRIAL_MESSAGE_BYTES, MalformedMessage, MessageReader
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local.scratch import ScratchDirectory

_NO_WAIT = timedelta(0)
_EXIT_TIMEOUT = timedelta(seconds=5)
_TERM_TIMEOUT = timedelta(seconds=0.5)
_GROUP_POLL_SECONDS = 0.02
_JOIN_BYTES = 64 * 1024

# The executors set the environment variables of a slot; `runtime` sets those of a trial's child processes. A value in
# `AttemptRequest.environment` must not be unique to a trial, since no other trial could then use its process or import.

# Libraries read these variables once, on import or first use, so a process serves only trials with the same values.
READ_ONCE_VARIABLES = (
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


def make_interpreter_environment(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return `variables` for a new interpreter, and the variable that makes the interpreter's output unbuffered."""
    return {**variables, "PYTHONUNBUFFERED": "1"}


def get_interpreter_flags() -> list[str]:
    """Return the flags with which this interpreter was started, such as `-O` and `-W`."""
    flags: list[str] = vars(subprocess)["_args_from_interpreter_flags"]()  # this list lacks most `-X` options
    options = sys._xoptions.items()  # noqa: SLF001 - it is documented
    return [*flags, *(f"-X{name}" if value is True else f"-X{name}={value}" for name, value in options)]


def make_program_command(module: str, descriptor: int) -> list[str]:
    """Return the command that runs `module` with `descriptor`, this process's pid and the trials' `sys.argv`."""
    program = getattr(sys.modules["__main__"].__spec__, "name", "").partition(".")[0]
    arguments = sys.argv[:1] if program in ("prefect", "prefect_tune") else sys.argv  # omit the options of these CLIs
    flags = [*get_interpreter_flags(), "-u", "-P", "-X", "faulthandler"]
    return [sys.executable, *flags, "-m", module, str(descriptor), str(os.getpid()), *arguments]


NO_EXTRA_ENV: Mapping[str, str] = MappingProxyType({})
"""No variables besides the environment of this process."""


# The channel to the thread or process that runs a trial, and the classes of such processes.


class ProcessHandle(Protocol):
    """What runs the training: a separate process, or a thread of this process."""

    def is_alive(self) -> bool: ...

    def end(self) -> ProcessEnd:
        """End the process immediately, and return how it ended. A thread cannot be killed, so only wait for it."""


class TrialChannel:
    """The connection to a running attempt. Call `receive` from one thread, `send` from any thread."""

    def __init__(self, connection: Connection, process: ProcessHandle, output: TrialOutput | None = None) -> None:
        """Args: output: the output of the process; None if the output is logged elsewhere."""
        self.connection, self._process, self._output = connection, process, output
        """The connection, which becomes readable when a message arrives."""
        self._reader = _make_reader(connection)
        self._sending = threading.Lock()
        self.has_started = False
        """Whether the process has begun to import, set up or train the trainable."""

    def switch_process(self, connection: Connection, process: ProcessHandle, output: TrialOutput) -> None:
        with self._sending:
            self.connection, self._reader, self._process = connection, _make_reader(connection), process
            self._output, self.has_started = output, False

    def send(self, message: ToTrial) -> None:
        """Send a message. If the trial is gone, the message is dropped, and `receive` raises."""
        with self._sending, suppress(OSError):  # the trial is gone, or the channel was just closed
            self.connection.send_bytes(message.model_dump_json().encode())

    def receive(self, timeout: timedelta) -> FromTrial | None:
        """Return the next message; None if none arrives within `timeout`.

        Raises:
            EOFError: the trial is gone, and all its messages have been received.
            MalformedMessage: the trial's process or a child process wrote invalid bytes; nothing more can be read.
        """
        try:
            message = self._reader.read(timeout)
            # A child process may hold the socket open, so also check that the trial's process is alive.
            if message is None and not self._process.is_alive() and (message := self._reader.read(_NO_WAIT)) is None:
                raise EOFError("the trial is gone")
        except OSError as error:  # the process was killed in the middle of a message
            raise EOFError("the trial is gone") from error
        except MalformedMessage as error:
            raise MalformedMessage(
                f"the channel of the trial's process: {error}. Only that process and its children can write there, so "
                "look for code that writes to a file descriptor that it did not open (os.write, os.fdopen)"
            ) from None
        if isinstance(message, StartReceived):
            self.has_started = True
            return TrialChannel.receive(self, timeout)
        return message

    def end(self) -> ProcessEnd:
        """End the trial's process and its descendants; return how the process ended."""
        return self._process.end()

    def last_output(self) -> str:
        """Return the last lines that the trial has printed; empty if its output is not captured here."""
        return self._output.last_lines() if self._output else ""


def _make_reader(connection: Connection) -> MessageReader[FromTrial | StartReceived]:
    return MessageReader(connection, from_trial_adapter, limit_bytes=MAX_TRIAL_MESSAGE_BYTES)


@contextmanager
def open_trial_thread(start: Start, _log: Log) -> Iterator[TrialChannel]:
    """Train in a thread of this process, for notebooks and debuggers. The thread cannot be killed."""
    from prefect_tune.runtime.processes.trial_process import serve_one_attempt

    ours, theirs = socket.socketpair()
    their_connection = Connection(theirs.detach())

    def run_training() -> None:
        with their_connection:
            serve_one_attempt(their_connection)

    thread = _TrialThread(target=run_training, name=f"trial-{start.trial}", daemon=True)
    with Connection(ours.detach()) as connection:
        channel = TrialChannel(connection, thread)
        thread.start()  # before `send`, because sending a long start message blocks until the thread reads it
        channel.send(start)
        yield channel


class _TrialThread(threading.Thread):
    def end(self) -> ProcessEnd:
        self.join(_EXIT_TIMEOUT.total_seconds())
        return ProcessEnd(reason=make_reason("thread-runs" if self.is_alive() else "thread-ended"))


class SupervisedProcess(ABC):
    """A process for trials, controlled by this process."""

    def __init__(self, output: int, connection: Connection | None, resources: ExitStack) -> None:
        """Args: resources: `stop` closes them."""
        self.output = output
        """The descriptor of the pipe that carries the stdout and stderr of the process."""
        self._connection, self._resources = connection, resources
        self.was_killed = False
        """Whether `stop` killed the process because it did not exit in time."""
        self._temporary_files = ExitStack()

    @property
    def connection(self) -> Connection:
        """The channel to a trial's process; a template has none."""
        if self._connection is None:
            raise ValueError("a template has no channel")
        return self._connection

    def make_temporary_directory(self) -> Path:
        """Return a new empty directory. Earlier directories, which may still be used, stay until `end`."""
        return self._temporary_files.enter_context(ScratchDirectory())

    def is_alive(self) -> bool:
        return self._wait_for_end(_NO_WAIT) is None

    def stop(self, timeout: timedelta | None) -> int:
        """Wait up to `timeout` (None: no limit) for the exit, then kill the process and its descendants.

        Return the exit code; a negative code is the negated number of the signal that killed the process. The temporary
        files of the process stay, because a save may still read them.
        """
        if (code := self._wait_for_end(timeout)) is None:
            self.was_killed = True
            code = self._kill()
        self._resources.close()
        return code

    def end(self, timeout: timedelta | None = _EXIT_TIMEOUT) -> int:
        """Stop the process, then remove its temporary files."""
        code = self.stop(timeout)
        self._temporary_files.close()
        return code

    @abstractmethod
    def _wait_for_end(self, timeout: timedelta | None) -> int | None:
        """Return the exit code; None if the process has not ended within `timeout`."""

    @abstractmethod
    def _kill(self) -> int:
        """Kill the process; return its exit code."""


class SpawnedProcess(SupervisedProcess):
    """A process that is not forked but started in a new session, on systems other than Linux.

    The process ends with its supervisor. Then its process group is ended; descendants in other groups continue.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        with ExitStack() as undo:
            ours, theirs = socket.socketpair()
            connection = undo.enter_context(Connection(ours.detach()))
            output, their_output = os.pipe()
            undo.callback(os.close, output)
            with theirs, os.fdopen(their_output, "wb"):
                self._child = subprocess.Popen(
                    make_program_command("prefect_tune.runtime.processes.trial_process", theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=their_output,
                    stderr=subprocess.STDOUT,
                    env=make_interpreter_environment(environment),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            undo.callback(self._end_process_group)
            super().__init__(output, connection, undo.pop_all())

    def _wait_for_end(self, timeout: timedelta | None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._child.wait(None if timeout is None else timeout.total_seconds())
        return None

    def _kill(self) -> int:
        self._child.kill()
        code = self._wait_for_end(_EXIT_TIMEOUT)
        return -signal.SIGKILL if code is None else code  # None while an uninterruptible system call delays the exit

    def _end_process_group(self) -> None:
        """Send SIGTERM to the process group, then SIGKILL after 0.5 s, like a subreaper."""
        deadline = Deadline.after(_TERM_TIMEOUT)
        with suppress(ProcessLookupError, PermissionError):  # the group is empty or, on macOS, has only zombies
            os.killpg(self._child.pid, signal.SIGTERM)
            while deadline.remaining_seconds:
                time.sleep(_GROUP_POLL_SECONDS)
                os.killpg(self._child.pid, 0)
            os.killpg(self._child.pid, signal.SIGKILL)


CRASH_SIGNALS = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"})
"""The signals of crashes that the trainable or its libraries cause; without SIGKILL, which comes from outside."""


def make_process_end(code: int, output: str) -> ProcessEnd:
    """Return how a process ended, from its exit code (negative: a signal's negated number) and its last output."""
    if code >= 0:
        return ProcessEnd(exit_code=code, output=output)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"  # some signals lack a name
    return ProcessEnd(signal=name, output=output)


# The channels of an attempt, by rank.

PARENT_RANK: Final = -1
"""The pseudo-rank of the trial's own process, if it has started ranks with a launcher and is not rank 0 itself."""
_MessageSource: TypeAlias = "Connection | socket.socket"
# These ports are below the kernel's ephemeral ports, so that no client gets the chosen port before rank 0 binds it.
_PORTS = range(20_000, 32_000)
_LOOPBACK = "127.0.0.1"


class RankLostError(Exception):
    """The process of a rank is gone, or wrote invalid bytes."""

    def __init__(self, rank: int, error: EOFError | MalformedMessage) -> None:
        super().__init__(str(error))
        self.rank = rank
        self.is_gone = isinstance(error, EOFError)


class RankGroup:
    """The channels to the processes of an attempt. Call `receive` from one thread, the `send_` methods from any."""

    def __init__(
        self,
        channels: Sequence[TrialChannel],
        joins: _JoinSocket | None = None,
        node_count: int = 1,
        local_rank_count: float = math.inf,
    ) -> None:
        self.node_count, self._local_rank_count, self._joins = node_count, local_rank_count, joins
        self._channels = dict(enumerate(channels))
        self._open_channels = dict(self._channels)
        self.parent_is_rank_0 = False
        """Whether the trial's own process is rank 0, and the parent process of the other ranks."""
        self._pids: dict[int, int] = {}
        """The pids of the ranks that have joined."""
        self.self_exited_ranks: set[int] = set()
        """The ranks that exited by themselves, before their launcher had killed any rank."""
        self._senders: dict[int, _RankSender] = {}
        self._senders_lock = threading.Lock()
        self._outputs: dict[int, str] = {}
        """The last output of each rank that has exited on another node."""
        self._turn = 0
        self._messages_for_joiners: list[ToTrial] = []
        self.world_size = len(channels)

    @property
    def has_separate_parent(self) -> bool:
        """Whether the trial's own process is the parent process of all ranks, and not a rank itself."""
        return PARENT_RANK in self._channels

    def is_local(self, rank: int) -> bool:
        """Return whether a rank's process is on this machine; True for all ranks of a launcher."""
        return rank < self._local_rank_count

    @property
    def open_ranks(self) -> frozenset[int]:
        """The ranks that may still send messages, including `PARENT_RANK`."""
        return frozenset(self._open_channels)

    def send_to_rank_0(self, message: ToTrial) -> None:
        """Send a message to rank 0; the message is dropped if the rank is gone."""
        self._channels[0 if 0 in self._channels else PARENT_RANK].send(message)

    def send_to_rank(self, rank: int, message: ToTrial) -> None:
        """Send a message to a rank without waiting; the message is dropped if the rank is gone."""
        self._get_sender(rank).put(message)

    def send_to_others(self, message: ToTrial) -> None:
        """Send a message to all ranks but rank 0, including ranks that join later."""
        ranks = [rank for rank in self._channels if rank > 0]
        for rank in ranks:
            self._get_sender(rank).put(message)
        if len(ranks) < self.world_size - 1:
            self._messages_for_joiners.append(message)

    def receive(self, timeout: timedelta) -> tuple[int, FromTrial] | None:
        """Return the next message with its rank; None after `timeout`. The caller need not answer a `RankJoined`.

        Raises:
            RankLostError: a rank is gone, and all its messages have been received; or the rank wrote invalid bytes.
        """
        sources = {channel.connection: rank for rank, channel in self._open_channels.items()}
        joining = [] if self._joins is None else self._joins.sources
        # Do not use `multiprocessing.connection.wait`, which has about ten times the overhead.
        by_descriptor: dict[int, _MessageSource] = {source.fileno(): source for source in (*sources, *joining)}
        ready = [by_descriptor[descriptor] for descriptor in poll_readable(by_descriptor, timeout)]
        if self._joins is not None and (arrived := self._joins.accept_join(ready)) is not None:
            return self._add_joined_rank(*arrived, self._joins.start)
        self._turn += 1  # round-robin, so that one rank cannot block the others
        ranks = [sources[source] for source in ready if source in sources] if ready else [*self._open_channels]
        # The parent process fails after the rank that caused the failure, so receive the parent's messages last.
        for rank in sorted(ranks, key=lambda rank: (rank == PARENT_RANK, (rank - self._turn) % self.world_size)):
            try:
                message = self._open_channels[rank].receive(_NO_WAIT)
            except (EOFError, MalformedMessage) as error:
                self.stop_receiving(rank)
                raise RankLostError(rank, error) from None
            if isinstance(message, RankJoined):
                self._promote_to_rank_0(rank, message)
                return 0, message
            if isinstance(message, TrainingEnded) and message.raised and self.has_separate_parent:
                exited = {key for key in self._open_channels if key in self._pids and not get_cmdline(self._pids[key])}
                if get_cmdline(self._pids.get(rank, 0)):  # `rank` still runs, so its launcher did not kill `exited`
                    self.self_exited_ranks |= exited
            if message is not None:
                return rank, message
        return None

    def _promote_to_rank_0(self, rank: int, join: RankJoined) -> None:
        """Make the trial's own process rank 0. Raises InvalidInput if another process has joined as rank 0."""
        if rank == PARENT_RANK and 0 in self._channels:
            raise InvalidInput(f"rank 0 of {self.world_size}: this trial already has that rank, in another process")
        self._channels[0], self._open_channels[0] = self._channels.pop(rank), self._open_channels.pop(rank)
        self.world_size, self.parent_is_rank_0 = join.rank.world_size, True

    def _get_sender(self, rank: int) -> _RankSender:
        """Return the sender of messages to a rank; its `put` does not wait, even if the rank does not read."""
        with self._senders_lock:
            if rank not in self._senders:
                self._senders[rank] = _RankSender(self._channels[rank])
            return self._senders[rank]

    def _add_joined_rank(self, join: RankJoined, connection: Connection, start: Start) -> tuple[int, RankJoined] | None:
        """Add a rank that a launcher has started, and return its message; or reject the rank, and return None."""
        rank, channel = join.rank, TrialChannel(connection, _JoinedRank(join.pid))
        if PARENT_RANK not in self._channels and not self.parent_is_rank_0:
            self._channels = {PARENT_RANK: self._channels.pop(0)}
            self._open_channels = {PARENT_RANK: self._open_channels.pop(0)} if 0 in self._open_channels else {}
            self.world_size = rank.world_size
        elif rank.rank in self._channels or rank.world_size != self.world_size:
            conflict = "that rank" if rank.world_size == self.world_size else f"{self.world_size} ranks"
            reason = f"rank {rank.rank} of {rank.world_size}: this trial already has {conflict}"
            channel.send(JoinRejected(reason=reason))
            return None
        self._channels[rank.rank] = self._open_channels[rank.rank] = channel
        self._pids[rank.rank] = join.pid
        for message in (start.model_copy(update={"rank": rank}), *(self._messages_for_joiners if rank.rank else ())):
            self._get_sender(rank.rank).put(message)
        return rank.rank, join

    def stop_receiving(self, rank: int) -> None:
        self._open_channels.pop(rank, None)

    def end_rank(self, rank: int = 0) -> ProcessEnd:
        """End the process of a rank, and its descendants; return how it ended."""
        end = self._channels[rank].end()
        if end.output and not self._channels[rank].last_output():  # true only for a process on another node
            self._outputs[rank] = end.output
        return end

    def end_all_ranks(self) -> None:
        for channel in self._channels.values():
            channel.end()

    def last_output(self) -> str:
        """Return the last lines that the processes have printed; name the ranks if several have printed."""
        lines = {rank: channel.last_output() or self._outputs.get(rank) for rank, channel in self._channels.items()}
        outputs = {rank: output for rank, output in lines.items() if output}
        named = (output if len(outputs) == 1 else f"rank {rank}:\n{output}" for rank, output in outputs.items())
        return make_storable("\n".join(named))

    @property
    def missing_ranks(self) -> Sequence[int]:
        """The ranks of a launcher that have not joined; empty until the first rank has joined."""
        return [rank for rank in range(self.world_size) if rank not in self._channels] if self._joins else []

    def close(self) -> None:
        """End the threads that send messages to the ranks."""
        for sender in self._senders.values():
            sender.put(None)


class _RankSender:
    """Sends queued messages to a rank in a separate thread, so a full pipe blocks only that thread. `None` ends it."""

    def __init__(self, channel: TrialChannel) -> None:
        self._messages: SimpleQueue[ToTrial | None] = SimpleQueue()
        self.put = self._messages.put
        threading.Thread(target=self._send_messages, args=(channel,), name="rank-sender", daemon=True).start()

    def _send_messages(self, channel: TrialChannel) -> None:
        while (message := self._messages.get()) is not None:
            channel.send(message)


class _JoinedRank:
    """The process of a rank that a launcher has started. The process ends with the trial's own process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def is_alive(self) -> bool:
        return True  # no check is needed: the end of the process closes the connection, so `receive` raises

    def end(self) -> ProcessEnd:
        return ProcessEnd(reason=make_reason("rank-vanished", process=self._pid))


class _JoinSocket:
    """The socket through which the ranks of a launcher in the trial join the attempt."""

    start: Start
    """The start message of the trial's own process; each rank gets a copy with the rank's own number."""

    def __init__(self, directory: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(directory / "ranks"))
        self.socket.listen()
        self._arriving: dict[Connection, MessageReader[FromTrial | StartReceived]] = {}
        self._joined: list[Connection] = []

    @property
    def sources(self) -> Sequence[Connection | socket.socket]:
        """The sources that become readable when a process connects or sends its `RankJoined`."""
        return [self.socket, *self._arriving]

    def accept_join(self, ready: Collection[object]) -> tuple[RankJoined, Connection] | None:
        """Accept a new connection; return the next `RankJoined` with its connection, None if no rank has joined."""
        if self.socket in ready:
            connection = Connection(self.socket.accept()[0].detach())
            self._arriving[connection] = MessageReader(connection, from_trial_adapter, limit_bytes=_JOIN_BYTES)
        for connection in [connection for connection in self._arriving if connection in ready]:
            try:
                message = self._arriving[connection].read(_NO_WAIT)
            except (EOFError, OSError, MalformedMessage):
                self._arriving.pop(connection)
                connection.close()
                continue
            if isinstance(message, RankJoined):
                self._arriving.pop(connection)
                self._joined.append(connection)
                return message, connection
        return None

    def close(self) -> None:
        self.socket.close()
        for connection in (*self._arriving, *self._joined):
            connection.close()


@dataclass(frozen=True, slots=True)
class Placement:
    """Which ranks train on this node. Each node has the same number of processes."""

    processes: int = 1
    """The number of processes per node."""
    node_count: int = 1
    node: int = 0
    """The index of this node among the participating nodes."""
    rendezvous_endpoint: tuple[str, int] | None = None
    """The address and port of rank 0; None for a single node."""

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.processes * self.node_count

    @property
    def first_rank(self) -> int:
        return self.processes * self.node


@contextmanager
def open_rank_group(
    start: Start,
    placement: Placement,
    open_channel: Callable[[Start], AbstractContextManager[TrialChannel]],
    remote_channels: Sequence[TrialChannel] = (),
) -> Iterator[RankGroup]:
    """Open the local processes of an attempt, each with its rank; end them when the block ends.

    `remote_channels` are the channels to the ranks of other nodes.
    """
    # A single process gets the address for `torch.distributed`, too, but not the other variables that ranks get.
    address, port = placement.rendezvous_endpoint or (_LOOPBACK, find_free_port(_LOOPBACK))
    rendezvous = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    with ExitStack() as resources:
        if placement.world_size > 1:
            starts = _make_start_messages(start, placement, rendezvous)
            local = [resources.enter_context(open_channel(message)) for message in starts]
            group = RankGroup([*local, *remote_channels], None, placement.node_count, len(local))
            resources.callback(group.close)
            yield group
            return
        variables = {} if "MASTER_ADDR" in os.environ else rendezvous  # the user's address has precedence
        start = start.model_copy(update={"rank": start.rank.model_copy(update={"variables": variables})})
        directory = resources.enter_context(ScratchDirectory())
        joins = None
        with suppress(OSError):  # on a file system without sockets, the ranks of a launcher cannot join
            joins = _JoinSocket(directory)
            resources.callback(joins.close)
            joins.start = start = start.model_copy(update={"rank_socket": str(directory / "ranks")})
        group = RankGroup([resources.enter_context(open_channel(start))], joins)
        resources.callback(group.close)
        yield group


def _make_start_messages(start: Start, placement: Placement, rendezvous: Mapping[str, str]) -> Iterator[Start]:
    """Yield the start message of each rank of this node, with the environment variables that torchrun sets."""
    for local_rank in range(placement.processes):
        rank = placement.first_rank + local_rank
        variables = {  # under torchrun's names
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(placement.world_size),
            "LOCAL_WORLD_SIZE": str(placement.processes),
            "GROUP_RANK": str(placement.node),
            "GROUP_WORLD_SIZE": str(placement.node_count),
            **rendezvous,
        }
        named = RankInfo(rank=rank, world_size=placement.world_size, local_rank=local_rank, variables=variables)
        yield start.model_copy(update={"rank": named, "reusable": False})


def find_free_port(address: str = "") -> int:
    """Return a port that is free at the local `address` (empty: all addresses). Raises OSError after 100 tries."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as sock:
            try:
                sock.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError("no free port for the ranks of a trial, in 100 tries")
