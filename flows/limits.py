"""How far an experiment may go, and whether a trial has had enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from prefect_tune.core.events import CheckpointRef
from prefect_tune.core.failures import FailurePolicy
from prefect_tune.core.stoppers import Stopper
from prefect_tune.core.trial import Trial
from prefect_tune.core.values import StepReport
from prefect_tune.tasks.plan import TrialPlan
from prefect_tune.tasks.run_trial import curve_up_to

__all__ = ["Limits", "has_had_enough"]


@dataclass(frozen=True)
class Limits:
    """How far an experiment may go."""

    max_concurrent_trials: int
    failures: FailurePolicy = field(default_factory=FailurePolicy)
    fail_fast: bool = False
    """Whether the first trial that errors ends the experiment; the others save, and can be resumed."""
    time: timedelta | None = None
    """After which everything saves and ends, resumable."""
    reruns_errored: bool = False
    """Whether trials that errored are tried again."""
    has_had_enough: Callable[[Trial], bool] = lambda _: True
    """Whether a trial that met its stop criterion meets today's too; otherwise it goes on."""


def has_had_enough(plan: TrialPlan, trial: Trial, stopper: Stopper) -> bool:
    """Whether a finished trial is finished under today's criterion too."""
    if trial.returned or trial.left or trial.metrics.get("done") is True:
        return True
    last = StepReport(step=trial.step, metrics=trial.metrics, trained_seconds=trial.trained_seconds)
    told = curve_up_to(plan, CheckpointRef(sequence=0, **last.model_dump())) if stopper.looks_back else [last]
    return bool(told) and stopper.why_stop(told) is not None
