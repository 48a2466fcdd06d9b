"""Compare the values that a search's journal contains twice, and the writer of each event.

The attempt journals the report of each step. The search journals the same report with its decision. A checkpoint has
the metrics of the report that it was saved with: in `committed`, in `adopted`, and in the `cloned` of another trial.

    reported (step 4) ◄── decided (step 4)      in either order: a decision does not wait for the attempt's entry
                      ◄── committed, adopted (step 4) ◄── cloned
An attempt that is lost may never have journaled the report of its last decision; the next attempt trains that step
again. So a report is compared only with events of its own attempt.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefect_tune.attempt.attempt import last_report
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial import Trial
from prefect_tune.core.journal_events import (
    Absorbed,
    Adopted,
    AttemptEnded,
    CheckpointRef,
    Claimed,
    Cloned,
    Committed,
    Decided,
    Event,
    Finished,
    GaveUp,
    Paused,
    Pinned,
    Quarantined,
    Reported,
    Resumed,
    Retired,
    SlotFreed,
    Started,
)
from prefect_tune.core.values import StepReport

_BY_THE_SEARCH = Decided | Resumed | GaveUp | SlotFreed | Pinned
_BY_ATTEMPTS = Started | Reported | Committed | AttemptEnded
_BY_GUESTS = Claimed | Quarantined | Retired


def misplacement_reason(event: Event, trial: Trial | None, absorbed: Absorbed | None) -> str | None:
    """Return why no release writes `event` where it is; None if one does.

    Args:
        event: an event of the experiment's journal, or of an entry in it that a trial's own journal held first.
        trial: its trial in the state before it; None for an event of the whole experiment.
        absorbed: the copy of the trial's own entry that holds the event; None for the experiment's journal.
    """
    if absorbed is None:
        is_misplaced = trial is not None and trial.own_journal and isinstance(event, _BY_ATTEMPTS)
        return "an event of the search: attempts write to the trial's own journal" if is_misplaced else None
    if trial is not None and not trial.own_journal:
        return "no event of a journal of the trial's own: it has none"
    if absorbed.writer == "guest" and not isinstance(event, _BY_GUESTS):
        return "an event that a guest may write"
    return "an event of the attempt: only the search writes this one" if isinstance(event, _BY_THE_SEARCH) else None


class ReportCopies:
    """The reports of each trial's present attempt, and the copies that came before their report."""

    def __init__(self) -> None:
        self._reports: dict[str, dict[int, StepReport]] = {}
        self._copies: dict[str, dict[int, StepReport]] = {}

    def expected_event(self, trial: Trial, event: Event) -> Event | None:
        """Return `event` with the values that the journal contains already; None if it repeats none.

        Args:
            trial: in the state before the event.
            event: of this trial.
        """
        match event:
            case Reported(report=report):
                copy = self._copies.get(trial.trial, {}).get(report.step)
                if copy is None:
                    return None
                return event.model_copy(update={"report": report.model_copy(update=_measured(copy))})
            case Decided(report=report):
                known = self._report_of(trial, report.step)
                return None if known is None else event.model_copy(update={"report": known})
            case Committed(checkpoint=checkpoint):
                known = self._report_of(trial, checkpoint.step)
                if known is None:
                    return None
                return event.model_copy(update={"checkpoint": checkpoint.model_copy(update=_measured(known))})
            case _:
                return None

    def record(self, trial: Trial, event: Event) -> None:
        """Record an event of the trial; `trial` is the state before it."""
        reports, copies = self._reports.setdefault(trial.trial, {}), self._copies.setdefault(trial.trial, {})
        match event:
            case Reported(report=report):
                reports[report.step] = report
                copies.pop(report.step, None)
            case Decided(report=report) if self._report_of(trial, report.step) is None:
                copies[report.step] = report
            case Committed(checkpoint=checkpoint):
                for step in [step for step in reports if step < checkpoint.step]:
                    del reports[step]
            case Adopted(checkpoints=adopted):
                unreported = (each for each in adopted.get(trial.trial, ()) if each.step > trial.step)
                copies.update({each.step: StepReport(step=each.step, **_measured(each)) for each in unreported})
            case Started() | AttemptEnded() | Paused() | Finished() | GaveUp():
                reports.clear()
                copies.clear()
            case _:
                pass

    def last_reported_step(self, trial: str) -> int | None:
        """Return the last step that the trial's present attempt has reported; None before its first report."""
        return next(reversed(self._reports.get(trial, {})), None)

    def missing_step(self, trial: Trial, event: Event) -> int | None:
        """Return a step that the trial's attempt must have reported before `event`, and has not; None if there is none.

        A decision is about a report, which the attempt journals before its end; a checkpoint is saved after a report.
        """
        match event:
            case Paused() | Finished():
                return next((step for step in self._copies.get(trial.trial, ()) if step > trial.step), None)
            case Committed(checkpoint=checkpoint) if self._report_of(trial, checkpoint.step) is None:
                return checkpoint.step
            case _:
                return None

    def _report_of(self, trial: Trial, step: int) -> StepReport | None:
        is_last = trial.step == step > 0
        return self._reports.get(trial.trial, {}).get(step) or (last_report(trial) if is_last else None)


def clone_of_source(before: Experiment, event: Cloned) -> Cloned:
    """Return `event` with the values of the checkpoint that it is a clone of, if the journal still has that one."""
    source = before.trials.get(event.source.trial.trial) if event.source.trial.of_experiment == before.key else None
    for checkpoint in source.checkpoints if source else ():
        if checkpoint.sequence == event.source.sequence:
            copied = {"step": checkpoint.step, **_measured(checkpoint)}
            return event.model_copy(update={"checkpoint": event.checkpoint.model_copy(update=copied)})
    return event


def _measured(source: StepReport | CheckpointRef) -> Mapping[str, object]:
    return {"metrics": source.metrics, "trained_seconds": source.trained_seconds}
