"""The tasks on an experiment: check its target, take ownership, write its journal, fork it, publish its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from prefect import task
from prefect.logging import get_run_logger

from prefect_tune import ownership
from prefect_tune.arrow_tables import COLUMN_VERSIONS, curves_to_arrow, read_curves, to_parquet, trials_to_arrow
from prefect_tune.blocks import StorageTarget
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.errors import AlreadyExists, CheckpointNotFound, InvalidInput, ResumeFailed, StoreRefused
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import LearningCurves
from prefect_tune.core.experiment.trial_transitions import ENDED_PHASES, Phase, Trial, newest_checkpoint
from prefect_tune.core.journal.journal import append_events, load_experiment
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointRef,
    Event,
    FinishKind,
    Owner,
    StepReported,
    TrialAdded,
    TrialErrored,
    TrialFinished,
    TrialPaused,
)
from prefect_tune.core.operations.fork_experiment import (
    ForkPoint,
    begin_fork,
    complete_fork,
    find_lost_checkpoints,
    load_fork_point,
)
from prefect_tune.core.reasons import AnyReason, make_reason
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.seeded_random import seed_from_name
from prefect_tune.core.storage.documents import add_signature, has_valid_signature, strip_signature
from prefect_tune.core.storage.generations import find_current_journal, no_experiment_message
from prefect_tune.core.storage.layout import JournalKey, ResultsTable, delete_older_documents, results_path
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import StepReport, WriteStamp
from prefect_tune.journal_access import OwnershipRequest, acquire_and_adopt, make_process_owner, raising_resume_failed
from prefect_tune.ownership import ensure_ownership, make_attempt_start_events, retry_on_conflict, write_if_unchanged
from prefect_tune.parameters.forms import TargetLike
from prefect_tune.prefect_api.task_runs import public_task, skip_prefect_introspection
from prefect_tune.storage_retries import (
    FIRST_TASK_RETRY_OPTIONS,
    READ_TIMEOUT,
    REFUSAL_RETRY_OPTIONS,
    TASK_RETRY_OPTIONS,
    get_run_log,
    with_retries,
)
from prefect_tune.task_values import (
    ExperimentArguments,
    ExperimentState,
    SyncStateArguments,
    TrialEndStatus,
    make_experiment_state,
    make_similar_experiment_hint,
)
from prefect_tune.terminal.live_display import NOTICE

_FORK_TIMEOUT = timedelta(minutes=10)

check_target = task(name="check-target", task_run_name="check {target.uri}", **FIRST_TASK_RETRY_OPTIONS)(
    ownership.check_target
)


@task(name="restore-experiment-state", task_run_name="open {key.experiment}", **TASK_RETRY_OPTIONS)
def acquire_experiment(
    target: StorageTarget, key: JournalKey, owner: Owner, stamp: WriteStamp, loaded: Experiment | None = None
) -> Experiment:
    """Take ownership of an experiment for `owner` and return its state; every earlier owner's writes then fail.

    The task adopts a checkpoint whose save was killed between the creation of the manifest and the journal entry.
    Running trials become pending. If the experiment does not exist yet, it is created empty.

    Args:
        key: the experiment's journal, from `read_experiment_by_name`.
        owner: the flow run and process that take ownership; messages of superseded owners name them.
        stamp: write id and time of the entry that records the new owner.
        loaded: the experiment, if the caller has just read it, so that the task need not read it again.

    Raises:
        ResumeFailed: the journal is damaged or has an unknown version. Nothing was started.
        Superseded: in every try, another process took ownership first.
        StoreRefused: the target refuses access; this is retried only in the context `retrying_refusals`.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with target.open(timeout=READ_TIMEOUT) as store:
        return acquire_and_adopt(store, key, target, OwnershipRequest(owner, stamp, loaded=loaded))


@task(name="sync-experiment-state", task_run_name="journal {experiment.name}", **TASK_RETRY_OPTIONS)
def write_stamped_entry(
    target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: WriteStamp
) -> Experiment:
    """Write `events` as the next journal entry of `experiment` and return the state after it.

    On return, the entry is durable, and it was written while this process owned the experiment. A retry with the same
    `stamp` writes the same entry.

    Raises:
        Superseded: another process owns the experiment now.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with target.open(timeout=READ_TIMEOUT) as store:
        return append_events(store, experiment, events, stamp)


def write_entry(
    target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: WriteStamp | None = None
) -> Experiment:
    """Run the task `write_stamped_entry`, by default with a new stamp. Raises the errors of that task."""
    arguments = skip_prefect_introspection(experiment), skip_prefect_introspection(events)
    return write_stamped_entry(target, *arguments, stamp or new_write_stamp())


# The public tasks, for users' own flows. Several tasks of a flow may write at the same time.


@public_task(name="restore-experiment-state", task_run_name="open {experiment}", **TASK_RETRY_OPTIONS)
def restore_experiment_state(*, target: TargetLike, experiment: str) -> ExperimentState:
    """Take over an experiment for this flow run and return its state; create it if it does not exist.

    Afterwards all saves of other runs and of this run's earlier tries fail. The task adopts a checkpoint whose save
    was killed just before its journal entry, and makes running trials pending. The first `save_checkpoint` of a flow
    run does the same; call this task before the training to stop an earlier run's writes, or to see which trials have
    finished. To read without taking over, use `pt.load_results`. If the experiment is new and another experiment on the
    target has a similar name, the task logs a warning.

    ```python
    state = pt.restore_experiment_state(target="runs", experiment="descent")
    ```

    Args:
        target: where the experiment is stored: a URI, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target.

    Returns:
        ExperimentState: its trials, each with status, step, metrics and newest checkpoint.

    Raises:
        Superseded: this flow run owned the experiment, and another flow run has taken it over. Stop.
        InvalidInput: an argument is invalid, or the experiment is a search.
        ResumeFailed: the experiment exists and cannot be read. Nothing was started.
        StoreUnavailable, CommitUnknown: the target failed for longer than the retries last.
        StoreRefused: the target refused access, for example because credentials expired; not retried.
    """
    args = ExperimentArguments(**locals())
    state = ensure_ownership(args.target, args.experiment)
    is_new = state.term == 1 and not state.trials
    if is_new and (hint := make_similar_experiment_hint(args.target, args.experiment)):
        get_run_log().warning("Experiment %r at %s is new%s", args.experiment, args.target.uri, hint)
    return make_experiment_state(args.target, state)


@public_task(name="sync-experiment-state", task_run_name="journal {experiment} {trial}", **REFUSAL_RETRY_OPTIONS)
def sync_experiment_state(
    *,
    target: TargetLike,
    experiment: str,
    trial: str = "trial",
    reports: Mapping[int, Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    status: TrialEndStatus | None = None,
    reason: str = "",
) -> ExperimentState:
    """Write to the journal what no checkpoint contains: reports, a configuration, the end of a trial.

    One call writes one durable entry. A repeated call writes nothing. The flow run then owns the experiment, as after
    `save_checkpoint`.

    ```python
    pt.sync_experiment_state(target="runs", experiment="descent", reports={1: {"loss": 0.5}})
    ```

    Args:
        target: where the experiment is stored: a URI, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target; it is created if it does not exist.
        trial: the trial's name in the experiment; it is added if it is new.
        reports: the metrics of trained steps, by step, such as `{1: {"loss": 0.5}}`. Steps up to the newest step of
            the running attempt are left out, because the journal has them. If no attempt is running, steps up to the
            checkpoint from which the next attempt continues are left out. `save_checkpoint` reports its own step.
        config: the configuration of a new trial; an existing trial must have the same configuration.
        status: how the trial ends: `completed`; `paused`, so that a later run continues it; or `errored`. A later save
            continues the trial in any case. Default: the trial does not end.
        reason: the reason for the end, which `show` prints.

    Returns:
        ExperimentState: the state after the entry.

    Raises:
        InvalidInput: an argument is invalid, the trial has another configuration, or the experiment is a search.
        BadMetric: a metric cannot be stored.
        Superseded: another flow run has taken the experiment over. Stop.
        ResumeFailed: the experiment exists and cannot be read.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    args = SyncStateArguments(**locals())
    return make_experiment_state(args.target, retry_on_conflict(lambda: _write_trial_changes(args)))


def _write_trial_changes(args: SyncStateArguments) -> Experiment:
    state, name = ensure_ownership(args.target, args.experiment), args.trial
    existing = state.trials.get(name)
    if existing is not None and args.config is not None and args.config != existing.config:
        raise InvalidInput(
            f"config: trial {name!r} of experiment {state.name!r} has {dict(existing.config)}, found "
            f"{dict(args.config)}. Pass the same config, or choose another trial name"
        )
    new_reports = _select_new_reports(existing, args.reports)
    ends = args.status is not None and (bool(new_reports) or existing is None or existing.status != args.status)
    events: list[Event] = []
    if new_reports or ends:
        step = new_reports[0].step if new_reports else (existing.step if existing else 0)
        events += make_attempt_start_events(existing, name, step, args.config)
    elif existing is None:
        events.append(TrialAdded(trial=name, config=args.config or {}))
    events += (StepReported(trial=name, report=report) for report in new_reports)
    if ends:
        reason: AnyReason = args.reason or make_reason("said", status=args.status)
        match args.status:
            case "completed":
                events.append(TrialFinished(trial=name, reason=reason, kind=FinishKind.RETURNED))
            case "paused":
                events.append(TrialPaused(trial=name, reason=reason))
            case _:
                events.append(AttemptEnded(trial=name, cause=Cause.TRAINABLE, reason=reason))
                events.append(TrialErrored(trial=name, cause=Cause.TRAINABLE, reason=reason))
    return write_if_unchanged(args.target, state, name, events) if events else state


def _select_new_reports(trial: Trial | None, reports: Sequence[StepReport]) -> Sequence[StepReport]:
    """Return the reports that are not in the journal yet.

    A trial that is not running continues from its newest checkpoint and trains later steps again. The reports of these
    steps are new. But if the trial ended with the last of `reports`, this call is a repetition, and no report is new.
    """
    if trial is None:
        return reports
    if trial.phase is Phase.RUNNING:
        return [report for report in reports if report.step > trial.step]
    last = reports[-1] if reports else None
    if trial.phase is not Phase.PENDING and last and (last.step, last.metrics) == (trial.step, trial.metrics):
        return []
    newest = newest_checkpoint(trial)
    return [report for report in reports if report.step > (newest.step if newest else 0)]


# Fork an experiment.


@dataclass(frozen=True, kw_only=True)
class ForkRequest:
    """The arguments of a fork. All tries of a fork use the same owner and stamp, so a retry makes the same fork."""

    experiment: str
    into: str
    at: int | None = None
    """The journal entry of `experiment` after which the fork begins; None for the last entry."""
    strict: bool = False
    """Whether to raise an error if the origin has deleted a checkpoint since this entry."""
    owner: Owner = field(default_factory=make_process_owner)
    stamp: WriteStamp = field(default_factory=new_write_stamp)


@task(name="fork-experiment", task_run_name="fork {request.experiment} into {request.into}", **TASK_RETRY_OPTIONS)
def fork_experiment(target: StorageTarget, request: ForkRequest) -> Experiment:
    """Create the experiment `request.into` as a fork of another experiment on the same target. Idempotent.

    The origin may be running. The target copies the inherited checkpoints, so the fork and the origin are independent.
    It warns of each trial whose checkpoints the origin has since deleted, or whose checkpoints are all quarantined.

    Raises:
        InvalidInput: the entry does not exist, the name `into` is taken, or the origin is being deleted.
        CheckpointNotFound: `strict` is set, and the origin has deleted a checkpoint since the entry.
        ResumeFailed: the origin does not exist or cannot be read. Nothing was started.
        Superseded: another process is making the same fork.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with _open_store_for_fork(target, request) as store:
        destination = _load_experiment(store, request.into)
        if destination.origin is not None and destination.is_complete and _is_requested_fork(destination, request):
            return destination
        origin = _load_experiment(store, request.experiment)
        if not origin.entry_count:
            raise ResumeFailed(f"nothing was started: {no_experiment_message(store, request.experiment, target.uri)}")
        point = _load_requested_fork_point(store, request, origin, destination)
        settings: Mapping[str, object] = {"seed": seed_from_name(request.experiment), **strip_signature(point.settings)}
        key = target.signing_secret
        if key is not None and has_valid_signature(point.settings, request.experiment, key):
            settings = add_signature(settings, request.into, key)  # unsigned settings stay unsigned
        point = replace(point, settings=settings)
        if request.strict and (deleted := find_lost_checkpoints(store, point)):
            raise CheckpointNotFound(
                f"{point.origin}: checkpoints deleted since: {_format_steps_by_trial(deleted)}. Nothing was started"
            )
        into = begin_fork(store, destination.key, point.origin, request.owner, request.stamp)
        result = complete_fork(store, point, into, request.stamp)
        fork, log = result.experiment, get_run_logger()
        log.info("%s: a fork of %s, %d trials", fork.name, point.origin, len(fork.trials), extra=NOTICE)
        for name, refs in result.lost_checkpoints.items():
            steps, resume_step = _format_steps_by_trial({name: refs}), _format_resume_step(fork.trial(name))
            log.warning("the origin has since deleted checkpoints: %s%s", steps, resume_step)
        for name, trial in point.experiment.trials.items():
            if (count := len(trial.quarantined_checkpoints)) and not trial.checkpoints:
                resume_step = _format_resume_step(trial)
                log.warning("trial %s: all %d of its checkpoints are quarantined%s", name, count, resume_step)
        return fork


def load_fork_origin(target: StorageTarget, request: ForkRequest) -> Experiment | None:
    """Return the state of the origin from which the fork begins; None if the fork has begun, or there is no origin.

    Writes nothing. Raises the errors of `fork_experiment`, except that of a missing origin.
    """

    def load_origin() -> Experiment | None:
        with _open_store_for_fork(target, request) as store:
            destination = _load_experiment(store, request.into)
            origin = _load_experiment(store, request.experiment)
            if destination.entry_count or not origin.entry_count:
                return None
            return _load_requested_fork_point(store, request, origin, destination).experiment

    return with_retries(load_origin)


@contextmanager
def _open_store_for_fork(target: StorageTarget, request: ForkRequest) -> Iterator[ObjectStore]:
    with target.open(timeout=_FORK_TIMEOUT) as store, raising_resume_failed(target, request.experiment, StoreRefused):
        yield store


def _load_experiment(store: ObjectStore, experiment: str) -> Experiment:
    return load_experiment(store, find_current_journal(store, experiment))


def _is_requested_fork(destination: Experiment, request: ForkRequest) -> bool:
    origin = destination.origin
    return origin is not None and origin.experiment == request.experiment and request.at in (None, origin.number)


def _load_requested_fork_point(
    store: ObjectStore, request: ForkRequest, origin: Experiment, destination: Experiment
) -> ForkPoint:
    """Return the origin at the requested entry; by default, at an earlier try's entry, or else at the last entry."""
    earlier_origin = destination.origin if _is_requested_fork(destination, request) else None
    entry = earlier_origin.number if request.at is None and earlier_origin is not None else request.at
    point = load_fork_point(store, origin.key, entry)
    if not point.settings:
        raise InvalidInput(f"{point.origin}: expected a search; only searches can be forked, once they have begun")
    return point


def _format_resume_step(trial: Trial) -> str:
    """Return the text about the step from which a trial resumes; "" if the trial has ended."""
    newest = f"step {trial.checkpoints[-1].step}" if trial.checkpoints else "nothing"
    return "" if trial.phase in ENDED_PHASES else f"; the trial resumes from {newest}"


def _format_steps_by_trial(checkpoints: Mapping[str, Sequence[CheckpointRef]]) -> str:
    steps = {trial: ", ".join(str(checkpoint.step) for checkpoint in refs) for trial, refs in checkpoints.items()}
    return "; ".join(f"trial {trial}, step {numbers}" for trial, numbers in steps.items())


# Publish the results of an experiment as Parquet files on its target.


@task(name="publish-results", task_run_name="publish results {experiment.name}", **TASK_RETRY_OPTIONS)
def publish_results(
    target: StorageTarget,
    experiment: Experiment,
    objective: Objective | None = None,
    curves: LearningCurves | None = None,
) -> Mapping[ResultsTable, str]:
    """Write the experiment's trials and reports as Parquet files on `target`, and return the paths.

    Idempotent. The files of earlier states of the experiment are deleted, because the new files include their rows.

    Args:
        curves: the learning curves, if the caller has already read the journal.

    Raises:
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    metadata = {"experiment": experiment.name, "entry": str(experiment.entry_count), "digest": experiment.digest}
    if objective is not None:
        metadata["objective"] = objective.model_dump_json()
    paths: dict[ResultsTable, str] = {
        rows: results_path(experiment.key, rows, experiment.entry_count) for rows in COLUMN_VERSIONS
    }
    with target.open(timeout=timedelta(minutes=5)) as store:
        reports = curves or read_curves(store, experiment)
        for rows, path in paths.items():
            table = trials_to_arrow(experiment) if rows == "trials" else curves_to_arrow(experiment, reports)
            with suppress(AlreadyExists):  # an existing file of this entry has the same content
                store.create(path, to_parquet(table, {**metadata, "version": COLUMN_VERSIONS[rows]}))
            delete_older_documents(store, before=path)
    return paths
