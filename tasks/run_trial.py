"""Run a trial: one attempt, from its newest good checkpoint to its end, its failure, or the request to stop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from prefect import task
from prefect.logging import get_run_logger

from prefect_tune.core.curve import curve
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, ResumeFailed, Superseded
from prefect_tune.core.events import AttemptEnded, Cause, CheckpointRef, Event, Quarantined, Started
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.journal import history
from prefect_tune.core.trial import Status, newest_checkpoint, newest_key
from prefect_tune.core.values import StepReport
from prefect_tune.core.wire import Start
from prefect_tune.stores.scratch import scratch_directory
from prefect_tune.stores.staging import side_by_side
from prefect_tune.tasks.attempt import Failed, Outcome, events_of, supervise
from prefect_tune.tasks.checkpoints import restore_checkpoint
from prefect_tune.tasks.experiment_state import read_experiment, write_entry
from prefect_tune.tasks.ledger import Ledger
from prefect_tune.tasks.plan import TrialPlan
from prefect_tune.tasks.transient import RETRYING
from prefect_tune.tasks.trial_artifacts import TrialArtifacts
from prefect_tune.tasks.trial_channel import Log, trial_in_place, trial_process

__all__ = ["AttemptResult", "curve_up_to", "run_trial"]


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended, and the experiment after its last journal entry."""

    outcome: Outcome
    experiment: Experiment


@task(name="run-trial", task_run_name="train {plan.trial.trial}", **RETRYING)
def run_trial(plan: TrialPlan, epoch: int, stop: threading.Event) -> AttemptResult:
    """Train one attempt of a trial in a process of its own, and journal how it ended.

    It remembers nothing: state is read from the target, so a retry of the task is an attempt more.
    Every checkpoint the trial hands over is persisted, then committed, then acknowledged to it.

    Args:
        epoch: the epoch in which the caller owns the experiment.
        stop: set it to have the trial save and end within `plan.grace`.

    Raises:
        Superseded: the experiment belongs to somebody else; the trial's process is gone.
        ResumeFailed: there are checkpoints, and none of them can be used.
        StoreUnavailable, CommitUnknown: the target failed for longer than the retries last.
    """
    log = get_run_logger()
    experiment = _owned(plan, epoch)
    if stop.is_set():
        return AttemptResult(Failed(Cause.PREEMPTED, "asked to stop before it began", at_start=False), experiment)
    with scratch_directory() as scratch:
        for folder in ("staging", "artifacts", "temporary"):
            (scratch / folder).mkdir()
        artifacts = TrialArtifacts(plan, scratch / "artifacts", log)
        experiment, restored = _restore_newest(plan, experiment, scratch / "restored", log)
        experiment, start = _begin(plan, experiment, scratch, restored)
        if start.attempt > 1:
            artifacts.bring_back(start.attempt)
        ledger = Ledger(plan, experiment, artifacts, log)
        open_channel = trial_process if plan.isolation == "process" else trial_in_place
        with open_channel(start, log) as channel:
            outcome = supervise(channel, ledger, plan, stop)
            channel.end()
            # Before the channel closes: a save that is under way still tells the trial, dead or not.
            ledger.close(lambda trial: events_of(trial.trial, outcome))
    return AttemptResult(outcome, ledger.experiment)


def _owned(plan: TrialPlan, epoch: int) -> Experiment:
    """The experiment as the journal has it, with an attempt that a retried task left unfinished closed."""
    experiment = read_experiment(plan.target, plan.trial.experiment)
    if experiment.epoch != epoch:
        raise Superseded(
            f"experiment {experiment.name!r}: epoch {epoch} has ended; it was taken over by {experiment.owner}"
        )
    trial = experiment.trial(plan.trial.trial)
    if trial.status is not Status.RUNNING:
        return experiment
    lost = AttemptEnded(trial=trial.trial, cause=Cause.MACHINE, message="its supervisor failed, and was retried")
    return _write(plan, experiment, [lost])


def _restore_newest(
    plan: TrialPlan, experiment: Experiment, destination: Path, log: Log
) -> tuple[Experiment, Path | None]:
    """Restore the newest checkpoint that verifies; those that do not are put aside, in the journal and aloud."""
    while (key := newest_key(plan.trial, experiment.trial(plan.trial.trial))) is not None:
        try:
            timeout = plan.sync.sync_timeout_seconds
            return experiment, restore_checkpoint(plan.target, key, destination, timeout_seconds=timeout)
        except (CheckpointCorrupt, CheckpointNotFound) as bad:
            log.error("step %d cannot be restored, and is put aside: %s", key.step, bad)  # noqa: TRY400 - no trace: it is handled
            reason = f"{type(bad).__name__}: {bad}"
            aside = Quarantined(trial=plan.trial.trial, sequence=key.sequence, reason=reason)
            experiment = _write(plan, experiment, [aside])
    if lost := experiment.trial(plan.trial.trial).lost_checkpoints:
        raise ResumeFailed(
            f"trial {plan.trial.trial!r} of {experiment.name!r} at {plan.target.uri}: all its {lost} committed "
            "checkpoints are damaged or kill the trainable. Nothing was started afresh: mend what they need, "
            "or start again under another experiment name"
        )
    return experiment, None


def _begin(plan: TrialPlan, experiment: Experiment, scratch: Path, restored: Path | None) -> tuple[Experiment, Start]:
    trial = experiment.trial(plan.trial.trial)
    from_ref = newest_checkpoint(trial)
    told = curve_up_to(plan, from_ref)
    started = Started(
        trial=trial.trial,
        attempt=trial.attempt + 1,
        from_step=from_ref.step if from_ref else 0,
        from_sequence=from_ref.sequence if from_ref else None,
    )
    experiment = _write(plan, experiment, [started])
    trial = experiment.trial(plan.trial.trial)
    return experiment, Start(
        experiment=experiment.name,
        trial=trial.trial,
        attempt=trial.attempt,
        trainable=plan.trainable,
        stopper=plan.stopper,
        import_path=tuple(sys.path),
        config=trial.config,
        directory=str(scratch / "artifacts"),
        staging=str(scratch / "staging"),
        temporary=str(scratch / "temporary"),
        restored=str(restored) if restored else None,
        from_step=trial.step,
        trained_seconds=trial.trained_seconds,
        curve=tuple(told),
        cadence=plan.cadence,
        overlap=plan.sync.commit == "async",
    )


def curve_up_to(plan: TrialPlan, start: CheckpointRef | None) -> Sequence[StepReport]:
    """The reports that count so far, for a stopper that looks back; the whole journal is read only for such a one."""
    if start is None:
        return ()
    last = StepReport(step=start.step, metrics=start.metrics, trained_seconds=start.trained_seconds)
    if not plan.needs_curve:
        return (last,)
    with plan.target.open(timeout=timedelta(minutes=5)) as store, side_by_side() as transfers:
        told = curve(history(store, plan.trial.experiment, side_by_side=transfers), plan.trial.trial)
    return [report for report in told if report.step <= start.step]


def _write(plan: TrialPlan, experiment: Experiment, events: Sequence[Event]) -> Experiment:
    return write_entry(plan.target, experiment, events)
