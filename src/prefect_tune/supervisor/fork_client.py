"""Client of the fork server (`prefect_tune.runtime.fork_server`): start it, request processes, end them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

from prefect_tune.core.messages.process_messages import READY, Preload, ToTrial
from prefect_tune.stores.local.scratch import ScratchDirectory
from prefect_tune.supervisor.process_output import Log, TrialOutput

__all__ = ["ForkServer", "ForkedProcess", "PendingFork"]

_PATIENCE = timedelta(seconds=30)  # a fork takes milliseconds, even on a busy machine, unless the server is stopped
_GOODBYE = timedelta(seconds=5)
_IMPORT = timedelta(minutes=10)  # of PyTorch and more from a cold network disk
_WORDS_BYTES = 64
_REASON_BYTES = 2000
_FIRST = "1"  # a process's first temporary directory


class ForkServer:
    """A running fork server (`prefect_tune.runtime.fork_server`). It ends with this process."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._was_asked = False
        self._ready = threading.Event()
        self._ready.set()
        self.why_plain = ""
        """Why it forks without the trainable, although it was to import it; empty if it has, or if it was not."""
        self.has_died = False
        """Whether the import has ended it, or took too long."""

    @staticmethod
    def start(environment: Mapping[str, str], preload: Preload | None = None, log: Log | None = None) -> ForkServer:
        """Start the fork server without waiting; requests queue until it is ready.

        Args:
            preload: the trainable that it imports first. Call `fork` only after `is_ready` has returned True.
            log: the log that receives what the import prints.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_PATIENCE.total_seconds())
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "prefect_tune.runtime.fork_server"]
        with theirs, _file_of(preload) as request:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), *map(str, request)],
                stdin=subprocess.DEVNULL,
                # Trials have their own pipe, and without an import the fork server prints nothing.
                stdout=subprocess.DEVNULL if preload is None else subprocess.PIPE,
                env={**environment, "PYTHONUNBUFFERED": "1"},
                pass_fds=(theirs.fileno(), *request),
                start_new_session=True,
            )
        started = ForkServer(process, ours)
        if preload is not None and log is not None:
            started._await_import(log)
        return started

    def _await_import(self, log: Log) -> None:
        """Wait for the end of the import, in a thread."""
        self._ready.clear()
        output = TrialOutput(log)
        if self._process.stdout is not None:
            with self._process.stdout:
                output.start(self._process.stdout.fileno())
        threading.Thread(target=self._note_import, args=(output,), name="fork-server-import", daemon=True).start()

    def _note_import(self, output: TrialOutput) -> None:
        said = _message(self._control, _IMPORT, most_bytes=_REASON_BYTES)
        output.stop()
        if not said:
            self.has_died = True
            self._process.kill()
            how = f"took longer than {_IMPORT}" if said is None else "ended the process"
            self.why_plain = f"its import {how}"
        elif said != READY:
            self.why_plain = said
        self._ready.set()

    def is_ready(self, patience: timedelta) -> bool:
        """Wait up to `patience`; return whether the import is over, however it ended."""
        return self._ready.wait(patience.total_seconds())

    def fork(self) -> PendingFork:
        """Request a process that waits for its first message; return without waiting for the fork."""
        self._was_asked = True
        with ExitStack() as undo:
            home = ScratchDirectory(_FIRST)
            undo.callback(home.close)
            connection, channel = socket.socketpair()
            status, says = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            output, prints = os.pipe()
            undo.pop_all()
        with channel, says, suppress(OSError):  # if the server is gone, reading `status` gives end of file
            socket.send_fds(self._control, [b"fork"], [channel.fileno(), prints, says.fileno()])
        os.close(prints)
        return PendingFork(_Ends(Connection(connection.detach()), status, output, home))

    def end(self) -> None:
        """End the fork server: it exits after its forked processes, and is killed if that takes more than 5 s."""
        if not self._was_asked:
            self._process.kill()  # it may still be importing
        self._close()
        try:
            self._process.wait(_GOODBYE.total_seconds())
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def let_go(self) -> None:
        """Send no more requests, and do not wait: the fork server exits after the last process that it forked."""
        self._close()
        threading.Thread(target=self._process.wait, name="fork-server", daemon=True).start()

    def kill(self) -> None:
        """Kill the fork server, even if it is stopped by SIGSTOP."""
        self._process.kill()
        self.end()

    def _close(self) -> None:
        if not self._ready.is_set():
            self._process.kill()
            self._ready.wait()  # its thread reads `control`
        self._control.close()


@contextmanager
def _file_of(preload: Preload | None) -> Iterator[Sequence[int]]:
    """Yield the descriptor of a file in memory that holds `preload`; none without it."""
    if preload is None:
        yield ()
        return
    with os.fdopen(os.memfd_create("preload"), "wb") as file:
        file.write(preload.model_dump_json().encode())
        file.flush()
        file.seek(0)
        yield (file.fileno(),)


def _started_pid(status: socket.socket) -> int | None:
    words = _message(status, _PATIENCE)
    match (words or "").split():
        case ["born", subreaper, _]:
            return int(subreaper)
        case ["failed", number]:
            raise OSError(int(number), f"a trial's process cannot be forked: {os.strerror(int(number))}")
        case _:
            return None


@dataclass(frozen=True, slots=True)
class _Ends:
    """The supervisor's descriptors of a process, which may not be forked yet."""

    connection: Connection
    status: socket.socket
    output: int
    home: ScratchDirectory
    """For its temporary files."""

    def close(self) -> None:
        self.connection.close()
        self.status.close()
        os.close(self.output)
        self.home.close()


class PendingFork:
    """A requested process that may not be forked yet."""

    def __init__(self, ends: _Ends) -> None:
        self._ends = ends

    def child(self) -> ForkedProcess | None:
        """Wait up to 30 s for the process; return None if the fork server is gone or does not answer.

        Raises:
            OSError: the fork failed, for example for lack of memory or process ids.
        """
        with ExitStack() as undo:
            undo.callback(self._ends.close)
            subreaper = _started_pid(self._ends.status)
            if subreaper is None:
                return None
            undo.pop_all()
        return ForkedProcess(self._ends, subreaper)

    @property
    def temporary_directory(self) -> Path:
        """An empty directory for what it does in advance."""
        return self._ends.home.path / _FIRST

    def tell(self, message: ToTrial) -> None:
        """Send a message, which it reads when it is forked."""
        self._ends.connection.send_bytes(message.model_dump_json().encode())

    def dismiss(self) -> None:
        """Let the process exit by itself: it is not needed. Call `end` afterwards."""
        self._ends.connection.close()

    def end(self, patience: timedelta) -> None:
        """Give the process `patience` to exit by itself; then its subreaper, if there is one, kills it."""
        try:
            while _message(self._ends.status, patience):
                pass  # "born", then "ended"
        finally:
            self._ends.close()


class ForkedProcess:
    """A forked process, as its supervisor controls it."""

    def __init__(self, ends: _Ends, subreaper: int) -> None:
        self.connection = ends.connection
        self.output = ends.output
        """Descriptor of the pipe that carries its stdout and stderr."""
        self._ends = ends
        self._subreaper = subreaper
        self._temporary_count = 0
        self._code: int | None = None
        self._closed = False

    def new_temporary_directory(self) -> Path:
        """Return a new empty directory; earlier ones stay until the process ends, since it may still use them."""
        self._temporary_count += 1
        directory = self._ends.home.path / str(self._temporary_count)
        directory.mkdir(parents=True, exist_ok=True)  # a cleaner of temporary files may have removed an empty parent
        return directory

    def is_alive(self) -> bool:
        return self._ended_within(timedelta(0)) is None

    def dismiss(self) -> None:
        """Let a waiting process clean up and exit: it is not needed any more."""
        self.connection.close()

    def end(self, patience: timedelta = _GOODBYE) -> int:
        """Give the process `patience` to exit by itself, then kill it and all its descendants; return its exit code.

        A negative code is the negated number of the signal that killed it.
        """
        code = self._ended_within(patience)
        if code is None:
            with suppress(OSError):  # the process has just ended
                self._ends.status.shutdown(socket.SHUT_WR)
            code = self._ended_within(_GOODBYE)
        if code is None:
            # The subreaper still holds the other side of `status`, so its pid was not reused; and after a request to
            # end a trial it supervises no other one.
            os.kill(self._subreaper, signal.SIGKILL)
            code = -signal.SIGKILL
        self._close()
        return code

    def _ended_within(self, patience: timedelta) -> int | None:
        if self._code is None and not self._closed:
            words = _message(self._ends.status, patience)
            match (words if words is not None else "no word yet").split():
                case ["ended", status]:
                    self._code = os.waitstatus_to_exitcode(int(status))
                case []:
                    self._code = -signal.SIGKILL  # its subreaper was killed, which kills the process too
                case _:
                    pass  # it is alive
        return self._code

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ends.close()


def _message(status: socket.socket, patience: timedelta, most_bytes: int = _WORDS_BYTES) -> str | None:
    """Return the next message of a forked process: "" if it is gone, None if no message came in time."""
    if not wait([status], patience.total_seconds()):
        return None
    try:
        return status.recv(most_bytes).decode()
    except ConnectionError:
        return ""
