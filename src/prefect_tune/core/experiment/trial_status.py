"""The status of a trial: the words in every table, report, event and message, and the phases they are derived from.

The words are Optuna's and Ray's. A journal holds phases; so a journal of any release is read with these words.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, assert_never

from prefect_tune.core.schedulers.base import Pause, Stop

if TYPE_CHECKING:
    from prefect_tune.core.experiment.trial import Trial

__all__ = ["ENDED", "Phase", "Status", "status_label", "status_of"]


class Phase(StrEnum):
    """What can happen to a trial next, see `trial_transitions.NEXT`. Its values are on targets, in segments."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    ERRORED = "errored"


ENDED = frozenset({Phase.FINISHED, Phase.ERRORED})


class Status(StrEnum):
    """The status of a trial, in the order of tables and counts."""

    COMPLETED = "completed"
    """It met its stop criterion, trained all of the scheduler's steps, or its trainable returned."""
    PRUNED = "pruned"
    """The scheduler ended it early."""
    INTERRUPTED = "interrupted"
    """It ended before it was done, and not by its scheduler: its run was stopped, suspended or killed, its attempt
    failed and is to be repeated, or a stop request named it. A resume continues it, except after a stop request."""
    ERRORED = "errored"
    """It failed, and its retries are spent."""
    RUNNING = "running"
    """It trains."""
    PAUSED = "paused"
    """The scheduler gave its slot to another trial, and may resume it."""
    PENDING = "pending"
    """It waits for a slot."""


_ENDED_SHORT = frozenset({Status.PRUNED, Status.INTERRUPTED, Status.PAUSED})


def status_of(trial: Trial) -> Status:
    """Return the status of a trial."""
    match trial.phase:
        case Phase.FINISHED:
            return _status_of_finished(trial)
        case Phase.ERRORED:
            return Status.ERRORED
        case Phase.RUNNING:
            return Status.RUNNING
        case Phase.PAUSED:
            return Status.PAUSED
        case Phase.PENDING:
            return Status.PENDING if trial.cause is None else Status.INTERRUPTED
        case never:
            assert_never(never)


def _status_of_finished(trial: Trial) -> Status:
    decided = next((each.decision for each in reversed(trial.past) if each.what == "decided"), None)
    if not trial.left or (isinstance(decided, Stop) and not decided.early):
        return Status.COMPLETED
    # The experiment's journal absorbs the end later than the trial's own journal has it.
    is_absorbed = trial.past and trial.past[-1].what == "ended"
    is_pruned = trial.past[-1].stopped if is_absorbed else isinstance(decided, Pause | Stop)
    return Status.PRUNED if is_pruned else Status.INTERRUPTED


def status_label(status: str, step: int) -> str:
    """Return the status for people, with the step where it says how far the trial came: `pruned @3`, `completed`."""
    return f"{status} @{step}" if status in _ENDED_SHORT and step else str(status)
