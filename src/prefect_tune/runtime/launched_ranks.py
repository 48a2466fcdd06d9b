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
from pathlib import Path
from types import TracebackType
from typing import cast

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.messages.process_messages import Join, Refused, Start
from prefect_tune.runtime.group_session import session_of
from prefect_tune.runtime.load_named import load_named
from prefect_tune.runtime.message_stream import SupervisorConnection
from prefect_tune.runtime.ranks import RANKS_AT, rank_here, reached, started_by
from prefect_tune.runtime.session import TrialSession
from prefect_tune.runtime.trainable import TrialOver, enter
from prefect_tune.runtime.trial_errors import broke

_FIRST = 10
_joined: dict[int, TrialSession] = {}
"""The session of this process, by its id: a forked child has none."""


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
    rank = rank_here()
    is_rank = rank.world_size > 1 or (started_by() is not None and {"RANK", "WORLD_SIZE"} <= os.environ.keys())
    if not is_rank or not (address := os.environ.get(RANKS_AT)) or multiprocessing.current_process().daemon:
        return None  # a daemon is a worker, such as that of a data loader
    if not 0 <= rank.rank < rank.world_size:
        raise InvalidInput(f"{call}: expected a rank from 0 to {rank.world_size - 1}, found {rank.rank}")
    connection = _connected(address, call)
    connection.send(Join(rank=rank, pid=os.getpid()))
    match connection.receive():
        case Start() as start:
            pass
        case Refused(why=why):
            raise InvalidInput(f"{call}: {why}")
        case other:
            raise InvalidInput(f"{call}: expected the start of the trial, received a {other.type} message")
    session = session_of(connection, start, cast("Stopper", load_named(start.stopper)))
    session.begin()
    _joined[os.getpid()] = session
    os.environ[RANKS_AT] = ""  # what this process starts is no rank, and what it forks reads which trial this is
    enter(session, whole_process=True)
    if started_by() is not None:
        _say_how_it_ends(session)
    return session


def _connected(address: str, call: str) -> SupervisorConnection:
    channel = socket.socket(socket.AF_UNIX)
    try:
        with reached(Path(address)) as path:
            channel.connect(path)
    except OSError as error:
        channel.close()
        raise InvalidInput(
            f"{call}: expected the trial's supervisor at {RANKS_AT}={address}, found none ({error}): the trial has "
            "ended, or this is another machine"
        ) from error
    return SupervisorConnection(Connection(channel.detach()))


def _say_how_it_ends(session: TrialSession) -> None:
    """Send the end of this process: else the supervisor takes it for killed."""
    session.leaves_by = RankOver
    end = partial(_end, os.getpid(), session)
    atexit.register(end)  # of a program
    Finalize(None, end, exitpriority=_FIRST)  # of a child of `multiprocessing`, which runs no handlers of `atexit`
    sys.excepthook = partial(_raised, session, sys.excepthook)


def _end(process: int, session: TrialSession) -> None:
    """Send how this process ends: by the exception that `multiprocessing` handles, or in order."""
    if os.getpid() != process:
        return
    error = sys.exc_info()[1]
    with suppress(Exception):  # the supervisor is gone
        if error is None or isinstance(error, RankOver) or (isinstance(error, SystemExit) and not error.code):
            session.end(session.finish(None))
        else:
            session.end(broke(error.__context__ or error if isinstance(error, SystemExit) else error))


def _raised(
    session: TrialSession,
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    with suppress(Exception):
        session.end(broke(error))
    before(kind, error, trace)
