"""Failure policy: two retry budgets, and the quarantine of checkpoints from which attempts die."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from prefect_tune.core.reasons import Cause, Reason, code_of, make_reason, summarize_error
from prefect_tune.core.values import AS_WHOLE, Value, parse_time

if TYPE_CHECKING:
    from prefect_tune.core.experiment.trial_transitions import Trial

_Count = Annotated[int, Field(ge=0), AS_WHOLE]
_UNKNOWN = datetime.min.replace(tzinfo=UTC)
_NEVER_AGAIN = frozenset({Cause.IMPORT, Cause.OUT_OF_MEMORY, Cause.BAD_METRIC, Cause.BAD_STOP})


class FailurePolicy(Value):
    """How often a trial is started again after a failure, by the kind of failure.

    Args:
        max_failures: failures of your code that are retried. Default: 0.
        max_machine_failures: failures of machines, workers and stores in a row, without a commit in between.
            Default: 10.
        max_restarts: restarts of the whole run by automations in a row, without a commit or a decision in between.
            Default: 5.
        quarantine_after: deaths before the first step, after which the checkpoint that was loaded is quarantined.
            Default: 3.
    """

    max_failures: _Count = Field(default=0, description="Failures of your code that are retried.")
    max_machine_failures: _Count = Field(
        default=10,
        description="Failures of machines, workers and stores in a row, without a commit in between.",
    )
    max_restarts: _Count = Field(
        default=5,
        description="Restarts of the whole run by automations in a row, without a commit or a decision in between.",
    )
    quarantine_after: Annotated[int, Field(ge=1), AS_WHOLE] = Field(
        default=3,
        description="Deaths before the first step, after which the checkpoint that was loaded is quarantined.",
    )


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Start another attempt from the newest checkpoint."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Quarantine this checkpoint, then start another attempt from the one before it."""

    sequence: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Resumable:
    """End the run without giving up the trial; a Retry, a Resume or a schedule continues it."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the trial as errored: its budget is spent."""

    reason: Reason


Verdict: TypeAlias = TryAgain | Quarantine | Resumable | GiveUp


def verdict(trial: Trial, cause: Cause, policy: FailurePolicy) -> Verdict:
    """Decide after an attempt of `trial` ended by `cause`; `trial` counts that attempt already."""
    if cause is Cause.PREEMPTED:
        return Resumable()
    if (spent := _spent_budget(trial, cause, policy)) is not None:
        return GiveUp(spent)
    if trial.started_from is None or trial.same_start < policy.quarantine_after:
        return TryAgain()
    died = {"attempts": trial.same_start, "error": trial.end_reason}
    if trial.blamed_checkpoints:
        return GiveUp(make_reason("died-at-each-start", **died))
    return Quarantine(trial.started_from, make_reason("died-at-start", **died))


def errors_end_reason(trial: Trial, trials: Iterable[Trial], *, fail_fast: bool | None) -> Reason | None:
    """Return why the error of `trial`, one of `trials`, ends the experiment; None if it goes on."""
    if fail_fast:
        return make_reason("fail-fast", trial=trial.trial, error=summarize_error(trial.end_reason))
    return same_errors_reason(trials) if fail_fast is None else None


def same_errors_reason(trials: Iterable[Trial]) -> Reason | None:
    """Return why a search ends in which three trials errored by the same error before their second step.

    None if a trial has reported a second step or completed, if an error differs, or while a trial trains its first
    step that began before the third error.
    """
    from prefect_tune.core.experiment.trial_transitions import (
        Phase,
    )  # the flows import this module, and need no journal

    begun = [trial for trial in trials if trial.attempt]
    errored = [trial for trial in begun if trial.phase is Phase.ERRORED]
    if len(errored) < 3 or any(trial.step > 1 or trial.phase is Phase.FINISHED for trial in begun):
        return None
    error, *others = (summarize_error(trial.end_reason) for trial in errored)
    third_error_at = sorted(map(_last_sign_of, errored))[2]
    if any(other != error for other in others) or any(
        trial.phase is Phase.RUNNING and _last_sign_of(trial) <= third_error_at for trial in begun
    ):
        return None
    return make_reason("same-errors", count=len(errored), error=error)


def _last_sign_of(trial: Trial) -> datetime:
    """Return when the last attempt of a trial ended, or when it began, if it has not reported a step yet."""
    record = trial.records[-1]
    return (parse_time(record.began_at or "") or _UNKNOWN) + timedelta(seconds=record.seconds.total)


def machines_spent(trial: Trial, policy: FailurePolicy) -> bool:
    """Return whether a waiting trial has had more machine failures than `policy` allows.

    The last run ended before it could give up the trial, for example because its target failed.
    """
    return trial.cause is Cause.MACHINE and _spent_budget(trial, Cause.MACHINE, policy) is not None


def is_forgiven(trial: Trial, policy: FailurePolicy) -> bool:
    """Return whether the next run begins with fresh budgets for a waiting trial.

    It does if the import of its trainable or its stop criterion failed, which may be corrected; and after too many
    machine failures, but not if the trial's last owner vanished with it: a trial that kills its machine each time would
    be restarted forever, and its search could never finish.
    """
    if trial.cause in (Cause.IMPORT, Cause.BAD_STOP):
        return True
    return machines_spent(trial, policy) and code_of(trial.end_reason) != "owner-vanished"


def _spent_budget(trial: Trial, cause: Cause, policy: FailurePolicy) -> Reason | None:
    """Return why another attempt is not made; None if the retry budget for this cause is not spent."""
    error = trial.end_reason
    if cause in _NEVER_AGAIN:
        return make_reason("not-retried", cause=cause.value, error=error)
    if cause is Cause.MACHINE and trial.machine_failures > policy.max_machine_failures:
        return make_reason("max-machine-failures", failures=trial.machine_failures, error=error)
    if cause is Cause.USER and trial.user_failures > policy.max_failures:
        return make_reason("max-failures", failures=trial.user_failures, limit=policy.max_failures, error=error)
    return None
