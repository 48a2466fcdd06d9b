"""The tasks that run one attempt of a trial, for a search and for users' own flows."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

from prefect import task
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger

from prefect_tune.attempt.attempt import (
    Attempt,
    ReportReader,
    log_failure,
    make_node_state,
    make_task_state,
    stays_finished,
)
from prefect_tune.attempt.graceful_stop import run_interruptible
from prefect_tune.attempt.nodes import train_node
from prefect_tune.attempt.processes.process_output import Log, TrialLog
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.search_channel import InProcessChannel, SearchChannel, WritingJournal
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import SyncConfig
from prefect_tune.core.display_text import first_line
from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Cadence, Retention
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.experiment.trial_transitions import ENDED_PHASES, Phase, Trial
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Event,
    Outcome,
    TrialAdded,
    TrialRequeued,
    TrialResumed,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.journal_access import JournalWriter
from prefect_tune.ownership import ensure_ownership, make_trial_entry_writer, retry_on_conflict, write_if_unchanged
from prefect_tune.parameters.argument_checks import config_to_json
from prefect_tune.parameters.forms import ConfigLike, StopLike, TargetLike, TrainableLike
from prefect_tune.parameters.import_check import require_importable
from prefect_tune.parameters.plan_checks import make_single_trial_spec, require_same_training
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.call_paths import isolated_run_context
from prefect_tune.prefect_api.flow_runs import ignore_broken_log_pipe
from prefect_tune.prefect_api.task_runs import (
    TRIAL_TASK_NAME,
    holding_concurrency_limits,
    public_task,
    quieting_inner_tasks,
)
from prefect_tune.storage_retries import REFUSAL_RETRY_OPTIONS, TASK_RETRY_OPTIONS, get_run_log, retrying_refusals
from prefect_tune.task_values import TrialArguments, TrialState, make_trial_state
from prefect_tune.tasks.checkpoints import PrefectAttemptTasks


@task(name=TRIAL_TASK_NAME, task_run_name="train {spec.trial.trial} · attempt {request.attempt}", **TASK_RETRY_OPTIONS)
def run_attempt(spec: TrialSpec, request: AttemptRequest, channel: SearchChannel) -> State[Any]:
    """Train one attempt of a trial in its own process, and journal how the attempt ended; see `Attempt`.

    All state is read from the target, so a retry of the task runs the next attempt. The task run ends in the returned
    state, which shows how the attempt ended: Completed, Pruned, Paused, Interrupted or Failed, with the reason.
    What happens next depends only on the journal.

    Args:
        spec: the specification of the trial.
        request: the request for this attempt.
        channel: the channel to the search; `channel.run_stop` makes the trial save and end within `spec.grace_period`.

    Raises the errors of `Attempt.run`.
    """
    ignore_broken_log_pipe()
    log: Log = get_run_logger()
    if spec.proposed_by_search:  # in a search, each log message names the trial
        log = TrialLog(log, f"trial {spec.trial.trial}")
    channel.start_polling()  # first, since a stop may be requested during a wait (for a slot, other nodes or an import)
    with (
        quieting_inner_tasks(),
        retrying_refusals(),
        closing(channel),
        holding_concurrency_limits(spec.concurrency_limits, channel.run_stop),
    ):
        ended = Attempt(spec, request, channel, PrefectAttemptTasks(spec), log).run()
    if isinstance(ended.outcome, AttemptEnded):
        log_failure(ended.outcome, ended.trial.attempt, spec, request.owner_term, log)
    return make_task_state(ended.outcome)


@task(
    name="run-node", task_run_name="node {node} of {spec.trial.trial} · attempt {request.attempt}", **TASK_RETRY_OPTIONS
)
def run_node(spec: TrialSpec, request: AttemptRequest, node: int, channel: SearchChannel) -> State[Any]:
    """Train an attempt's ranks on a further node; the journal records how the attempt ends. Args: see `run_attempt`.

    If the worker of this task is lost, Dask and Ray repeat the task. An attempt that has begun rejects the new process.
    """
    log = TrialLog(get_run_logger(), f"trial {spec.trial.trial}")
    with quieting_inner_tasks(), retrying_refusals(), closing(channel):
        return make_node_state(train_node(spec, request, node, channel, PrefectAttemptTasks(spec), log))


# The public task, for users' own flows.


@public_task(name=TRIAL_TASK_NAME, task_run_name="train {trial}", **REFUSAL_RETRY_OPTIONS)
def run_trial(
    trainable: TrainableLike,
    config: ConfigLike | None = None,
    *,
    target: TargetLike,
    experiment: str,
    trial: str = "trial",
    stop: StopLike = None,
    checkpoint: Cadence | None = None,
    retention: Retention | None = None,
    sync: SyncConfig | None = None,
    isolation: Literal["process", "thread"] = "process",
    grace_period_seconds: float = 25,
    silence_timeout_seconds: float | None = None,
) -> TrialState:
    """Run one attempt of a trial: restore its newest checkpoint, train, commit each checkpoint, journal the end.

    The trainable runs in its own process, as in `durable_trainable`. A repeated call, by a retry or a later flow
    run, continues the trial from its newest committed checkpoint; a finished trial is returned at once. The flow run
    owns the experiment, as after `save_checkpoint`, and can run several trials at once (`.map`).
    For retries with budgets and a live report, call `durable_trainable` instead.

    ```python
    state = pt.run_trial(train, {"lr": 0.01}, target="runs", experiment="first-model")
    ```

    Args:
        trainable: the code to train: `package.module:Name`, or the function or the subclass of `pt.Trainable` itself.
        config: the configuration, such as `{"lr": 0.01}`, or a dataclass, which is passed as a dict of its fields.
        target: where checkpoints and state are stored: a URI, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target; it is created if it does not exist.
        trial: the trial's name in the experiment; a call with the same name continues the trial.
        stop: when to stop: `{"step": 100}` or other limits (stop at `>=`), a function of the metrics, or a stopper.
            Default: when the trainable is done.
        checkpoint: when a class trainable saves. Default: every 60 s and at the end.
        retention: the checkpoints to keep. Default: all.
        sync: periods and timeouts in seconds, artifacts, and `commit="async"`.
        isolation: `process` trains in a child process; `thread` trains in this process, for debuggers.
        grace_period_seconds: seconds that the trial may take to save after SIGTERM or a cancellation.
        silence_timeout_seconds: seconds without a report after which a hung trial is stopped. Default: never.

    Returns:
        TrialState: the status (`completed`, or `interrupted` by a suspension), step, metrics and newest checkpoint.

    Raises:
        TrialFailed: the attempt failed, or needs an answer from the user. Call the task again: it continues from the
            newest checkpoint. Prefect retries the task only after failures of the target; for other retries pass
            `retry_condition_fn` to `.with_options`.
        InvalidInput: an argument is invalid, does not fit the trial, or names a missing trainable; nothing was started.
        Superseded: another flow run took over the experiment, or another task took over the trial. Stop.
        ResumeFailed: the experiment cannot be read, or all checkpoints of the trial are damaged.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    parameters = dict(locals())  # `SearchPlan` has fields with all these names, except `config` and `trial`
    parameters.pop("config")
    args = TrialArguments(target=target, experiment=experiment, trial=parameters.pop("trial"))
    plan = SearchPlan(**parameters)
    spec, stopper = make_single_trial_spec(plan, args.trial)
    config_values = config_to_json(config)
    require_importable(plan.trainable, plan.isolation, get_run_log(), spec.cadence)
    state = retry_on_conflict(lambda: _prepare_trial(spec, config_values, stopper))
    spec = replace(spec, trial=state.trial_key(args.trial))
    result = state.trial(args.trial)
    if result.phase is not Phase.FINISHED:
        with isolated_run_context():  # so that uploads do not wait for this task's tags, whose slots the task holds
            result, outcome = run_interruptible(
                lambda stop: _run_attempt_without_search(spec, state, stop),
                grace=spec.grace_period,
                poll_interval=spec.sync.request_period,
            )
        if isinstance(outcome, AttemptEnded) and outcome.cause is not Cause.PREEMPTED:
            where = f"trial {args.trial!r} of experiment {state.name!r} at {spec.target.uri}"
            raise TrialFailed(f"{where}: {first_line(outcome.reason)}")
    return make_trial_state(spec.target, state.key, result)


def _prepare_trial(spec: TrialSpec, config: Mapping[str, object], stopper: Stopper) -> Experiment:
    """Make the trial pending, unless it has finished and meets the current stop criterion; return the experiment."""
    state, name = ensure_ownership(spec.target, spec.trial.experiment), spec.trial.trial
    require_same_training(state, spec, config)
    trial = state.trials.get(name)
    event: Event | None = None
    if trial is None:
        event = TrialAdded(trial=name, config=config, fingerprint=spec.fingerprint)
    elif trial.phase is Phase.RUNNING:
        event = AttemptEnded(trial=name, cause=Cause.MACHINE, reason=make_reason("task-failed"))
    elif trial.phase is Phase.PAUSED:
        event = TrialResumed(trial=name)
    elif trial.phase in ENDED_PHASES:
        curves = ReportReader(spec.target, state.key)
        if trial.phase is not Phase.FINISHED or not stays_finished(trial, stopper, curves):
            event = TrialRequeued(trial=name, reason=make_reason("attempt-requested"))
    return write_if_unchanged(spec.target, state, name, [event]) if event else state


def _run_attempt_without_search(spec: TrialSpec, state: Experiment, stop: threading.Event) -> tuple[Trial, Outcome]:
    with TrialProcessPool(slots=0) as pool:
        channel = InProcessChannel(spec.trial.trial, lambda _: None, pool)
        channel.run_stop = stop
        name, trial = spec.trial.trial, state.trial(spec.trial.trial)
        has_history = spec.needs_history and trial.checkpoints
        reports = tuple(ReportReader(spec.target, state.key).read_reports(trial)) if has_history else ()
        journal = WritingJournal(name, JournalWriter(spec.target, state, make_trial_entry_writer(name)))
        with retrying_refusals(), closing(channel):
            request = AttemptRequest(owner_term=state.term, trial=trial, reports=reports)
            ended = Attempt(spec, request, channel, PrefectAttemptTasks(spec), get_run_log()).run_with_journal(journal)
    return ended.trial, ended.outcome
