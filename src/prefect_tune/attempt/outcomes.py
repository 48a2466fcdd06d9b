"""The state of an attempt's task run, and the log of a failure, by how the attempt ended."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, assert_never

from prefect import states
from prefect.client.schemas.objects import State

from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.journal_events import AttemptEnded, Cause, Finished, FinishKind, Outcome, Paused
from prefect_tune.core.reasons import Reason, format_error
from prefect_tune.core.shown_text import first_line
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.terminal.formatting import with_last_output

FIRST_NODE_SILENT = "FirstNodeSilent"
"""The name of the state of a node's run that ended since node 0 of its attempt writes nothing any more."""


def state_of(outcome: Outcome) -> State[Any]:
    """Return the final state of an attempt: Completed, Pruned, Paused, Interrupted or Failed.

    Its message is the reason in one line; a Failed one holds a `TrialFailed` as its result.
    """
    message = first_line(outcome.reason)
    match outcome:
        case Finished(kind=FinishKind.PRUNED):
            return states.Completed(name="Pruned", message=message)
        case Finished(kind=FinishKind.STOPPED):
            return states.Cancelled(name="Interrupted", message=message)
        case Finished():
            return states.Completed(message=message)
        case Paused():
            return states.Completed(name="Paused", message=message)
        case AttemptEnded(cause=Cause.PREEMPTED):
            return states.Cancelled(name="Interrupted", message=message)
        case AttemptEnded():
            return states.Failed(message=message, data=TrialFailed(f"trial {outcome.trial}: {message}"))
        case _:
            assert_never(outcome)


def state_of_node(reason: Reason) -> State[Any]:
    """Return the final state of the run of another node than the first, which was over for this reason."""
    return states.Completed(name=FIRST_NODE_SILENT if reason.code == "node-silent" else None, message=str(reason))


def log_failure(failure: AttemptEnded, attempt: int, spec: TrialSpec, search_term: int, log: Log) -> None:
    """Log a failure with its traceback and the last output; elsewhere only its first line is shown.

    An error that this process has logged for another trial, in the same run of the search, is logged in one line.
    """
    shown = with_last_output(failure.reason, failure.use.output if failure.use else "")
    if failure.cause is Cause.PREEMPTED or "\n" not in shown:
        return
    key = failure.reason.model_dump_json() if isinstance(failure.reason, Reason) else failure.reason
    first = _logged_errors(spec.target.uri, spec.trial.of_experiment, search_term).setdefault(key, failure.trial)
    same = f"{format_error(failure.reason)}, the same error as that of trial {first}"
    log.error("attempt %d failed: %s", attempt, shown if first == failure.trial else same)


@lru_cache(maxsize=8)
def _logged_errors(_target: str, _experiment: JournalKey, _search_term: int) -> dict[str, str]:
    """Return the errors that one run of a search has logged here with a traceback, and their trials."""
    return {}
