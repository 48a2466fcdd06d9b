"""The public tasks that open an experiment, and that write reports and ends of its trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from prefect import task

from prefect_tune.blocks import resolve_target
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.events.experiment_events import (
    AttemptEnded,
    Cause,
    Event,
    Finished,
    GaveUp,
    Paused,
    Reported,
    TrialAdded,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.metrics import storable
from prefect_tune.core.models import StepReport, valid_name
from prefect_tune.parameters.training_request import storable_config
from prefect_tune.task_retries import RETRYING
from prefect_tune.tasks.public.arguments import TargetLike, trial_key, valid_step
from prefect_tune.tasks.public.attempts import opening_events, trying_again, write
from prefect_tune.tasks.public.ownership import own
from prefect_tune.tasks.public.results import ExperimentState, experiment_state

__all__ = ["restore_experiment_state", "sync_experiment_state"]

_End: TypeAlias = Literal["completed", "paused", "errored"]
_ENDS: tuple[_End, ...] = ("completed", "paused", "errored")


@task(name="restore-experiment-state", task_run_name="open {experiment}", **RETRYING)
def restore_experiment_state(*, target: TargetLike, experiment: str) -> ExperimentState:
    """Take an experiment over for this flow run and return its state; create it if it does not exist.

    From then on the saves of every other run fail, those of an earlier try of this run too. A checkpoint whose save was
    killed just before it was journaled is adopted, and trials that were running wait to be continued. The first
    `save_checkpoint` of a flow run does the same: call this first to fence an earlier run off before the training, or
    to see which trials have finished. To look without taking anything over, use `pt.load_results`.

    Args:
        target: where the experiment is stored: a URI, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target.

    Returns:
        ExperimentState: its trials, each with status, step, metrics and newest checkpoint.

    Raises:
        Superseded: this flow run owned the experiment, and another one has taken it over. Stop.
        InvalidInput: an argument is invalid, or the experiment is a search.
        ResumeFailed: it exists and cannot be read. Nothing was started.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    place = resolve_target(target)
    return experiment_state(place, own(place, valid_name(experiment)))


@task(name="sync-experiment-state", task_run_name="journal {experiment} {trial}", **RETRYING)
def sync_experiment_state(  # noqa: PLR0913 - a form: the place and the facts, each with its default
    *,
    target: TargetLike,
    experiment: str,
    trial: str = "trial",
    reports: Mapping[int, Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    status: _End | None = None,
    reason: str = "",
) -> ExperimentState:
    """Write what a checkpoint does not say into the experiment's journal: reports, a configuration, a trial's end.

    All of it is one durable entry. Writing the same again writes nothing. The flow run owns the experiment from then
    on, as with `save_checkpoint`.

    Args:
        target: where the experiment is stored: a URI, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target; it is created if it does not exist.
        trial: the trial's name in the experiment; it is added if it is new.
        reports: the metrics of steps that were trained, by step, such as `{1: {"loss": 0.5}}`. Steps up to the
            trial's newest one are in the journal already and are left out. A checkpoint journals its own step.
        config: the trial's configuration, for a new trial; one that exists must have the same.
        status: how the trial ends: `completed` for good; `paused`, to be continued by a later run; `errored`. A later
            save continues any of them. Default: it does not end.
        reason: why it ends, as `show` prints it.

    Returns:
        ExperimentState: the state after the entry.

    Raises:
        InvalidInput: an argument is invalid, the trial has another configuration, or the experiment is a search.
        BadMetric: a metric cannot be stored.
        Superseded: another flow run has taken the experiment over. Stop.
        ResumeFailed: the experiment exists and cannot be read.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    if status is not None and status not in _ENDS:
        raise InvalidInput(f"status: expected one of {', '.join(_ENDS)}, or none, found {status!r}")
    place, name = resolve_target(target), trial_key(experiment, trial).trial
    steps, wanted = _reports(reports or {}), None if config is None else storable_config(config)

    def synced() -> Experiment:
        state = own(place, experiment)
        found = state.trials.get(name)
        _require_same_config(found, name, state, wanted)
        begun = _begun(found, name, steps, wanted, status)
        ends = status is not None and (bool(begun) or found is None or found.status != status)
        events = [*begun, *_ended(name, status if ends else None, reason)]
        return write(place, state, name, events) if events else state

    return experiment_state(place, trying_again(synced))


def _reports(reports: Mapping[int, Mapping[str, Any]]) -> Sequence[StepReport]:
    """Return the reports in the order of their steps, which JSON parameters have as text."""
    try:
        numbered = {int(step): metrics for step, metrics in reports.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(f"reports: expected metrics by step, such as {{1: {{'loss': 0.5}}}}: {error}") from error
    return [
        StepReport(step=valid_step(step), metrics=storable(numbered[step], f"reports, step {step}"))
        for step in sorted(numbered)
    ]


def _require_same_config(
    found: Trial | None, name: str, state: Experiment, config: Mapping[str, object] | None
) -> None:
    if found is not None and config is not None and config != found.config:
        raise InvalidInput(
            f"config: trial {name!r} of experiment {state.name!r} has {dict(found.config)}, found {dict(config)}. "
            "Pass the same config, or choose another trial name"
        )


def _begun(
    found: Trial | None,
    name: str,
    reports: Sequence[StepReport],
    config: Mapping[str, object] | None,
    status: _End | None,
) -> Sequence[Event]:
    """Return the events of the reports that are new, after those with which an attempt begins."""
    new = [each for each in reports if found is None or each.step > found.step]
    told = [Reported(trial=name, report=each) for each in new]
    if told or (status is not None and (found is None or found.status != status)):
        step = new[0].step if new else (found.step if found else 0)
        return [*opening_events(found, name, step, config), *told]
    return [TrialAdded(trial=name, config=config or {})] if found is None else []


def _ended(name: str, status: _End | None, reason: str) -> Sequence[Event]:
    why = reason or f"its flow run said {status}"
    match status:
        case None:
            return []
        case "completed":
            return [Finished(trial=name, reason=why, returned=True)]
        case "paused":
            return [Paused(trial=name, reason=why)]
        case "errored":
            ended = AttemptEnded(trial=name, cause=Cause.USER, message=why)
            return [ended, GaveUp(trial=name, cause=Cause.USER, message=why)]
