"""The task that runs one attempt of a trial, from its newest good checkpoint to its end, failure or stop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect import task
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger

from prefect_tune.artifact_sync.trial_artifacts import TrialArtifacts
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, ResumeFailed, Superseded
from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.experiment.summary import curve
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial, newest_checkpoint, newest_key
from prefect_tune.core.journal.journal import LoadedJournal, history
from prefect_tune.core.journal_events.experiment_events import (
    Adopted,
    AttemptEnded,
    Cause,
    CheckpointRef,
    Cloned,
    Event,
    Quarantined,
    Requeued,
    Started,
    TrialAdded,
)
from prefect_tune.core.messages.process_messages import Start
from prefect_tune.core.models import StepReport, plural
from prefect_tune.core.schedulers.base import Exploit
from prefect_tune.core.texts import visible
from prefect_tune.prefect_api.broken_log_pipe import outlive_log_reader
from prefect_tune.prefect_api.task_runs import RUN_TRIAL, quiet_inner_tasks
from prefect_tune.storage_retries import RETRYING, retrying_refusals, skip_prefect_introspection
from prefect_tune.stores.local.scratch import ScratchDirectory
from prefect_tune.stores.local.staging import transfer_pool
from prefect_tune.supervisor.concurrency_slots import holding_concurrency_limits
from prefect_tune.supervisor.journal_writer import JournalWriter, current_owner, new_write_id
from prefect_tune.supervisor.processes.process_channel import trial_in_place
from prefect_tune.supervisor.processes.process_output import Log, TrialLog
from prefect_tune.supervisor.search_link import SearchLink
from prefect_tune.supervisor.trial_spec import AttemptRequest, TrialSpec, import_path
from prefect_tune.tasks.attempt_states import log_failure, state_of
from prefect_tune.tasks.attempt_supervisor import Done, Failed, Outcome, Yielded, events_of, supervise
from prefect_tune.tasks.checkpoints import clone_checkpoint, restore_checkpoint
from prefect_tune.tasks.commit_worker import CommitWorker
from prefect_tune.tasks.experiment_state import (
    Opening,
    experiment_id,
    open_journal,
    read_experiment,
    write_directly,
    write_entry,
)


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended, and the experiment after its last journal entry."""

    outcome: Outcome
    experiment: Experiment


@task(name=RUN_TRIAL, task_run_name="train {spec.trial.trial} · attempt {request.attempt}", **RETRYING)
def run_trial(spec: TrialSpec, request: AttemptRequest, link: SearchLink) -> State[Any]:
    """Train one attempt of a trial in a process of its own, and journal how it ended.

    All state is read from the target, so a retry of the task is a further attempt. Every checkpoint that the trial
    reports is persisted, then committed, then acknowledged to it.

    The task run ends in the returned state, which tells people how the attempt ended: Completed, Pruned, Paused,
    Interrupted or Failed, with the reason. The journal decides what follows.

    Args:
        spec: the specification of the trial.
        request: the request for this attempt.
        link: the link to the search; `link.stop` makes the trial save and end within `spec.grace`.

    Raises:
        Superseded: another process owns the journal, and the trial's process has been ended; or the requesting
            experiment was deleted.
        ResumeFailed: the trial has checkpoints, but none of them can be used.
        StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
    """
    outlive_log_reader()
    log = _log_of(spec)
    with (
        quiet_inner_tasks(),
        retrying_refusals(),
        closing(link),
        holding_concurrency_limits(spec.concurrency_limits, link.stop),
    ):
        ended = _attempt(spec, request, link, log)
    if isinstance(ended.outcome, Failed):
        number = ended.experiment.trial(spec.trial.trial).attempt
        log_failure(ended.outcome, number, spec, request.search_epoch, log)
    return state_of(ended.outcome, spec.trial.trial)


def _log_of(spec: TrialSpec) -> Log:
    """Return the log of the task run; each message of a search's trial names the trial."""
    log = get_run_logger()
    return TrialLog(log, spec.trial.trial) if spec.apart else log


def _attempt(spec: TrialSpec, request: AttemptRequest, link: SearchLink, log: Log) -> AttemptResult:
    journal_writer = _journal_writer(spec, request, link)
    if isinstance(journal_writer, AttemptResult):
        return journal_writer
    return run_attempt(spec, request, link, journal_writer, log)


def run_attempt(
    spec: TrialSpec, request: AttemptRequest, link: SearchLink, journal_writer: JournalWriter, log: Log
) -> AttemptResult:
    """Train one attempt of a trial, whose journal is open, and journal how it ended. Raises as `run_trial`."""
    if link.stop.is_set() and journal_writer.experiment.trial(spec.trial.trial).phase is not Phase.RUNNING:
        return AttemptResult(
            Failed(Cause.PREEMPTED, "asked to stop before it began", at_start=False), journal_writer.experiment
        )
    with ScratchDirectory("staging", "artifacts") as scratch:
        artifacts = TrialArtifacts(spec, scratch / "artifacts", log)
        restored = _restore_newest(spec, journal_writer, scratch / "restored", log)
        _say_what_is_lost(journal_writer.experiment.trial(spec.trial.trial), log)
        start = _begin(spec, request, journal_writer, scratch, restored)
        if start.attempt > 1:
            artifacts.bring_back(start.attempt)
        alone = spec.isolation == "thread"
        with (
            CommitWorker(spec, journal_writer, artifacts, log) as commit_worker,
            trial_in_place(start, log) if alone else link.process(start, log, request.environment) as channel,
        ):
            outcome = supervise(channel, commit_worker, spec, link)
            ending = events_of(spec.trial.trial, outcome)
            if isinstance(outcome, Done):  # the process exits by itself while its end is journaled
                commit_worker.end(ending)
                channel.end()
            else:
                channel.end()
                commit_worker.end(ending)
            # Before the channel closes: a save under way still acknowledges to the trial, dead or not.
            commit_worker.close()
    return _as_journaled(AttemptResult(outcome, commit_worker.experiment), spec, log)


def _as_journaled(result: AttemptResult, spec: TrialSpec, log: Log) -> AttemptResult:
    """Return the journaled end instead of a failure after the last commit, such as an exception in `cleanup`."""
    if not isinstance(result.outcome, Failed) or (ended := _ended(result.experiment, spec)) is None:
        return result
    why = visible(result.outcome.message)
    log.warning("the trial had finished, and its last checkpoint was committed, when %s", why)
    return ended


def _journal_writer(spec: TrialSpec, request: AttemptRequest, link: SearchLink) -> JournalWriter | AttemptResult:
    """Return a journal writer, after closing an attempt without a journaled end; or the result of an ended trial."""
    return _own_journal(spec, request, link) if spec.apart else _experiments_journal(spec, request, link)


def _experiments_journal(spec: TrialSpec, request: AttemptRequest, link: SearchLink) -> JournalWriter | AttemptResult:
    """Read the experiment's journal, which the run that requested the attempt has opened."""
    experiment, term = read_experiment(spec.target, spec.trial.of_experiment), request.search_epoch
    if experiment.epoch != term:
        raise Superseded(
            f"{spec.journal}: owner {term} requested this attempt, and owner {experiment.epoch}, {experiment.owner}, "
            "took over"
        )
    journal_writer = JournalWriter(spec.target, experiment, write_entry, link.wrote)
    if (ended := _ended(experiment, spec)) is not None:
        return ended
    if experiment.trial(spec.trial.trial).phase is Phase.RUNNING:
        lost = "its supervisor failed, and was retried"
        journal_writer.write([AttemptEnded(trial=spec.trial.trial, cause=Cause.MACHINE, message=lost)])
    _carry_out(spec, request, journal_writer)
    return journal_writer


def _ended(experiment: Experiment, spec: TrialSpec) -> AttemptResult | None:
    """Return how the trial ended, if an earlier run of this attempt journaled its end; None otherwise."""
    trial = experiment.trial(spec.trial.trial)
    if trial.phase is Phase.FINISHED:
        return AttemptResult(Done(trial.reason, trial.returned, trial.left), experiment)
    return AttemptResult(Yielded(trial.reason), experiment) if trial.phase is Phase.PAUSED else None


def _own_journal(spec: TrialSpec, request: AttemptRequest, link: SearchLink) -> JournalWriter | AttemptResult:
    """Open the trial's own journal, or create it, and take it over from an earlier writer.

    A request is carried out once its attempt has begun: running it again only makes a further attempt, if the trial
    has not ended.
    """
    _require_same_experiment(spec, request)
    trial = spec.trial.trial
    carried_out = False

    def first(found: Experiment) -> Sequence[Event]:
        nonlocal carried_out
        carried_out = _are_carried_out(request, found, trial)
        if trial in found.trials:
            return ()
        added = TrialAdded(trial=trial, config=request.config, fingerprint=spec.fingerprint)
        if request.exploit is not None or link.stop.is_set():
            return (Adopted(), added)
        return (Adopted(), added, Started(trial=trial, attempt=1, from_step=0, from_sequence=None))

    owner = current_owner(search_epoch=request.search_epoch, attempt=request.attempt)
    # A first attempt needs no read; but a request that waits in a queue may run twice, and outlive its experiment.
    known = LoadedJournal(nothing_yet(spec.journal)) if request.attempt == 1 and not request.experiment_id else None
    reached = {} if request.reached is None else {trial: request.reached}
    opening = Opening(owner, new_write_id(), first, link.wrote, known, reached)
    journal_writer = JournalWriter(
        spec.target, open_journal(spec.target, spec.journal, opening), write_directly, link.wrote
    )
    if carried_out:
        return _ended(journal_writer.experiment, spec) or journal_writer
    _carry_out(spec, request, journal_writer)
    return journal_writer


def _require_same_experiment(spec: TrialSpec, request: AttemptRequest) -> None:
    """Refuse a request whose experiment was deleted, or replaced by one of the same name, while it was queued.

    Raises:
        Superseded: there is no such experiment any more.
    """
    name = spec.trial.experiment
    if (
        not request.experiment_id
        or (found := experiment_id(spec.target, spec.trial.of_experiment)) == request.experiment_id
    ):
        return
    what = "no longer exists" if found is None else "is a new one with the same name"
    raise Superseded(
        f"experiment {name!r} at {spec.target.uri} {what}: the one that requested attempt {request.attempt} of trial "
        f"{spec.trial.trial!r} was deleted. Nothing was trained or written"
    )


def _are_carried_out(request: AttemptRequest, found: Experiment, trial: str) -> bool:
    """Whether the requested attempt has begun; one that an older request began does not count, whatever its number."""
    ordered = found.owner.attempt if found.owner else 0
    return trial in found.trials and 0 < request.attempt <= min(ordered, found.trial(trial).attempt)


def _carry_out(spec: TrialSpec, request: AttemptRequest, journal_writer: JournalWriter) -> None:
    """Apply the request's changes before the attempt: quarantine, requeue, exploit."""
    state = journal_writer.experiment.trial(spec.trial.trial)
    known = {each.sequence for each in state.checkpoints}
    events: list[Event] = [each for each in request.puts_aside if each.sequence in known]
    if state.phase in ENDED:
        events.append(Requeued(trial=state.trial, reason="another attempt was requested"))
    if events:
        journal_writer.write(events)
    if request.exploit is not None:
        _exploit(spec, request.exploit, request.last_step, journal_writer)


def _exploit(spec: TrialSpec, exploit: Exploit, last_step: int | None, journal_writer: JournalWriter) -> None:
    """Clone the source's newest checkpoint that another step follows; if it has none, the trial's own.

    The new configuration trains at least one step, so that no result is shown beside a configuration without a part
    in it.
    """
    trial = spec.trial.trial
    for source in (exploit.source, trial):
        key = spec.trial.of_experiment.trial_key(source)
        try:
            into = skip_prefect_introspection(journal_writer.experiment)
            cloned = clone_checkpoint(spec.target, key, into, trial, new_write_id(), last_step=last_step)
            event = Cloned(
                trial=trial,
                checkpoint=cloned.checkpoint,
                source=cloned.source,
                config=exploit.config,
                reason=exploit.reason,
            )
            journal_writer.write([event])
        except (CheckpointCorrupt, CheckpointNotFound) as bad:
            get_run_logger().warning("trial %s: %s has nothing to exploit: %s", trial, source, bad)
        else:
            return
    get_run_logger().warning("trial %s: neither it nor %s has a checkpoint to exploit", trial, exploit.source)


def _restore_newest(spec: TrialSpec, journal_writer: JournalWriter, destination: Path, log: Log) -> Path | None:
    """Restore the newest checkpoint that verifies; quarantine those that do not, in the journal and in the log."""
    name = spec.trial.trial
    _say_what_is_aside(journal_writer.experiment.trial(name), log)
    while (key := newest_key(spec.trial, journal_writer.experiment.trial(name))) is not None:
        try:
            timeout = spec.sync.sync_timeout_seconds
            return restore_checkpoint(spec.target, key, destination, timeout_seconds=timeout)
        except (CheckpointCorrupt, CheckpointNotFound) as bad:
            reason = f"{type(bad).__name__}: {bad}"
            # If another process owns the trial, it may have retired the checkpoint: then this raises `Superseded`.
            journal_writer.write([Quarantined(trial=name, sequence=key.sequence, reason=reason)])
            log.error("step %d cannot be restored, and is quarantined: %s", key.step, bad)  # noqa: TRY400 - no trace: it is handled
    if lost := journal_writer.experiment.trial(name).lost_checkpoints:
        raise ResumeFailed(
            f"trial {name!r} of {spec.trial.experiment!r} at {spec.target.uri}: all its {lost} committed "
            "checkpoints are damaged or kill the trainable. Nothing was restarted from zero: repair the damaged "
            "objects and release the checkpoints (prefect-tune verify --release), or use another experiment name"
        )
    return None


def _say_what_is_aside(trial: Trial, log: Log) -> None:
    """Log the quarantined checkpoints newer than the one being resumed; nothing else reports them."""
    newest = newest_checkpoint(trial)
    for each in trial.aside:
        if each.checkpoint.sequence > (newest.sequence if newest else 0):
            where = f"step {newest.step}" if newest else "nothing"
            log.error(
                "step %d was quarantined; the trial resumes from %s: %s",
                *(each.checkpoint.step, where, visible(each.reason)),
            )


def _say_what_is_lost(trial: Trial, log: Log) -> None:
    """Warn that trained steps are lost, if the trainable has not committed any checkpoint."""
    if trial.attempt and trial.step and trial.phase is not Phase.RUNNING and newest_checkpoint(trial) is None:
        log.warning(
            "no checkpoint was committed: its %s trained again; save%s",
            plural(trial.step, "step is", "steps are"),
            ", or use ASHA(variant='stopping')" if trial.phase is Phase.PAUSED else " checkpoints regularly",
        )


def _begin(
    spec: TrialSpec, request: AttemptRequest, journal_writer: JournalWriter, scratch: Path, restored: Path | None
) -> Start:
    trial = journal_writer.experiment.trial(spec.trial.trial)
    reports = curve_up_to(spec, newest_checkpoint(trial))
    if trial.phase is not Phase.RUNNING:  # a trial's first attempt begins with the entry that opens its journal
        trial = journal_writer.write([next_start(trial)]).trial(spec.trial.trial)
    return Start(
        experiment=spec.trial.experiment,
        trial=trial.trial,
        attempt=trial.attempt,
        trainable=spec.trainable,
        stopper=spec.stopper,
        import_path=import_path(),
        config=trial.config,
        directory=str(scratch / "artifacts"),
        staging=str(scratch / "staging"),
        temporary=str(scratch / "temporary"),
        restored=str(restored) if restored else None,
        from_step=trial.step,
        trained_seconds=trial.trained_seconds,
        curve=tuple(reports),
        cadence=spec.cadence,
        overlap=spec.sync.commit == "async",
        milestone=request.milestone,
        saves_first=request.saves_first,
        answers=request.answers,
    )


def next_start(trial: Trial) -> Started:
    """Return the event with which the next attempt of `trial` begins, at its newest checkpoint."""
    newest = newest_checkpoint(trial)
    return Started(
        trial=trial.trial,
        attempt=trial.attempt + 1,
        from_step=newest.step if newest else 0,
        from_sequence=newest.sequence if newest else None,
    )


def last_report(trial: Trial) -> StepReport:
    """Return the newest report of a trial that the journal holds."""
    return StepReport(step=trial.step, metrics=trial.metrics, trained_seconds=trial.trained_seconds)


def curve_up_to(spec: TrialSpec, start: CheckpointRef | None) -> Sequence[StepReport]:
    """Return the valid reports up to `start`; the last one only, without reading the journal, if that is enough."""
    if start is None:
        return ()
    last = StepReport(step=start.step, metrics=start.metrics, trained_seconds=start.trained_seconds)
    if not spec.needs_curve:
        return (last,)
    with spec.target.open(timeout=timedelta(minutes=5)) as store, transfer_pool() as transfers:
        reports = curve(history(store, spec.journal, side_by_side=transfers), spec.trial.trial)
    return [report for report in reports if report.step <= start.step]


def has_had_enough(spec: TrialSpec, trial: Trial, stopper: Stopper) -> bool:
    """Whether a finished trial meets today's stop criterion too, or ended by itself or by the scheduler."""
    if trial.returned or trial.left or trial.metrics.get("done") is True:
        return True
    last = last_report(trial)
    curve = curve_up_to(spec, CheckpointRef(sequence=0, **last.model_dump())) if stopper.looks_back else [last]
    return bool(curve) and stopper.why_stop(curve) is not None
