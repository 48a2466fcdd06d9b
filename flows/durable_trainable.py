"""The flow that trains one trial durably: restore, train, persist each checkpoint, commit, sync, repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Cadence, Retention
from prefect_tune.core.experiment.summary import status_label, wasted_words
from prefect_tune.core.experiment.trial_transitions import Status, newest_key
from prefect_tune.core.page_elements import Cell, Table, Text, Verbatim, cell_html, values_table
from prefect_tune.core.shown_text import first_line, plural, shorten
from prefect_tune.core.values import ExperimentName, Number, Whole, flat
from prefect_tune.parameters.forms import (
    ConfigField,
    StopField,
    SyncField,
    TargetField,
    TrainableField,
)
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.flow_runs import failed_by
from prefect_tune.prefect_api.flow_with_server import flow_with_server, search_output
from prefect_tune.runtime.checkpoint import Checkpoint

__all__ = ["TrialResult", "durable_trainable"]


@dataclass(frozen=True)
class TrialResult:
    """The state of a `trial` of an `experiment` when its flow run ends."""

    experiment: str
    trial: str
    status: Status
    """For example completed, interrupted or errored."""
    reason: str
    """Why it has this status."""
    step: int
    """Steps trained, each counted once."""
    metrics: Mapping[str, Any]
    """Of the last report."""
    checkpoint: Checkpoint | None
    """The newest committed one; None if none was committed."""
    attempts: int
    """Number of attempts, over all runs."""
    wasted_steps: int
    """Steps that are known to have been trained again."""
    wasted_at_least: bool
    """Whether they may be more: a run vanished, and its last reports with it."""

    def _repr_html_(self) -> str:
        """Return the result for a notebook."""
        facts: dict[str, Cell] = {
            "trained": f"{self.step:,} steps in {plural(self.attempts, 'attempt', 'attempts')}",
            "trained again": wasted_words(self.wasted_steps, at_least=self.wasted_at_least),
            "reason": shorten(first_line(self.reason), 300),
            "checkpoint": Verbatim(str(self.checkpoint)) if self.checkpoint else "none",
        }
        return cell_html(
            Text([f"{self.experiment} · {status_label(self.status, self.step)}"], kind="strong"),
            values_table("metric", flat(self.metrics)),
            Table((), [(name, cell) for name, cell in facts.items() if cell]),
        )


@flow_with_server(name="durable-trainable", persist_result=False, call_context=search_output)
def durable_trainable(
    trainable: TrainableField,
    config: ConfigField = None,
    *,
    target: TargetField,
    experiment: ExperimentName | None = None,
    stop: StopField = None,
    checkpoint: Cadence | None = None,
    retention: Retention | None = None,
    failures: FailurePolicy | None = None,
    sync: SyncField = None,
    isolation: Literal["process", "thread"] = "process",
    processes_per_trial: Whole | tuple[Whole, Whole] = 1,
    metrics_from: Literal["rank 0", "mean"] = "rank 0",
    grace_period_seconds: Number = 25,
    silence_timeout_seconds: Number | None = None,
) -> TrialResult:
    """Train `trainable` until it is done, across failures of the process, the machine or the network.

    Every checkpoint is persisted on `target` before it is committed. Started again with the same
    experiment name, by whatever means, the flow resumes from the newest committed checkpoint; a trial
    that has finished is returned at once.

    Args:
        trainable: the code to train: `package.module:Name`, installed where the flow runs; in code also the function
            `train(config)` or the subclass of `pt.Trainable` itself.
        config: the configuration of the trainable, such as `{"lr": 0.01, "layers": 3}`; in code also a dataclass:
            it gets a dict of its fields.
        target: where checkpoints and state are stored: an absolute path or URI, such as `s3://bucket/runs`, the
            `type/name` of a saved block, such as `s3-target/prod`, or the block; in a script also a relative path. Put
            credentials into blocks, which hide them.
        experiment: its name on the target. Reusing a name resumes the training. Default: the id of the flow run,
            so that a Retry of it resumes. In a flow of your own, the first call has the id of the outermost flow run,
            and each other one has a name of its own that begins with it.
        stop: when to stop: `{"step": 100}` or other limits (stop at `>=`); in code also a function of the
            metrics, or a stopper. Default: when the trainable is done.
        checkpoint: when a class trainable saves. Default: every 60 s and at the end.
        retention: which checkpoints to keep. Default: all.
        failures: the two retry budgets. Default: none for the trainable's own failures, 10 for the machine's.
        sync: periods and timeouts in seconds, artifacts, and `commit="async"`, to continue training during an upload.
        isolation: `process` trains in a child process; `thread` in this one, for debuggers.
        processes_per_trial: how many processes train together, each with the whole trainable and a rank, as
            `torch.distributed` takes it from the environment; `pt.get_trial().rank` is its number. `(1, 8)`: in each
            attempt as many as there are GPUs, or processors where there are none, at least 1 and at most 8.
        metrics_from: the metrics of a step of several processes: those of `rank 0`, or the `mean` over all ranks of
            each number that every rank reports.
        grace_period_seconds: seconds that the trial may take to save once SIGTERM or a cancellation arrives.
        silence_timeout_seconds: seconds without a report after which the trial is considered hung and is restarted.
            Default: never.

    Returns:
        TrialResult: step, metrics and newest checkpoint of the finished trial.

    Raises:
        InvalidInput: an argument is invalid, or does not fit the experiment; nothing was started.
        TrialFailed: a retry budget is spent. Fix the cause and run the flow again: it resumes.
        Superseded: another run has taken the experiment over.
        ResumeFailed: the experiment exists and cannot be read.
        CrashLoop: automations restarted this run repeatedly, without progress.
        StoreUnavailable: the target did not answer for too long. Run the flow again: it resumes.
        StoreRefused: the target refuses requests, for example because of the credentials: from the start, or for too
            long. Run the flow again: it resumes.
    """
    given = dict(locals())  # the parameters; the fields of `SearchPlan` have the same names, except `config`
    given.pop("config")
    from prefect_tune.ownership import name_by_call
    from prefect_tune.tuner.run_training import trained  # flow_with_server imports it while its server starts

    plan = SearchPlan(**given)
    found = trained(name_by_call(plan, config) if experiment is None else plan, config)
    if isinstance(found, TrialFailed):
        return failed_by(found, TrialResult)
    spec, trial = found
    return TrialResult(
        experiment=spec.trial.experiment,
        trial=trial.trial,
        status=trial.status,
        reason=trial.reason,
        step=trial.step,
        metrics=trial.metrics,
        checkpoint=spec.target.checkpoint(key) if (key := newest_key(spec.trial, trial)) else None,
        attempts=trial.attempt,
        wasted_steps=trial.wasted_steps,
        wasted_at_least=trial.wasted_at_least,
    )
