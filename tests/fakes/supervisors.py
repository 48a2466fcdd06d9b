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
from tests.fakes.trial_processes import (
    Family,
    make_start,
    receive_messages,
    started_process,
    supervised_process,
    wait_until,
)
from tests.flows.forked_programs import get_preloaded_context
from tests.trainables.processes.forked import leave_children
from tests.trainables.witness import Act, acts_of

TIMEOUT_SECONDS = 60.0  # the machine may be busy with other tests


@dataclass(frozen=True)
class SupervisedTrial:
    """A supervisor and its trial, in processes that the test may kill."""

    supervisor: BaseProcess
    folder: Path
    family: Family

    def acts(self, *names: str) -> list[Act]:
        return [act for act in acts_of(self.folder / "witness") if act.act in names]

    @property
    def trial_pid(self) -> int:
        return self.acts("begin")[0].pid

    @property
    def started_pids(self) -> set[int]:
        """The processes that the trial has started."""
        return {act.step for act in self.acts("child", "orphan")}

    @property
    def child_pid(self) -> int:
        """The one of them that is in the trial's process group."""
        return self.acts("child")[0].step

    @property
    def orphan_pid(self) -> int:
        return self.acts("orphan")[0].step

    def kill(self, *names: str) -> None:
        """Kill processes by name; all of them before one can react."""
        pids_by_name = {"supervisor": self.supervisor.pid, "trial": self.trial_pid}
        pids = [pids_by_name.get(name) or self.family.wait_for_one(name) for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            with suppress(ProcessLookupError):  # the kernel has ended it with the one before
                os.kill(pid, signal.SIGKILL)

    def living_pids(self) -> set[int]:
        """Return which of the trial's process and its descendants are alive."""
        return {self.trial_pid, *self.started_pids} & set(self.family.pids())


@contextmanager
def supervise_trial(folder: Path, way: str, *, stubborn: bool = False) -> Iterator[SupervisedTrial]:
    """Train a trial that starts processes; fail if one of them outlives the block.

    The trial's process is forked as by `tune` ("search"), by `durable_trainable` ("training"), or by a worker of Dask
    or Ray or a deployment ("elsewhere"); or it is "started". With `stubborn`, what it starts ignores SIGTERM.
    """
    folder.mkdir(exist_ok=True)
    family = Family()
    supervisor = get_preloaded_context().Process(target=_supervise, args=(str(folder), way, stubborn, family.variable))
    supervisor.start()
    try:
        trial = SupervisedTrial(supervisor, folder, family)
        wait_until(lambda: trial.acts("begin"), seconds=TIMEOUT_SECONDS, what=lambda: f"a trial: {family.names()}")
        assert len(trial.started_pids) == 3  # one in its session, one in a session of its own, and an orphan
        yield trial
    finally:
        supervisor.kill()
        supervisor.join()
    family.require_none(seconds=TIMEOUT_SECONDS)


def _supervise(folder: str, way: str, stubborn: bool, mark: tuple[str, str]) -> None:
    os.environ.update([mark])
    with ExitStack() as stack:
        slots = {"search": 2, "training": 0}.get(way)
        process = started_process if way == "started" else supervised_process
        if slots is not None:
            process = stack.enter_context(TrialProcessPool(slots=slots)).open_process
        config = {"witness": f"{folder}/witness", "gate": "/none", "stubborn": stubborn}
        start = make_start(leave_children, Path(folder), config)
        with process(start, logging.getLogger()) as channel:
            receive_messages(channel, seconds=10 * TIMEOUT_SECONDS)
            channel.end()
            Path(folder, "ended").touch()
            threading.Event().wait()
