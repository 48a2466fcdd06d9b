"""One attempt of a trial: restore the trial's newest valid checkpoint, train, and journal how the attempt ended.

    restore ──► AttemptStarted ──► process ══ reports, checkpoints ══► outcome ──► journal
                                      └─ supervisor (this thread)  └─ commit worker (another thread)

The request carries the trial's state; the attempt journals every change of that state (`search_channel`). No process
trains before `AttemptStarted` is durable, and no end is journaled before the saves that precede it. A trial whose
checkpoints are all unusable does not start from scratch: the attempt raises `ResumeFailed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, assert_never

from prefect import states
from prefect.client.schemas.objects import State
from prefect.runtime import task_run

from prefect_tune.attempt.commit_worker import AttemptTasks, CommitWorker, TrialArtifacts
from prefect_tune.attempt.nodes import NodesMissingError, OtherNodes
from prefect_tune.attempt.processes.process_channel import (
    Placement,
    RankGroup,
    TrialChannel,
    open_rank_group,
    open_trial_thread,
)
from prefect_tune.attempt.processes.process_output import Log, make_rank_log
from prefect_tune.attempt.search_channel import SearchChannel, TrialJournal
from prefect_tune.attempt.supervisor import supervise
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec, get_absolute_sys_path
from prefect_tune.attempt.usage_meter import UsageMeter, choose_process_count
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.display_text import first_line, make_visible, pluralize
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, ResumeFailed, TrialFailed
from prefect_tune.core.experiment.experiment import last_report
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.experiment.summary import LearningCurves
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, newest_checkpoint, newest_checkpoint_key
from prefect_tune.core.journal.journal import read_entries
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    CheckpointQuarantined,
    FinishKind,
    Outcome,
    TrialFinished,
    TrialPaused,
)
from prefect_tune.core.messages.process_messages import Start
from prefect_tune.core.reasons import Reason, format_error, make_reason
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import StepReport
from prefect_tune.stores.local.scratch import ScratchDirectory
from prefect_tune.terminal.formatting import append_last_output


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The outcome of an attempt, and the state of the trial after the attempt's last event."""

    outcome: Outcome
    trial: Trial


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that a search has requested for a trial."""

    spec: TrialSpec
    request: AttemptRequest
    channel: SearchChannel
    tasks: AttemptTasks
    log: Log
    meter: UsageMeter = field(default_factory=UsageMeter)

    @property
    def _trial_name(self) -> str:
        return self.spec.trial.trial

    def run(self) -> AttemptResult:
        """Train, and journal how the attempt ended.

        Each reported checkpoint is uploaded, then committed, then acknowledged to the trial. A retry of the Prefect
        task is a new attempt, unless the trial has ended.

        Raises:
            Superseded: the experiment that requested the attempt was deleted, or another process owns the experiment
                or trains the trial, so this attempt has stopped its training.
            ResumeFailed: the trial has checkpoints, but none of them can be used.
            StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
        """
        journal = self.channel.make_journal(self.spec, self.request)
        if journal.trial.phase is Phase.RUNNING:
            reason = make_reason("supervisor-failed")
            journal.write([AttemptEnded(trial=self._trial_name, cause=Cause.MACHINE, reason=reason)])
        return self._get_journaled_result(journal.trial) or self.run_with_journal(journal)

    def run_with_journal(self, journal: TrialJournal) -> AttemptResult:
        """Train a trial that waits for an attempt, and journal how the attempt ended. Raises the errors of `run`."""
        spec, channel, log, name = self.spec, self.channel, self.log, self._trial_name
        if channel.run_stop.is_set():
            stopped = AttemptEnded(trial=name, cause=Cause.PREEMPTED, reason=make_reason("stopped-before-start"))
            return AttemptResult(stopped, journal.trial)
        with ScratchDirectory("staging", "artifacts") as scratch:
            artifacts = TrialArtifacts(spec, scratch / "artifacts", log)
            with self.meter.measuring_restore():
                restored = self._restore_newest_checkpoint(journal, scratch / "restored")
            self._warn_if_all_steps_lost(journal.trial)
            start = self._journal_start(journal, scratch, restored)
            artifacts.prepare(start.attempt)
            self.meter.environment = self.request.environment
            nodes, term = None, self.request.owner_term
            if spec.nodes_per_trial > 1:
                newest = newest_checkpoint_key(spec.trial, journal.trial)
                nodes = OtherNodes(spec, start, term, newest, self.request.secret, log)
            open_parts = nodes.requesting_parts if nodes is not None else None
            with CommitWorker(spec, term, journal, artifacts, self.tasks, log, self.meter, open_parts) as commit_worker:
                try:
                    with self._open_rank_group(start, nodes) as group:
                        self.meter.last_output = group.last_output
                        outcome = supervise(group, commit_worker, spec, channel, self.meter)
                        if isinstance(outcome, TrialFinished):  # end the process while the trial's end is journaled
                            commit_worker.queue_end(outcome)
                            group.end_all_ranks()
                        else:
                            group.end_all_ranks()
                            commit_worker.queue_end(outcome)
                        # Close the worker before the channel, which a running save still needs for its acknowledgment.
                        commit_worker.close()
                except NodesMissingError as error:
                    cause = Cause.PREEMPTED if error.is_stop_requested else Cause.MACHINE
                    reason = make_reason("nodes-missing", error=str(error))
                    outcome = AttemptEnded(trial=name, cause=cause, reason=reason)
                    commit_worker.queue_end(outcome)
                    commit_worker.close()
            outcome = commit_worker.outcome or outcome
        if isinstance(outcome, AttemptEnded) and (result := self._get_journaled_result(journal.trial)) is not None:
            late_reason = make_visible(outcome.reason)  # the error came after the trial's end, e.g. in `cleanup`
            log.warning("error after the trial finished and committed its last checkpoint: %s", late_reason)
            return result
        return AttemptResult(outcome, journal.trial)

    @contextmanager
    def _open_rank_group(self, start: Start, nodes: OtherNodes | None) -> Iterator[RankGroup]:
        """Open the processes of the attempt, including those on other nodes. Raises NodesMissingError."""
        if nodes is None:
            processes = choose_process_count(self.spec.processes_per_trial, self.request.environment)
            if processes != self.spec.processes_per_trial:
                self.log.info("this attempt trains with %s", pluralize(processes, "process", "processes"))
            with open_rank_group(start, Placement(processes), self._open_process) as group:
                yield group
            return
        with nodes:
            remote_channels = nodes.gather_nodes(self.channel.run_stop)
            with open_rank_group(start, nodes.placement, self._open_process, remote_channels) as group:
                yield group

    def _open_process(self, start: Start) -> AbstractContextManager[TrialChannel]:
        """Open the process of a rank. The log lines of a rank other than 0 contain the number of the rank."""
        if self.spec.isolation == "thread":
            return open_trial_thread(start, self.log)
        log = make_rank_log(self.log, start.rank.rank) if start.rank.rank else self.log
        return self.channel.open_process(start, log, self.request.environment)

    def _get_journaled_result(self, trial: Trial) -> AttemptResult | None:
        """Return the journaled end or pause of the trial; None if the trial is neither finished nor paused."""
        if trial.phase is Phase.FINISHED:
            kind = trial.finish_kind or FinishKind.CRITERION
            return AttemptResult(TrialFinished(trial=self._trial_name, reason=trial.end_reason, kind=kind), trial)
        if trial.phase is Phase.PAUSED:
            return AttemptResult(TrialPaused(trial=self._trial_name, reason=trial.end_reason), trial)
        return None

    def _restore_newest_checkpoint(self, journal: TrialJournal, destination: Path) -> Path | None:
        """Restore the newest valid checkpoint; quarantine newer ones. Return its folder, or None if none exists."""
        spec, name = self.spec, self._trial_name
        _log_quarantined_checkpoints(journal.trial, self.log)
        while (newest := newest_checkpoint(journal.trial)) is not None:
            key = spec.trial.checkpoint_key(newest)
            try:
                return self.tasks.restore_checkpoint(key, destination)
            except (CheckpointCorrupt, CheckpointNotFound) as error:
                reason = f"{type(error).__name__}: {error}"
                # If another process owns the trial and so may have retired the checkpoint, this raises Superseded.
                journal.write([CheckpointQuarantined(trial=name, sequence=newest.sequence, reason=reason)])
                self.log.error("quarantined step %d: cannot be restored: %s", key.step, error)  # noqa: TRY400 - no trace: it is handled
        if lost := journal.trial.lost_checkpoint_count:
            raise ResumeFailed(
                f"trial {name!r} of {spec.trial.experiment!r} at {spec.target.uri}: all its {lost} committed "
                "checkpoints are damaged or crash the trainable. Nothing was restarted from zero: repair the damaged "
                "objects and release the checkpoints (prefect-tune verify --release), or use another experiment name"
            )
        return None

    def _journal_start(self, journal: TrialJournal, scratch: Path, restored: Path | None) -> Start:
        """Journal the start of the attempt; return the start message for its processes."""
        spec, request, supervisor = self.spec, self.request, self.channel.supervisor
        origin = {"supervisor": supervisor, "task_run": None if supervisor else task_run.id}
        journal.write([make_attempt_started(journal.trial, self.meter.began_at).model_copy(update=origin)])
        trial, newest = journal.trial, newest_checkpoint(journal.trial)
        reports: Sequence[StepReport] = () if newest is None else (newest.report,)
        if newest is not None and spec.needs_history:
            reports = tuple(report for report in request.reports if report.step <= newest.step)
        return Start(
            experiment=spec.trial.experiment,
            trial=trial.id,
            attempt=trial.attempt,
            trainable=spec.trainable,
            stopper=spec.stopper,
            import_path=get_absolute_sys_path(),
            config=trial.config,
            directory=str(scratch / "artifacts"),
            staging=str(scratch / "staging"),
            restored_directory=str(restored) if restored else None,
            from_step=trial.step,
            trained_seconds=trial.trained_seconds,
            reports=reports,
            cadence=spec.cadence,
            async_commit=spec.sync.commit == "async",
            milestone=request.milestone,
            saves_first=request.saves_first,
            metrics_from=spec.metrics_from,
            required_metrics=spec.required_metrics,
        )

    def _warn_if_all_steps_lost(self, trial: Trial) -> None:
        """Warn if all trained steps are lost because the trial has no checkpoint."""
        if trial.attempt and trial.step and trial.phase is not Phase.RUNNING and newest_checkpoint(trial) is None:
            self.log.warning(
                "without a committed checkpoint, %s trained again; save%s",
                pluralize(trial.step, "step is", "steps are"),
                ", or use ASHA(variant='stopping')" if trial.cause is None else " checkpoints regularly",
            )


def _log_quarantined_checkpoints(trial: Trial, log: Log) -> None:
    """Log the quarantined checkpoints that are newer than all live checkpoints, because nothing else reports them."""
    newest = newest_checkpoint(trial)
    for quarantined in trial.quarantined_checkpoints:
        step, reason = quarantined.checkpoint.step, make_visible(quarantined.reason)
        if quarantined.checkpoint.sequence > (newest.sequence if newest else 0):
            resume_point = f"resumes from step {newest.step}" if newest else "starts from scratch"
            log.error("step %d was quarantined; the trial %s: %s", step, resume_point, reason)


def make_attempt_started(trial: Trial, at: str | None = None) -> AttemptStarted:
    """Return the event that starts the next attempt of `trial` at the time `at`, from the newest checkpoint."""
    newest = newest_checkpoint(trial)
    return AttemptStarted(
        trial=trial.id,
        attempt=trial.attempt + 1,
        from_step=newest.step if newest else 0,
        from_sequence=newest.sequence if newest else None,
        at=at,
    )


class ReportReader:
    """Reads the reports of an experiment's trials from the journal; reads each entry once."""

    def __init__(self, target: StorageTarget, journal: JournalKey) -> None:
        self._target, self._journal = target, journal
        self._curves, self._last_entry_number = LearningCurves(), 0

    def read_reports(self, trial: Trial) -> Sequence[StepReport]:
        """Return the reports of a trial up to its last journaled step."""
        reports, curves = self._curves.get_curve(trial.id), self._curves
        last_read = curves.attempts.get(trial.id, 0), curves.clones.get(trial.id)
        if not reports or reports[-1].step < trial.step or last_read != (trial.attempt, trial.last_clone_sequence):
            with self._target.open(timeout=timedelta(minutes=5)) as store:
                for entry in read_entries(store, self._journal, self._last_entry_number):
                    self._curves.add_entry(entry)
                    self._last_entry_number = entry.number
        return [report for report in self._curves.get_curve(trial.id) if report.step <= trial.step]


def stays_finished(trial: Trial, stopper: Stopper, reader: ReportReader) -> bool:
    """Return whether a finished trial stays finished: it meets `stopper`, or it was not ended by a stop criterion."""
    if trial.finish_kind not in (None, FinishKind.CRITERION) or trial.metrics.get("done") is True:
        return True
    reports = reader.read_reports(trial) if stopper.needs_history else [last_report(trial)]
    return bool(reports) and stopper.stop_reason(reports) is not None


# The final state of an attempt's task run, and the log message of a failed attempt.

NODE_0_SILENT = "FirstNodeSilent"
"""The name of a flow run's final state if the run's node lost contact with node 0."""


def make_task_state(outcome: Outcome) -> State[Any]:
    """Return the final state of an attempt: Completed, Pruned, Paused, Interrupted or Failed.

    The state's message is the first line of the reason. The result of a Failed state is a `TrialFailed`.
    """
    message = first_line(outcome.reason)
    match outcome:
        case TrialFinished(kind=FinishKind.PRUNED):
            return states.Completed(name="Pruned", message=message)
        case TrialFinished(kind=FinishKind.STOPPED):
            return states.Cancelled(name="Interrupted", message=message)
        case TrialFinished():
            return states.Completed(message=message)
        case TrialPaused():
            return states.Completed(name="Paused", message=message)
        case AttemptEnded(cause=Cause.PREEMPTED):
            return states.Cancelled(name="Interrupted", message=message)
        case AttemptEnded():
            return states.Failed(message=message, data=TrialFailed(f"trial {outcome.trial}: {message}"))
        case _:
            assert_never(outcome)


def make_node_state(reason: Reason) -> State[Any]:
    """Return the final state of the flow run of a node other than node 0, on which training ended for `reason`."""
    return states.Completed(name=NODE_0_SILENT if reason.code == "node-silent" else None, message=str(reason))


def log_failure(failure: AttemptEnded, attempt: int, spec: TrialSpec, owner_term: int, log: Log) -> None:
    """Log a failure with its traceback and the last output, because other places show only the failure's first line.

    If this process has logged the same error for another trial in the same term of this experiment, log only one line.
    """
    text = append_last_output(failure.reason, failure.usage.output if failure.usage else "")
    if failure.cause is Cause.PREEMPTED or "\n" not in text:
        return
    key = failure.reason.model_dump_json() if isinstance(failure.reason, Reason) else failure.reason
    first = _get_logged_errors(spec.target.uri, spec.trial.journal_key, owner_term).setdefault(key, failure.trial)
    repeated = f"{format_error(failure.reason)}, the same error as trial {first}"
    log.error("attempt %d failed: %s", attempt, text if first == failure.trial else repeated)


@lru_cache(maxsize=8)
def _get_logged_errors(_target: str, _experiment: JournalKey, _owner_term: int) -> dict[str, str]:
    """Return the errors logged by this process in one term, each with its first trial; callers add to this dict."""
    return {}
