"""The flow that trains one trial durably: restore, train, persist each checkpoint, commit, sync, repeat."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, assert_never

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_tune.blocks import SyncConfig, resolve_target
from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.errors import InvalidInput, TrialFailed
from prefect_tune.core.events.experiment_events import Cause, Event, GaveUp, Quarantined, Requeued, TrialAdded
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.experiment_stoppers import of_experiment
from prefect_tune.core.experiment.failure_policy import (
    FailurePolicy,
    GiveUp,
    Quarantine,
    Resumable,
    TryAgain,
    is_forgiven,
    verdict,
)
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_stoppers import Stopper
from prefect_tune.core.experiment.trial_transitions import Status, Trial, newest_checkpoint, newest_key
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.monitoring.assets import ExperimentAddress
from prefect_tune.monitoring.event_builder import EventContext
from prefect_tune.monitoring.event_emitter import EventEmitter, emitting_events, this_run
from prefect_tune.monitoring.listener import ObserverGroup, TrainingObserver
from prefect_tune.monitoring.live_report import Reporter, reported
from prefect_tune.parameters.form_schema import SyncField, TargetField, TrainableField
from prefect_tune.parameters.limits import has_had_enough, require_possible
from prefect_tune.parameters.resume_compatibility import require_goes_on
from prefect_tune.parameters.resume_mode import read_known
from prefect_tune.parameters.training_request import (
    experiment_name,
    name_of,
    stopper_for,
    storable_config,
    valid_trainable,
)
from prefect_tune.prefect_api.flow_with_server import flow_with_server
from prefect_tune.retry_policy import retrying_refusals, skip_prefect_introspection
from prefect_tune.runtime.checkpoint import Checkpoint
from prefect_tune.supervisor.graceful_shutdown import interruptible
from prefect_tune.supervisor.process_pool import TrialProcessPool
from prefect_tune.supervisor.run_identity import new_write_id
from prefect_tune.supervisor.search_link import StandaloneLink
from prefect_tune.supervisor.trial_spec import AttemptRequest, TrialSpec, pickled_or_path
from prefect_tune.suspension.answers import answers_for
from prefect_tune.suspension.restart_guard import owner_after
from prefect_tune.suspension.suspend_loop import as_one_owner, say_what_is_resumable
from prefect_tune.suspension.training_answers import TrainingTurn, code_changed, first_turn, followed, next_turn
from prefect_tune.tasks import restore_experiment_state, run_trial
from prefect_tune.tasks.attempt_supervisor import Failed
from prefect_tune.tasks.experiment_state import check_target, write_entry
from prefect_tune.terminal.progress_state import SearchEstimate

__all__ = ["TrialResult", "durable_trainable"]

_TRIAL = "trial"


@dataclass(frozen=True)
class TrialResult:
    """The state of a `trial` of an `experiment` when its flow run ends."""

    experiment: str
    trial: str
    status: Status
    """For example finished, errored or paused."""
    reason: str
    """Why it has this status."""
    step: int
    """Steps trained, each counted once."""
    metrics: Mapping[str, object]
    """Of the last report."""
    checkpoint: Checkpoint | None
    """The newest committed one; None if none was committed."""
    attempts: int
    """Number of attempts, over all runs."""
    wasted_steps: int
    """Steps that had to be trained again."""


@flow_with_server(name="durable-trainable", persist_result=False)
def durable_trainable(
    trainable: TrainableField,
    config: dict[str, Any] | None = None,
    *,
    target: TargetField,
    experiment: str | None = None,
    stop: Any = None,
    checkpoint: Cadence | None = None,
    retention: Retention | None = None,
    failures: FailurePolicy | None = None,
    sync: SyncField = None,
    isolation: Literal["process", "thread"] = "process",
    grace_period_seconds: float = 25,
    silence_timeout_seconds: float | None = None,
) -> TrialResult:
    """Train `trainable` until it is done, across failures of the process, the machine or the network.

    Every checkpoint is persisted on `target` before it is committed. Started again with the same
    experiment name, by whatever means, the flow resumes from the newest committed checkpoint; a trial
    that has finished is returned at once.

    Args:
        trainable: the code to train: `package.module:Name`, installed where the flow runs; in code also the function
            `train(config)` or the subclass of `pt.Trainable` itself.
        config: the configuration of the trainable, such as `{"lr": 0.01, "layers": 3}`.
        target: where checkpoints and state are stored: a URI such as `s3://bucket/runs`, the `type/name` of a saved
            block, such as `s3-target/prod`, or the block. Put credentials into blocks, which hide them.
        experiment: its name on the target; the same name resumes it. Default: the id of the root flow run, which a
            Retry keeps.
        stop: when to stop: `{"step": 100}` or other limits (stop at `>=`); in code also a function of the
            metrics, or a stopper. Default: when the trainable is done.
        checkpoint: when a class trainable saves. Default: every 60 s and at the end.
        retention: which checkpoints to keep. Default: all.
        failures: the two retry budgets. Default: none for the trainable's own failures, 10 for the machine's.
        sync: periods and timeouts in seconds, artifacts, and `commit="async"`, to continue training during an upload.
        isolation: `process` trains in a child process; `thread` in this one, for debuggers.
        grace_period_seconds: seconds that the trial may take to save once SIGTERM or a cancellation arrives.
        silence_timeout_seconds: seconds without a report after which the trial is considered hung and is restarted.
            Default: never.

    Returns:
        TrialResult: step, metrics and newest checkpoint of the finished trial.

    Raises:
        InvalidInput: an argument is invalid, or does not fit the experiment; nothing was started.
        TrialFailed: a retry budget is spent. Fix the cause and run the flow again: it resumes.
        Superseded: another run has taken the experiment over.
        ResumeFailed: the experiment exists and cannot be read.
        CrashLoop: automations restarted this run repeatedly, without progress.
        StoreUnavailable: the target did not answer for too long. Run the flow again: it resumes.
        StoreRefused: the target refuses requests, for example because of the credentials: from the start, or for too
            long. Run the flow again: it resumes.
    """
    where, name = resolve_target(target), experiment_name(experiment)
    turn: TrainingTurn | None = (first := first_turn(where, name, stop, trainable))
    stopper = _of_one_trial(stopper_for(first.stop))  # type: ignore[arg-type]  # it raises if the type is wrong
    plan = TrialSpec(
        target=where,
        trial=TrialKey(experiment=name, trial=_TRIAL),
        trainable=pickled_or_path(valid_trainable(trainable)),
        fingerprint=name_of(trainable),
        stopper=pickled_or_path(stopper),
        needs_curve=stopper.looks_back,
        cadence=checkpoint or Cadence(),
        retention=retention or Retention(),
        sync=sync or SyncConfig(),
        isolation=isolation,
        grace=timedelta(seconds=grace_period_seconds),
        silence=None if silence_timeout_seconds is None else timedelta(seconds=silence_timeout_seconds),
    )
    require_possible(plan)
    task = _Task(plan, storable_config(config), stopper, failures or FailurePolicy(), trainable)
    while turn is not None:
        state = _train(task, turn)
        turn = next_turn(turn, plan.target, state)
    return _ended(task, state)


def _of_one_trial(stopper: Stopper) -> Stopper:
    if found := of_experiment(stopper):
        raise InvalidInput(
            f"stop: {found[0]} is for a search of many trials; for one trial use MaxSteps, MaxTime or Plateau"
        )
    return stopper


@dataclass(frozen=True, slots=True)
class _Task:
    """The validated request of the flow run."""

    plan: TrialSpec
    config: Mapping[str, object]
    stopper: Stopper
    policy: FailurePolicy
    trainable: object


def _train(task: _Task, turn: TrainingTurn) -> Experiment:
    plan, name = task.plan, task.plan.trial.experiment

    def attempts(stop: threading.Event) -> Experiment:
        check_target(plan.target)
        known = _require_one_training(plan)
        if plan.isolation == "process" and not _is_finished(known.experiment):
            pool.prepare()  # a child process starts while the experiment opens
        owner = owner_after(known.experiment, task.policy.max_restarts, answered=turn.answered)
        state = restore_experiment_state(plan.target, name, owner, new_write_id(), skip_prefect_introspection(known))
        emitter = EventEmitter(_subject(plan), known.experiment, get_run_logger())
        emitter.opened(state)
        outlook = SearchEstimate(state.name, trial_count=1, step_count=task.stopper.step_count)
        reporter = Reporter(plan.target, state, outlook, get_run_logger())
        news = TrainingObserver(ObserverGroup([emitter, reporter]), state)
        with retrying_refusals(), reported(reporter, stop):
            state = _ready(task, news, followed(plan, state, turn))
            turn.reached(state)
            _say_where_it_stands(task, state)
            with nullcontext() if _is_finished(state) else emitting_events(emitter, stop):
                while state.trial(_TRIAL).status is Status.PENDING and not (state.questions or stop.is_set()):
                    state = _attempt(task, news, state, StandaloneLink(plan, pool, stop, news))
                    turn.reached(state)
                reporter.conclude()  # it draws the last page while the event emitter ends
        return state

    with (
        TrialProcessPool(slots=0) as pool,
        as_one_owner(plan.target, name),
        say_what_is_resumable(lambda: turn.state),
    ):
        return interruptible(attempts, grace=plan.grace)


def _is_finished(state: Experiment) -> bool:
    return _TRIAL in state.trials and state.trial(_TRIAL).status is Status.FINISHED


def _ended(task: _Task, state: Experiment) -> TrialResult:
    plan, trial = task.plan, state.trial(_TRIAL)
    if trial.status is Status.ERRORED:
        raise TrialFailed(f"{plan.trial.experiment}: {trial.reason}")
    _say_what_is_not_saved(trial)
    return _result(plan, trial)


def _require_one_training(plan: TrialSpec) -> LoadedJournal:
    """Read the experiment, and check that it can be resumed here; no owner is superseded yet.

    Raises:
        InvalidInput: the experiment is a search.
        ResumeFailed: it cannot be read, is an incomplete fork, or is being deleted.
    """
    known = read_known(plan.target, plan.trial.experiment)
    state = known.experiment
    require_goes_on(state)
    if state.settings or any(trial.apart for trial in state.trials.values()):
        raise InvalidInput(
            f"experiment {state.name!r} at {plan.target.uri} is a search: resume it by pt.resume(...), or choose "
            "another experiment name"
        )
    return known


def _attempt(task: _Task, news: TrainingObserver, state: Experiment, line: StandaloneLink) -> Experiment:
    """Run one attempt; if it failed, apply the failure policy. Return the state afterwards."""
    orders = AttemptRequest(epoch=state.epoch, answers=answers_for(_TRIAL, state.answers))
    attempt = run_trial(task.plan, orders, line)
    outcome, after = attempt.outcome, attempt.experiment
    if not isinstance(outcome, Failed):
        return after
    get_run_logger().warning("attempt %d: %s: %s", after.trial(_TRIAL).attempt, outcome.cause, outcome.message)
    return _failure_handler(task, news, after, outcome.cause)


def _failure_handler(task: _Task, news: TrainingObserver, state: Experiment, cause: Cause) -> Experiment:
    plan = task.plan
    match verdict(state.trial(_TRIAL), cause, task.policy):
        case TryAgain() | Resumable():
            return state
        case Quarantine(sequence=sequence, reason=reason):
            get_run_logger().error("a checkpoint is quarantined: %s", reason)
            return _write(plan, news, state, Quarantined(trial=_TRIAL, sequence=sequence, reason=reason, kills=True))
        case GiveUp(message=message):
            return _write(plan, news, state, GaveUp(trial=_TRIAL, cause=cause, message=message))
        case never:
            assert_never(never)


def _ready(task: _Task, news: TrainingObserver, state: Experiment) -> Experiment:
    """Bring the trial into a state that is final, or from which an attempt can start; add it to a new experiment."""
    plan, config, trial = task.plan, task.config, state.trials.get(_TRIAL)
    if trial is None:
        return _write(plan, news, state, TrialAdded(trial=_TRIAL, config=config, fingerprint=plan.fingerprint))
    _require_same(plan, trial, config)
    if trial.status is Status.ERRORED:
        return _write(plan, news, state, Requeued(trial=_TRIAL, reason=f"tried again after: {trial.reason}"))
    if trial.status is Status.FINISHED and not has_had_enough(plan, trial, task.stopper):
        return _write(plan, news, state, Requeued(trial=_TRIAL, reason=f"extended beyond step {trial.step}"))
    if trial.status is Status.PENDING and is_forgiven(trial, task.policy):
        return _write(plan, news, state, Requeued(trial=_TRIAL, reason=f"tried again after: {trial.reason}"))
    if trial.status is Status.PENDING and trial.cause is not None:
        return _failure_handler(task, news, state, trial.cause)
    return state


def _require_same(plan: TrialSpec, trial: Trial, config: Mapping[str, object]) -> None:
    where = f"experiment {plan.trial.experiment!r} at {plan.target.uri}"
    if trial.config != config:
        raise InvalidInput(
            f"{where}: expected its config {dict(trial.config)}, found {dict(config)}. "
            "Pass the same config, or choose another experiment name"
        )
    before, now = trial.fingerprint.get("trainable"), plan.fingerprint.get("trainable")
    if before and now and before != now:
        raise InvalidInput(
            f"{where}: expected its trainable {before!r}, found {now!r}. Pass the same trainable, or choose another "
            "experiment name; the default name is different for each flow run"
        )


def _write(plan: TrialSpec, news: TrainingObserver, state: Experiment, event: Event) -> Experiment:
    after = write_entry(plan.target, state, [event])
    news.wrote([event], after)
    return after


def _subject(plan: TrialSpec) -> EventContext:
    place = ExperimentAddress(plan.target.uri, plan.trial.experiment)
    return EventContext(place, sync_period=plan.sync.sync_period, run=this_run())


def _say_where_it_stands(task: _Task, state: Experiment) -> None:
    plan, trial, log = task.plan, state.trial(_TRIAL), get_run_logger()
    where = f"experiment {state.name!r} at {plan.target.uri}"
    newest = newest_checkpoint(trial)
    if trial.status is Status.FINISHED:
        log.info("%s: finished already, at step %d: %s", where, trial.step, trial.reason)
    elif newest is not None:
        log.info("%s: resumes from step %d, after %d attempts", where, newest.step, trial.attempt)
        if changed := code_changed(plan.target, plan.trial, trial, task.trainable):
            log.warning("%s: training continues with the new code", changed)
    elif trial.attempt or (flow_run.run_count or 1) > 1:
        log.warning("%s: no checkpoint was ever committed, so training starts again from step 0", where)
    else:
        log.info("%s: starts from step 0", where)


def _say_what_is_not_saved(trial: Trial) -> None:
    newest = newest_checkpoint(trial)
    saved = newest.step if newest else 0
    if trial.status is Status.FINISHED and saved < trial.step:
        get_run_logger().warning(
            "the newest checkpoint is of step %d; the %d steps after it were reported, but not saved",
            saved,
            trial.step - saved,
        )


def _result(plan: TrialSpec, trial: Trial) -> TrialResult:
    return TrialResult(
        experiment=plan.trial.experiment,
        trial=trial.trial,
        status=trial.status,
        reason=trial.reason,
        step=trial.step,
        metrics=trial.metrics,
        checkpoint=plan.target.checkpoint(key) if (key := newest_key(plan.trial, trial)) else None,
        attempts=trial.attempt,
        wasted_steps=trial.wasted_steps,
    )
