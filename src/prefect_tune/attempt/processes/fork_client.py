"""Client of the fork server (`prefect_tune.runtime.processes.fork_server`): start it, request processes, end them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

from prefect_tune.attempt.processes.process_channel import command_of_trials, of_interpreter, of_trial
from prefect_tune.core.messages.process_messages import (
    FORK,
    IMPORT,
    ImportRequest,
    Preload,
    Surroundings,
)
from prefect_tune.stores.local.scratch import ScratchDirectory

_PATIENCE = timedelta(seconds=30)  # a fork takes milliseconds, even on a busy machine, unless the server is stopped
_GOODBYE = timedelta(seconds=5)
_WORDS_BYTES, REASON_BYTES = 64, 2000
_MOST_SPLITS = 2  # "born" and two numbers; "unfit" and a reason
_FIRST = "1"  # a process's first temporary directory


class ForkServer:
    """A running fork server (`prefect_tune.runtime.processes.fork_server`). It ends with this process."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._was_asked = False

    @staticmethod
    def start(environment: Mapping[str, str]) -> ForkServer:
        """Start the fork server without waiting; requests queue until it is ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_PATIENCE.total_seconds())
        with theirs:
            process = subprocess.Popen(
                command_of_trials("prefect_tune.runtime.processes.fork_server", theirs.fileno(), os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # trials have their own pipe; the fork server prints nothing
                env=of_interpreter(environment),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return ForkServer(process, ours)

    def fork(self) -> PendingFork:
        """Request a process that waits for its first message; return without waiting for the fork."""
        self._was_asked = True
        return fork_from(self._control)

    def import_first(
        self, trainable: str, import_path: tuple[str, ...], environment: Mapping[str, str]
    ) -> tuple[PendingFork, socket.socket]:
        """Request a template: a process that imports a trainable; return the socket on which it says how that ended.

        Afterwards it takes fork requests on that socket; see `fork_from`. `environment` is all of its variables.

        Raises:
            OSError: the request could not be written, for lack of memory or descriptors.
        """
        self._was_asked = True
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_PATIENCE.total_seconds())
        pending = fork_from(self._control, IMPORT, theirs)
        request = ImportRequest(
            trainable=trainable,
            import_path=import_path,
            surroundings=surroundings(pending.temporary_directory, environment),
            supervisor=os.getpid(),
        )
        try:
            _send_file(ours, request.model_dump_json().encode())
        except OSError:
            ours.close()
            pending.end(timedelta(0))
            raise
        return pending, ours

    def end(self) -> None:
        """End the fork server: it exits after its forked processes, and is killed if that takes more than 5 s."""
        if not self._was_asked:
            self._process.kill()  # it may still be importing
        self._control.close()
        try:
            self._process.wait(_GOODBYE.total_seconds())
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def let_go(self) -> None:
        """Send no more requests, and do not wait: the fork server exits after the last process that it forked."""
        self._control.close()
        threading.Thread(target=self._process.wait, name="fork-server", daemon=True).start()

    def kill(self) -> None:
        """Kill the fork server, even if it is stopped by SIGSTOP."""
        self._process.kill()
        self.end()


def _send_file(control: socket.socket, content: bytes) -> None:
    """Send content of any length as a file in memory."""
    with os.fdopen(os.memfd_create("import"), "wb") as file:
        file.write(content)
        file.flush()
        file.seek(0)
        with suppress(OSError):  # the template is gone
            socket.send_fds(control, [IMPORT], [file.fileno()])


def fork_from(control: socket.socket, word: bytes = FORK, channel: socket.socket | None = None) -> PendingFork:
    """Request a process of a fork server or a template."""
    with ExitStack() as undo:
        home = ScratchDirectory(_FIRST)
        undo.callback(home.close)
        connection, theirs = socket.socketpair() if channel is None else (None, channel)
        status, says = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output, prints = os.pipe()
        undo.pop_all()
    with theirs, says, suppress(OSError):  # if the server is gone, reading `status` gives end of file
        socket.send_fds(control, [word], [theirs.fileno(), prints, says.fileno()])
    os.close(prints)
    return PendingFork(_Ends(Connection(connection.detach()) if connection else None, status, output, home))


def surroundings(temporary: Path, environment: Mapping[str, str]) -> Surroundings:
    """Return what a process adopts: these variables, a temporary directory, and this process's working directory."""
    return Surroundings(
        environment={_latin(name): _latin(value) for name, value in of_trial(environment, temporary).items()},
        working_directory=_latin(_here()),
    )


def _here() -> str:
    """Return the working directory; "" if it was removed: then a fork inherits it anyway."""
    try:
        return os.getcwd()  # noqa: PTH109 - text is needed, not a Path
    except FileNotFoundError:
        return ""


def _latin(text: str) -> str:
    """Return the text's bytes as Latin-1, a character per byte: a variable or a path may not be UTF-8."""
    return os.fsencode(text).decode("latin-1")


class ForksUnfit(OSError):
    """A template cannot be forked safely any more; the text is the reason."""


def _started_pid(status: socket.socket) -> int | None:
    words = message_of(status, _PATIENCE, REASON_BYTES)
    match (words if words is not None else "no word yet").split(maxsplit=_MOST_SPLITS):
        case ["born", subreaper, _]:
            return int(subreaper)
        case ["failed", number]:
            raise OSError(int(number), f"a trial's process cannot be forked: {os.strerror(int(number))}")
        case ["unfit", *why]:
            raise ForksUnfit(" ".join(why))
        case []:
            return None
        case _:
            raise TimeoutError(f"no trial's process was forked within {_PATIENCE.total_seconds():g} s")


@dataclass(frozen=True, slots=True)
class _Ends:
    """The supervisor's descriptors of a process, which may not be forked yet."""

    connection: Connection | None
    """None for a template."""
    status: socket.socket
    output: int
    home: ScratchDirectory
    """For its temporary files."""

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.status.close()
        os.close(self.output)
        self.home.close()


class PendingFork:
    """A requested process that may not be forked yet."""

    def __init__(self, ends: _Ends) -> None:
        self.imports = False
        """Whether it imports a trainable first."""
        self._ends = ends

    def child(self) -> ForkedProcess | None:
        """Wait up to 30 s for the process; return None if the fork server is gone.

        Raises:
            TimeoutError: it does not answer.
            ForksUnfit: what it was to be forked from cannot be forked safely any more.
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

    def import_ahead(self, request: Preload, environment: Mapping[str, str]) -> None:
        """Have it import a trainable as soon as it is forked; see `ForkedProcess.has_imported`."""
        if self._ends.connection is not None:
            for message in (surroundings(self.temporary_directory, environment), request):
                self._ends.connection.send_bytes(message.model_dump_json().encode())
            self.imports = True

    def dismiss(self) -> None:
        """Let the process exit by itself: it is not needed. Call `end` afterwards."""
        if self._ends.connection is not None:
            self._ends.connection.close()

    def end(self, patience: timedelta) -> None:
        """Give the process `patience` to exit by itself; then its subreaper, if there is one, kills it."""
        try:
            while message_of(self._ends.status, patience):
                pass  # "born", then "ended"
        finally:
            self._ends.close()


class ForkedProcess:
    """A forked process, as its supervisor controls it."""

    def __init__(self, ends: _Ends, subreaper: int) -> None:
        self.output = ends.output
        """Descriptor of the pipe that carries its stdout and stderr."""
        self._ends = ends
        self._subreaper = subreaper
        self.was_cut = False
        """Whether `end` killed it, since it did not exit by itself in time."""
        self._temporary_count = 0
        self._code: int | None = None
        self._closed = False

    @property
    def connection(self) -> Connection:
        """The channel to a trial's process; a template has none."""
        if self._ends.connection is None:
            raise ValueError("a template has no channel")
        return self._ends.connection

    def has_imported(self, patience: timedelta) -> bool:
        """Wait up to `patience`; return whether the import that it was asked for is over, however it ended.

        Return True only once.

        Raises:
            EOFError: the process is gone.
        """
        if not self.connection.poll(patience.total_seconds()):
            return False
        self.connection.recv_bytes()
        return True

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

    def end(self, patience: timedelta | None = _GOODBYE) -> int:
        """Give the process `patience` to exit by itself, then kill it and all its descendants; return its exit code.

        With None it has no limit.
        A negative code is the negated number of the signal that killed it.
        """
        code = self._ended_within(patience)
        if code is None:
            self.was_cut = True
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

    def _ended_within(self, patience: timedelta | None) -> int | None:
        if self._code is None and not self._closed:
            words = message_of(self._ends.status, patience)
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


def message_of(status: socket.socket, patience: timedelta | None, most_bytes: int = _WORDS_BYTES) -> str | None:
    """Return the next message of a forked process: "" if it is gone, None if no message came in time."""
    if not wait([status], None if patience is None else patience.total_seconds()):
        return None
    try:
        return status.recv(most_bytes).decode("utf-8", "replace")
    except ConnectionError:
        return ""
