"""Join a trial as a rank that a launcher has started: torchrun, accelerate, `torch.multiprocessing`, Lightning, MPI.

A rank finds its attempt by one environment variable, which the launcher passes on: the path of a socket on which the
supervisor listens. It connects, names itself, receives the start message of the trial's process, and then reports:

    trial's process ── launcher ── rank ── socket ──► Join(rank, world size) ──► supervisor
                                     ◄──────────────────────── Start ───────────┘

Only the same user can connect: the socket is in a folder of mode 0700. Never: two processes of one rank.
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
from prefect_tune.core.messages.process_messages import Join, Rank, Refused, Start
from prefect_tune.runtime.load_named import load_named, prepend_import_path
from prefect_tune.runtime.message_stream import SupervisorConnection
from prefect_tune.runtime.ranks import (
    LEADS,
    RANKS_AT,
    is_copy_for_rank,
    is_launched,
    may_be_rank,
    rank_here,
    started_by,
)
from prefect_tune.runtime.session import FollowingSession, TrialSession
from prefect_tune.runtime.trainable import TrialOver, enter, session_of_process
from prefect_tune.runtime.trial_errors import failure_message, was_raised_by_signal_handler

_EXIT_PRIORITY = 10
_rank_sessions: dict[int, TrialSession] = {}
"""The session of this process, by process id: a forked child has none."""


ON_JOIN = "PREFECT_TUNE_ON_JOIN"
"""The environment variable with a `package.module:function` that each launched rank calls when it joins (drills)."""


class RankOver(TrialOver, SystemExit):
    """Ends a rank when its trial ends; the launcher sees exit code 0."""

    code = 0


def joined_session(call: str) -> TrialSession | None:
    """Return the session of this process as a rank; None if no launcher of the trial made it a rank.

    Raises:
        InvalidInput: the supervisor rejects it, such as a second process of one rank.
    """
    if (session := _rank_sessions.get(os.getpid())) is not None:
        return session
    if not may_be_rank():
        return None
    rank = rank_here()
    is_rank = rank.world_size > 1 or is_launched()
    if not is_rank or not (address := os.environ.get(RANKS_AT)) or multiprocessing.current_process().daemon:
        return None  # a daemon is a worker, for example of a data loader
    process_session = session_of_process()
    if rank.rank == 0 and process_session is not None and process_session.start.rank.rank == 0:
        process_session.lead(rank.world_size)
        _rank_sessions[os.getpid()] = process_session
        return process_session
    if rank.rank == 0 and os.environ.get(LEADS):
        return None  # started by rank 0, but not as a rank
    if not 0 <= rank.rank < rank.world_size:
        raise InvalidInput(f"{call}: expected a rank from 0 to {rank.world_size - 1}, found {rank.rank}")
    connection, start = _connect_to_supervisor(rank, address, call)
    if is_copy_for_rank():
        prepend_import_path(start.import_path)  # other programs have their own path
    session = session_of(connection, start, cast("Stopper", load_named(start.stopper)))
    session.begin()
    _rank_sessions[os.getpid()] = session
    os.environ[RANKS_AT] = ""  # its child processes are not ranks; a forked child may still read the trial's info
    enter(session, whole_process=True)
    if started_by() is not None:  # else the supervisor would consider this process killed
        session.leaves_by = RankOver
        end = partial(_send_rank_end, os.getpid(), session)
        atexit.register(end)  # for a program
        Finalize(None, end, exitpriority=_EXIT_PRIORITY)  # for `multiprocessing`: its children run no `atexit`
        sys.excepthook = partial(_on_uncaught_exception, session, sys.excepthook)
    if on_join := os.environ.get(ON_JOIN):
        cast("Callable[[], None]", load_named(on_join))()
    return session


def _connect_to_supervisor(rank: Rank, address: str, call: str) -> tuple[SupervisorConnection, Start]:
    """Connect to the supervisor at `address` as `rank`; return the connection and the trial's start message."""
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(address)
    except OSError as error:
        channel.close()
        raise InvalidInput(
            f"{call}: expected the trial's supervisor at {RANKS_AT}={address}, found none ({error}): the trial has "
            "ended, or this is another machine"
        ) from error
    connection = SupervisorConnection(Connection(channel.detach()))
    connection.send(Join(rank=rank, pid=os.getpid()))
    match connection.receive():
        case Start() as start:
            return connection, start
        case Refused(why=reason):
            raise InvalidInput(f"{call}: {reason}")
        case other:
            raise InvalidInput(f"{call}: expected the trial's start message, received a {other.type} message")


def session_of(connection: SupervisorConnection, start: Start, stopper: Stopper) -> TrialSession:
    """Return a session for the rank of this process."""
    return (FollowingSession if start.rank.rank else TrialSession)(connection, start, stopper)


def _send_rank_end(process: int, session: TrialSession) -> None:
    """Send the end of this process: the exception that `multiprocessing` handles, or a normal end."""
    if os.getpid() != process:
        return
    error = sys.exc_info()[1]
    with suppress(Exception):  # the supervisor has exited
        if (
            error is None
            or isinstance(error, RankOver)
            or (isinstance(error, SystemExit) and not error.code and not was_raised_by_signal_handler(error))
        ):
            session.end(session.finish(None))
        else:
            raised = error.__context__ or error if isinstance(error, SystemExit) else error
            session.end(failure_message(raised, session.start.trial))


def _on_uncaught_exception(
    session: TrialSession,
    previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    error_type: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    with suppress(Exception):
        session.end(failure_message(error, session.start.trial))
    previous_hook(error_type, error, trace)
