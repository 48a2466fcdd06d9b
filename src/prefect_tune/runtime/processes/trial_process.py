"""The main program of a trial's process, without Prefect.

It reads a `Start` message from its channel, trains, sends the end of the attempt, and may then serve another one. It
writes to no target. On Linux the process is forked and supervised by the fork server
(`prefect_tune.runtime.processes.fork_server`). Elsewhere it is started as
`python -m prefect_tune.runtime.processes.trial_process`, and kills its process group when its supervisor is gone.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn, TypeAlias, cast

from prefect_tune.core.experiment.stoppers import Never, Stopper
from prefect_tune.core.journal_events import AttemptEnded, Finished
from prefect_tune.core.messages.process_messages import ProcessEnvironment, Start, StartReceived, TrialEnded
from prefect_tune.core.values import digest_of
from prefect_tune.runtime.group_session import joined_session, session_of
from prefect_tune.runtime.load_named import (
    load_named,
    load_trainable,
    names_for_spawned,
    offer_to_spawned,
    pickled,
    prepend_import_path,
)
from prefect_tune.runtime.message_stream import SupervisorConnection
from prefect_tune.runtime.processes.process_reset import (
    flush_output,
    free_memory,
    has_noted_import,
    noting_import,
    print_logs_of_run,
    reset_process_state,
    run_exit_handlers,
)
from prefect_tune.runtime.ranks import SCRIPT, claim_process, is_copy_for_rank
from prefect_tune.runtime.session import TrialSession
from prefect_tune.runtime.trainable import (
    Trainable,
    TrialOver,
    enter,
    require_no_coroutine,
    require_saves,
    require_trainable_class,
)
from prefect_tune.runtime.trial_errors import NotLoaded, failure_message, was_raised_by_signal_handler

Life: TypeAlias = "Callable[[], Life | None]"
_PARENT_POLL_SECONDS = 0.5
TrainFunction = Callable[[Mapping[str, object]], Mapping[str, object] | None]


class _Declined(Exception):
    """The trainable of the previous trial refused this trial's configuration."""


@dataclass(frozen=True, slots=True)
class _SetUp:
    """A class trainable after `setup`, ready for a checkpoint or its first step."""

    trainable: Trainable
    code: str
    """The digest of its source when it was imported."""


def take_numbers() -> tuple[int, int]:
    """Return the two numbers of the command line; `sys.argv` is that of the user's script then."""
    numbers = int(sys.argv[1]), int(sys.argv[2])
    sys.argv[:] = sys.argv[3:]
    return numbers


def run_forever(life: Life | None) -> NoReturn:
    """Run a process's main function, then the one that it returns, and so on; then exit.

    A forked child returns its own main function, so that it does not run on the stack of its parent's. Threads and
    children that a trainable has left do not keep the process alive.
    """
    code = 1
    try:
        while life is not None:
            life = life()
        code = 0
    except BaseException:  # noqa: BLE001 - the process's edge: a traceback, and exit code 1
        with suppress(Exception):  # the trainable has replaced stderr
            traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def main(channel_fd: int, supervisor: int) -> None:
    """Serve attempts on the inherited descriptor, in a process that was not forked."""
    threading.Thread(target=_die_with_parent, args=(supervisor,), daemon=True).start()
    faulthandler.enable(all_threads=False)  # the stack of that thread would push out what the trial has printed last
    serve(Connection(channel_fd))


def train(channel: Connection) -> None:
    """Run the attempt that the channel's first message describes in this thread, and send its end on the channel."""
    connection = SupervisorConnection(channel)
    start = cast("Start", connection.receive())
    _Attempts(connection, whole_process=False).run(start.model_copy(update={"waits": False}))


def serve(channel: Connection) -> None:
    """Run one attempt after the other, as long as the last one's trainable can be reused.

    It returns without a message when the trainable declines the next trial, and when the channel is closed.
    """
    ignore_group_signals()
    connection = SupervisorConnection(channel)
    attempts = _Attempts(connection, whole_process=True)
    if (start := _next_start(connection)) is None:
        return  # the supervisor is gone
    with suppress(_Declined):
        while start is not None and attempts.run(start):
            start = _next_start(connection)
    attempts.clean_up()
    run_exit_handlers()


def train_as_rank() -> None:
    """Train as a rank, in a second copy of a trial's program that a launcher has started: Lightning's, Fabric's.

    It ends as a script does, with its exit handlers.
    """
    ignore_group_signals()
    sys.argv[:1] = [os.environ[SCRIPT]]
    session = cast("TrialSession", joined_session("a copy of the trial's program"))
    start = session.start.model_copy(update={"waits": False})
    attempts = _Attempts(session.connection, whole_process=True)
    session.end(attempts.train(session, load_trainable(start.trainable), start))


def warm_up() -> None:
    """Run a trivial attempt in this process, so that lazy imports and caches are done once and not in every fork."""
    start = Start(
        experiment="warm-up",
        trial="warm-up",
        attempt=1,
        trainable=pickled(lambda _config: {"loss": 1.0}),
        stopper=pickled(Never()),
        import_path=(),
        config={},
        directory="",
        staging="",
    )
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as near, Connection(theirs.detach()) as far:
        near.send_bytes(start.model_dump_json().encode())
        train(far)


def _next_start(connection: SupervisorConnection) -> Start | None:
    """Return the start message of the next trial; None when the channel is closed."""
    while True:
        try:
            message = connection.receive()
        except (EOFError, ConnectionResetError):
            return None
        match message:
            case Start():
                return message
            case ProcessEnvironment():
                reset_process_state(message)
            case _:
                pass  # a message to the previous trial, which had ended meanwhile


class _Attempts:
    """Runs the attempts of one process, and keeps the trainable for the next one."""

    def __init__(self, connection: SupervisorConnection, *, whole_process: bool) -> None:
        self._connection = connection
        self._whole_process = whole_process
        self._session: TrialSession | None = None
        self._kept: _SetUp | None = None
        if whole_process:
            print_logs_of_run()
            _be_quiet_when_a_thread_leaves()

    def run(self, start: Start) -> bool:
        """Run an attempt and send its end; return whether the process waits for another.

        Raises:
            _Declined: the trainable refused this trial; nothing was sent.
        """
        self._session = None
        with suppress(OSError):  # the supervisor is gone, which the next message shows
            self._connection.send(StartReceived())
        try:
            ended = self._run(start)
        except _Declined:
            raise
        except BaseException as error:  # noqa: BLE001 - the process's edge: everything becomes a message
            ended = failure_message(error, start.trial)
        self._send_end(ended)
        if ended.waits:
            free_memory()
        return ended.waits

    def _send_end(self, ended: TrialEnded) -> None:
        if self._session is None:  # the trainable or the stopper could not be loaded
            self._connection.send(ended)
        else:
            self._session.end(ended)

    def clean_up(self) -> None:
        """Call `cleanup` of a trainable that was kept for another trial."""
        if self._kept is not None:
            self._kept.trainable.cleanup()

    def _run(self, start: Start) -> TrialEnded:
        kept = self._kept
        prepend_import_path(start.import_path)
        notes_import = start.waits and not has_noted_import()  # for the next trial of this process
        try:
            with forks_end(), noting_import() if notes_import and kept is None else nullcontext():
                trainable = kept or load_trainable(start.trainable)
            stopper = cast("Stopper", load_named(start.stopper))
        except Exception as error:
            raise NotLoaded(f"{type(error).__name__}: {error}") from error
        self._session = session = session_of(self._connection, start, stopper)
        enter(session, whole_process=self._whole_process)
        if self._whole_process:
            claim_process(start, session.lead)
            offer_to_spawned(start.trainable)
        if (reason := session.why_stop()) is not None:  # its last step was committed, its end not journaled
            return TrialEnded(outcome=Finished(trial=start.trial, reason=reason), waits=kept is not None)
        try:
            session.ask_first()
            return self.train(session, trainable, start)
        except TrialOver as over:
            return self._ended(over)

    def train(self, session: TrialSession, trainable: object, start: Start) -> TrialEnded:
        with forks_end():
            if isinstance(trainable, type):
                require_saves(require_trainable_class(trainable), start.cadence)
                made: Trainable = trainable()
                made.setup(dict(start.config))
                return self._run_class(session, _SetUp(made, _code(trainable)), start)
            if isinstance(trainable, _SetUp):
                if not trainable.trainable.reset_config(dict(start.config)):
                    raise _Declined
                return self._run_class(session, trainable, start)
        function = cast("TrainFunction", trainable)
        session.loaded(_code(function))
        session.begin()
        returned = None
        try:
            with forks_end():
                returned = function(dict(start.config))
        except SystemExit as left:
            if isinstance(left, TrialOver) or left.code not in (None, 0) or was_raised_by_signal_handler(left):
                raise
        require_no_coroutine(returned)
        return session.finish(returned)

    def _run_class(self, session: TrialSession, ready: _SetUp, start: Start) -> TrialEnded:
        self._kept = None
        session.loaded(ready.code)
        trainable = ready.trainable
        if start.restored:
            trainable.load_checkpoint(start.restored)
        try:
            with forks_end():  # a forked child must not run `cleanup`
                session.begin()
                while True:
                    metrics = trainable.step()
                    require_no_coroutine(metrics)
                    session.report_step(metrics, trainable.save_checkpoint)
        except TrialOver as over:
            can_be_reset = type(trainable).reset_config is not Trainable.reset_config
            is_alone = session.start.rank.world_size == 1  # else `torch.distributed` and a launcher may be left here
            if start.waits and not isinstance(over.outcome, AttemptEnded) and can_be_reset and is_alone:
                self._kept = ready
            return self._ended(over)
        finally:
            if self._kept is None:
                trainable.cleanup()

    def _ended(self, over: TrialOver) -> TrialEnded:
        return TrialEnded(outcome=over.outcome, waits=self._kept is not None)


@contextmanager
def forks_end() -> Iterator[None]:
    """Exit a forked child that returns from the trainable or its import, so that it does not send the trial's end."""
    trial, code = os.getpid(), 1
    try:
        yield
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        raise
    except BaseException:
        if os.getpid() != trial:
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != trial:
            flush_output()
            os._exit(code)


_sources: dict[int, tuple[object, str]] = {}
"""The trainable that was imported before the fork, by `id`, and the digest of its source: the file may change since."""


def remember_source(trainable: object) -> None:
    """Remember the digest of the trainable's source as it is now, for this process and its forks."""
    _sources[id(trainable)] = trainable, _code(cast("type | TrainFunction", trainable))


def _code(trainable: type | TrainFunction) -> str:
    """Return a digest of the trainable's source; "" if there is none, as for some pickled objects."""
    if (imported := _sources.get(id(trainable))) is not None:
        return imported[1]
    with suppress(Exception):  # no source; a file edited since; Python 3.11's parser, while another thread parses
        return digest_of(inspect.getsource(trainable).encode())[:16]
    return ""


def _be_quiet_when_a_thread_leaves() -> None:
    """Print no traceback when `TrialOver` ends a thread: the attempt's end is reported already."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if not isinstance(arguments.exc_value, TrialOver):
            before(arguments)

    threading.excepthook = hook


def _die_with_parent(supervisor: int) -> None:
    """Kill the process group when the supervisor has ended, however it died: this process has another parent then.

    A pipe to it would show that too, unless a fork of the supervisor holds the other end open.
    """
    while os.getppid() == supervisor:
        time.sleep(_PARENT_POLL_SECONDS)
    os.killpg(os.getpid(), signal.SIGKILL)


# Ignore SIGTERM and SIGINT in a trial's process, but not in the processes that it forks or executes.

_GROUP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_handlers_before: dict[int, Any] = {}
_forking = threading.local()  # the signal mask before the fork, of each thread that forks


def ignore_group_signals() -> None:
    """Ignore SIGTERM and SIGINT, which SLURM and terminals send to the whole group, so that the trial can still save.

    A handler, unlike SIG_IGN, is not inherited by programs that the trainable executes. Forked children get the
    earlier handlers back, so that `Process.terminate()` ends them.
    """
    global _handlers_before  # noqa: PLW0603 - handlers are global too, and functions called at a fork take no arguments
    if not _handlers_before:
        _handlers_before = {number: signal.signal(number, _ignore) for number in _GROUP_SIGNALS}
        os.register_at_fork(
            before=_block_ignored_signals,
            after_in_parent=_unblock_signals,
            after_in_child=_restore_handlers,
        )


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal to the group: the supervisor asks the trial to save and end."""


def _block_ignored_signals() -> None:
    """Block the signals around the fork: one that reaches the child before it has its handlers back would be lost."""
    ignored = [number for number in _GROUP_SIGNALS if signal.getsignal(number) is _ignore]
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_handlers() -> None:
    """Restore the earlier handlers in a forked child; those that the trainable installed are inherited."""
    for number, handler in _handlers_before.items():
        if signal.getsignal(number) is _ignore:
            signal.signal(number, handler)
    _unblock_signals()


if __name__ == "__main__" and is_copy_for_rank() and sys.argv[2:3] != [str(os.getppid())]:
    train_as_rank()
elif __name__ == "__main__":
    run_forever(partial(main, *take_numbers()))
elif __name__ == "__mp_main__":
    globals().update(names_for_spawned())
