"""Failure policy: two retry budgets, and the quarantine of a checkpoint if the attempts that load it crash."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from prefect_tune.core.reasons import Cause, Reason, get_reason_code, make_reason, summarize_error
from prefect_tune.core.values import INTEGER_VALIDATOR, Value, parse_time

if TYPE_CHECKING:
    from prefect_tune.core.experiment.trial_transitions import Trial

_NonNegativeInt = Annotated[int, Field(ge=0), INTEGER_VALIDATOR]
_UNKNOWN_TIME = datetime.min.replace(tzinfo=UTC)
_NON_RETRYABLE_CAUSES = frozenset({Cause.IMPORT, Cause.OUT_OF_MEMORY, Cause.BAD_METRIC, Cause.BAD_STOP})


class FailurePolicy(Value):
    """How many times a failed trial is retried, for each kind of failure.

    ```python
    failures = pt.FailurePolicy(max_failures=2)
    ```

    Args:
        max_failures: how many failures of your code are retried. Default: 0.
        max_machine_failures: how many failures of machines, workers and stores are retried; a commit resets the count.
            Default: 10.
        max_restarts: how many times automations restart the run; a commit or a decision resets the count. Default: 5.
        quarantine_after: quarantine a checkpoint if this many attempts in a row load it and crash before their first
            step. Default: 3.
    """

    max_failures: _NonNegativeInt = Field(default=0, description="How many failures of your code are retried.")
    max_machine_failures: _NonNegativeInt = Field(
        default=10,
        description="How many failures of machines, workers and stores are retried; a commit resets the count.",
    )
    max_restarts: _NonNegativeInt = Field(
        default=5, description="How many times automations restart the run; a commit or a decision resets the count."
    )
    quarantine_after: Annotated[int, Field(ge=1), INTEGER_VALIDATOR] = Field(
        default=3, description="Quarantine a checkpoint if this many attempts in a row crash before their first step."
    )


@dataclass(frozen=True, slots=True)
class RetryTrial:
    """Start another attempt from the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class QuarantineCheckpoint:
    """Quarantine this checkpoint, then start another attempt from the previous checkpoint."""

    sequence: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class EndRun:
    """End the run without failing the trial; a Retry, a Resume or a scheduled run continues the trial."""


@dataclass(frozen=True, slots=True)
class FailTrial:
    """End the trial as errored, because its retry budget is spent, or because its failure is never retried."""

    reason: Reason


FailureDecision: TypeAlias = RetryTrial | QuarantineCheckpoint | EndRun | FailTrial


def decide_after_failure(trial: Trial, cause: Cause, policy: FailurePolicy) -> FailureDecision:
    """Decide what follows an attempt that ended because of `cause`; `trial` already counts this failure."""
    if cause is Cause.PREEMPTED:
        return EndRun()
    if (reason := _no_retry_reason(trial, cause, policy)) is not None:
        return FailTrial(reason)
    if trial.restored_sequence is None or trial.consecutive_start_failures < policy.quarantine_after:
        return RetryTrial()
    crashes = {"attempts": trial.consecutive_start_failures, "error": trial.end_reason}
    if trial.quarantined_since_commit:
        return FailTrial(make_reason("died-at-each-start", **crashes))
    return QuarantineCheckpoint(trial.restored_sequence, make_reason("died-at-start", **crashes))


def end_reason_after_error(trial: Trial, trials: Iterable[Trial], *, fail_fast: bool | None) -> Reason | None:
    """Return why the error of `trial`, one of `trials`, ends the experiment; None if the experiment continues."""
    if fail_fast:
        return make_reason("fail-fast", trial=trial.id, error=summarize_error(trial.end_reason))
    return repeated_error_reason(trials) if fail_fast is None else None


def repeated_error_reason(trials: Iterable[Trial]) -> Reason | None:
    """Return why a search ends after three trials failed with the same error before their second step.

    None if a trial has reported a second step or completed, if not all errors are equal, or while a trial that began
    before the third error still trains its first step.
    """
    from prefect_tune.core.experiment.trial_transitions import Phase  # late, so that flows load no journal modules

    started = [trial for trial in trials if trial.attempt]
    errored = [trial for trial in started if trial.phase is Phase.ERRORED]
    if len(errored) < 3 or any(trial.step > 1 or trial.phase is Phase.FINISHED for trial in started):
        return None
    error, *others = (summarize_error(trial.end_reason) for trial in errored)
    third_error_at = sorted(map(_last_activity_time, errored))[2]
    if any(other != error for other in others) or any(
        trial.phase is Phase.RUNNING and _last_activity_time(trial) <= third_error_at for trial in started
    ):
        return None
    return make_reason("same-errors", count=len(errored), error=error)


def _last_activity_time(trial: Trial) -> datetime:
    """Return the last known time of a trial's last attempt: when it began, plus the seconds that it has measured."""
    record = trial.attempt_records[-1]
    return (parse_time(record.began_at or "") or _UNKNOWN_TIME) + timedelta(seconds=record.seconds.total)


def is_machine_budget_spent(trial: Trial, policy: FailurePolicy) -> bool:
    """Return whether a waiting trial has had more machine failures than `policy` allows.

    This happens if the last run ended before it could end the trial, for example because the target was unavailable.
    """
    return trial.cause is Cause.MACHINE and _no_retry_reason(trial, Cause.MACHINE, policy) is not None


def should_reset_budgets(trial: Trial, policy: FailurePolicy) -> bool:
    """Return whether the next run resets the retry budgets of a waiting trial.

    True after an error of the import or the stop criterion, which the user may have fixed. Also true after too many
    machine failures, unless the owner vanished at the last failure, because a trial that crashes its machine each time
    must not be retried forever: the search would never finish.
    """
    if trial.cause in (Cause.IMPORT, Cause.BAD_STOP):
        return True
    return is_machine_budget_spent(trial, policy) and get_reason_code(trial.end_reason) != "owner-vanished"


def _no_retry_reason(trial: Trial, cause: Cause, policy: FailurePolicy) -> Reason | None:
    """Return why a failure with this cause is not retried; None if nothing forbids a retry."""
    error = trial.end_reason
    if cause in _NON_RETRYABLE_CAUSES:
        return make_reason("not-retried", cause=cause.value, error=error)
    if cause is Cause.MACHINE and trial.machine_failures > policy.max_machine_failures:
        return make_reason("max-machine-failures", failures=trial.machine_failures, error=error)
    if cause is Cause.TRAINABLE and trial.trainable_failures > policy.max_failures:
        return make_reason("max-failures", failures=trial.trainable_failures, limit=policy.max_failures, error=error)
    return None
