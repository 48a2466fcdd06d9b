"""The tasks on an experiment: check its target, open it for a run, write its journal, fork it, publish its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from prefect import task
from prefect.logging import get_run_logger

from prefect_tune import ownership
from prefect_tune.arrow_tables import COLUMNS_VERSIONS, as_parquet, curves_as_arrow, read_curves, trials_as_arrow
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.blocks import StorageTarget
from prefect_tune.clock import new_write_id
from prefect_tune.core.errors import (
    AlreadyExists,
    CheckpointNotFound,
    InvalidInput,
    ResumeFailed,
    StoreRefused,
)
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import Curves
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial, newest_checkpoint
from prefect_tune.core.journal.journal import append, load
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    CheckpointRef,
    Event,
    Finished,
    FinishKind,
    GaveUp,
    Owner,
    Paused,
    Reported,
    TrialAdded,
)
from prefect_tune.core.operations.fork_experiment import Fork, Past, begin_fork, deleted_since, fork, past_of
from prefect_tune.core.reasons import AnyReason, make_reason
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.seeded_random import seed_named
from prefect_tune.core.storage.documents import is_signed, signed, unsigned
from prefect_tune.core.storage.generations import current_journal, no_experiment
from prefect_tune.core.storage.layout import JournalKey, Rows, delete_numbered, results_path
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import Stamp, StepReport
from prefect_tune.journal_access import Opening, current_owner, failing_to_resume, opened_journal
from prefect_tune.ownership import opening_events, own, trying_again, write_if_unchanged
from prefect_tune.parameters.forms import TargetLike
from prefect_tune.prefect_api.task_runs import public_task, skip_prefect_introspection
from prefect_tune.storage_retries import (
    CHECKING,
    READ_TIMEOUT,
    RETRYING,
    RETRYING_REFUSALS,
    run_log,
    with_retries,
)
from prefect_tune.task_values import (
    End,
    ExperimentArguments,
    ExperimentState,
    SyncArguments,
    experiment_state,
    similar_experiment,
)
from prefect_tune.terminal.live_display import NOTICE

_LONG = timedelta(minutes=10)

check_target = task(name="check-target", task_run_name="check {target.uri}", **CHECKING)(ownership.check_target)


@task(name="restore-experiment-state", task_run_name="open {key.experiment}", **RETRYING)
def open_experiment(
    target: StorageTarget,
    key: JournalKey,
    owner: Owner,
    stamp: Stamp,
    known: Experiment | None = None,
) -> Experiment:
    """Open an experiment for `owner` and return its state; from now on every earlier owner's writes fail.

    A checkpoint whose save was killed between its manifest and its journal entry is adopted, and running trials
    become waiting ones. An experiment that does not exist yet is opened as an empty one.

    Args:
        key: the experiment's journal, as `read_journal` found it.
        owner: the flow run and process that open it, named in messages of superseded owners.
        stamp: write id and time of the entry that records the opening.
        known: the experiment, if the caller has just read it; saves a second read.

    Raises:
        ResumeFailed: it exists and its journal is damaged or of an unknown version. Nothing was started.
        Superseded: other processes opened it first, again and again.
        StoreRefused: the target refuses access; retried within `retrying_refusals`.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with target.open(timeout=READ_TIMEOUT) as store:
        return opened_journal(store, key, target, Opening(owner, stamp, known=known))


@task(name="sync-experiment-state", task_run_name="journal {experiment.name}", **RETRYING)
def write_stamped_entry(
    target: StorageTarget,
    experiment: Experiment,
    events: Sequence[Event],
    stamp: Stamp,
) -> Experiment:
    """Write `events` as the next journal entry of `experiment` and return the state after it.

    On return the entry is durable, and this process was still the owner when it was written. A try with the write id
    of the same `stamp` is the same entry.

    Raises:
        Superseded: another process owns the experiment now.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with target.open(timeout=READ_TIMEOUT) as store:
        return append(store, experiment, events, stamp)


def write_entry(
    target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None = None
) -> Experiment:
    """Run `write_stamped_entry`, with a new stamp unless one is given. Raises as that task does."""
    return write_stamped_entry(
        target, skip_prefect_introspection(experiment), skip_prefect_introspection(events), stamp or new_write_id()
    )


# The same for a flow of one's own, whose tasks write beside each other.


@public_task(name="restore-experiment-state", task_run_name="open {experiment}", **RETRYING)
def restore_experiment_state(*, target: TargetLike, experiment: str) -> ExperimentState:
    """Take an experiment over for this flow run and return its state; create it if it does not exist.

    From then on the saves of every other run fail, and so do those of an earlier try of this run. A checkpoint whose
    save was killed just before it was journaled is adopted, and trials that were running wait to be continued. The
    first `save_checkpoint` of a flow run does the same: call this first to fence an earlier run off before the
    training, or to see which trials have finished. To look without taking anything over, use `pt.load_results`. If the
    experiment is new, and its name is similar to that of another one on the target, a warning in the log says so.

    Args:
        target: where the experiment is stored: a URI, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target.

    Returns:
        ExperimentState: its trials, each with status, step, metrics and newest checkpoint.

    Raises:
        Superseded: this flow run owned the experiment, and another one has taken it over. Stop.
        InvalidInput: an argument is invalid, or the experiment is a search.
        ResumeFailed: it exists and cannot be read. Nothing was started.
        StoreUnavailable, CommitUnknown: the target failed for longer than the retries last.
        StoreRefused: the target refused, for example since credentials have expired; this is not retried.
    """
    asked = ExperimentArguments(**locals())
    state = own(asked.target, asked.experiment)
    is_new = state.term == 1 and not state.trials
    if is_new and (hint := similar_experiment(asked.target, asked.experiment)):
        run_log().warning("Experiment %r at %s is new%s", asked.experiment, asked.target.uri, hint)
    return experiment_state(asked.target, state)


@public_task(name="sync-experiment-state", task_run_name="journal {experiment} {trial}", **RETRYING_REFUSALS)
def sync_experiment_state(
    *,
    target: TargetLike,
    experiment: str,
    trial: str = "trial",
    reports: Mapping[int, Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    status: End | None = None,
    reason: str = "",
) -> ExperimentState:
    """Write what a checkpoint does not say into the experiment's journal: reports, a configuration, a trial's end.

    All of it is one durable entry. Writing the same again writes nothing. The flow run owns the experiment from then
    on, as with `save_checkpoint`.

    Args:
        target: where the experiment is stored: a URI, the `type/name` of a saved block, or the block.
        experiment: the experiment's name on the target; it is created if it does not exist.
        trial: the trial's name in the experiment; it is added if it is new.
        reports: the metrics of steps that were trained, by step, such as `{1: {"loss": 0.5}}`. Steps that the journal
            has already are left out: all up to the newest step of this attempt. Before the attempt begins, all up to
            the checkpoint that it continues from. `save_checkpoint` journals the step of its checkpoint itself.
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
    asked = SyncArguments(**locals())
    return experiment_state(asked.target, trying_again(lambda: _synced(asked)))


def _synced(asked: SyncArguments) -> Experiment:
    state, name = own(asked.target, asked.experiment), asked.trial
    found = state.trials.get(name)
    if found is not None and asked.config is not None and asked.config != found.config:
        raise InvalidInput(
            f"config: trial {name!r} of experiment {state.name!r} has {dict(found.config)}, found {dict(asked.config)}"
            ". Pass the same config, or choose another trial name"
        )
    new = _new_reports(found, asked.reports)
    ends = asked.status is not None and (bool(new) or found is None or found.status != asked.status)
    events: list[Event] = []
    if new or ends:
        step = new[0].step if new else (found.step if found else 0)
        events += opening_events(found, name, step, asked.config)
    elif found is None:
        events.append(TrialAdded(trial=name, config=asked.config or {}))
    events += (Reported(trial=name, report=each) for each in new)
    if ends:
        why: AnyReason = asked.reason or make_reason("said", status=asked.status)
        match asked.status:
            case "completed":
                events.append(Finished(trial=name, reason=why, kind=FinishKind.RETURNED))
            case "paused":
                events.append(Paused(trial=name, reason=why))
            case _:
                events.append(AttemptEnded(trial=name, cause=Cause.USER, reason=why))
                events.append(GaveUp(trial=name, cause=Cause.USER, reason=why))
    return write_if_unchanged(asked.target, state, name, events) if events else state


def _new_reports(found: Trial | None, reports: Sequence[StepReport]) -> Sequence[StepReport]:
    """Return the reports that are not in the journal yet.

    A trial that is not running continues from its newest checkpoint: it trains later steps again, so their reports are
    new. An exception is a trial that these same reports have ended: then the call is a repetition, and nothing is new.
    """
    if found is None:
        return reports
    if found.phase is Phase.RUNNING:
        return [each for each in reports if each.step > found.step]
    last = reports[-1] if reports else None
    if found.phase is not Phase.PENDING and last and (last.step, last.metrics) == (found.step, found.metrics):
        return []
    newest = newest_checkpoint(found)
    return [each for each in reports if each.step > (newest.step if newest else 0)]


# Fork an experiment.


@dataclass(frozen=True, kw_only=True)
class ForkRequest:
    """The arguments of a fork. Every try has the same owner and stamp, so that a retry is the same fork."""

    experiment: str
    into: str
    at: int | None = None
    """The entry of the experiment's journal; None for the last."""
    strict: bool = False
    """Whether it is an error if the origin has deleted a checkpoint of that entry since."""
    owner: Owner = field(default_factory=current_owner)
    stamp: Stamp = field(default_factory=new_write_id)


@task(name="fork-experiment", task_run_name="fork {request.experiment} into {request.into}", **RETRYING)
def fork_experiment(target: StorageTarget, request: ForkRequest) -> Experiment:
    """Make the experiment `request.into` a fork of another one on the same target. Idempotent.

    The origin may be running. The target copies the checkpoints that the fork inherits: neither needs the other then.

    Raises:
        InvalidInput: there is no such entry, the name is taken, or the origin is being deleted.
        CheckpointNotFound: `strict` is set, and the origin has deleted a checkpoint since.
        ResumeFailed: there is no such experiment, or it cannot be read. Nothing was started.
        Superseded: another process makes the same fork.
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    with _opened(target, request) as store:
        there = _state(store, request.into)
        if there.origin is not None and there.is_whole and _is_asked_for(there, request):
            return there
        origin = _state(store, request.experiment)
        if not origin.number:
            raise ResumeFailed(f"nothing was started: {no_experiment(store, request.experiment, target.uri)}")
        past = _past(store, request, origin, there)
        settings: Mapping[str, object] = {"seed": seed_named(request.experiment), **unsigned(past.settings)}
        key = target.signing_secret
        if key is not None and is_signed(past.settings, request.experiment, key):
            settings = signed(settings, request.into, key)  # unsigned settings stay unsigned
        past = replace(past, settings=settings)
        if request.strict and (gone := deleted_since(store, past)):
            raise CheckpointNotFound(f"{past.origin}: deleted since then: {_deleted_steps(gone)}. Nothing was started")
        into = begin_fork(store, there.key, past.origin, request.owner, request.stamp)
        made = fork(store, past, into, request.stamp)
        _log_fork(get_run_logger(), past, made)
        return made.experiment


def fork_source(target: StorageTarget, request: ForkRequest) -> Experiment | None:
    """Return the origin's state that the fork is to begin with, and write nothing; None if the fork has begun.

    Also None if there is no origin: `fork_experiment` then says so. Raises what that raises.
    """

    def look() -> Experiment | None:
        with _opened(target, request) as store:
            there = _state(store, request.into)
            origin = _state(store, request.experiment)
            if there.number or not origin.number:
                return None
            return _past(store, request, origin, there).experiment

    return with_retries(look)


@contextmanager
def _opened(target: StorageTarget, request: ForkRequest) -> Iterator[ObjectStore]:
    with target.open(timeout=_LONG) as store, failing_to_resume(target, request.experiment, StoreRefused):
        yield store


def _state(store: ObjectStore, experiment: str) -> Experiment:
    return load(store, current_journal(store, experiment))


def _is_asked_for(there: Experiment, request: ForkRequest) -> bool:
    origin = there.origin
    return origin is not None and origin.experiment == request.experiment and request.at in (None, origin.number)


def _past(store: ObjectStore, request: ForkRequest, origin: Experiment, there: Experiment) -> Past:
    """Return the origin's state at the requested entry; if none was requested, at an earlier try's, or at the last."""
    begun = there.origin.number if there.origin is not None and _is_asked_for(there, request) else None
    at = begun if request.at is None else request.at
    past = past_of(store, origin.key, at)
    if not past.settings:
        raise InvalidInput(f"{past.origin}: expected a search; only searches can be forked, once they have begun")
    return past


def _log_fork(log: Log, past: Past, made: Fork) -> None:
    """Log the fork; warn of each trial whose checkpoints the origin has deleted, or are all quarantined."""
    line = "%s: a fork of %s, %d trials"
    log.info(line, made.experiment.name, past.origin, len(made.experiment.trials), extra=NOTICE)
    for name, refs in made.lost.items():
        then = _start_of(made.experiment.trial(name))
        log.warning("trial %s: the origin has deleted %s since%s", name, _deleted_steps({name: refs}), then)
    for name, trial in past.experiment.trials.items():
        if (count := len(trial.quarantined_checkpoints)) and not trial.checkpoints:
            log.warning("trial %s: all %d of its checkpoints are quarantined%s", name, count, _start_of(trial))


def _start_of(trial: Trial) -> str:
    """Return what a trial resumes from, to append to a line; empty if it has ended."""
    newest = f"step {trial.checkpoints[-1].step}" if trial.checkpoints else "nothing"
    return "" if trial.phase in ENDED else f"; it resumes from {newest}"


def _deleted_steps(gone: Mapping[str, Sequence[CheckpointRef]]) -> str:
    steps = {trial: ", ".join(str(each.step) for each in refs) for trial, refs in gone.items()}
    return "; ".join(f"trial {trial}, step {found}" for trial, found in steps.items())


# Publish the results of an experiment as Parquet files on its target.


@task(name="publish-results", task_run_name="publish results {experiment.name}", **RETRYING)
def publish_results(
    target: StorageTarget,
    experiment: Experiment,
    objective: Objective | None = None,
    curves: Curves | None = None,
) -> Mapping[Rows, str]:
    """Write the experiment's trials and reports as Parquet files on `target`, and return their paths.

    Idempotent. Files of an earlier state of the experiment are deleted: the new ones include their rows.

    Args:
        curves: the learning curves, if the caller has read the journal already.

    Raises:
        StoreUnavailable, CommitUnknown: all retries failed.
    """
    about = {"experiment": experiment.name, "entry": str(experiment.number), "digest": experiment.digest}
    if objective is not None:
        about["objective"] = objective.model_dump_json()
    paths: dict[Rows, str] = {rows: results_path(experiment.key, rows, experiment.number) for rows in COLUMNS_VERSIONS}
    with target.open(timeout=timedelta(minutes=5)) as store:
        read = curves or read_curves(store, experiment)
        for rows, path in paths.items():
            table = trials_as_arrow(experiment) if rows == "trials" else curves_as_arrow(experiment, read)
            with suppress(AlreadyExists):  # the name holds the entry's number, and the entry decides the content
                store.create(path, as_parquet(table, {**about, "version": COLUMNS_VERSIONS[rows]}))
            delete_numbered(store, before=path)
    return paths
