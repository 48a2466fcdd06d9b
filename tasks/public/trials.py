"""The public task that runs one attempt of a trial."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Literal, TypeVar, assert_never

from prefect_tune.attempt.attempt import Attempt, has_had_enough, next_start
from prefect_tune.attempt.cancel_and_suspend import interruptible
from prefect_tune.attempt.commit_worker import delete_retired, find_doomed
from prefect_tune.attempt.outcomes import Asking, Done, Failed, Outcome, Yielded
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.search_link import InProcessLink
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.errors import SaveOvertaken, StoreUnavailable, TrialFailed
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial
from prefect_tune.core.journal_events import AttemptEnded, Cause, Event, Requeued, Started, TrialAdded
from prefect_tune.core.models import Stamp, first_line
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.journal_access import JournalWriter, new_write_id
from prefect_tune.parameters.argument_checks import stopper_of_one_trial, storable_config
from prefect_tune.parameters.forms import ConfigLike, StopLike, TargetLike, TrainableLike
from prefect_tune.parameters.import_check import require_importable
from prefect_tune.parameters.resume_compatibility import require_same_training
from prefect_tune.parameters.search_limits import require_possible, trial_spec
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.task_runs import public_task
from prefect_tune.storage_retries import RETRYING_REFUSALS, retrying_refusals, run_log
from prefect_tune.tasks.checkpoints import delete_checkpoint
from prefect_tune.tasks.public.arguments import TrialArguments
from prefect_tune.tasks.public.ownership import append_beside_others, own, writer_of_trial
from prefect_tune.tasks.public.results import TrialState, trial_state
from prefect_tune.tasks.trials import TasksOfAttempt

__all__ = [
    "begin_attempt",
    "opening_events",
    "restarted",
    "run_trial",
    "trying_again",
    "write",
]


# Begin an attempt of a trial in a flow of one's own, and the events of its reports and of its end.

_TRIES = 16
_Result = TypeVar("_Result")


def trying_again(act: Callable[[], _Result]) -> _Result:
    """Return `act()`, repeated while other tasks of this flow run change the trial meanwhile.

    Raises:
        StoreUnavailable: they did so 16 times.
    """
    for _ in range(_TRIES):
        try:
            return act()
        except SaveOvertaken as overtaken:
            last = overtaken
    raise StoreUnavailable(f"{last}; tried {_TRIES} times: save one trial from one task at a time") from last


def write(
    target: StorageTarget, known: Experiment, trial: str, events: Sequence[Event], stamp: Stamp | None = None
) -> Experiment:
    """Write `events` of `trial` as one entry; raise `SaveOvertaken` if another task has changed the trial."""

    def require_same(now: Experiment) -> None:
        if now.trials.get(trial) != known.trials.get(trial):
            raise SaveOvertaken(f"{now.key}: another task has changed trial {trial!r} meanwhile")

    return append_beside_others(target, known, events, stamp or new_write_id(), require_same)


def begin_attempt(target: StorageTarget, state: Experiment, folder: TrialKey, step: int, log: Log) -> Experiment:
    """Return the experiment with `folder`'s trial running, before it reports `step`; begin an attempt if need be.

    A new attempt also deletes the bytes of checkpoints that earlier ones retired.
    """
    events = opening_events(state.trials.get(folder.trial), folder.trial, step)
    if not events:
        return state
    state = write(target, state, folder.trial, events)
    if doomed := find_doomed(target, folder, state, log):
        delete_retired(lambda: delete_checkpoint.fn(target, folder, state.trial(folder.trial), doomed), log)
    return state


def opening_events(
    trial: Trial | None, name: str, step: int, config: Mapping[str, object] | None = None
) -> Sequence[Event]:
    """Return the events after which the trial runs and may report `step`; none if it may already."""
    if trial is None:
        began = Started(trial=name, attempt=1, from_step=0, at=new_write_id().at)
        return [TrialAdded(trial=name, config=config or {}), began]
    started = next_start(trial, new_write_id().at)
    if trial.phase is Phase.RUNNING:
        why = f"step {step} is trained again, after step {started.from_step}"
        return [] if step >= trial.step else restarted(trial, why)
    if trial.phase in ENDED:
        return [Requeued(trial=name, reason=f"trained on, after it had {trial.status}"), started]
    return [started]


def restarted(trial: Trial, why: str) -> Sequence[Event]:
    """Return the events that end the running attempt of `trial` and begin the next, from its newest checkpoint."""
    return [AttemptEnded(trial=trial.trial, cause=Cause.PREEMPTED, message=why), next_start(trial, new_write_id().at)]


@public_task(name="run-trial", task_run_name="train {trial}", **RETRYING_REFUSALS)
def run_trial(  # noqa: PLR0913 - a form, as `durable_trainable`: its fields are the options of a training
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
    For retries with budgets, questions to people and a live report, call `durable_trainable` instead.

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
    stopper = stopper_of_one_trial(plan.stopper)
    spec = trial_spec(plan, stopper)
    spec = replace(spec, trial=spec.trial.of_experiment.trial_key(asked.trial), own_journal=False)
    require_possible(spec)
    plain = storable_config(config)
    require_importable(plan.trainable, plan.isolation, run_log(), spec.cadence)
    return _trained(spec, plain, stopper)


def _trained(spec: TrialSpec, config: Mapping[str, object], stopper: Stopper) -> TrialState:
    state = trying_again(lambda: _ready(spec, config, stopper))
    spec = replace(spec, trial=state.trial_key(spec.trial.trial))
    trial = state.trial(spec.trial.trial)
    if trial.phase is not Phase.FINISHED:
        state, outcome = interruptible(lambda stop: _attempted(spec, state, stop), grace=spec.grace)
        _require_success(outcome, spec)
    return trial_state(spec.target, state.key, state.trial(spec.trial.trial))


def _ready(spec: TrialSpec, config: Mapping[str, object], stopper: Stopper) -> Experiment:
    """Return the experiment with the trial waiting for an attempt, or finished by today's stop criterion too."""
    state, name = own(spec.target, spec.trial.experiment), spec.trial.trial
    require_same_training(state, spec, config)
    events = _waiting_events(state.trials.get(name), spec, config, stopper)
    return write(spec.target, state, name, events) if events else state


def _waiting_events(
    trial: Trial | None, spec: TrialSpec, config: Mapping[str, object], stopper: Stopper
) -> Sequence[Event]:
    name = spec.trial.trial
    if trial is None:
        return [TrialAdded(trial=name, config=config, fingerprint=spec.fingerprint)]
    if trial.phase is Phase.RUNNING:
        return [AttemptEnded(trial=name, cause=Cause.MACHINE, message="its task failed, and was started again")]
    is_done = trial.phase is Phase.FINISHED and has_had_enough(spec, trial, stopper)
    if trial.phase in ENDED and not is_done:
        return [Requeued(trial=name, reason="another attempt was requested")]
    return []


def _attempted(spec: TrialSpec, state: Experiment, stop: threading.Event) -> tuple[Experiment, Outcome]:
    with TrialProcessPool(slots=0) as pool:
        link = InProcessLink(spec.trial.trial, lambda _: None, pool)
        link.stop = stop
        writer = JournalWriter(spec.target, state, writer_of_trial(spec.trial.trial), link.wrote)
        with retrying_refusals(), closing(link):
            request = AttemptRequest(search_term=state.term)
            ended = Attempt(spec, request, link, TasksOfAttempt(spec), run_log()).run_in(writer)
    return ended.experiment, ended.outcome


def _require_success(outcome: Outcome, spec: TrialSpec) -> None:
    where = f"trial {spec.trial.trial!r} of experiment {spec.trial.experiment!r} at {spec.target.uri}"
    match outcome:
        case Done() | Yielded() | Failed(cause=Cause.PREEMPTED):
            return
        case Failed(message=message):
            raise TrialFailed(f"{where}: {first_line(message)}")
        case Asking(question=asked):
            raise TrialFailed(f"{where} asks: {asked.question}. Answers need pt.durable_trainable, which suspends")
        case _:
            assert_never(outcome)
