"""Trials as callbacks receive them, and the events of their lives."""

from __future__ import annotations

from collections.abc import Mapping

from prefect_tune.callbacks import Callback, SearchInfo
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal_events import AttemptEnded, Cause, Finished, GaveUp, Started
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.values import StepReport

SEARCH = SearchInfo("e", "file:///target", Objective(metrics=("loss",), modes=("min",)))
CONFIG = {"lr": 0.1, "model": {"depth": 2}}


def trial(name: str = "00000", **facts: object) -> Trial:
    """Return a trial with a nested configuration."""
    return Trial.model_validate({"trial": name, "config": CONFIG, **facts})


def started(callback: Callback, *, name: str = "00000", from_step: int = 0) -> None:
    """Start an attempt of a trial after `from_step`."""
    callback.on_trial_start(trial(name), Started(trial=name, attempt=1, from_step=from_step))


def report(callback: Callback, step: int, /, *, name: str = "00000", **metrics: object) -> None:
    """Report a step of a trial; its loss falls as 1 / step."""
    reported: Mapping[str, object] = {"loss": 1 / step, **metrics}
    callback.on_trial_result(
        trial(name, step=step), StepReport(step=step, metrics=reported, trained_seconds=step * 0.5)
    )


def killed(callback: Callback, *, name: str = "00000") -> None:
    """End the attempt, as when the machine kills it."""
    callback.on_trial_recover(trial(name), AttemptEnded(trial=name, cause=Cause.MACHINE, reason="killed"))


def finished(callback: Callback, *, name: str = "00000", **facts: object) -> None:
    """Complete a trial."""
    callback.on_trial_complete(trial(name, **facts), Finished(trial=name, reason="had enough"))


def errored(callback: Callback, *, name: str = "00000") -> None:
    """Give a trial up after its last error."""
    callback.on_trial_error(trial(name), GaveUp(trial=name, cause=Cause.USER, reason="ValueError: in a mood"))
