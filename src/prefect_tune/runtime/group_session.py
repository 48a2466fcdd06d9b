"""The sessions of a trial that several processes train together: rank 0 decides, and the other ranks follow.

    rank 0           report of step s ──► decides: save? end? ──► Directive(s) ─┐
    supervisor                                                                  ├─► sends it to all other ranks
    rank 1, 2, ...   report of step s ──► Part(s): its files ──► waits for ◄────┘

So all ranks save, continue and end at the same step, whatever their clocks say. Rank 0 never waits for another rank,
but for the commit of a checkpoint, to which each rank adds its part, within a deadline (`attempt/supervisor.py`).
Never: a rank that decides by itself whether it saves or ends; a checkpoint without the part of a rank.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.journal_events import Outcome
from prefect_tune.core.messages.process_messages import (
    Directive,
    Join,
    Part,
    Rank,
    RankMetrics,
    Refused,
    Start,
    TrialEnded,
)
from prefect_tune.core.metrics import storable
from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.values import StepReport
from prefect_tune.runtime.load_named import load_named, prepend_import_path
from prefect_tune.runtime.message_stream import SupervisorConnection
from prefect_tune.runtime.ranks import (
    LEADS,
    RANKS_AT,
    is_copy_for_rank,
    is_launched,
    may_be_rank,
    rank_here,
    reached,
    started_by,
)
from prefect_tune.runtime.session import TrialSession, local_directory, snapshot
from prefect_tune.runtime.trainable import TrialOver, enter, session_of_process
from prefect_tune.runtime.trial_errors import failure_message, was_raised_by_signal_handler

if TYPE_CHECKING:
    from prefect_tune.runtime.checkpoint import Checkpoint


def session_of(connection: SupervisorConnection, start: Start, stopper: Stopper) -> LeadingSession | FollowingSession:
    """Return the session of a process with its rank."""
    return (FollowingSession if start.rank.rank else LeadingSession)(connection, start, stopper)


class LeadingSession(TrialSession):
    """The session of rank 0: it decides as that of a single process does, and sends each decision to the others."""

    _said_stop = False

    @property
    def _is_alone(self) -> bool:
        return self.start.rank.world_size == 1

    def lead(self, world_size: int) -> None:
        """Be rank 0 of so many ranks from now on: a launcher in this process starts the others.

        Raises:
            InvalidInput: a step was reported already, which the others do not have.
        """
        with self._reporting("a launcher of ranks"):
            if not self._is_alone:
                return
            if self.step != self.start.from_step:
                raise InvalidInput("expected the ranks to be launched before the first pt.report, found a step before")
            rank = Rank(rank=0, world_size=world_size)
            self._send(Join(rank=rank, pid=os.getpid()))
            self.start = self.start.model_copy(update={"rank": rank})
            _joined[os.getpid()] = self
            os.environ[LEADS] = "1"

    def count(self, metrics: Mapping[str, object]) -> StepReport:
        """Make the report of the next step; with `metrics_from="mean"` of what all ranks report for it."""
        is_mean = self.start.metrics_from == "mean" and not self._is_alone
        return super().count(self._mean_with(metrics) if is_mean else metrics)

    def _mean_with(self, metrics: Mapping[str, object]) -> Mapping[str, object]:
        step = self.step + 1
        self._send(RankMetrics(step=step, metrics=storable(metrics, f"metrics of step {step}")))
        while self._mean is None or self._mean.step != step:
            self._take_in()
        return self._mean.metrics

    def is_asked_to_stop(self) -> bool:
        """Return what all ranks know since the last report: else some would save a step before the others."""
        return super().is_asked_to_stop() if self._is_alone else self._said_stop

    def save_last_step(self, save: Callable[[str], None]) -> None:
        super().save_last_step(save)
        if self._over is None:
            self._direct()

    def _written_by(self, save: Callable[[str], None]) -> Path:
        self._direct(saves=True)
        return super()._written_by(save)

    def _end(self, *, saved: bool) -> None:
        over = None if self._is_alone else self._why_over(saved=saved)
        self._direct(over=None if over is None else over.outcome)
        super()._end(saved=saved)

    def _direct(self, *, saves: bool = False, over: Outcome | None = None) -> None:
        if self._is_alone:
            return
        if not saves:
            self._said_stop = self.asked_to_stop
        self._send(Directive(step=self.step, saves=saves, stop=self._said_stop, over=over))


class FollowingSession(TrialSession):
    """The session of another rank: it adds its part to checkpoints, and follows the directives of rank 0."""

    def count(self, metrics: Mapping[str, object]) -> StepReport:
        """Make the report of the next step, and send its metrics if rank 0 waits for their mean."""
        report = super().count(metrics)
        self._send_metrics(report)
        return report

    def _send_metrics(self, report: StepReport, *, returned: bool = False) -> None:
        if self.start.metrics_from == "mean":
            self._send(RankMetrics(step=report.step, metrics=report.metrics, returned=returned))

    def lead(self, world_size: int) -> None:
        """Refuse it: this is another rank than 0."""
        found = self.start.rank.rank
        raise InvalidInput(f"expected one process, or rank 0, to start {world_size} ranks, found rank {found}")

    def is_asked_to_stop(self) -> bool:
        return self.asked_to_stop

    def report(self, metrics: Mapping[str, object], checkpoint: Checkpoint | None) -> None:
        with self._reporting("pt.report"):
            directory = None if checkpoint is None else self._handed_over(local_directory(checkpoint))
            self.count(metrics)
            self._add(directory)
            self._follow(None)

    def report_step(self, metrics: Mapping[str, object], save: Callable[[str], None]) -> None:
        with self._reporting("pt.report_step"):
            self.count(metrics)
            self._follow(save)

    def save_last_step(self, save: Callable[[str], None]) -> None:
        self._require_own_process("save_last_step")
        with self._reports:
            if self._over is None:
                self._follow(save)

    def finish(self, returned: Mapping[str, object] | None) -> TrialEnded:
        """Return how the attempt ended. What the function returned is not reported, but a part of the mean."""
        with self._reports:
            if self.start.metrics_from == "mean" and self._over is None and returned is not None:
                self._send_metrics(super().count(returned), returned=True)
        return super().finish(None)

    def why_stop(self) -> AnyReason | None:
        """Return None: rank 0 decides."""
        return None

    def ask_first(self) -> None:
        """Wait for the decision on the restored checkpoint's step, if it is a milestone."""
        if self._curve and self._milestone is not None and self.step >= self._milestone:
            self._follow(None)

    def _handed_over(self, directory: Path) -> Path:
        if directory.parent == Path(self.start.staging).resolve():
            return directory
        with self._saving():
            return snapshot(directory, self.new_directory())

    def _add(self, directory: Path | None) -> None:
        path = None if directory is None else str(directory)
        self._send(Part(step=self.step, directory=path))

    def _follow(self, save: Callable[[str], None] | None) -> None:
        """Do what rank 0 directs at this step.

        Raises:
            TrialOver: the trial ends.
            InvalidInput: rank 0 has reported more steps.
        """
        began = time.monotonic()
        while True:
            match self.connection.receive():
                case Directive() as directive:
                    self._require_step(directive.step)
                    if directive.over is not None:
                        raise self._leaving(TrialOver(directive.over))
                    if not directive.saves:
                        break
                    if save is not None:
                        self._add(self._written_by(save))
                case _:
                    pass
        self.asked_to_stop = directive.stop
        self._resumed_at += time.monotonic() - began  # waiting is not training

    def _require_step(self, step: int) -> None:
        if step != self.step:
            raise InvalidInput(
                f"rank {self.start.rank.rank}: expected a report of step {step}, as rank 0 made it, found one of step "
                f"{self.step}. Every rank calls pt.report once in each step, with or without a checkpoint"
            )


# Join a trial from a rank that a launcher has started: torchrun, accelerate, `torch.multiprocessing`, Lightning, MPI.
#
# A rank finds the attempt by one environment variable, which its launcher passes on: the path of a socket on which the
# supervisor listens. There it says who it is, receives what the trial's own process received, and reports as a rank:
#
#     trial's process ── launcher ── rank ── socket ──► Join(rank, world size) ──► supervisor
#                                      ◄──────────────────────── Start ───────────┘
#
# Only this user can reach the socket: it is in a folder of mode 0700. Never: a second process of one rank.

_FIRST = 10
_joined: dict[int, LeadingSession | FollowingSession] = {}
"""The session of this process, by its id: a forked child has none."""


ON_JOIN = "PREFECT_TUNE_ON_JOIN"
"""What a rank that a launcher has started calls when it joins, as `package.module:function`: a drill's probe."""


class RankOver(TrialOver, SystemExit):
    """Ends a rank when its trial ends: a launcher sees a process that exits with code 0."""

    code = 0


def joined_session(call: str) -> LeadingSession | FollowingSession | None:
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
    if rank.rank == 0 and (isinstance(own, LeadingSession) or os.environ.get(LEADS)):
        if isinstance(own, LeadingSession):
            own.lead(rank.world_size)
            return own
        return None  # started by rank 0, and no rank
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
    if is_copy_for_rank():
        prepend_import_path(start.import_path)  # another program has its own
    session = session_of(connection, start, cast("Stopper", load_named(start.stopper)))
    session.begin()
    _join(session)
    return session


def _join(session: LeadingSession | FollowingSession) -> None:
    _joined[os.getpid()] = session
    os.environ[RANKS_AT] = ""  # what this process starts is no rank, and what it forks reads which trial this is
    enter(session, whole_process=True)
    if started_by() is not None:
        _say_how_it_ends(session)
    if on_join := os.environ.get(ON_JOIN):
        cast("Callable[[], None]", load_named(on_join))()


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
