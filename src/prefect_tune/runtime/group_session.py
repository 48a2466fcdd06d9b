"""Join a trial as a rank that a launcher (torchrun, accelerate, `torch.multiprocessing`, Lightning, MPI) has started.

The launcher passes on an environment variable with the path of the supervisor's socket. The rank connects to the
socket, sends its number, receives a start message (as the trial's process does), and then reports steps:

    trial's process ── launcher ── rank ── socket ──► RankJoined ──► supervisor
                                     ◄──────────────────────── Start ───────────┘

Only the trial's user can connect, since the socket is in a folder of mode 0700. Two processes cannot join as one rank.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from types import TracebackType
from typing import cast

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.messages.process_messages import JoinRejected, RankInfo, RankJoined, Start
from prefect_tune.runtime.load_named import load_object, prepend_import_path
from prefect_tune.runtime.message_stream import SupervisorConnection
from prefect_tune.runtime.ranks import (
    RANK_0_ENV,
    RANK_SOCKET_ENV,
    detect_rank,
    find_ancestor_trial,
    has_rank_info,
    is_launched_rank,
    is_relaunched_as_rank,
)
from prefect_tune.runtime.session import TrialSession, WorkerRankSession
from prefect_tune.runtime.trainable import StopTraining, activate_session, get_process_session
from prefect_tune.runtime.trial_errors import failure_message, was_raised_by_signal_handler

_EXIT_PRIORITY = 10
_rank_sessions: dict[int, TrialSession] = {}
"""The key is the id of the session's process. A forked child has another id, and so finds no session."""
ON_JOIN_ENV = "PREFECT_TUNE_ON_JOIN"
"""The environment variable in which a drill names a `package.module:function` that each rank calls when it joins."""


class StopRank(StopTraining, SystemExit):
    """Ends a rank when its trial ends; the launcher sees exit code 0."""

    code = 0


def join_as_rank(caller: str) -> TrialSession | None:
    """Return the session of this process as a rank; None if this process is not a rank of a trial.

    Raises:
        InvalidInput: the supervisor rejects this process, for example because its rank has already joined.
    """
    if (session := _rank_sessions.get(os.getpid())) is not None:
        return session
    if not has_rank_info():
        return None
    rank = detect_rank()
    is_rank = rank.world_size > 1 or is_launched_rank()
    if not is_rank or not (address := os.environ.get(RANK_SOCKET_ENV)) or multiprocessing.current_process().daemon:
        return None  # a daemon process is not a rank, but a helper, for example of a data loader
    process_session = get_process_session()
    if rank.rank == 0 and process_session is not None and process_session.start.rank.rank == 0:
        process_session.become_rank_0(rank.world_size)
        _rank_sessions[os.getpid()] = process_session
        return process_session
    if rank.rank == 0 and os.environ.get(RANK_0_ENV):
        return None  # rank 0 has started this process, which is not a rank itself
    if not 0 <= rank.rank < rank.world_size:
        raise InvalidInput(f"{caller}: expected a rank from 0 to {rank.world_size - 1}, found {rank.rank}")
    connection, start = _connect_to_supervisor(rank, address, caller)
    if is_relaunched_as_rank():
        prepend_import_path(start.import_path)  # a program of the user keeps its own `sys.path`
    session = make_session(connection, start, cast("Stopper", load_object(start.stopper)))
    session.start_training_clock()
    _rank_sessions[os.getpid()] = session
    os.environ[RANK_SOCKET_ENV] = ""  # so that no child process joins; `pt.get_trial` still works in a forked child
    activate_session(session, whole_process=True)
    if find_ancestor_trial() is not None:  # send the end, else the supervisor assumes that this rank was killed
        session.stop_exception_type = StopRank
        end = partial(_send_rank_end, os.getpid(), session)
        atexit.register(end)  # at the exit of a program
        Finalize(None, end, exitpriority=_EXIT_PRIORITY)  # for children of `multiprocessing`, which ignore `atexit`
        sys.excepthook = partial(_on_uncaught_exception, session, sys.excepthook)
    if on_join := os.environ.get(ON_JOIN_ENV):
        cast("Callable[[], None]", load_object(on_join))()
    return session


def _connect_to_supervisor(rank: RankInfo, address: str, caller: str) -> tuple[SupervisorConnection, Start]:
    """Join the trial as `rank` at the supervisor's `address`; return the connection and the start message."""
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(address)
    except OSError as error:
        channel.close()
        raise InvalidInput(
            f"{caller}: expected the trial's supervisor at {RANK_SOCKET_ENV}={address}, found none ({error}): the "
            "trial has ended, or this is another machine"
        ) from error
    connection = SupervisorConnection(Connection(channel.detach()))
    connection.send(RankJoined(rank=rank, pid=os.getpid()))
    match connection.receive():
        case Start() as start:
            return connection, start
        case JoinRejected(reason=reason):
            raise InvalidInput(f"{caller}: {reason}")
        case other:
            raise InvalidInput(f"{caller}: expected the trial's start message, received a {other.type} message")


def make_session(connection: SupervisorConnection, start: Start, stopper: Stopper) -> TrialSession:
    """Make the session of this process: a `TrialSession` for rank 0, a `WorkerRankSession` for other ranks."""
    return (WorkerRankSession if start.rank.rank else TrialSession)(connection, start, stopper)


def _send_rank_end(pid: int, session: TrialSession) -> None:
    """Send the end of this rank: a failure if an exception ends the process, a normal end otherwise."""
    if os.getpid() != pid:
        return
    error = sys.exc_info()[1]
    with suppress(Exception):  # the supervisor has exited
        is_normal = isinstance(error, SystemExit) and not error.code and not was_raised_by_signal_handler(error)
        if error is None or isinstance(error, StopRank) or is_normal:
            session.send_end(session.finish(None))
        else:
            raised = error.__context__ or error if isinstance(error, SystemExit) else error
            session.send_end(failure_message(raised, session.start.trial))


def _on_uncaught_exception(
    session: TrialSession,
    previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    error_type: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    with suppress(Exception):
        session.send_end(failure_message(error, session.start.trial))
    previous_hook(error_type, error, trace)
