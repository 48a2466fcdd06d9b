"""The processes that trials are forked from: a fork server, and a template for each trainable and environment.

    fork server (no user code) ──► template: imports the trainable, is inspected ──► READY: trials are forked from it
           │                                   └─► unsafe to fork: the reason is logged once, the template ends
           └──► a process that imports the trainable itself: if `reuse="never"`, if forks are unsafe, or after `stop`

Each template and each trial has a subreaper (`prefect_tune.runtime.processes.fork_server`), which exists only on Linux.
No trial is forked from a template that is unsafe to fork, or whose earlier fork hung. No trial waits for an import for
more than 10 minutes, or after `stop` is set. No template outlives the pool, unless trials forked from it still run.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Self, TypeAlias

from prefect_tune.attempt.processes.process_channel import (
    READ_ONCE_VARIABLES,
    SupervisedProcess,
    make_interpreter_environment,
    make_program_command,
)
from prefect_tune.attempt.processes.process_output import Log, TrialOutput, WaitLog
from prefect_tune.core.messages.process_messages import (
    FORK_REQUEST,
    IMPORT_REQUEST,
    TEMPLATE_READY,
    ImportRequest,
    ProcessEnvironment,
)
from prefect_tune.runtime.trainable import Reuse
from prefect_tune.stores.deadline import Deadline
from prefect_tune.terminal.live_display import NOTICE

_FORK_TIMEOUT = timedelta(seconds=30)  # ample, because a fork takes milliseconds even on a busy machine
_SEND_TIMEOUT = timedelta(seconds=60)
"""The time after which a send fails if the receiving process hangs or is stopped."""
_IMPORT_TIMEOUT = timedelta(minutes=10)  # long enough to import PyTorch from a slow network disk
_NO_WAIT = timedelta(0)
_EXIT_TIMEOUT = timedelta(seconds=5)
_POLL_INTERVAL = timedelta(seconds=0.2)
_MESSAGE_BYTES = 2000
_MAX_TRIES = 3


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """Identifies the trials that one process can serve: those of one trainable, one import path and one environment."""

    trainable: str
    import_path: tuple[str, ...]
    environment: frozenset[tuple[str, str]]

    @classmethod
    def for_trial(cls, trainable: str, import_path: tuple[str, ...], environment: Mapping[str, str]) -> Self:
        """Return a trial's key, with this process's `READ_ONCE_VARIABLES`, which `environment` extends or overrides."""
        # Read `os.environ` at each call, because a task runner such as Ray may change the visible GPUs between trials.
        inherited = {name: os.environ[name] for name in READ_ONCE_VARIABLES if name in os.environ}
        return cls(trainable, import_path, frozenset({**inherited, **environment}.items()))

    @property
    def full_environment(self) -> Mapping[str, str]:
        """The variables of this process, extended and overridden by the trial's variables."""
        return {**os.environ, **dict(self.environment)}

    def __str__(self) -> str:
        return f"trainable {self.trainable!r}" if ":" in self.trainable else "the trainable"


def make_process_environment(temporary: Path, environment: Mapping[str, str]) -> ProcessEnvironment:
    """Return what a new process gets: `environment`, `temporary` as TMPDIR, and this process's working directory."""

    def to_latin(text: str) -> str:  # one character per byte, because a variable or a path may be invalid UTF-8
        return os.fsencode(text).decode("latin-1")

    variables = {**make_interpreter_environment(environment), "TMPDIR": str(temporary)}
    directory = ""
    with suppress(FileNotFoundError):  # if the directory was removed, omit it; a fork inherits it anyway
        directory = os.getcwd()  # noqa: PTH109 - text is needed, not a Path
    return ProcessEnvironment(
        environment={to_latin(name): to_latin(value) for name, value in variables.items()},
        working_directory=to_latin(directory),
    )


class ForkedProcess(SupervisedProcess):
    """A forked process with its subreaper. All descendants of the process end with it."""

    def __init__(
        self, subreaper: int, status: socket.socket, output: int, connection: Connection | None, resources: ExitStack
    ) -> None:
        super().__init__(output, connection, resources)
        self._subreaper, self._status = subreaper, status
        self._code: int | None = None

    @staticmethod
    def fork(
        control: socket.socket, request: bytes = FORK_REQUEST, channel: socket.socket | None = None
    ) -> ForkedProcess | None:
        """Request a process from the fork server (or template) at `control`; return None if the server is gone.

        Pass `channel` only for a new template; for a trial's process, this method makes a channel.

        Raises:
            TimeoutError: no answer arrived within 30 s.
            OSError: the fork failed, for example for lack of memory, or the template is not safe to fork.
        """
        with ExitStack() as undo:
            connection = None
            if channel is None:
                ours, channel = socket.socketpair()
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT.seconds, 0))
                connection = undo.enter_context(Connection(ours.detach()))
            with channel:
                status, their_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.enter_context(status)
                with their_status:
                    output, their_output = os.pipe()
                    undo.callback(os.close, output)
                    with suppress(OSError):  # the server is gone, so `read_fork_message` returns ""
                        socket.send_fds(control, [request], [channel.fileno(), their_output, their_status.fileno()])
                    os.close(their_output)
            message = read_fork_message(status, _FORK_TIMEOUT)
            match (message if message is not None else "no answer yet").split(maxsplit=1):
                case ["born", subreaper]:
                    return ForkedProcess(int(subreaper), status, output, connection, undo.pop_all())
                case ["failed", number]:
                    raise OSError(int(number), f"a trial's process cannot be forked: {os.strerror(int(number))}")
                case ["unsafe", *reason]:
                    raise OSError(" ".join(reason))
                case []:
                    return None
                case _:
                    raise TimeoutError(f"a trial's process was not forked within {_FORK_TIMEOUT.total_seconds():g} s")

    def _kill(self) -> int:
        with suppress(OSError):  # the process may have just ended
            self._status.shutdown(socket.SHUT_WR)
        if (code := self._wait_for_end(_EXIT_TIMEOUT)) is None:
            # The subreaper still runs, since its side of `status` is open, so no other process can have this pid.
            os.kill(self._subreaper, signal.SIGKILL)
            code = self._code = -signal.SIGKILL
        return code

    def _wait_for_end(self, timeout: timedelta | None) -> int | None:
        if self._code is None and (message := read_fork_message(self._status, timeout)) is not None:
            # The message is `ended <wait status>`, or empty if the subreaper was killed, which also kills the process.
            self._code = os.waitstatus_to_exitcode(int(message.split()[1])) if message else -signal.SIGKILL
        return self._code


def read_fork_message(source: socket.socket, timeout: timedelta | None) -> str | None:
    """Return the next message of a forked process: "" if the process is gone, None if no message arrives in time."""
    if not wait([source], None if timeout is None else timeout.total_seconds()):
        return None
    try:
        return source.recv(_MESSAGE_BYTES).decode("utf-8", "replace")
    except ConnectionError:
        return ""


class ForkServer:
    """A running fork server (`prefect_tune.runtime.processes.fork_server`), which ends with this process."""

    def __init__(self) -> None:
        """Start the fork server without waiting; requests queue until the server is ready."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(_FORK_TIMEOUT.total_seconds())
        self._has_requests = False
        with theirs:
            self._process = subprocess.Popen(
                make_program_command("prefect_tune.runtime.processes.fork_server", theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # each trial has a pipe for its output; the fork server prints nothing
                env=make_interpreter_environment(os.environ),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def fork(self, request: bytes = FORK_REQUEST, channel: socket.socket | None = None) -> ForkedProcess | None:
        """Return a new process; see `ForkedProcess.fork`."""
        self._has_requests = True
        return ForkedProcess.fork(self.control, request, channel)

    def end(self, timeout: timedelta | None = _EXIT_TIMEOUT) -> None:
        """End the fork server, which waits for its forked processes; kill it after `timeout` (None: never)."""
        if not self._has_requests:
            self._process.kill()  # do not wait for the server's imports, because nothing was forked
        self.control.close()
        try:
            self._process.wait(None if timeout is None else timeout.total_seconds())
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class TemplateProcess:
    """A process that imports a trainable, and then forks the trainable's trials. Like a trial, it has a subreaper.

    When the template ends, all processes that the import has started are ended, too. A template that is unsafe to fork
    ends before `wait_for_import` returns True.
    """

    def __init__(self, server: ForkServer, key: ProcessKey, log: Log) -> None:
        self.server = server
        self.process: ForkedProcess | None = None
        """The template; None if the fork server was gone. Valid after the import has ended."""
        self.unsafe_reason: str | None = None
        """Why trials cannot be forked from the template; None if they can. Valid after the import has ended."""
        self._key = key
        self._control, self._their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_FORK_TIMEOUT.total_seconds())
        self._output = TrialOutput(log)
        self._wait_log = WaitLog(log, f"importing {key}")
        self._imported, self._ending = threading.Event(), threading.Event()
        threading.Thread(target=copy_context().run, args=(self._run_import,), name="template", daemon=True).start()

    def wait_for_import(self, timeout: timedelta) -> bool:
        """Wait up to `timeout`; return whether the import has ended, with or without success."""
        return self._imported.wait(timeout.total_seconds())

    def fork(self) -> ForkedProcess | None:
        """Return a trial's process. Call this only after the import has ended, and only if `unsafe_reason` is None."""
        return ForkedProcess.fork(self._control)

    def end(self, timeout: timedelta | None = _EXIT_TIMEOUT) -> None:
        """End the template, which waits for its forked processes; kill it after `timeout` (None: never).

        A template that is still importing is killed immediately.
        """
        self._ending.set()  # ends the wait for a running import
        self._imported.wait()
        self._control.close()
        if self.process is not None:
            self.process.end(timeout)
            self._output.stop()

    def _run_import(self) -> None:
        try:
            with self._their_control:
                self.process = self.server.fork(IMPORT_REQUEST, self._their_control)
            self.unsafe_reason = "its process could not be forked"
            if self.process is not None:
                self.unsafe_reason = self._import_trainable(self.process)
        except Exception as error:  # noqa: BLE001 - without this, threads in `wait_for_import` never end
            self.unsafe_reason = f"its import could not be observed: {type(error).__name__}: {error}"
        finally:
            if self.unsafe_reason is not None and self.process is not None:
                self.process.end(_NO_WAIT)
                self._output.stop()
            self._imported.set()

    def _import_trainable(self, process: ForkedProcess) -> str | None:
        """Import the trainable in `process`; return why trials cannot be forked from this process, None if they can."""
        self._output.start(process.output)  # reads until the template ends, so that fork handlers cannot fill the pipe
        request = ImportRequest(
            trainable=self._key.trainable,
            import_path=self._key.import_path,
            environment=make_process_environment(process.make_temporary_directory(), self._key.full_environment),
            supervisor=os.getpid(),
        )
        with tempfile.TemporaryFile() as file:  # send a file, because the length of a message is limited
            file.write(request.model_dump_json().encode())
            file.flush()
            file.seek(0)
            with suppress(OSError):  # the template may be gone
                socket.send_fds(self._control, [IMPORT_REQUEST], [file.fileno()])
        deadline = Deadline.after(_IMPORT_TIMEOUT)
        while not self._ending.is_set():
            if message := read_fork_message(self._control, _POLL_INTERVAL):
                return None if message == TEMPLATE_READY else message
            if message is not None or not process.is_alive():
                return "its import ended the process"
            self._wait_log.log_if_due()
            if deadline.remaining_seconds <= 0:
                return f"its import took longer than {_IMPORT_TIMEOUT}"
        return "it is not needed any more"


_ForkSource: TypeAlias = ForkServer | TemplateProcess


def _end_in_background(source: _ForkSource) -> None:
    """End `source` in a thread, because the source exits only after the last process that it has forked."""
    threading.Thread(target=source.end, args=(None,), name="fork-server", daemon=True).start()


class ForkSources:
    """The fork server of a pool and, with `reuse="auto"`, a template for each key. Thread-safe."""

    def __init__(self, reuse: Reuse) -> None:
        self._has_templates = reuse == "auto"
        self._guard = threading.RLock()
        self._server: ForkServer | None = None
        self._templates: dict[ProcessKey, TemplateProcess] = {}  # least recently used first
        self._unsafe: set[ProcessKey] = set()
        self._closed = False

    def start_fork_source(self, key: ProcessKey, log: Log, slots: int = 1) -> _ForkSource:
        """Return the template or the fork server for trials with this key; start it, without waiting, if needed.

        If there are more than two templates per slot, end the least recently used templates.
        Raises RuntimeError after `close`.
        """
        with self._guard:
            server = self._get_server()
            if not self._has_templates or key in self._unsafe:
                return server
            self._templates[key] = template = self._templates.pop(key, None) or TemplateProcess(server, key, log)
            for surplus in [*self._templates][: -2 * max(1, slots)]:
                _end_in_background(self._templates.pop(surplus))
            return template

    def fork(self, key: ProcessKey, log: Log, stop: threading.Event, slots: int) -> ForkedProcess:
        """Return a new process: a fork of the template, or of the fork server, which has not imported the trainable.

        The fork server is used if `stop` is set during the import, or if the import cannot be shared (logged once).
        Raises OSError if no process could be forked.
        """
        for _ in range(_MAX_TRIES):
            source = self._get_ready_source(key, log, stop, slots)
            try:
                process = source.fork()
            except OSError as error:  # the fork failed, for example because a thread runs or the import lowered a limit
                if isinstance(error, TimeoutError):  # a fork handler hangs, or the server hangs
                    self._discard(source)
                elif isinstance(source, ForkServer):
                    raise
                if isinstance(source, TemplateProcess):
                    self.stop_forking(key, str(error), log)
            else:
                if process is not None:
                    return process
                self._discard(source)
        raise OSError(f"cannot fork a trial's process: {_MAX_TRIES} consecutive fork servers did not respond")

    def stop_forking(self, key: ProcessKey, reason: str, log: Log) -> None:
        """Fork no more trials with this key from a template; log the reason once. Running trials continue."""
        with self._guard:
            if not self._has_templates or key in self._unsafe:
                return
            self._unsafe.add(key)
            template = self._templates.pop(key, None)
        line = "%s: trials cannot be forked after its import, so each trial imports it: %s"
        log.info(line, key, reason, extra=NOTICE)
        if template is not None:
            _end_in_background(template) if template.unsafe_reason is None else template.end()

    def close(self, *, is_used: bool) -> None:
        """End the fork server and the templates. If `is_used`, do not wait, since forked processes still run."""
        with self._guard:
            self._closed = True
            running: list[_ForkSource] = [*self._templates.values(), *([self._server] if self._server else [])]
            self._templates, self._server = {}, None
        for source in running:
            _end_in_background(source) if is_used else source.end()

    def _get_ready_source(self, key: ProcessKey, log: Log, stop: threading.Event, slots: int) -> _ForkSource:
        source = self.start_fork_source(key, log, slots)
        if isinstance(source, ForkServer):
            return source
        while not source.wait_for_import(_POLL_INTERVAL):
            if stop.is_set():
                return self._get_server()
        if source.unsafe_reason is None:
            return source
        if source.process is not None:
            self.stop_forking(key, source.unsafe_reason, log)
        else:  # the template's fork server is gone, but a new fork server may work
            self._discard(source)
            self._discard(source.server)
        return self._get_server()

    def _get_server(self) -> ForkServer:
        """Return the fork server; start it if it does not run."""
        with self._guard:
            if self._closed:
                raise RuntimeError("the pool of trial processes is closed")
            self._server = self._server or ForkServer()
            return self._server

    def _discard(self, source: _ForkSource) -> None:
        """Remove and kill a source that is gone or hangs; its forked processes continue.

        If the source is already removed, do nothing, because another thread ends it.
        """
        with self._guard:
            keys = [key for key, template in self._templates.items() if template is source]
            for key in keys:
                del self._templates[key]
            if is_server := source is self._server:
                self._server = None
        if keys or is_server:
            source.end(_NO_WAIT)
