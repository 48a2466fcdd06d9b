"""How far an experiment may go, and whether a trial has had enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from prefect.logging import get_run_logger

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.events import CheckpointRef
from prefect_tune.core.failures import FailurePolicy
from prefect_tune.core.objective import Objective
from prefect_tune.core.stoppers import Stopper, limits_in
from prefect_tune.core.trial import Trial
from prefect_tune.core.values import StepReport
from prefect_tune.tasks.plan import TrialPlan
from prefect_tune.tasks.run_trial import curve_up_to
from prefect_tune.tasks.trial_artifacts import TrialArtifacts
from prefect_tune.tasks.trial_channel import Log

__all__ = ["Limits", "has_had_enough", "require_possible", "warn_of_limits"]


@dataclass(frozen=True)
class Limits:
    """How far an experiment may go."""

    max_concurrent_trials: int
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    fail_fast: bool = False
    """Whether the first trial that errors ends the experiment; the others save, and can be resumed."""
    time: timedelta | None = None
    """After which everything saves and ends, resumable."""
    ends: str = ""
    """Why nothing is begun any more; empty where that is not so."""
    reruns_errored: bool = False
    """Whether trials that errored are tried again."""
    only_errored: bool = False
    """Whether nothing else goes on."""
    has_had_enough: Callable[[Trial], bool] = lambda _: True
    """Whether a trial that met its stop criterion meets today's too; otherwise it goes on."""


def has_had_enough(plan: TrialPlan, trial: Trial, stopper: Stopper) -> bool:
    """Whether a finished trial is finished under today's criterion too."""
    if trial.returned or trial.left or trial.metrics.get("done") is True:
        return True
    last = StepReport(step=trial.step, metrics=trial.metrics, trained_seconds=trial.trained_seconds)
    told = curve_up_to(plan, CheckpointRef(sequence=0, **last.model_dump())) if stopper.looks_back else [last]
    return bool(told) and stopper.why_stop(told) is not None


def warn_of_limits(stopper: Stopper, objective: Objective | None, log: Log) -> None:
    """Say so where a trial would be ended by what it is to become good at."""
    modes = dict(zip(objective.metrics, objective.modes, strict=True)) if objective else {}
    for name, limit in limits_in(stopper).items():
        if modes.get(name) == "min":
            log.warning(
                "stop={'%s': %g} ends a trial as soon as %s >= %g, and a small one is good: most end at their first "
                "step. To end one that is good enough: stop=lambda metrics: metrics['%s'] <= %g",
                *(name, limit) * 3,
            )


def require_possible(plan: TrialPlan) -> None:
    """Find out before anything is written.

    Raises:
        InvalidInput: a period is not one, or the artifacts cannot be synced as asked.
    """
    TrialArtifacts(plan, Path(), get_run_logger())
    if plan.grace < timedelta(0):
        raise InvalidInput(f"grace_period_seconds: expected 0 or more, found {plan.grace.total_seconds():g}")
    if plan.silence is not None and plan.silence <= timedelta(0):
        raise InvalidInput(f"silence_timeout_seconds: expected more than 0, found {plan.silence.total_seconds():g}")
