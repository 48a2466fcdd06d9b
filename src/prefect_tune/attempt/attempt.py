"""One attempt of a trial: restore its newest good checkpoint, train, journal the end.

    restored ──► Started ──► process ══ reports, checkpoints ══► outcome ──► its events journaled
                                └─ supervisor (this thread)  └─ commit worker (its own thread)

The request has the trial's state; what the attempt adds to it is in the journal (`search_link`).
Never: a process that trains before `Started` is durable; an end that is journaled before the saves handed over before
it; a trial that starts from nothing while it has checkpoints that cannot be used.
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
from prefect_tune.attempt.nodes import NodesMissing, OtherNodes
from prefect_tune.attempt.processes.process_channel import (
    Placement,
    RankGroup,
    TrialChannel,
    rank_group,
    trial_in_place,
)
from prefect_tune.attempt.processes.process_output import Log, rank_log
from prefect_tune.attempt.search_link import SearchLink, TrialJournal
from prefect_tune.attempt.supervisor import supervise
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec, import_path
from prefect_tune.attempt.usage_meter import UsageMeter, processes_here
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, ResumeFailed, TrialFailed
from prefect_tune.core.experiment.experiment import last_report
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.experiment.summary import Curves
from prefect_tune.core.experiment.trial_transitions import Phase, Trial, newest_checkpoint, newest_key
from prefect_tune.core.journal.journal import history
from prefect_tune.core.journal_events import (
    AttemptEnded,
    Cause,
    Finished,
    FinishKind,
    Outcome,
    Paused,
    Quarantined,
    Started,
)
from prefect_tune.core.messages.process_messages import Start
from prefect_tune.core.reasons import Reason, format_error, make_reason
from prefect_tune.core.shown_text import first_line, plural, visible
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import StepReport
from prefect_tune.stores.local.scratch import ScratchDirectory
from prefect_tune.terminal.formatting import with_last_output


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended, and the trial after its last event."""

    outcome: Outcome
    trial: Trial


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a trial, as its search requested it."""

    spec: TrialSpec
    request: AttemptRequest
    link: SearchLink
    tasks: AttemptTasks
    log: Log
    meter: UsageMeter = field(default_factory=UsageMeter)

    @property
    def _name(self) -> str:
        return self.spec.trial.trial

    def run(self) -> AttemptResult:
        """Train, and journal how it ended.

        Every checkpoint that the trial reports is persisted, then committed, then acknowledged to it. If the task runs
        it again, this is a further attempt, unless the trial has ended.

        Raises:
            Superseded: another process owns the experiment or trains the trial, and the trial's process has been ended;
                or the requesting experiment was deleted.
            ResumeFailed: the trial has checkpoints, but none of them can be used.
            StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
        """
        journal = self.link.open_journal(self.spec, self.request)
        if journal.trial.phase is Phase.RUNNING:
            reason = make_reason("supervisor-failed")
            journal.write([AttemptEnded(trial=self._name, cause=Cause.MACHINE, reason=reason)])
        return self._ended(journal.trial) or self.run_in(journal)

    def run_in(self, journal: TrialJournal) -> AttemptResult:
        """Train a trial that waits for an attempt, and journal how it ended. Raises as `run`."""
        spec, link, log = self.spec, self.link, self.log
        if link.stop.is_set():
            stopped = AttemptEnded(trial=self._name, cause=Cause.PREEMPTED, reason=make_reason("stopped-before-start"))
            return AttemptResult(stopped, journal.trial)
        with ScratchDirectory("staging", "artifacts") as scratch:
            artifacts = TrialArtifacts(spec, scratch / "artifacts", log)
            with self.meter.restoring():
                restored = self._restore_newest(journal, scratch / "restored")
            self._log_lost_steps(journal.trial)
            start = self._begin(journal, scratch, restored)
            artifacts.begin(start.attempt)
            self.meter.environment = self.request.environment
            nodes, term = None, self.request.search_term
            if spec.nodes_per_trial > 1:
                newest = newest_key(spec.trial, journal.trial)
                nodes = OtherNodes(spec, start, term, newest, self.request.secret, log)
            open_parts = nodes.parts if nodes is not None else None
            with CommitWorker(spec, term, journal, artifacts, self.tasks, log, self.meter, open_parts) as commit_worker:
                try:
                    with self._ranks(start, nodes) as group:
                        self.meter.last_output = group.last_output
                        outcome = supervise(group, commit_worker, spec, link, self.meter)
                        if isinstance(outcome, Finished):  # the process exits by itself while its end is journaled
                            commit_worker.end(outcome)
                            group.end_all()
                        else:
                            group.end_all()
                            commit_worker.end(outcome)
                        # Before the channel closes: a save under way still acknowledges to the trial, dead or not.
                        commit_worker.close()
                except NodesMissing as missing:
                    cause = Cause.PREEMPTED if missing.is_stopped else Cause.MACHINE
                    reason = make_reason("nodes-missing", error=str(missing))
                    outcome = AttemptEnded(trial=self._name, cause=cause, reason=reason)
                    commit_worker.end(outcome)
                    commit_worker.close()
            outcome = commit_worker.outcome or outcome
        if isinstance(outcome, AttemptEnded) and (ended := self._ended(journal.trial)) is not None:
            why = visible(outcome.reason)  # such as an exception in `cleanup`
            log.warning("the trial had finished, and its last checkpoint was committed, when %s", why)
            return ended
        return AttemptResult(outcome, journal.trial)

    @contextmanager
    def _ranks(self, start: Start, nodes: OtherNodes | None) -> Iterator[RankGroup]:
        """Open the processes of the attempt, those on other nodes too. Raises NodesMissing."""
        if nodes is None:
            processes = processes_here(self.spec.processes_per_trial, self.request.environment)
            if processes != self.spec.processes_per_trial:
                self.log.info("this attempt trains with %s", plural(processes, "process", "processes"))
            with rank_group(start, Placement(processes), self._open_process) as group:
                yield group
            return
        with nodes:
            elsewhere = nodes.begin(self.link.stop)
            with rank_group(start, nodes.placement, self._open_process, elsewhere) as group:
                yield group

    def _open_process(self, start: Start) -> AbstractContextManager[TrialChannel]:
        """Open the process of one rank; the lines of other ranks than the first name it."""
        if self.spec.isolation == "thread":
            return trial_in_place(start, self.log)
        rank = start.rank.rank
        log = rank_log(self.log, rank) if rank else self.log
        return self.link.process(start, log, self.request.environment)

    def _ended(self, trial: Trial) -> AttemptResult | None:
        """Return how the trial ended, if an earlier run of this attempt journaled its end; None otherwise."""
        if trial.phase is Phase.FINISHED:
            kind = trial.finish_kind or FinishKind.CRITERION
            return AttemptResult(Finished(trial=self._name, reason=trial.end_reason, kind=kind), trial)
        if trial.phase is Phase.PAUSED:
            return AttemptResult(Paused(trial=self._name, reason=trial.end_reason), trial)
        return None

    def _restore_newest(self, journal: TrialJournal, destination: Path) -> Path | None:
        """Restore the newest checkpoint that verifies; quarantine those that do not, in the journal and in the log."""
        spec, name = self.spec, self._name
        _log_quarantined(journal.trial, self.log)
        while (newest := newest_checkpoint(journal.trial)) is not None:
            key = spec.trial.checkpoint_key(newest)
            try:
                return self.tasks.restore(key, destination)
            except (CheckpointCorrupt, CheckpointNotFound) as bad:
                reason = f"{type(bad).__name__}: {bad}"
                # If another process owns the trial, it may have retired the checkpoint: then this raises `Superseded`.
                journal.write([Quarantined(trial=name, sequence=newest.sequence, reason=reason)])
                self.log.error("step %d cannot be restored, and is quarantined: %s", key.step, bad)  # noqa: TRY400 - no trace: it is handled
        if lost := journal.trial.lost_checkpoints:
            raise ResumeFailed(
                f"trial {name!r} of {spec.trial.experiment!r} at {spec.target.uri}: all its {lost} committed "
                "checkpoints are damaged or kill the trainable. Nothing was restarted from zero: repair the damaged "
                "objects and release the checkpoints (prefect-tune verify --release), or use another experiment name"
            )
        return None

    def _begin(self, journal: TrialJournal, scratch: Path, restored: Path | None) -> Start:
        spec, request = self.spec, self.request
        supervisor = self.link.supervisor
        where = {"supervisor": supervisor, "task_run": None if supervisor else task_run.id}
        journal.write([next_start(journal.trial, self.meter.began_at).model_copy(update=where)])
        trial, newest = journal.trial, newest_checkpoint(journal.trial)
        curve: Sequence[StepReport] = ()
        if newest is not None and spec.needs_curve:
            curve = tuple(report for report in request.curve if report.step <= newest.step)
        elif newest is not None:
            curve = (newest.report,)
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
            restored=str(restored) if restored else None,
            from_step=trial.step,
            trained_seconds=trial.trained_seconds,
            curve=curve,
            cadence=spec.cadence,
            overlap=spec.sync.commit == "async",
            milestone=request.milestone,
            saves_first=request.saves_first,
            metrics_from=spec.metrics_from,
            required_metrics=spec.required_metrics,
        )

    def _log_lost_steps(self, trial: Trial) -> None:
        """Warn that trained steps are lost, if the trainable has not committed any checkpoint."""
        if trial.attempt and trial.step and trial.phase is not Phase.RUNNING and newest_checkpoint(trial) is None:
            self.log.warning(
                "no checkpoint was committed: its %s trained again; save%s",
                plural(trial.step, "step is", "steps are"),
                ", or use ASHA(variant='stopping')" if trial.cause is None else " checkpoints regularly",
            )


def _log_quarantined(trial: Trial, log: Log) -> None:
    """Log the quarantined checkpoints newer than the one being resumed; nothing else reports them."""
    newest = newest_checkpoint(trial)
    for quarantined in trial.quarantined_checkpoints:
        step, reason = quarantined.checkpoint.step, visible(quarantined.reason)
        if quarantined.checkpoint.sequence > (newest.sequence if newest else 0):
            where = f"step {newest.step}" if newest else "nothing"
            log.error("step %d was quarantined; the trial resumes from %s: %s", step, where, reason)


def next_start(trial: Trial, at: str | None = None) -> Started:
    """Return the event with which the next attempt of `trial` begins at the time `at`, at its newest checkpoint."""
    newest = newest_checkpoint(trial)
    return Started(
        trial=trial.trial,
        attempt=trial.attempt + 1,
        from_step=newest.step if newest else 0,
        from_sequence=newest.sequence if newest else None,
        at=at,
    )


class CurveReader:
    """Reads the curves of an experiment's trials from its journal, each entry once."""

    def __init__(self, target: StorageTarget, journal: JournalKey) -> None:
        self._target, self._journal = target, journal
        self._curves, self._number = Curves(), 0

    def of(self, trial: Trial) -> Sequence[StepReport]:
        """Return the reports of a trial up to its last journaled step."""
        reports = self._curves.of(trial.trial)
        if not reports or reports[-1].step < trial.step:
            with self._target.open(timeout=timedelta(minutes=5)) as store:
                for entry in history(store, self._journal, self._number):
                    self._curves.tell(entry)
                    self._number = entry.number
        return [report for report in self._curves.of(trial.trial) if report.step <= trial.step]


def has_had_enough(trial: Trial, stopper: Stopper, curves: CurveReader) -> bool:
    """Whether a finished trial meets today's stop criterion too, or ended by itself or by the scheduler."""
    if trial.finish_kind not in (None, FinishKind.CRITERION) or trial.metrics.get("done") is True:
        return True
    reports = curves.of(trial) if stopper.looks_back else [last_report(trial)]
    return bool(reports) and stopper.why_stop(reports) is not None


# How an attempt is shown to have ended: the state of its task run, and the log of a failure.

FIRST_NODE_SILENT = "FirstNodeSilent"
"""The name of the state of a node's run that ended since node 0 of its attempt writes nothing any more."""


def state_of(outcome: Outcome) -> State[Any]:
    """Return the final state of an attempt: Completed, Pruned, Paused, Interrupted or Failed.

    Its message is the reason in one line; a Failed one holds a `TrialFailed` as its result.
    """
    message = first_line(outcome.reason)
    match outcome:
        case Finished(kind=FinishKind.PRUNED):
            return states.Completed(name="Pruned", message=message)
        case Finished(kind=FinishKind.STOPPED):
            return states.Cancelled(name="Interrupted", message=message)
        case Finished():
            return states.Completed(message=message)
        case Paused():
            return states.Completed(name="Paused", message=message)
        case AttemptEnded(cause=Cause.PREEMPTED):
            return states.Cancelled(name="Interrupted", message=message)
        case AttemptEnded():
            return states.Failed(message=message, data=TrialFailed(f"trial {outcome.trial}: {message}"))
        case _:
            assert_never(outcome)


def state_of_node(reason: Reason) -> State[Any]:
    """Return the final state of the run of another node than the first, which was over for this reason."""
    return states.Completed(name=FIRST_NODE_SILENT if reason.code == "node-silent" else None, message=str(reason))


def log_failure(failure: AttemptEnded, attempt: int, spec: TrialSpec, search_term: int, log: Log) -> None:
    """Log a failure with its traceback and the last output; elsewhere only its first line is shown.

    An error that this process has logged for another trial, in the same run of the search, is logged in one line.
    """
    shown = with_last_output(failure.reason, failure.use.output if failure.use else "")
    if failure.cause is Cause.PREEMPTED or "\n" not in shown:
        return
    key = failure.reason.model_dump_json() if isinstance(failure.reason, Reason) else failure.reason
    first = _logged_errors(spec.target.uri, spec.trial.of_experiment, search_term).setdefault(key, failure.trial)
    same = f"{format_error(failure.reason)}, the same error as that of trial {first}"
    log.error("attempt %d failed: %s", attempt, shown if first == failure.trial else same)


@lru_cache(maxsize=8)
def _logged_errors(_target: str, _experiment: JournalKey, _search_term: int) -> dict[str, str]:
    """Return the errors that one run of a search has logged here with a traceback, and their trials."""
    return {}
