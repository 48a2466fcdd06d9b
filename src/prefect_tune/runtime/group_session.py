"""Join a trial from a rank that a launcher has started: torchrun, accelerate, `torch.multiprocessing`, Lightning, MPI.

A rank finds the attempt by one environment variable, which its launcher passes on: the path of a socket on which the
supervisor listens. There it says who it is, receives what the trial's own process received, and reports as a rank:

    trial's process ── launcher ── rank ── socket ──► Join(rank, world size) ──► supervisor
                                     ◄──────────────────────── Start ───────────┘

Only this user can reach the socket: it is in a folder of mode 0700. Never: a second process of one rank.
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

_FIRST = 10
_joined: dict[int, TrialSession] = {}
"""The session of this process, by its id: a forked child has none."""


ON_JOIN = "PREFECT_TUNE_ON_JOIN"
"""What a rank that a launcher has started calls when it joins, as `package.module:function`: a drill's probe."""


class RankOver(TrialOver, SystemExit):
    """Ends a rank when its trial ends: a launcher sees a process that exits with code 0."""

    code = 0


def joined_session(call: str) -> TrialSession | None:
    """Return the session of this process as a rank; None if no launcher of the trial made it one.

    Raises:
        InvalidInput: the supervisor refuses it, such as a second process of one rank.
    """
    if (session := _joined.get(os.getpid())) is not None:
        return session
    if not may_be_rank():
        return None
    rank = rank_here()
    is_rank = rank.world_size > 1 or is_launched()
    if not is_rank or not (address := os.environ.get(RANKS_AT)) or multiprocessing.current_process().daemon:
        return None  # a daemon is a worker, such as that of a data loader
    own = session_of_process()
    if rank.rank == 0 and own is not None and own.start.rank.rank == 0:
        own.lead(rank.world_size)
        _joined[os.getpid()] = own
        return own
    if rank.rank == 0 and os.environ.get(LEADS):
        return None  # started by rank 0, and no rank
    if not 0 <= rank.rank < rank.world_size:
        raise InvalidInput(f"{call}: expected a rank from 0 to {rank.world_size - 1}, found {rank.rank}")
    connection, start = _introduce(rank, address, call)
    if is_copy_for_rank():
        prepend_import_path(start.import_path)  # another program has its own
    session = session_of(connection, start, cast("Stopper", load_named(start.stopper)))
    session.begin()
    _joined[os.getpid()] = session
    os.environ[RANKS_AT] = ""  # what this process starts is no rank, and what it forks reads which trial this is
    enter(session, whole_process=True)
    if started_by() is not None:  # send the end of this process: else the supervisor takes it for killed
        session.leaves_by = RankOver
        end = partial(_end, os.getpid(), session)
        atexit.register(end)  # of a program
        Finalize(None, end, exitpriority=_FIRST)  # of a child of `multiprocessing`, which runs no handlers of `atexit`
        sys.excepthook = partial(_raised, session, sys.excepthook)
    if on_join := os.environ.get(ON_JOIN):
        cast("Callable[[], None]", load_named(on_join))()
    return session


def _introduce(rank: Rank, address: str, call: str) -> tuple[SupervisorConnection, Start]:
    """Say to the supervisor at `address` which rank this is, and return the connection and the trial's start."""
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
        case Refused(why=why):
            raise InvalidInput(f"{call}: {why}")
        case other:
            raise InvalidInput(f"{call}: expected the start of the trial, received a {other.type} message")


def session_of(connection: SupervisorConnection, start: Start, stopper: Stopper) -> TrialSession:
    """Return the session of a process with its rank."""
    return (FollowingSession if start.rank.rank else TrialSession)(connection, start, stopper)


def _end(process: int, session: TrialSession) -> None:
    """Send how this process ends: by the exception that `multiprocessing` handles, or in order."""
    if os.getpid() != process:
        return
    error = sys.exc_info()[1]
    with suppress(Exception):  # the supervisor is gone
        if (
            error is None
            or isinstance(error, RankOver)
            or (isinstance(error, SystemExit) and not error.code and not was_raised_by_signal_handler(error))
        ):
            session.end(session.finish(None))
        else:
            raised = error.__context__ or error if isinstance(error, SystemExit) else error
            session.end(failure_message(raised, session.start.trial))


def _raised(
    session: TrialSession,
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    with suppress(Exception):
        session.end(failure_message(error, session.start.trial))
    before(kind, error, trace)
