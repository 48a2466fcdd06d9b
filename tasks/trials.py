"""The tasks that run one attempt of a trial, for a search and for a flow of one's own."""

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
    CurveReader,
    has_had_enough,
    log_failure,
    state_of,
    state_of_node,
)
from prefect_tune.attempt.graceful_stop import interruptible
from prefect_tune.attempt.nodes import train_node
from prefect_tune.attempt.processes.process_output import Log, TrialLog
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.search_link import InProcessLink, SearchLink, WrittenEntries
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import SyncConfig
from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Cadence, Retention
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Event,
    Outcome,
    Requeued,
    Resumed,
    TrialAdded,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.shown_text import first_line
from prefect_tune.journal_access import JournalWriter
from prefect_tune.ownership import own, trying_again, write_if_unchanged, writer_of_trial
from prefect_tune.parameters.argument_checks import storable_config
from prefect_tune.parameters.forms import ConfigLike, StopLike, TargetLike, TrainableLike
from prefect_tune.parameters.import_check import require_importable
from prefect_tune.parameters.plan_checks import require_same_training, spec_of_one_trial
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.call_paths import own_context
from prefect_tune.prefect_api.flow_runs import outlive_log_reader
from prefect_tune.prefect_api.task_runs import (
    RUN_TRIAL,
    holding_concurrency_limits,
    public_task,
    quiet_inner_tasks,
)
from prefect_tune.storage_retries import (
    RETRYING,
    RETRYING_REFUSALS,
    retrying_refusals,
    run_log,
)
from prefect_tune.task_values import TrialArguments, TrialState, trial_state
from prefect_tune.tasks.checkpoints import TasksOfAttempt


@task(name=RUN_TRIAL, task_run_name="train {spec.trial.trial} · attempt {request.attempt}", **RETRYING)
def run_attempt(spec: TrialSpec, request: AttemptRequest, link: SearchLink) -> State[Any]:
    """Train one attempt of a trial in a process of its own, and journal how it ended; see `Attempt`.

    All state is read from the target, so a retry of the task is a further attempt. The task run ends in the returned
    state, which tells people how the attempt ended: Completed, Pruned, Paused, Interrupted or Failed, with the reason.
    The journal decides what follows.

    Args:
        spec: the specification of the trial.
        request: the request for this attempt.
        link: the link to the search; `link.stop` makes the trial save and end within `spec.grace`.

    Raises as `Attempt.run`.
    """
    outlive_log_reader()
    log: Log = get_run_logger()
    if spec.of_search:  # each message of a search's trial names the trial
        log = TrialLog(log, f"trial {spec.trial.trial}")
    link.watch()  # a request to stop may arrive while it waits for a slot, for other nodes or for an import
    with (
        quiet_inner_tasks(),
        retrying_refusals(),
        closing(link),
        holding_concurrency_limits(spec.concurrency_limits, link.stop),
    ):
        ended = Attempt(spec, request, link, TasksOfAttempt(spec), log).run()
    if isinstance(ended.outcome, AttemptEnded):
        log_failure(ended.outcome, ended.trial.attempt, spec, request.search_term, log)
    return state_of(ended.outcome)


@task(name="run-node", task_run_name="node {node} of {spec.trial.trial} · attempt {request.attempt}", **RETRYING)
def run_node(spec: TrialSpec, request: AttemptRequest, node: int, link: SearchLink) -> State[Any]:
    """Train the ranks of another node of an attempt; the journal records how the attempt ends. Args: as `run_attempt`.

    If the task runner runs it again, as Dask and Ray do for a dead worker, the attempt has begun without it.
    """
    log = TrialLog(get_run_logger(), f"trial {spec.trial.trial}")
    with quiet_inner_tasks(), retrying_refusals(), closing(link):
        return state_of_node(train_node(spec, request, node, link, TasksOfAttempt(spec), log))


# The same for a flow of one's own.


@public_task(name=RUN_TRIAL, task_run_name="train {trial}", **RETRYING_REFUSALS)
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

    The trainable runs in a process of its own, as in `durable_trainable`. Called again, by a retry or a later run of
    the flow, the trial continues from its newest committed checkpoint; one that has finished is returned at once.
    The flow run owns the experiment, as with `save_checkpoint`; it may run several trials of it at once (`.map`).
    For retries with budgets and a live report, call `durable_trainable` instead.

    Args:
        trainable: the code to train: `package.module:Name`, or the function or the subclass of `pt.Trainable` itself.
        config: the configuration of the trainable, such as `{"lr": 0.01}`, or a dataclass: it gets a dict of its
            fields.
        target: where checkpoints and state are stored: a URI, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target; it is created if it does not exist.
        trial: the trial's name in the experiment; the same name continues it.
        stop: when to stop: `{"step": 100}` or other limits (stop at `>=`), a function of the metrics, or a stopper.
            Default: when the trainable is done.
        checkpoint: when a class trainable saves. Default: every 60 s and at the end.
        retention: which checkpoints to keep. Default: all.
        sync: periods and timeouts in seconds, artifacts, and `commit="async"`.
        isolation: `process` trains in a child process; `thread` in this one, for debuggers.
        grace_period_seconds: seconds that the trial may take to save once SIGTERM or a cancellation arrives.
        silence_timeout_seconds: seconds without a report after which the trial is considered hung and is ended.
            Default: never.

    Returns:
        TrialState: status, step, metrics and newest checkpoint; the status is `completed`, or `interrupted` if the
            flow run was suspended.

    Raises:
        TrialFailed: the attempt failed, or asks a person. Call it again: it continues from the newest checkpoint. The
            task is retried by itself after failures of the target only; pass `retry_condition_fn` to
            `.with_options` for more.
        InvalidInput: an argument is invalid, does not fit the trial, or names a trainable that does not exist; nothing
            was started.
        Superseded: another flow run has taken the experiment over, or another task the trial. Stop.
        ResumeFailed: the experiment cannot be read, or all checkpoints of the trial are damaged.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    given = dict(locals())  # the parameters; the fields of `SearchPlan` have the same names, except these two
    given.pop("config")
    asked = TrialArguments(target=target, experiment=experiment, trial=given.pop("trial"))
    plan = SearchPlan(**given)
    spec, stopper = spec_of_one_trial(plan, asked.trial)
    plain = storable_config(config)
    require_importable(plan.trainable, plan.isolation, run_log(), spec.cadence)
    state = trying_again(lambda: _ready(spec, plain, stopper))
    spec = replace(spec, trial=state.trial_key(asked.trial))
    ended = state.trial(asked.trial)
    if ended.phase is not Phase.FINISHED:
        with own_context():  # else uploads would wait for the slots that this task holds for its tags
            ended, outcome = interruptible(
                lambda stop: _attempted(spec, state, stop), grace=spec.grace, request_period=spec.sync.request_period
            )
        if isinstance(outcome, AttemptEnded) and outcome.cause is not Cause.PREEMPTED:
            where = f"trial {asked.trial!r} of experiment {state.name!r} at {spec.target.uri}"
            raise TrialFailed(f"{where}: {first_line(outcome.reason)}")
    return trial_state(spec.target, state.key, ended)


def _ready(spec: TrialSpec, config: Mapping[str, object], stopper: Stopper) -> Experiment:
    """Return the experiment with the trial waiting for an attempt, or finished by today's stop criterion too."""
    state, name = own(spec.target, spec.trial.experiment), spec.trial.trial
    require_same_training(state, spec, config)
    trial = state.trials.get(name)
    event: Event | None = None
    if trial is None:
        event = TrialAdded(trial=name, config=config, fingerprint=spec.fingerprint)
    elif trial.phase is Phase.RUNNING:
        event = AttemptEnded(trial=name, cause=Cause.MACHINE, reason=make_reason("task-failed"))
    elif trial.phase is Phase.PAUSED:
        event = Resumed(trial=name)
    elif trial.phase in ENDED:
        curves = CurveReader(spec.target, state.key)
        if trial.phase is not Phase.FINISHED or not has_had_enough(trial, stopper, curves):
            event = Requeued(trial=name, reason=make_reason("attempt-requested"))
    return write_if_unchanged(spec.target, state, name, [event]) if event else state


def _attempted(spec: TrialSpec, state: Experiment, stop: threading.Event) -> tuple[Trial, Outcome]:
    with TrialProcessPool(slots=0) as pool:
        link = InProcessLink(spec.trial.trial, lambda _: None, pool)
        link.stop = stop
        name, trial = spec.trial.trial, state.trial(spec.trial.trial)
        curve = tuple(CurveReader(spec.target, state.key).of(trial)) if spec.needs_curve and trial.checkpoints else ()
        journal = WrittenEntries(name, JournalWriter(spec.target, state, writer_of_trial(name)))
        with retrying_refusals(), closing(link):
            request = AttemptRequest(search_term=state.term, trial=trial, curve=curve)
            ended = Attempt(spec, request, link, TasksOfAttempt(spec), run_log()).run_in(journal)
    return ended.trial, ended.outcome
