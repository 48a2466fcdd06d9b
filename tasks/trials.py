"""The task that runs one attempt of a trial, and the tasks that the attempt calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger

from prefect_tune.attempt.attempt import Attempt
from prefect_tune.attempt.attempt_tasks import ClonedCheckpoint, SavedCheckpoint
from prefect_tune.attempt.concurrency_slots import holding_concurrency_limits
from prefect_tune.attempt.outcomes import Failed, log_failure, state_of
from prefect_tune.attempt.processes.process_output import Log, TrialLog
from prefect_tune.attempt.search_link import SearchLink
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.blocks import StorageTarget
from prefect_tune.core.checkpoints.commit import Reverification
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.checkpoints.parts import PartsOfSave
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial, parent_of_next, reused_from
from prefect_tune.core.journal_events import Event
from prefect_tune.core.models import Stamp
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.journal_access import new_write_id
from prefect_tune.prefect_api.broken_log_pipe import outlive_log_reader
from prefect_tune.prefect_api.task_runs import RUN_TRIAL, quiet_inner_tasks, run_here
from prefect_tune.storage_retries import RETRYING, retrying_refusals, skip_prefect_introspection
from prefect_tune.tasks.checkpoints import clone_checkpoint, delete_checkpoint, restore_checkpoint, save_checkpoint
from prefect_tune.tasks.experiment_state import write_entry


@task(name=RUN_TRIAL, task_run_name="train {spec.trial.trial} · attempt {request.attempt}", **RETRYING)
def run_trial(spec: TrialSpec, request: AttemptRequest, link: SearchLink) -> State[Any]:
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
    log = _log_of(spec)
    with (
        quiet_inner_tasks(),
        retrying_refusals(),
        closing(link),
        holding_concurrency_limits(spec.concurrency_limits, link.stop),
    ):
        ended = Attempt(spec, request, link, TasksOfAttempt(spec), log).run()
    if isinstance(ended.outcome, Failed):
        number = ended.experiment.trial(spec.trial.trial).attempt
        log_failure(ended.outcome, number, spec, request.search_term, log)
    return state_of(ended.outcome, spec.trial.trial)


def _log_of(spec: TrialSpec) -> Log:
    """Return the log of the task run; each message of a search's trial names the trial."""
    log = get_run_logger()
    return TrialLog(log, f"trial {spec.trial.trial}") if spec.own_journal else log


@dataclass(frozen=True, slots=True)
class TasksOfAttempt:
    """The `AttemptTasks` of attempts of one trial, as task runs within the calling task."""

    spec: TrialSpec

    def save(  # noqa: PLR0913, PLR0917 - as `AttemptTasks`
        self,
        key: CheckpointKey,
        directory: Path,
        about: About,
        before: Trial,
        reverification: Reverification,
        parts: PartsOfSave | None = None,
    ) -> SavedCheckpoint:
        return run_here(
            save_checkpoint,
            skip_prefect_introspection(self.spec.target),
            skip_prefect_introspection(key),
            directory,
            skip_prefect_introspection(about),
            parent=skip_prefect_introspection(parent_of_next(self.spec.trial, before)),
            collected_up_to=reused_from(before),
            reverification=reverification,
            parts=skip_prefect_introspection(parts),
            timeout_seconds=self.spec.sync.sync_timeout_seconds,
        )

    def clone(self, source: TrialKey, into: Experiment, last_step: int | None) -> ClonedCheckpoint:
        into = skip_prefect_introspection(into)
        trial = self.spec.trial.trial
        return clone_checkpoint(self.spec.target, source, into, trial, new_write_id(), last_step=last_step)

    def restore(self, key: CheckpointKey, destination: Path) -> Path:
        timeout_seconds = self.spec.sync.sync_timeout_seconds
        return restore_checkpoint(self.spec.target, key, destination, timeout_seconds=timeout_seconds)

    def delete(self, state: Trial, retired: Sequence[CheckpointKey]) -> None:
        delete_checkpoint(self.spec.target, self.spec.trial, skip_prefect_introspection(state), retired)

    def journal(
        self, target: StorageTarget, experiment: Experiment, events: Sequence[Event], stamp: Stamp | None
    ) -> Experiment:
        return write_entry(target, experiment, events, stamp)
