"""Start a trial's process, exchange messages with it, and end it: the supervisor's side of `process_messages`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from prefect_tune.attempt.processes.process_output import Log, TrialOutput
from prefect_tune.core.messages.process_messages import FromTrial, Start, StartReceived, ToTrial, from_trial
from prefect_tune.core.reasons import ProcessEnd, make_reason
from prefect_tune.runtime.message_stream import FROM_TRIAL_BYTES, MalformedMessage, MessageReader

# The environment variables of a trial's process. Those of a slot are set by the executors; those that a trial sets for
# its children, in `runtime`. A value of one trial is no part of `AttemptRequest.environment`: no two would share an
# import.

# Libraries read these variables once: when they are imported, or when they first compute.
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


def added_to_this(added: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables of this process, with `added` in addition to them or replacing them."""
    return {**os.environ, **added}


def fixed_by_this() -> Mapping[str, str]:
    """Return the variables of this process that libraries read once: processes with other values serve other trials."""
    return {name: os.environ[name] for name in READ_ONCE if name in os.environ}


def of_interpreter(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables with which an interpreter starts: what it prints is read line by line."""
    return {**variables, "PYTHONUNBUFFERED": "1"}


def interpreter_flags() -> list[str]:
    """Return the flags with which this interpreter was started, such as `-O` and `-W`, for another one."""
    flags: list[str] = vars(subprocess)["_args_from_interpreter_flags"]()  # which leaves out most of `-X`
    options = sys._xoptions.items()  # noqa: SLF001 - it is documented
    return [*flags, *(f"-X{name}" if value is True else f"-X{name}={value}" for name, value in options)]


def command_of_trials(module: str, *descriptors: int) -> list[str]:
    """Return the command that starts a program of trials: its numbers, then what its trials find in `sys.argv`."""
    program = getattr(sys.modules["__main__"].__spec__, "name", "").partition(".")[0]
    arguments = sys.argv[:1] if program in ("prefect", "prefect_tune") else sys.argv  # these are not for trials
    flags = [*interpreter_flags(), "-u", "-P", "-X", "faulthandler"]
    return [sys.executable, *flags, "-m", module, *map(str, descriptors), *arguments]


def of_trial(variables: Mapping[str, str], temporary: str | Path) -> Mapping[str, str]:
    """Return all variables of a trial; its temporary files are removed with that directory, however it ends."""
    return {**of_interpreter(variables), "TMPDIR": str(temporary)}


AS_IT_IS: Mapping[str, str] = MappingProxyType({})
"""No variables besides this process's own."""
_GOODBYE = timedelta(seconds=5)


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
        self._connection, self._output = connection, output
        self._reader = _reader_of(connection)
        self._body = body
        self._sending = threading.Lock()
        self.has_begun = False
        """Whether the process has begun the attempt: what it does then is the trainable's, its import included."""

    @property
    def connection(self) -> Connection:
        """What to wait for until a message arrives."""
        return self._connection

    def go_over_to(self, connection: Connection, body: ProcessHandle, output: TrialOutput) -> None:
        """Switch to another process."""
        with self._sending:
            self._connection, self._reader, self._body = connection, _reader_of(connection), body
            self._output = output
            self.has_begun = False

    def tell(self, message: ToTrial) -> None:
        """Send a message; if the trial is gone the message is dropped, and `receive` raises."""
        with self._sending, suppress(OSError):  # the trial is gone, or the channel was just closed
            self._connection.send_bytes(message.model_dump_json().encode())

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
                message = self._reader.read(timedelta(0))
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
def trial_process(start: Start, log: Log, environment: Mapping[str, str] = AS_IT_IS) -> Iterator[TrialChannel]:
    """Train in a child process with its own session. Leaving the block kills all processes left in that session.

    For systems other than Linux, which have no child subreapers: descendants in other sessions survive, also if this
    process is killed. On Linux `TrialProcessPool.process` is used.

    Args:
        environment: variables of this trial, added to this process's environment or replacing them.
    """
    Path(start.temporary).mkdir(exist_ok=True)
    ours, theirs = socket.socketpair()
    lifeline, hold = os.pipe()  # the child is killed when `hold` is closed, also by this process's death
    descriptors = theirs.fileno(), lifeline
    with ours, os.fdopen(hold, "wb"):
        with theirs, os.fdopen(lifeline, "rb"):
            child = subprocess.Popen(
                command_of_trials("prefect_tune.runtime.processes.trial_process", *descriptors),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=of_trial(added_to_this(environment), start.temporary),
                pass_fds=descriptors,
                start_new_session=True,
            )
        body = _Process(child, log)
        body.start()
        with Connection(ours.detach()) as connection:
            channel = TrialChannel(connection, body, body.output)
            try:
                channel.tell(start)
                yield channel
            finally:
                body.end()


@contextmanager
def trial_in_place(start: Start, _log: Log) -> Iterator[TrialChannel]:
    """Train in a thread of this process, for notebooks and debuggers. The thread cannot be ended from outside."""
    from prefect_tune.runtime.processes.trial_process import train

    ours, theirs = socket.socketpair()
    inside = Connection(theirs.detach())

    def run() -> None:
        with inside:
            train(inside, whole_process=False)

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
        self._thread.join(_GOODBYE.total_seconds())
        return ProcessEnd(reason=make_reason("thread-runs" if self.is_alive() else "thread-ended"))


class _Process:
    """A child process whose output is logged line by line."""

    def __init__(self, child: subprocess.Popen[bytes], log: Log) -> None:
        self._child = child
        self.output = TrialOutput(log)
        self._end: ProcessEnd | None = None

    def start(self) -> None:
        if self._child.stdout is not None:
            with self._child.stdout:
                self.output.start(self._child.stdout.fileno())

    def is_alive(self) -> bool:
        return self._child.poll() is None

    def end(self) -> ProcessEnd:
        """Give the process 0.2 s to exit by itself, then kill its whole group."""
        if self._end is None:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(0.2)
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._end = make_process_end(self._child.wait(), self.output.stop())
        return self._end


OWN_SIGNALS = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL"})
"""The signals that the trainable or its libraries cause; SIGKILL comes from outside the process."""


def make_process_end(code: int, output: str) -> ProcessEnd:
    """Return how a process ended: by its exit code (negative: a signal's number), with its last output."""
    if code >= 0:
        return ProcessEnd(exit_code=code, output=output)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"  # a real-time one has none
    return ProcessEnd(signal=name, output=output)
