"""One attempt of a trial: open its journal, restore its newest good checkpoint, train, journal the end.

    journal opened ──► restored ──► Started ──► process ══ reports, checkpoints ══► outcome ──► its events journaled
                                                   └─ supervisor (this thread)  └─ commit worker (its own thread)

All state is read from the target, so that an attempt that is run again is a further attempt.
Never: an attempt that begins before its journal is its own; an end that is journaled before the saves handed over
before it; a trial that starts from nothing while it has checkpoints that cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from prefect_tune.attempt.attempt_tasks import AttemptTasks
from prefect_tune.attempt.commit_worker import CommitWorker
from prefect_tune.attempt.machine_limits import processes_here
from prefect_tune.attempt.nodes.first_node import NodesMissing, OtherNodes
from prefect_tune.attempt.processes.process_channel import TrialChannel, trial_in_place
from prefect_tune.attempt.processes.process_output import Log, rank_log
from prefect_tune.attempt.processes.rank_group import Placement, RankGroup, rank_group
from prefect_tune.attempt.search_link import SearchLink
from prefect_tune.attempt.supervisor import supervise
from prefect_tune.attempt.trial_artifacts import TrialArtifacts
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec, import_path
from prefect_tune.attempt.usage_meter import UsageMeter
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, ResumeFailed, Superseded
from prefect_tune.core.experiment.experiment import Experiment, nothing_yet
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.experiment.summary import curve
from prefect_tune.core.experiment.trial_transitions import ENDED, Phase, Trial, newest_checkpoint, newest_key
from prefect_tune.core.journal.journal import LoadedJournal, history
from prefect_tune.core.journal_events import (
    Adopted,
    AttemptEnded,
    Cause,
    CheckpointRef,
    Cloned,
    Event,
    Finished,
    FinishKind,
    Outcome,
    Paused,
    Quarantined,
    Requeued,
    Started,
    TrialAdded,
)
from prefect_tune.core.messages.process_messages import Start
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import Exploit
from prefect_tune.core.shown_text import plural, visible
from prefect_tune.core.values import StepReport
from prefect_tune.journal_access import (
    JournalWriter,
    Opening,
    current_owner,
    experiment_id,
    new_write_id,
    open_journal,
    read_experiment,
    write_directly,
)
from prefect_tune.stores.local.scratch import ScratchDirectory
from prefect_tune.stores.local.staging import transfer_pool


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended, and the experiment after its last journal entry."""

    outcome: Outcome
    experiment: Experiment


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
        """Open the journal, and train.

        Every checkpoint that the trial reports is persisted, then committed, then acknowledged to it.

        Raises:
            Superseded: another process owns the journal, and the trial's process has been ended; or the requesting
                experiment was deleted.
            ResumeFailed: the trial has checkpoints, but none of them can be used.
            StoreUnavailable, StoreRefused, CommitUnknown: the target failed for longer than the retries last.
        """
        journal_writer = self._own_journal() if self.spec.own_journal else self._experiments_journal()
        return self.run_in(journal_writer) if isinstance(journal_writer, JournalWriter) else journal_writer

    def run_in(self, journal_writer: JournalWriter) -> AttemptResult:
        """Train, in a journal that is open, and journal how it ended. Raises as `run`."""
        spec, link, log = self.spec, self.link, self.log
        if link.stop.is_set() and journal_writer.experiment.trial(self._name).phase is not Phase.RUNNING:
            stopped = AttemptEnded(trial=self._name, cause=Cause.PREEMPTED, reason=make_reason("stopped-before-start"))
            return AttemptResult(stopped, journal_writer.experiment)
        with ScratchDirectory("staging", "artifacts") as scratch:
            artifacts = TrialArtifacts(spec, scratch / "artifacts", log)
            with self.meter.restoring():
                restored = self._restore_newest(journal_writer, scratch / "restored")
            _log_lost_steps(journal_writer.experiment.trial(self._name), log)
            start = self._begin(journal_writer, scratch, restored)
            artifacts.begin(start.attempt)
            nodes = self._other_nodes(start, journal_writer.experiment)
            with CommitWorker(spec, journal_writer, artifacts, self.tasks, log, nodes) as commit_worker:
                commit_worker.meter, self.meter.environment = self.meter, self.request.environment
                try:
                    with self._ranks(start, nodes) as group:
                        self.meter.last_output = group.last_output
                        outcome = supervise(group, commit_worker, spec, link, self.meter)
                        self._end(outcome, group, commit_worker)
                except NodesMissing as missing:
                    cause = Cause.PREEMPTED if missing.is_stopped else Cause.MACHINE
                    reason = make_reason("nodes-missing", error=str(missing))
                    outcome = AttemptEnded(trial=self._name, cause=cause, reason=reason)
                    commit_worker.end(outcome)
                    commit_worker.close()
            outcome = commit_worker.outcome or outcome
        return self._as_journaled(AttemptResult(outcome, commit_worker.experiment))

    def _end(self, outcome: Outcome, group: RankGroup, commit_worker: CommitWorker) -> None:
        if isinstance(outcome, Finished):  # the process exits by itself while its end is journaled
            commit_worker.end(outcome)
            group.end_all()
        else:
            group.end_all()
            commit_worker.end(outcome)
        # Before the channel closes: a save under way still acknowledges to the trial, dead or not.
        commit_worker.close()

    def _other_nodes(self, start: Start, experiment: Experiment) -> OtherNodes | None:
        if self.spec.nodes_per_trial == 1:
            return None
        restored = newest_key(self.spec.trial, experiment.trial(self._name))
        return OtherNodes(self.spec, start, experiment.term, restored, self.request.secret, self.log)

    @contextmanager
    def _ranks(self, start: Start, nodes: OtherNodes | None) -> Iterator[RankGroup]:
        """Open the processes of the attempt, those on other nodes too. Raises NodesMissing."""
        if nodes is None:
            processes = processes_here(self.spec.processes_per_trial, self.request.environment)
            if processes != self.spec.processes_per_trial:
                self.log.info("this attempt trains with %s", plural(processes, "process", "processes"))
            with rank_group(start, Placement(processes), self._process) as group:
                yield group
            return
        with nodes:
            self.link.watch()
            elsewhere = nodes.begin(self.link.stop)
            with rank_group(start, nodes.placement, self._process, elsewhere, nodes.known_up_to) as group:
                yield group

    def _process(self, start: Start) -> AbstractContextManager[TrialChannel]:
        """Open the process of one rank; the lines of other ranks than the first name it."""
        if self.spec.isolation == "thread":
            return trial_in_place(start, self.log)
        rank = start.rank.rank
        log = rank_log(self.log, rank) if rank else self.log
        return self.link.process(start, log, self.request.environment)

    def _as_journaled(self, result: AttemptResult) -> AttemptResult:
        """Return the journaled end instead of a failure after the last commit, such as an exception in `cleanup`."""
        if not isinstance(result.outcome, AttemptEnded) or (ended := self._ended(result.experiment)) is None:
            return result
        why = visible(result.outcome.reason)
        self.log.warning("the trial had finished, and its last checkpoint was committed, when %s", why)
        return ended

    # ------------------------------------------------------------------------------------------- the journal

    def _experiments_journal(self) -> JournalWriter | AttemptResult:
        """Read the experiment's journal, which the run that requested the attempt has opened.

        Return its writer, after an attempt without a journaled end was closed; or the result of an ended trial.
        """
        spec, term = self.spec, self.request.search_term
        experiment = read_experiment(spec.target, spec.trial.of_experiment)
        if experiment.term != term:
            raise Superseded(
                f"{spec.journal}: owner {term} requested this attempt, and owner {experiment.term}, "
                f"{experiment.owner}, took over"
            )
        journal_writer = JournalWriter(spec.target, experiment, self.tasks.journal, self.link.wrote)
        if (ended := self._ended(experiment)) is not None:
            return ended
        if experiment.trial(self._name).phase is Phase.RUNNING:
            reason = make_reason("supervisor-failed")
            journal_writer.write([AttemptEnded(trial=self._name, cause=Cause.MACHINE, reason=reason)])
        self._carry_out(journal_writer)
        return journal_writer

    def _ended(self, experiment: Experiment) -> AttemptResult | None:
        """Return how the trial ended, if an earlier run of this attempt journaled its end; None otherwise."""
        trial = experiment.trial(self._name)
        if trial.phase is Phase.FINISHED:
            kind = trial.finish_kind or FinishKind.CRITERION
            return AttemptResult(Finished(trial=self._name, reason=trial.end_reason, kind=kind), experiment)
        if trial.phase is Phase.PAUSED:
            return AttemptResult(Paused(trial=self._name, reason=trial.end_reason), experiment)
        return None

    def _own_journal(self) -> JournalWriter | AttemptResult:
        """Open the trial's own journal, or create it, and take it over from an earlier writer.

        A request is carried out once its attempt has begun: running it again only makes a further attempt, if the
        trial has not ended.
        """
        self._require_same_experiment()
        spec, request, link, trial = self.spec, self.request, self.link, self._name
        carried_out = False

        def first(found: Experiment) -> Sequence[Event]:
            nonlocal carried_out
            carried_out = _are_carried_out(request, found, trial)
            if trial in found.trials:
                return ()
            added = TrialAdded(trial=trial, config=request.config, fingerprint=spec.fingerprint)
            if request.exploit is not None or link.stop.is_set():
                return (Adopted(), added)
            return (Adopted(), added, Started(trial=trial, attempt=1, from_step=0, at=self.meter.began_at))

        owner = current_owner(search_term=request.search_term, attempt=request.attempt)
        # A first attempt needs no read; but a request that waits in a queue may run twice, and outlive its experiment.
        known = LoadedJournal(nothing_yet(spec.journal)) if request.attempt == 1 and not request.experiment_id else None
        reached = {} if request.reached is None else {trial: request.reached}
        opening = Opening(owner, new_write_id(), first, link.wrote, known, reached)
        opened = open_journal(spec.target, spec.journal, opening)
        journal_writer = JournalWriter(spec.target, opened, write_directly, link.wrote)
        if carried_out:
            return self._ended(opened) or journal_writer
        self._carry_out(journal_writer)
        return journal_writer

    def _require_same_experiment(self) -> None:
        """Refuse a request whose experiment was deleted while it was queued.

        Raises:
            Superseded: there is no such experiment any more.
        """
        spec, wanted = self.spec, self.request.experiment_id
        name = spec.trial.experiment
        if not wanted or experiment_id(spec.target, spec.trial.of_experiment) == wanted:
            return
        raise Superseded(
            f"experiment {name!r} at {spec.target.uri} no longer exists: the one that requested attempt "
            f"{self.request.attempt} of trial {self._name!r} was deleted. Nothing was trained or written"
        )

    def _carry_out(self, journal_writer: JournalWriter) -> None:
        """Apply the request's changes before the attempt: quarantine, requeue, exploit."""
        state = journal_writer.experiment.trial(self._name)
        known = {each.sequence for each in state.checkpoints}
        events: list[Event] = [each for each in self.request.quarantines if each.sequence in known]
        if state.phase in ENDED:
            events.append(Requeued(trial=state.trial, reason=make_reason("attempt-requested")))
        if events:
            journal_writer.write(events)
        if self.request.exploit is not None:
            self._exploit(self.request.exploit, journal_writer)

    # --------------------------------------------------------------------------------------- the checkpoint

    def _exploit(self, exploit: Exploit, journal_writer: JournalWriter) -> None:
        """Clone the source's newest checkpoint that another step follows; if it has none, the trial's own.

        The new configuration trains at least one step, so that no result is shown beside a configuration without a
        part in it.
        """
        for source in (exploit.source, self._name):
            key = self.spec.trial.of_experiment.trial_key(source)
            try:
                cloned = self.tasks.clone(key, journal_writer.experiment, self.request.last_step)
                event = Cloned(
                    trial=self._name,
                    checkpoint=cloned.checkpoint,
                    source=cloned.source,
                    config=exploit.config,
                    reason=exploit.reason,
                )
                journal_writer.write([event])
            except (CheckpointCorrupt, CheckpointNotFound) as bad:
                self.log.warning("%s has nothing to exploit: %s", source, bad)
            else:
                return
        self.log.warning("neither it nor %s has a checkpoint to exploit", exploit.source)

    def _restore_newest(self, journal_writer: JournalWriter, destination: Path) -> Path | None:
        """Restore the newest checkpoint that verifies; quarantine those that do not, in the journal and in the log."""
        spec, name = self.spec, self._name
        _log_quarantined(journal_writer.experiment.trial(name), self.log)
        while (key := newest_key(spec.trial, journal_writer.experiment.trial(name))) is not None:
            try:
                return self.tasks.restore(key, destination)
            except (CheckpointCorrupt, CheckpointNotFound) as bad:
                reason = f"{type(bad).__name__}: {bad}"
                # If another process owns the trial, it may have retired the checkpoint: then this raises `Superseded`.
                journal_writer.write([Quarantined(trial=name, sequence=key.sequence, reason=reason)])
                self.log.error("step %d cannot be restored, and is quarantined: %s", key.step, bad)  # noqa: TRY400 - no trace: it is handled
        if lost := journal_writer.experiment.trial(name).lost_checkpoints:
            raise ResumeFailed(
                f"trial {name!r} of {spec.trial.experiment!r} at {spec.target.uri}: all its {lost} committed "
                "checkpoints are damaged or kill the trainable. Nothing was restarted from zero: repair the damaged "
                "objects and release the checkpoints (prefect-tune verify --release), or use another experiment name"
            )
        return None

    def _begin(self, journal_writer: JournalWriter, scratch: Path, restored: Path | None) -> Start:
        spec, request = self.spec, self.request
        trial = journal_writer.experiment.trial(self._name)
        reports = curve_up_to(spec, newest_checkpoint(trial))
        if trial.phase is not Phase.RUNNING:  # a trial's first attempt begins with the entry that opens its journal
            trial = journal_writer.write([next_start(trial, self.meter.began_at)]).trial(self._name)
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
            metrics_from=spec.metrics_from,
        )


def _are_carried_out(request: AttemptRequest, found: Experiment, trial: str) -> bool:
    """Whether the requested attempt has begun; one that an older request began does not count, whatever its number."""
    ordered = found.owner.attempt if found.owner else 0
    return trial in found.trials and 0 < request.attempt <= min(ordered, found.trial(trial).attempt)


def _log_quarantined(trial: Trial, log: Log) -> None:
    """Log the quarantined checkpoints newer than the one being resumed; nothing else reports them."""
    newest = newest_checkpoint(trial)
    for each in trial.quarantined_checkpoints:
        if each.checkpoint.sequence > (newest.sequence if newest else 0):
            where = f"step {newest.step}" if newest else "nothing"
            log.error(
                "step %d was quarantined; the trial resumes from %s: %s",
                *(each.checkpoint.step, where, visible(each.reason)),
            )


def _log_lost_steps(trial: Trial, log: Log) -> None:
    """Warn that trained steps are lost, if the trainable has not committed any checkpoint."""
    if trial.attempt and trial.step and trial.phase is not Phase.RUNNING and newest_checkpoint(trial) is None:
        log.warning(
            "no checkpoint was committed: its %s trained again; save%s",
            plural(trial.step, "step is", "steps are"),
            ", or use ASHA(variant='stopping')" if trial.phase is Phase.PAUSED else " checkpoints regularly",
        )


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
    last = CheckpointRef(sequence=0, **last_report(trial).model_dump())
    return meets(trial, stopper, lambda: curve_up_to(spec, last))


def meets(trial: Trial, stopper: Stopper, curve: Callable[[], Sequence[StepReport]]) -> bool:
    """As `has_had_enough`; `curve` returns the trial's reports, and is called only if the stopper looks back."""
    is_over = trial.finish_kind not in (None, FinishKind.CRITERION)
    if is_over or trial.metrics.get("done") is True:
        return True
    reports = curve() if stopper.looks_back else [last_report(trial)]
    return bool(reports) and stopper.why_stop(reports) is not None
