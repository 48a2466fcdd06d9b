"""Supervisors of one trial that tests kill; forked from a process that has imported everything already."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from tests.fakes.trial_processes import Family, messages_of, start_of, started_process, supervised_process, until
from tests.flows.forked_programs import preloaded
from tests.trainables.processes.forked import daemonizes
from tests.trainables.witness import acts_of

PATIENCE_SECONDS = 60.0  # the machine may be busy with other tests
_STARTED = 3  # by the trial: in its session, in a session of its own, and an orphan


@dataclass(frozen=True)
class Watched:
    """A supervisor and its trial, in processes that the test may kill."""

    supervisor: BaseProcess
    folder: Path
    ours: Family

    @property
    def trial(self) -> int:
        return next(each.pid for each in acts_of(self.folder / "witness") if each.act == "begin")

    @property
    def started(self) -> set[int]:
        """Return the processes that the trial has started."""
        return {each.step for each in acts_of(self.folder / "witness") if each.act in ("child", "orphan")}

    @property
    def in_group(self) -> int:
        """Return the one of them that is in the trial's process group."""
        return next(each.step for each in acts_of(self.folder / "witness") if each.act == "child")

    @property
    def orphan(self) -> int:
        return next(each.step for each in acts_of(self.folder / "witness") if each.act == "orphan")

    def has_begun(self) -> bool:
        return any(each.act == "begin" for each in acts_of(self.folder / "witness"))

    def kill(self, *names: str) -> None:
        """Kill processes by name; all of them before one can react."""
        known = {"supervisor": self.supervisor.pid, "trial": self.trial}
        pids = [known.get(name) or self.ours.one(name) for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            with suppress(ProcessLookupError):  # the kernel has ended it with the one before
                os.kill(pid, signal.SIGKILL)

    def living(self) -> set[int]:
        """Return which of the trial's process and its descendants are alive."""
        return {self.trial, *self.started} & set(self.ours.pids())


@contextmanager
def watched(folder: Path, way: str, *, stubborn: bool = False) -> Iterator[Watched]:
    """Train a trial that starts processes; fail if one of them outlives the block.

    The trial's process is forked as by `tune` ("search"), by `durable_trainable` ("training"), or by a worker of Dask
    or Ray or a deployment ("elsewhere"); or it is "started". With `stubborn`, what it starts ignores SIGTERM.
    """
    folder.mkdir(exist_ok=True)
    ours = Family()
    supervisor = preloaded().Process(target=_supervise, args=(str(folder), way, stubborn, ours.variable))
    supervisor.start()
    try:
        made = Watched(supervisor, folder, ours)
        until(made.has_begun, seconds=PATIENCE_SECONDS, what=lambda: f"a trial: {ours.names()}")
        assert len(made.started) == _STARTED
        yield made
    finally:
        supervisor.kill()
        supervisor.join()
    ours.require_none(seconds=PATIENCE_SECONDS)


def _supervise(folder: str, way: str, stubborn: bool, mark: tuple[str, str]) -> None:
    os.environ.update([mark])
    with ExitStack() as stack:
        slots = {"search": 2, "training": 0}.get(way)
        process = started_process if way == "started" else supervised_process
        if slots is not None:
            process = stack.enter_context(TrialProcessPool(slots=slots)).open_process
        config = {"witness": f"{folder}/witness", "gate": "/none", "stubborn": stubborn}
        start = start_of(daemonizes, Path(folder), config)
        with process(start, logging.getLogger()) as channel:
            messages_of(channel, seconds=10 * PATIENCE_SECONDS)
            channel.end()
            Path(folder, "ended").touch()
            threading.Event().wait()
