"""The main program of a trial's process. It does not import Prefect.

It reads a `Start` message from its channel, trains, sends the end of the attempt, and may then serve another trial. It
writes to no target. On Linux the process is forked and supervised by the fork server
(`prefect_tune.runtime.processes.fork_server`). Elsewhere it is started as
`python -m prefect_tune.runtime.processes.trial_process`, and kills its process group when its supervisor exits.
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
from prefect_tune.core.journal_events import AttemptEnded, Outcome, TrialFinished
from prefect_tune.core.messages.process_messages import ProcessEnvironment, Start, StartReceived, TrainingEnded
from prefect_tune.core.values import hash_bytes
from prefect_tune.runtime.group_session import join_as_rank, make_session
from prefect_tune.runtime.load_named import (
    load_definitions_for_spawn,
    load_object,
    load_trainable,
    pickle_to_hex,
    prepend_import_path,
    write_trainable_for_spawn,
)
from prefect_tune.runtime.message_stream import SupervisorConnection
from prefect_tune.runtime.processes.process_reset import (
    flush_output,
    free_memory,
    has_recorded_import_effects,
    install_printing_loggers,
    recording_import_effects,
    reset_process_state,
    run_exit_handlers,
)
from prefect_tune.runtime.ranks import SCRIPT_ENV, is_relaunched_as_rank, mark_as_trial_process
from prefect_tune.runtime.session import TrialSession
from prefect_tune.runtime.trainable import (
    StopTraining,
    Trainable,
    activate_session,
    require_no_coroutine,
    require_save_checkpoint,
    require_trainable_class,
)
from prefect_tune.runtime.trial_errors import TrainableLoadError, failure_message, was_raised_by_signal_handler

MainFunction: TypeAlias = "Callable[[], MainFunction | None]"
_PARENT_POLL_SECONDS = 0.5
TrainFunction = Callable[[Mapping[str, object]], Mapping[str, object] | None]


class _ResetDeclined(Exception):
    """The trainable of the previous trial declined this trial's configuration."""


@dataclass(frozen=True, slots=True)
class _ReadyTrainable:
    """A class trainable after `setup`, ready to load a checkpoint or to train its first step."""

    trainable: Trainable
    source_digest: str
    """The digest of the trainable's source at the time of the import."""


def pop_program_arguments() -> tuple[int, int]:
    """Remove this program's own arguments (two numbers) from `sys.argv`, and return them; keep the user's arguments."""
    numbers = int(sys.argv[1]), int(sys.argv[2])
    sys.argv[:] = sys.argv[3:]
    return numbers


def run_and_exit(main_function: MainFunction | None) -> NoReturn:
    """Run a process's main function, then the main function that it returns, and so on; then exit.

    A forked child returns its own main function, which then runs without the parent's stack. The process exits even
    if a trainable has left threads or children running.
    """
    code = 1
    try:
        while main_function is not None:
            main_function = main_function()
        code = 0
    except BaseException:  # noqa: BLE001 - the edge of the process: a traceback and exit code 1
        with suppress(Exception):  # if the trainable has replaced stderr
            traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def main(channel_fd: int, supervisor: int) -> None:
    """Serve attempts on the inherited descriptor `channel_fd`, in a process that was started by exec."""
    threading.Thread(target=_kill_group_after_parent_exit, args=(supervisor,), daemon=True).start()
    faulthandler.enable(all_threads=False)  # the other thread's stack would displace the trial's last output
    serve_attempts(Connection(channel_fd))


def serve_one_attempt(channel: Connection) -> None:
    """Run the attempt that the channel's first message describes, in this thread; then send the attempt's end."""
    connection = SupervisorConnection(channel)
    start = cast("Start", connection.receive())
    _AttemptRunner(connection, whole_process=False).run(start.model_copy(update={"reusable": False}))


def serve_attempts(channel: Connection) -> None:
    """Run attempts one after another, as long as the trainable can be reused.

    If the trainable declines the next trial, or if the channel is closed, return without sending a message.
    """
    ignore_group_signals()
    connection = SupervisorConnection(channel)
    attempts = _AttemptRunner(connection, whole_process=True)
    if (start := _receive_start(connection)) is None:
        return  # the supervisor has exited
    with suppress(_ResetDeclined):
        while start is not None and attempts.run(start):
            start = _receive_start(connection)
    attempts.clean_up_kept_trainable()
    run_exit_handlers()


def train_as_rank() -> None:
    """Train as a rank, in a copy of a trial's program that a launcher (Lightning's, Fabric's) has started.

    Like a script, the process runs its exit handlers when it exits.
    """
    ignore_group_signals()
    sys.argv[:1] = [os.environ[SCRIPT_ENV]]
    session = cast("TrialSession", join_as_rank("a copy of the trial's program"))
    start = session.start.model_copy(update={"reusable": False})
    attempts = _AttemptRunner(session.connection, whole_process=True)
    session.send_end(attempts.train(session, load_trainable(start.trainable), start))


def warm_up() -> None:
    """Run a trivial attempt in this process, so that lazy imports run and caches fill here, and not in every fork."""
    start = Start(
        experiment="warm-up",
        trial="warm-up",
        attempt=1,
        trainable=pickle_to_hex(lambda _config: {"loss": 1.0}),
        stopper=pickle_to_hex(Never()),
        import_path=(),
        config={},
        directory="",
        staging="",
    )
    parent_end, child_end = socket.socketpair()
    with Connection(parent_end.detach()) as sender, Connection(child_end.detach()) as receiver:
        sender.send_bytes(start.model_dump_json().encode())
        serve_one_attempt(receiver)


def _receive_start(connection: SupervisorConnection) -> Start | None:
    """Return the start message of the next trial; None if the channel is closed."""
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
                pass  # a late message to the previous trial


class _AttemptRunner:
    """Runs the attempts of one process, and keeps the trainable for the next attempt."""

    def __init__(self, connection: SupervisorConnection, *, whole_process: bool) -> None:
        self._connection = connection
        self._whole_process = whole_process
        self._session: TrialSession | None = None
        self._kept_trainable: _ReadyTrainable | None = None
        if whole_process:
            install_printing_loggers()
            _silence_stopped_threads()

    def run(self, start: Start) -> bool:
        """Run an attempt and send its end. Return whether the process waits for another trial.

        Raises:
            _ResetDeclined: the trainable declined this trial; no end was sent.
        """
        self._session = None
        with suppress(OSError):  # if the supervisor has exited, the next message fails too
            self._connection.send(StartReceived())
        try:
            end = self._run_attempt(start)
        except _ResetDeclined:
            raise
        except BaseException as error:  # noqa: BLE001 - the edge of the process: every error becomes a message
            end = failure_message(error, start.trial)
        self._send_end(end)
        if end.awaits_reuse:
            free_memory()
        return end.awaits_reuse

    def _send_end(self, end: TrainingEnded) -> None:
        if self._session is None:  # the trainable or the stopper could not be loaded
            self._connection.send(end)
        else:
            self._session.send_end(end)

    def clean_up_kept_trainable(self) -> None:
        """If a trainable is kept for another trial, call its `cleanup`."""
        if self._kept_trainable is not None:
            self._kept_trainable.trainable.cleanup()

    def _run_attempt(self, start: Start) -> TrainingEnded:
        kept = self._kept_trainable
        prepend_import_path(start.import_path)
        must_record = start.reusable and kept is None and not has_recorded_import_effects()  # for a later reset
        try:
            with exiting_forked_children(), recording_import_effects() if must_record else nullcontext():
                trainable = kept or load_trainable(start.trainable)
            stopper = cast("Stopper", load_object(start.stopper))
        except Exception as error:
            raise TrainableLoadError(f"{type(error).__name__}: {error}") from error
        self._session = session = make_session(self._connection, start, stopper)
        activate_session(session, whole_process=self._whole_process)
        if self._whole_process:
            mark_as_trial_process(start, session.become_rank_0)
            write_trainable_for_spawn(start.trainable)
        # Train nothing if an earlier attempt has committed the last step, but has not ended the trial.
        if (reason := session.find_stop_reason()) is not None:
            return self._make_training_ended(TrialFinished(trial=start.trial, reason=reason))
        try:
            session.wait_for_pending_decision()
            return self.train(session, trainable, start)
        except StopTraining as stop:
            return self._make_training_ended(stop.outcome)

    def _make_training_ended(self, outcome: Outcome) -> TrainingEnded:
        return TrainingEnded(outcome=outcome, awaits_reuse=self._kept_trainable is not None)

    def train(self, session: TrialSession, trainable: object, start: Start) -> TrainingEnded:
        with exiting_forked_children():
            if isinstance(trainable, type):
                require_save_checkpoint(require_trainable_class(trainable), start.cadence)
                made: Trainable = trainable()
                made.setup(dict(start.config))
                return self._train_class(session, _ReadyTrainable(made, _get_source_digest(trainable)), start)
            if isinstance(trainable, _ReadyTrainable):
                if not trainable.trainable.reset_config(dict(start.config)):
                    raise _ResetDeclined
                return self._train_class(session, trainable, start)
        function = cast("TrainFunction", trainable)
        session.send_trainable_loaded(_get_source_digest(function))
        session.start_training_clock()
        returned = None
        try:
            with exiting_forked_children():
                returned = function(dict(start.config))
        except SystemExit as error:
            if isinstance(error, StopTraining) or error.code not in (None, 0) or was_raised_by_signal_handler(error):
                raise
        require_no_coroutine(returned)
        return session.finish(returned)

    def _train_class(self, session: TrialSession, ready: _ReadyTrainable, start: Start) -> TrainingEnded:
        self._kept_trainable = None
        session.send_trainable_loaded(ready.source_digest)
        trainable = ready.trainable
        if start.restored_directory:
            trainable.load_checkpoint(start.restored_directory)
        try:
            with exiting_forked_children():  # a forked child must not run `cleanup`
                session.start_training_clock()
                while True:
                    metrics = trainable.step()
                    require_no_coroutine(metrics)
                    session.report_step(metrics, trainable.save_checkpoint)
        except StopTraining as stop:
            can_be_reset = type(trainable).reset_config is not Trainable.reset_config
            is_alone = session.start.rank.world_size == 1  # else `torch.distributed` and a launcher may still be active
            if start.reusable and not isinstance(stop.outcome, AttemptEnded) and can_be_reset and is_alone:
                self._kept_trainable = ready
            return self._make_training_ended(stop.outcome)
        finally:
            if self._kept_trainable is None:
                trainable.cleanup()


@contextmanager
def exiting_forked_children() -> Iterator[None]:
    """Make a forked child exit when it leaves the `with` block, so that only the parent sends the attempt's end."""
    trial, code = os.getpid(), 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except BaseException:
        if os.getpid() != trial:
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != trial:
            flush_output()
            os._exit(code)


_source_digests: dict[int, tuple[object, str]] = {}
"""For each trainable that was imported before a fork: its `id`, and as value the trainable and its source's digest."""


def record_source_digest(trainable: object) -> None:
    """Record the current digest of the trainable's source, for this process and its forks."""
    _source_digests[id(trainable)] = trainable, _get_source_digest(cast("type | TrainFunction", trainable))


def _get_source_digest(trainable: type | TrainFunction) -> str:
    """Return a digest of the trainable's source; "" if there is no source, as for some pickled objects."""
    if (recorded := _source_digests.get(id(trainable))) is not None:
        return recorded[1]
    with suppress(Exception):  # no source, its file was edited, or another thread parses code in Python 3.11
        return hash_bytes(inspect.getsource(trainable).encode())[:16]
    return ""


def _silence_stopped_threads() -> None:
    """Print no traceback if `StopTraining` ends a thread, since this is not an error."""
    original_hook = threading.excepthook

    def handle_thread_error(arguments: threading.ExceptHookArgs) -> None:
        if not isinstance(arguments.exc_value, StopTraining):
            original_hook(arguments)

    threading.excepthook = handle_thread_error


def _kill_group_after_parent_exit(supervisor: int) -> None:
    """Kill the process group as soon as this process has another parent, because its supervisor has then exited.

    A pipe would not always show the exit, since a fork of the supervisor may keep the pipe's other end open.
    """
    while os.getppid() == supervisor:
        time.sleep(_PARENT_POLL_SECONDS)
    os.killpg(os.getpid(), signal.SIGKILL)


# Ignore SIGTERM and SIGINT in a trial's process, but not in the processes that it forks or executes.

_GROUP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_original_handlers: dict[int, Any] = {}
_fork_state = threading.local()  # each forking thread's signal mask before the fork


def ignore_group_signals() -> None:
    """Ignore SIGTERM and SIGINT so that the trial can save; SLURM and terminals send them to the whole process group.

    A handler is set instead of SIG_IGN, since programs that the trainable executes would inherit SIG_IGN. In a forked
    child, the earlier handlers are restored, so that `Process.terminate()` ends the child.
    """
    global _original_handlers  # noqa: PLW0603 - handlers are global too, and fork handlers take no arguments
    if not _original_handlers:
        _original_handlers = {number: signal.signal(number, _ignore_signal) for number in _GROUP_SIGNALS}
        os.register_at_fork(
            before=_block_ignored_signals, after_in_parent=_unblock_signals, after_in_child=_restore_handlers
        )


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Ignore a signal to the process group, since the supervisor asks the trial to save and end."""


def _block_ignored_signals() -> None:
    """Block the signals during a fork, else the child would lose a signal that arrives before `_restore_handlers`."""
    ignored = [number for number in _GROUP_SIGNALS if signal.getsignal(number) is _ignore_signal]
    _fork_state.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork_state.mask)


def _restore_handlers() -> None:
    """Restore the earlier handlers in a forked child, except where the trainable has installed a handler."""
    for number, handler in _original_handlers.items():
        if signal.getsignal(number) is _ignore_signal:
            signal.signal(number, handler)
    _unblock_signals()


if __name__ == "__main__" and is_relaunched_as_rank() and sys.argv[2:3] != [str(os.getppid())]:
    train_as_rank()
elif __name__ == "__main__":
    run_and_exit(partial(main, *pop_program_arguments()))
elif __name__ == "__mp_main__":
    globals().update(load_definitions_for_spawn())
