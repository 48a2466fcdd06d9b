"""The flow that trains one trial durably: restore, train, persist each checkpoint, commit, sync, repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from prefect_tune.core.display_text import first_line, pluralize, shorten
from prefect_tune.core.errors import TrialFailed
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Cadence, Retention
from prefect_tune.core.experiment.summary import format_recomputed_steps, format_status
from prefect_tune.core.experiment.trial_transitions import Status, newest_checkpoint_key
from prefect_tune.core.page_elements import Cell, Table, Text, Verbatim, make_values_table, render_notebook_cell
from prefect_tune.core.renamed import RenamedMembers
from prefect_tune.core.values import ExperimentName, Number, WholeNumber, flatten
from prefect_tune.parameters.forms import ConfigField, StopField, SyncField, TargetField, TrainableField
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.flow_runs import make_failed_result
from prefect_tune.prefect_api.flow_with_server import flow_with_server, showing_search_output
from prefect_tune.runtime.checkpoint import Checkpoint

__all__ = ["TrialResult", "durable_trainable"]


@dataclass(frozen=True)
class TrialResult(RenamedMembers):
    """The state of `trial` in `experiment` at the end of the flow run that trained it."""

    _renamed: ClassVar[Mapping[str, str]] = {"wasted_steps": "recomputed_steps"}

    experiment: str
    trial: str
    status: Status
    """The trial's status, such as completed, interrupted or errored."""
    reason: str
    """Why the trial has this status."""
    step: int
    """Number of trained steps; repeated steps count once."""
    metrics: Mapping[str, Any]
    """The metrics of the last report."""
    checkpoint: Checkpoint | None
    """The newest committed checkpoint; None if none was committed."""
    attempts: int
    """Number of attempts in all runs."""
    recomputed_steps: int
    """Number of steps that are known to have been trained again."""
    recomputed_is_lower_bound: bool
    """Whether more steps may have been trained again, because a run ended before it journaled its last reports."""

    def _repr_html_(self) -> str:
        """Return the result for a notebook."""
        facts: dict[str, Cell] = {
            "trained": f"{self.step:,} steps in {pluralize(self.attempts, 'attempt', 'attempts')}",
            "recomputed": format_recomputed_steps(self.recomputed_steps, at_least=self.recomputed_is_lower_bound),
            "reason": shorten(first_line(self.reason), 300),
            "checkpoint": Verbatim(str(self.checkpoint)) if self.checkpoint else "none",
        }
        return render_notebook_cell(
            Text([f"{self.experiment} · {format_status(self.status, self.step)}"], kind="strong"),
            make_values_table("metric", flatten(self.metrics)),
            Table((), [(name, cell) for name, cell in facts.items() if cell]),
        )


@flow_with_server(name="durable-trainable", persist_result=False, call_context=showing_search_output)
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
    processes_per_trial: WholeNumber | tuple[WholeNumber, WholeNumber] = 1,
    metrics_from: Literal["rank 0", "mean"] = "rank 0",
    grace_period_seconds: Number = 25,
    silence_timeout_seconds: Number | None = None,
) -> TrialResult:
    """Train `trainable` until it is done, across failures of the process, the machine or the network.

    Every checkpoint is persisted on `target` before it is committed. A later run with the same
    experiment name, however that run is started, resumes from the newest committed checkpoint; if the
    trial has already finished, the flow returns the trial's result without training.

    ```python
    result = pt.durable_trainable(train, {"lr": 0.01}, target="runs", experiment="first-model")
    ```

    Args:
        trainable: the code to train: `package.module:Name`, installed where the flow runs; in code also the function
            `train(config)` or the subclass of `pt.Trainable` itself.
        config: the configuration of the trainable, such as `{"lr": 0.01, "layers": 3}`; in code also a dataclass:
            the trainable gets a dict of its fields.
        target: where checkpoints and state are stored: an absolute path or URI, such as `s3://bucket/runs`, the
            `type/name` of a saved block, such as `s3-target/prod`, or the block; in a script also a relative path. Put
            credentials into blocks, which hide them.
        experiment: name of the experiment on the target. Reusing a name resumes the training. Default: the id of the
            flow run, so that *Retry* resumes. In your own flow, the first call uses the id of the outermost flow run,
            and each further call uses a name that begins with this id.
        stop: limits of metrics, such as `{"step": 100}`; the training stops when a metric is `>=` its limit. In code
            also a function of the metrics, or a stopper. Default: the training stops when the trainable is done.
        checkpoint: when a class trainable saves. Default: every 60 s and at the end.
        retention: which checkpoints to keep. Default: all.
        failures: the budgets of retries. Default: 0 for failures of the trainable, 10 for failures of the machine.
        sync: periods and timeouts in seconds, and artifacts; with `commit="async"`, training continues during uploads.
        isolation: `process` trains in a child process; `thread` trains in this process, for debuggers.
        processes_per_trial: how many processes train together, each with the whole trainable and a rank in the
            environment variables of `torch.distributed`; `pt.get_trial().rank` is the rank. `(1, 8)`: as many processes
            as the attempt has GPUs, or CPUs if it has no GPUs, at least 1 and at most 8.
        metrics_from: which metrics a step of several processes reports: the metrics of `rank 0`; or, for each number
            that every rank reports, the `mean` over all ranks.
        grace_period_seconds: seconds that the trial may take to save after SIGTERM or a cancellation.
        silence_timeout_seconds: seconds without a report after which a hung trial is restarted. Default: never.

    Returns:
        TrialResult: step, metrics and newest checkpoint of the finished trial.

    Raises:
        InvalidInput: an argument is invalid, or does not fit the experiment; nothing was started.
        TrialFailed: a retry budget is used up. Fix the cause, then run the flow again to continue.
        Superseded: another run has taken over the experiment.
        ResumeFailed: the experiment exists and cannot be read.
        CrashLoop: automations restarted this run repeatedly, without progress.
        StoreUnavailable: the target did not answer for too long. Run the flow again to continue.
        StoreRefused: the target refused requests (wrong credentials) at the start or for too long; run the flow again.
    """
    parameters = dict(locals())  # all parameters except `config` are fields of `SearchPlan`
    parameters.pop("config")
    from prefect_tune.ownership import with_experiment_name  # imported here, since only calls need these modules
    from prefect_tune.tuner.run_training import run_training

    plan = SearchPlan(**parameters)
    outcome = run_training(with_experiment_name(plan, config) if experiment is None else plan, config)
    if isinstance(outcome, TrialFailed):
        return make_failed_result(outcome, TrialResult)
    spec, trial = outcome
    return TrialResult(
        experiment=spec.trial.experiment,
        trial=trial.id,
        status=trial.status,
        reason=trial.reason,
        step=trial.step,
        metrics=trial.metrics,
        checkpoint=spec.target.checkpoint(key) if (key := newest_checkpoint_key(spec.trial, trial)) else None,
        attempts=trial.attempt,
        recomputed_steps=trial.recomputed_steps,
        recomputed_is_lower_bound=trial.recomputed_is_lower_bound,
    )
