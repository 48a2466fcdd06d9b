"""Failure policy: two retry budgets, and the quarantine of checkpoints from which attempts die."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from prefect_tune.core.attempt_causes import Cause
from prefect_tune.core.shown_text import first_line
from prefect_tune.core.values import AS_WHOLE, Value, parse_time

if TYPE_CHECKING:
    from prefect_tune.core.experiment.trial import Trial

OWNER_VANISHED = "its owner vanished without ending it"
"""The reason that a new owner journals for an attempt it finds running: the old run was killed, or could not write."""

_USER_BUDGET_SPENT = re.compile(r"^(failure \d+ of the trainable \(max_failures=\d+\)|bad-metric is not retried): ")
"""What `verdict` puts before the error that spent the budget, or of which another attempt would fail too."""

_LOST = "attempts were lost without a commit: "
_LOSS = re.compile(rf"\d+ {_LOST}")
_Count = Annotated[int, Field(ge=0), AS_WHOLE]
_SAME_ERRORS = 3
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
    reason: str


@dataclass(frozen=True, slots=True)
class Resumable:
    """End the run without giving up the trial; a Retry, a Resume or a schedule continues it."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the trial as errored: its budget is spent."""

    message: str


Verdict: TypeAlias = TryAgain | Quarantine | Resumable | GiveUp


def verdict(trial: Trial, cause: Cause, policy: FailurePolicy) -> Verdict:
    """Decide after an attempt of `trial` ended by `cause`; `trial` counts that attempt already."""
    if cause is Cause.PREEMPTED:
        return Resumable()
    if spent := _spent(trial, cause, policy):
        return GiveUp(f"{spent}: {trial.reason}")
    if trial.started_from is None or trial.same_start < policy.quarantine_after:
        return TryAgain()
    died = f"{trial.same_start} attempts died before their first step"
    if trial.blamed_checkpoints:
        return GiveUp(f"{died}, also from the checkpoint before, so no checkpoint is the cause: {trial.reason}")
    return Quarantine(trial.started_from, f"{died}: {trial.reason}")


def loss_message(count: int, why: str) -> str:
    """Return why a trial is given up of which `count` attempts in a row ended without writing their end."""
    return f"{count} {_LOST}{why}"


def is_loss(message: str) -> bool:
    """Return whether `loss_message` returned the message. The journal does not hold these losses."""
    return bool(_LOSS.match(message))


def errors_end_reason(trial: Trial, trials: Iterable[Trial], *, fail_fast: bool | None) -> str | None:
    """Return why the error of `trial`, one of `trials`, ends the experiment; None if it goes on."""
    if fail_fast:
        return f"trial {trial.trial} errored, and fail_fast ends the experiment: {first_line(trial.reason)}"
    return same_errors_reason(trials) if fail_fast is None else None


def same_errors_reason(trials: Iterable[Trial]) -> str | None:
    """Return why a search ends in which three trials errored by the same error, and none has trained a step.

    None if a trial has reported a step or completed, if an error differs, or while a trial trains its first step that
    began before the third error.
    """
    from prefect_tune.core.experiment.trial import Phase  # the flows import this module, and need no journal

    begun = [trial for trial in trials if trial.attempt]
    errored = [trial for trial in begun if trial.phase is Phase.ERRORED]
    errors = [error_in(trial.reason) for trial in errored]
    if (
        any(trial.step or trial.phase is Phase.FINISHED for trial in begun)
        or len(errors) < _SAME_ERRORS
        or len(set(errors)) > 1
    ):
        return None
    third_error_at = sorted(map(_last_sign_of, errored))[_SAME_ERRORS - 1]
    if any(_last_sign_of(trial) <= third_error_at for trial in begun if trial.phase is Phase.RUNNING):
        return None
    return f"{len(errors)} trials errored before their first step, all with: {errors[0]}; fail_fast=False goes on"


def _last_sign_of(trial: Trial) -> datetime:
    """Return when the last attempt of a trial ended, or when it began, if it has not reported a step yet."""
    record = trial.records[-1]
    return (parse_time(record.began_at or "") or _UNKNOWN) + timedelta(seconds=record.seconds.total)


def error_in(reason: str) -> str:
    """Return the first line of an errored trial's reason, without what precedes an error of the trainable."""
    return _USER_BUDGET_SPENT.sub("", first_line(reason))


def machines_spent(trial: Trial, policy: FailurePolicy) -> bool:
    """Return whether a waiting trial has had more machine failures than `policy` allows.

    The last run ended before it could give up the trial, for example because its target failed.
    """
    return trial.cause is Cause.MACHINE and bool(_spent(trial, Cause.MACHINE, policy))


def is_forgiven(trial: Trial, policy: FailurePolicy) -> bool:
    """Return whether the next run begins with fresh budgets for a waiting trial.

    It does if the import of its trainable or its stop criterion failed, which may be corrected; and after too many
    machine failures, but not if the trial's last owner vanished with it: a trial that kills its machine each time would
    be restarted forever, and its search could never finish.
    """
    if trial.cause in (Cause.IMPORT, Cause.BAD_STOP):
        return True
    return machines_spent(trial, policy) and trial.reason != OWNER_VANISHED


def _spent(trial: Trial, cause: Cause, policy: FailurePolicy) -> str:
    if cause in _NEVER_AGAIN:
        return f"{cause} is not retried"
    if cause is Cause.MACHINE and trial.machine_failures > policy.max_machine_failures:
        return f"{trial.machine_failures} machine failures without a commit (max_machine_failures)"
    if cause is Cause.USER and trial.user_failures > policy.max_failures:
        return f"failure {trial.user_failures} of the trainable (max_failures={policy.max_failures})"
    return ""
