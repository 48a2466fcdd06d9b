"""The outcomes of attempts: failures, stop messages, and the last message of a trial's process."""

from __future__ import annotations

from prefect_tune.core.journal_events import AttemptEnded, Cause, FinishKind, TrialFinished
from prefect_tune.core.messages.process_messages import FromTrial, StopTrial, TrainingEnded
from prefect_tune.core.reasons import Reason, make_reason


def make_failure(text: str, cause: Cause = Cause.TRAINABLE, *, trial: str = "t", **arguments: object) -> AttemptEnded:
    return AttemptEnded(trial=trial, cause=cause, reason=make_reason("raised", text=text, **arguments))


def make_stop(reason: str, *, save: bool, trial: str = "t") -> StopTrial:
    """Return the message by which a stop request ends one trial."""
    return StopTrial(outcome=TrialFinished(trial=trial, reason=reason, kind=FinishKind.STOPPED), save=save)


def require_failure(message: FromTrial | None) -> AttemptEnded:
    """Return the failure in the last message of a process whose trainable raised."""
    assert isinstance(message, TrainingEnded), message
    assert message.raised, message
    assert isinstance(message.outcome, AttemptEnded), message
    return message.outcome


def require_reason(failure: object) -> Reason:
    assert isinstance(failure, AttemptEnded), failure
    assert isinstance(failure.reason, Reason), failure
    return failure.reason
