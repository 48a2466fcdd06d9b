"""Have processes forked by `prefect_tune.nursery`: the supervisor's half."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

from prefect_tune.stores.scratch import ScratchDirectory

__all__ = ["Child", "Expected", "Forks"]

_PATIENCE = timedelta(seconds=30)  # a busy machine's fork takes milliseconds; only a stopped process takes this long
_GOODBYE = timedelta(seconds=5)
_WORDS_BYTES = 64
_FIRST = "1"  # a process's first temporary directory


class Forks:
    """A running `prefect_tune.nursery`. It ends with this process."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._was_asked = False

    @staticmethod
    def start(environment: Mapping[str, str]) -> Forks:
        """Start it; what it is asked for meanwhile it does when it is ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_PATIENCE.total_seconds())
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "prefect_tune.nursery"]
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what a trial prints goes elsewhere, and this process prints nothing
                env={**environment, "PYTHONUNBUFFERED": "1"},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return Forks(process, ours)

    def fork(self) -> Expected:
        """Ask for a process that waits for its first words, and do not wait for it."""
        self._was_asked = True
        with ExitStack() as undo:
            home = ScratchDirectory(_FIRST)
            undo.callback(home.close)
            connection, channel = socket.socketpair()
            status, says = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            output, prints = os.pipe()
            undo.pop_all()
        with channel, says, suppress(OSError):  # it is gone: then nobody holds the other side of `status` either
            socket.send_fds(self._control, [b"fork"], [channel.fileno(), prints, says.fileno()])
        os.close(prints)
        return Expected(_Ends(Connection(connection.detach()), status, output, home))

    def end(self) -> None:
        """End it; what it has forked has ended, or lives on."""
        if not self._was_asked:
            self._process.kill()  # it may be importing still
        self._control.close()
        try:
            self._process.wait(_GOODBYE.total_seconds())
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def let_go(self) -> None:
        """Ask it for nothing any more, and do not wait: it stays as long as what it has forked."""
        self._control.close()
        threading.Thread(target=self._process.wait, name="fork-server", daemon=True).start()

    def kill(self) -> None:
        """End it at once, be it stopped."""
        self._process.kill()
        self.end()


def _born(status: socket.socket) -> int | None:
    words = _heard(status, _PATIENCE)
    match (words or "").split():
        case ["born", nanny, _]:
            return int(nanny)
        case ["failed", number]:
            raise OSError(int(number), f"a trial's process cannot be forked: {os.strerror(int(number))}")
        case _:
            return None


@dataclass(frozen=True, slots=True)
class _Ends:
    """What a supervisor holds of a process, be it there yet or not."""

    connection: Connection
    status: socket.socket
    output: int
    home: ScratchDirectory
    """Where its temporary files go."""

    def close(self) -> None:
        self.connection.close()
        self.status.close()
        os.close(self.output)
        self.home.close()


class Expected:
    """A process that was asked for, and may not be there yet."""

    def __init__(self, ends: _Ends) -> None:
        self._ends = ends

    def child(self) -> Child | None:
        """Wait for it; None when the nursery is gone, or does not answer.

        Raises:
            OSError: the machine has no room for another process.
        """
        with ExitStack() as undo:
            undo.callback(self._ends.close)
            nanny = _born(self._ends.status)
            if nanny is None:
                return None
            undo.pop_all()
        return Child(self._ends, nanny)

    def dismiss(self) -> None:
        """Tell it that nobody needs it any more: it leaves. `end` is to be called then."""
        self._ends.connection.close()

    def end(self, patience: timedelta) -> None:
        """Give it `patience` to leave by itself; then the nanny, if there is one, ends it."""
        try:
            while _heard(self._ends.status, patience):
                pass  # it was born; it has ended
        finally:
            self._ends.close()


class Child:
    """A process that was forked, as its supervisor sees it."""

    def __init__(self, ends: _Ends, nanny: int) -> None:
        self.connection = ends.connection
        self.output = ends.output
        """What it prints can be read here."""
        self._ends = ends
        self._nanny = nanny
        self._temporary_count = 0
        self._code: int | None = None
        self._closed = False

    def new_temporary_directory(self) -> Path:
        """Return a new empty directory; those before it stay as long as the process, which may still use them."""
        self._temporary_count += 1
        directory = self._ends.home.path / str(self._temporary_count)
        directory.mkdir(parents=True, exist_ok=True)  # who tidies up may have taken what nothing was in
        return directory

    def is_alive(self) -> bool:
        return self._ended_within(timedelta(0)) is None

    def dismiss(self) -> None:
        """Tell a process that waits that nobody needs it any more: it cleans up, and leaves."""
        self.connection.close()

    def end(self, patience: timedelta = _GOODBYE) -> int:
        """Give it `patience` to leave by itself, then kill it and all it has started; return its exit code.

        Less than 0 is a signal's number, negated.
        """
        code = self._ended_within(patience)
        if code is None:
            with suppress(OSError):  # it has ended this very moment
                self._ends.status.shutdown(socket.SHUT_WR)
            code = self._ended_within(_GOODBYE)
        if code is None:
            # Whoever holds the other side of `status` lives, so the number is still its own; and who was told to end
            # a trial looks after no other one.
            os.kill(self._nanny, signal.SIGKILL)
            code = -signal.SIGKILL
        self._close()
        return code

    def _ended_within(self, patience: timedelta) -> int | None:
        if self._code is None and not self._closed:
            words = _heard(self._ends.status, patience)
            match (words if words is not None else "no word yet").split():
                case ["ended", status]:
                    self._code = os.waitstatus_to_exitcode(int(status))
                case []:
                    self._code = -signal.SIGKILL  # its nanny was killed, and it with her
                case _:
                    pass  # it lives
        return self._code

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ends.close()


def _heard(status: socket.socket, patience: timedelta) -> str | None:
    """Return what the nanny says next; nothing ("") when she is gone, None when she has not said it yet."""
    if not wait([status], patience.total_seconds()):
        return None
    try:
        return status.recv(_WORDS_BYTES).decode()
    except ConnectionError:
        return ""
