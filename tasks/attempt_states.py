"""The states in which the task runs of attempts end: each says how the attempt ended, and why. The log of a failure."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, assert_never

from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.journal_events.experiment_events import Cause
from prefect_tune.core.messages.process_messages import EndOfAttempt
from prefect_tune.core.models import first_line
from prefect_tune.core.texts import visible
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.supervisor.trial_spec import TrialSpec
from prefect_tune.tasks import attempt_supervisor as outcomes
from prefect_tune.terminal.formatting import error_of


def state_of(outcome: outcomes.Outcome, trial: str) -> State[Any]:
    """Return the final state of an attempt of `trial`: Completed, Pruned, Paused, Interrupted or Failed.

    Its message is the reason in one line; a Failed one holds a `TrialFailed` as its result.
    """
    match outcome:
        case outcomes.Done(reason=reason, end=end) if end is not None:
            return _as_decided(end, reason, trial)
        case outcomes.Done(reason=reason):
            return Completed(message=first_line(reason))
        case outcomes.Yielded(reason=reason):
            return Completed(name="Paused", message=first_line(reason))
        case outcomes.Asking(question=asked):
            return Completed(name="Paused", message=f"it asks: {first_line(asked.question)}")
        case outcomes.Failed(cause=Cause.PREEMPTED, message=message):
            return Cancelled(name="Interrupted", message=first_line(message))
        case outcomes.Failed(message=message):
            return _failed(message, trial)
        case _:
            assert_never(outcome)


def _as_decided(end: EndOfAttempt, reason: str, trial: str) -> State[Any]:
    match end:
        case "pruned":
            return Completed(name="Pruned", message=first_line(reason))
        case "interrupted":
            return Cancelled(name="Interrupted", message=first_line(reason))
        case "errored":
            return _failed(reason, trial)
        case _:
            assert_never(end)


def _failed(message: str, trial: str) -> State[Any]:
    why = first_line(message)
    return Failed(message=why, data=TrialFailed(f"trial {trial}: {why}"))


def log_failure(failure: outcomes.Failed, attempt: int, spec: TrialSpec, search_term: int, log: Log) -> None:
    """Log a failure with its traceback, or the last output of its process; elsewhere only its first line is shown.

    An error that this process has logged for another trial, in the same run of the search, is logged in one line.
    """
    error = failure.message.strip()
    if failure.cause is Cause.PREEMPTED or "\n" not in error:
        return
    trial = spec.trial.trial
    first = _logged_errors(spec.target.uri, spec.trial.experiment, search_term).setdefault(hash(error), trial)
    said = error if first == trial else f"{error_of(error)}, the same error as that of trial {first}"
    log.error("attempt %d failed: %s", attempt, visible(said))


@lru_cache(maxsize=8)
def _logged_errors(_target: str, _experiment: str, _search_term: int) -> dict[int, str]:
    """Return the hashes of the errors that one run of a search has logged here with a traceback, and their trials."""
    return {}
