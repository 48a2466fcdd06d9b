"""The sessions of a trial that several processes train together: rank 0 decides, and the other ranks follow.

    rank 0           report of step s ──► decides: save? end? ──► Directive(s) ─┐
    supervisor                                                                  ├─► sends it to all other ranks
    rank 1, 2, ...   report of step s ──► Part(s): its files ──► waits for ◄────┘

So all ranks save, continue and end at the same step, whatever their clocks say. Rank 0 never waits for another rank,
but for the commit of a checkpoint, to which each rank adds its part: that wait has a deadline (`attempt.group_saves`).
Never: a rank that decides by itself whether it saves or ends; a checkpoint without the part of a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.journal_events import Scalar
from prefect_tune.core.messages.process_messages import Directive, Part, RankMetrics, Start, TrialEnded
from prefect_tune.core.metrics import storable
from prefect_tune.core.models import StepReport
from prefect_tune.runtime.message_stream import SupervisorConnection
from prefect_tune.runtime.session import TrialSession, local_directory, snapshot
from prefect_tune.runtime.trainable import TrialOver

if TYPE_CHECKING:
    from prefect_tune.runtime.checkpoint import Checkpoint


def session_of(connection: SupervisorConnection, start: Start, stopper: Stopper) -> TrialSession:
    """Return the session of a process with its rank."""
    if start.rank.world_size == 1:
        return TrialSession(connection, start, stopper)
    return (FollowingSession if start.rank.rank else LeadingSession)(connection, start, stopper)


class LeadingSession(TrialSession):
    """The session of rank 0: it decides as that of a single process does, and sends each decision to the others."""

    _said_stop = False

    def count(self, metrics: Mapping[str, object]) -> StepReport:
        """Make the report of the next step; with `metrics_from="mean"` of what all ranks report for it."""
        return super().count(metrics if self._start.metrics_from == "rank 0" else self._mean_with(metrics))

    def _mean_with(self, metrics: Mapping[str, object]) -> Mapping[str, object]:
        step = self.step + 1
        self._send(RankMetrics(step=step, metrics=storable(metrics, f"metrics of step {step}")))
        while self._mean is None or self._mean.step != step:
            self._take_in()
        return self._mean.metrics

    def is_asked_to_stop(self) -> bool:
        """Return what all ranks know since the last report: else some would save a step before the others."""
        return self._said_stop

    def save_last_step(self, save: Callable[[str], None]) -> None:
        super().save_last_step(save)
        if self._over is None:
            self._direct()

    def _written_by(self, save: Callable[[str], None]) -> Path:
        self._direct(saves=True)
        return super()._written_by(save)

    def _end(self, *, saved: bool) -> None:
        over = self._why_over(saved=saved)
        self._direct(over=None if over is None else over.ended)
        super()._end(saved=saved)

    def _direct(self, *, saves: bool = False, over: TrialEnded | None = None) -> None:
        if not saves:
            self._said_stop = self.asked_to_stop
        self._send(Directive(step=self.step, saves=saves, stop=self._said_stop, over=over))


class FollowingSession(TrialSession):
    """The session of another rank: it adds its part to checkpoints, and follows the directives of rank 0."""

    def count(self, metrics: Mapping[str, object]) -> StepReport:
        """Make the report of the next step, and send its metrics if rank 0 waits for their mean."""
        report = super().count(metrics)
        if self._start.metrics_from == "mean":
            self._send(RankMetrics(step=report.step, metrics=report.metrics))
        return report

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

    def ask(
        self,
        question: str,
        fields: Mapping[str, object] | None,
        key: str | None,
        save: Callable[[str], None] | None,
    ) -> dict[str, Scalar]:
        with self._reporting("pt.ask"):
            if (given := self._given(self._question(question, fields, key))) is not None:
                return given
            if save is not None:
                self.save_last_step(save)
            raise self._leaving(TrialOver(f"rank 0 asks a person: {question}", interrupted=True))

    def finish(self, returned: Mapping[str, object] | None) -> TrialEnded:
        """Return how the attempt ended. What the function returned is not reported, but a part of the mean."""
        with self._reports:
            if self._start.metrics_from == "mean" and self._over is None and returned is not None:
                self.count(returned)
        return super().finish(None)

    def why_stop(self) -> str | None:
        """Return None: rank 0 decides."""
        return None

    def ask_first(self) -> None:
        """Wait for the decision on the restored checkpoint's step, if it is a milestone."""
        if self._curve and self._milestone is not None and self.step >= self._milestone:
            self._follow(None)

    def _handed_over(self, directory: Path) -> Path:
        if directory.parent == Path(self._start.staging).resolve():
            return directory
        with self._writing():
            return snapshot(directory, self.new_directory())

    def _add(self, directory: Path | None) -> None:
        path = None if directory is None else str(directory)
        self._send(Part(step=self.step, directory=path, writing_seconds=self._written_in()))

    def _follow(self, save: Callable[[str], None] | None) -> None:
        """Do what rank 0 directs at this step.

        Raises:
            TrialOver: the trial ends.
            InvalidInput: rank 0 has reported more steps.
        """
        began = time.monotonic()
        while True:
            match self._connection.receive():
                case Directive() as directive:
                    self._require_step(directive.step)
                    if directive.over is not None:
                        raise self._leaving(TrialOver.as_ended(directive.over))
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
                f"rank {self._start.rank.rank}: expected a report of step {step}, as rank 0 made it, found one of step "
                f"{self.step}. Every rank calls pt.report once in each step, with or without a checkpoint"
            )
