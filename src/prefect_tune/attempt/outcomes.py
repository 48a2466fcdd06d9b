"""How an attempt ends: its outcome, the journal's events of that, the state of its task run, the log of a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, assert_never

from prefect import states
from prefect.client.schemas.objects import State

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.journal_events import AttemptEnded, Cause, Event, Finished, Paused, Question
from prefect_tune.core.messages.process_messages import EndOfAttempt
from prefect_tune.core.shown_text import first_line, visible
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.terminal.formatting import error_of, with_last_output


@dataclass(frozen=True, slots=True)
class Done:
    """The trial met a stop criterion, or its trainable returned."""

    reason: str
    returned: bool
    ended_early: bool = False
    """Whether the scheduler or a stop request ended the trial for good."""
    end: EndOfAttempt | None = None
    """How the search had it end; None for a trial that completed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt ended, the trial did not; `at_start` if the trainable failed before its first step."""

    cause: Cause
    message: str
    at_start: bool
    output: str = ""
    """The last lines that its processes printed."""


@dataclass(frozen=True, slots=True)
class Yielded:
    """The trial paused and freed its slot, because the scheduler decided so."""

    reason: str


@dataclass(frozen=True, slots=True)
class Asking:
    """The trial waits for a person to answer `question`."""

    question: Question


Outcome: TypeAlias = Done | Failed | Yielded | Asking


def events_of(trial: str, outcome: Outcome) -> Sequence[Event]:
    """Return the journal events of an outcome."""
    match outcome:
        case Done(reason=reason, returned=returned, ended_early=ended_early):
            return [Finished(trial=trial, reason=reason, returned=returned, ended_early=ended_early)]
        case Yielded(reason=reason):
            return [Paused(trial=trial, reason=reason)]
        case Asking(question=asked):
            message = f"it asks: {asked.question}"
            return [AttemptEnded(trial=trial, cause=Cause.PREEMPTED, message=message, question=asked)]
        case Failed(cause=cause, message=message, at_start=at_start):
            return [AttemptEnded(trial=trial, cause=cause, message=message, at_start=at_start)]
        case _:
            assert_never(outcome)


def state_of(outcome: Outcome, trial: str) -> State[Any]:
    """Return the final state of an attempt of `trial`: Completed, Pruned, Paused, Interrupted or Failed.

    Its message is the reason in one line; a Failed one holds a `TrialFailed` as its result.
    """
    match outcome:
        case Done(reason=reason, end=end) if end is not None:
            return _as_decided(end, reason, trial)
        case Done(reason=reason):
            return states.Completed(message=first_line(reason))
        case Yielded(reason=reason):
            return states.Completed(name="Paused", message=first_line(reason))
        case Asking(question=asked):
            return states.Completed(name="Paused", message=f"it asks: {first_line(asked.question)}")
        case Failed(cause=Cause.PREEMPTED, message=message):
            return states.Cancelled(name="Interrupted", message=first_line(message))
        case Failed(message=message):
            return _failed(message, trial)
        case _:
            assert_never(outcome)


def _as_decided(end: EndOfAttempt, reason: str, trial: str) -> State[Any]:
    match end:
        case "pruned":
            return states.Completed(name="Pruned", message=first_line(reason))
        case "interrupted":
            return states.Cancelled(name="Interrupted", message=first_line(reason))
        case "errored":
            return _failed(reason, trial)
        case _:
            assert_never(end)


def _failed(message: str, trial: str) -> State[Any]:
    why = first_line(message)
    return states.Failed(message=why, data=TrialFailed(f"trial {trial}: {why}"))


def log_failure(failure: Failed, attempt: int, spec: TrialSpec, search_term: int, log: Log) -> None:
    """Log a failure with its traceback and the last output; elsewhere only its first line is shown.

    An error that this process has logged for another trial, in the same run of the search, is logged in one line.
    """
    error = failure.message.strip()
    shown = with_last_output(error, failure.output)
    if failure.cause is Cause.PREEMPTED or "\n" not in shown:
        return
    trial = spec.trial.trial
    first = _logged_errors(spec.target.uri, spec.trial.of_experiment, search_term).setdefault(hash(error), trial)
    same = f"{visible(error_of(error))}, the same error as that of trial {first}"
    log.error("attempt %d failed: %s", attempt, shown if first == trial else same)


@lru_cache(maxsize=8)
def _logged_errors(_target: str, _experiment: JournalKey, _search_term: int) -> dict[int, str]:
    """Return the hashes of the errors that one run of a search has logged here with a traceback, and their trials."""
    return {}
