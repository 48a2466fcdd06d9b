"""`pt.tune`: the flow of a hyperparameter search, resumable at any point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Cadence, Retention
from prefect_tune.core.values import INTEGER_VALIDATOR, ExperimentName, Number, WholeNumber
from prefect_tune.parameters.forms import (
    CallbacksField,
    ConfigField,
    MetricField,
    ModeField,
    RerunField,
    ResourcesField,
    ResumeField,
    SchedulerField,
    SearchField,
    StopField,
    SyncField,
    TargetField,
    TrainableField,
    WarmStartField,
)
from prefect_tune.prefect_api.flow_with_server import flow_with_server, showing_search_output

if TYPE_CHECKING:
    from prefect_tune.results import Results

__all__ = ["tune"]


@flow_with_server(name="tune", persist_result=False, call_context=showing_search_output)
def tune(
    trainable: TrainableField,
    space: ConfigField = None,
    *,
    target: TargetField,
    experiment: ExperimentName | None = None,
    metric: MetricField = None,
    mode: ModeField = None,
    num_samples: WholeNumber | None = None,
    samples_per_run: WholeNumber | None = None,
    stop: StopField = None,
    scheduler: SchedulerField = None,
    search: SearchField = None,
    seed: Annotated[int, Field(ge=0), INTEGER_VALIDATOR] | None = None,
    time_budget_seconds: Number | None = None,
    max_concurrent_trials: WholeNumber | None = None,
    resources_per_trial: ResourcesField = None,
    resources_total: ResourcesField = None,
    checkpoint: Cadence | None = None,
    retention: Retention | None = None,
    failures: FailurePolicy | None = None,
    fail_fast: bool | None = None,
    allow_missing_metric: bool = False,
    resume: ResumeField = "auto",
    rerun_errored: RerunField = False,
    warm_start: WarmStartField = None,
    on_code_change: Literal["warn", "refuse"] = "warn",
    trials: Literal["tasks", "deployment"] = "tasks",
    trial_deployment: str = "train-trial/train-trial",
    trial_job_variables: dict[str, Any] | None = None,
    trial_tags: list[str] | None = None,
    concurrency_limits: list[str] | None = None,
    sync: SyncField = None,
    callbacks: CallbacksField = None,
    isolation: Literal["process", "thread"] = "process",
    processes_per_trial: WholeNumber | tuple[WholeNumber, WholeNumber] = 1,
    nodes_per_trial: WholeNumber = 1,
    min_nodes: WholeNumber | None = None,
    metrics_from: Literal["rank 0", "mean"] = "rank 0",
    reuse: Literal["auto", "never"] = "auto",
    grace_period_seconds: Number = 25,
    silence_timeout_seconds: Number | None = None,
) -> Results:
    """Search `space` for the configuration with which `trainable` performs best; resume the experiment if it exists.

    Every proposal and every decision is in the experiment's journal on `target` before it takes effect. In a later
    run with the same experiment name, however that run is started, interrupted trials continue from their newest
    committed checkpoints, and the search proposes the same configurations as without the interruption.

    ```python
    space = {"lr": pt.loguniform(1e-4, 0.1), "layers": pt.choice([1, 2])}
    results = pt.tune(train, space, target="runs", experiment="digits", metric="loss")
    ```

    Args:
        trainable: `package.module:Name`, installed where the flow runs; in code also the function
            `train(config)` or the subclass of `pt.Trainable` itself.
        space: a configuration in which some values are sampled. In JSON `{"lr": {"loguniform": [1e-4, 0.1]},
            "layers": {"choice": [1, 2]}, "batch": 32}`, in code `{"lr": pt.loguniform(1e-4, 0.1)}`, or a dataclass:
            trials get a dict of its fields. Default: no sampled values, for a `search` that proposes all parameters
            itself, or a trainable without parameters.
        target: where checkpoints and state are stored. An absolute path or URI, such as `s3://bucket/runs`, the
            `type/name` of a saved block, such as `s3-target/prod`, or the block; in a script also a relative path. Put
            secrets into a block: its secret fields are hidden.
        experiment: name of the experiment on the target. Reusing a name resumes the experiment. Default: the id of
            the flow run, so that *Retry* resumes. In your own flow, the first call uses the id of the outermost flow
            run, and each further call uses a name that begins with this id.
        metric: the reported metric to compare trials by, such as `loss`, or `eval/loss` if it is nested; or several.
        mode: whether the metric is minimized (`min`) or maximized (`max`); one mode for all metrics, or one for each.
            Default: `min`, with a warning for a name such as `accuracy`.
        num_samples: total number of configurations to try; with a grid, how many times each point is tried. Default:
            the `num_samples` of `search`; without `search`, 1 if all sampled values are grids, otherwise 10.
        samples_per_run: how many samples each scheduled run adds to the samples of earlier runs, instead of a total in
            `num_samples`. Unfinished samples come first. A restart (Retry, Resume, automation) adds no samples.
        stop: a trial is finished when a metric reaches a limit (`>=`, like Ray), such as `{"step": 100}`. Limits of the
            experiment end the search, such as `MaxFailures` in `{"step": 100, "MaxFailures": {"failures": 5}}`; in code
            `pt.MaxSteps(100) | pt.MaxFailures(5)`.
        scheduler: ends poor trials early. In JSON `{"ASHA": {"max_t": 81}}`, in code `pt.ASHA(max_t=81)`.
            Default: all trials continue.
        search: the search algorithm. In JSON `{"OptunaSearch": {"num_samples": 40}}`. Default: random search and grids.
        seed: seed of all random draws, 0 or more. Default: derived from the experiment's name.
        time_budget_seconds: seconds after which all trials save and the run ends; another run continues. Default: none.
        max_concurrent_trials: how many trials train at once. Default: one trial for each CPU, or as many trials as fit
            with their `resources_per_trial`. Never more than `max_workers` of the flow's `ThreadPoolTaskRunner`.
        resources_per_trial: resources of each trial: `{"cpu": 2, "gpu": 1}`; GPUs may be fractional. On this machine
            trials wait for free resources, and see only their GPUs (CUDA_VISIBLE_DEVICES); Dask and Ray schedule trials
            by these resources.
        resources_total: resources of this machine that trials may use, if not all: `{"cpu": 8, "gpu": 2}`.
        checkpoint: when a class trainable saves. Default: every 60 s and at the end.
        retention: which checkpoints of a trial are kept. Default: all.
        failures: the retry budgets of a trial. Default: 0 for its own failures, 10 for failures of the machine.
        allow_missing_metric: whether reports may lack the metric. By default, a report that lacks it fails the trial.
        fail_fast: whether the first trial that errors ends the experiment; the other trials save and can be resumed.
            None: the same error in three trials ends the experiment, if no trial has reported a second step.
        resume: `auto` resumes the experiment if it exists, and begins it otherwise; `must` (or true) requires that it
            exists, `never` (or false) that it does not exist. Ray's values, such as `auto+errored`, are also accepted.
        rerun_errored: retry trials that errored in an earlier run, with their configurations; `only` trains only these.
        warm_start: experiments whose finished trials the search learns from: names on the same target, or
            `s3://bucket/folder/name`. The trials are copied to this experiment's journal, but do not count as samples.
        on_code_change: whether to `warn` or to `refuse` if the source of the experiment's trainable has changed.
        trials: `tasks` runs trials on the flow's task runner (threads, Dask, Ray); `deployment` starts a flow run for
            each attempt, on the work pool of `trial_deployment`.
        trial_deployment: a deployment of `prefect_tune.flows.train_trial.train_trial`, named as `flow/deployment`.
        trial_job_variables: job variables of the trials' flow runs, such as CPU and memory, named as in the work pool.
        trial_tags: tags of each attempt's task run, and of its flow run if it has one. Prefect's limits by tag apply.
        concurrency_limits: names of Prefect's global concurrency limits; each attempt waits for a slot of each.
        sync: periods and timeouts in seconds, and artifacts; with `commit="async"`, training continues during uploads.
        callbacks: callbacks on events of the trials: `package.module:Name`; in code also `pt.FileLogger()`.
        isolation: `process` trains each trial in a child process; `thread` trains it in this process, for debuggers.
        processes_per_trial: how many processes train a trial together, each with the whole trainable and a rank in the
            environment variables of `torch.distributed`; `pt.get_trial().rank` is the rank. `(1, 8)`: as many processes
            as the attempt has GPUs, or CPUs if it has no GPUs, at least 1 and at most 8.
        nodes_per_trial: how many nodes train a trial together; the nodes share only the target. Each node has
            `processes_per_trial` ranks, and is a flow run (with `trials="deployment"`), or a task on Dask or Ray.
        min_nodes: number of nodes with which an attempt begins if the others have not begun after 2 minutes.
            Default: all.
        metrics_from: which metrics a step of several processes reports: the metrics of `rank 0`; or, for each number
            that every rank reports, the `mean` over all ranks.
        reuse: how trials share the import of the trainable's module. `auto`: one process imports the module, and trials
            are forked from this process if that is safe; `never`: each trial's process imports the module.
        grace_period_seconds: seconds that trials may take to save after the search stops; increase it for longer steps.
        silence_timeout_seconds: seconds without a report after which a hung trial is restarted. Default: never.

    Returns:
        Results: the best configuration and its checkpoint, every trial, every error.

    Raises:
        InvalidInput: a parameter is not valid; nothing was started.
        Superseded: another run has taken over the experiment.
        ResumeFailed: the experiment cannot be read, or does not exist although `resume="must"` requires it.
        SearchFailed: every trial errored, or three errored in the same way before any trial reported a second
            step; the Results are in the error's `results`. The flow run ends Failed.
        CrashLoop: automations restarted this run too often without progress.
        StoreUnavailable: the target did not answer for too long. Run the flow again to continue.
        StoreRefused: the target refused requests (wrong credentials) at the start or for too long; run the flow again.
    """
    parameters = dict(locals())  # each parameter is a field of `SearchPlan`
    # Imported here, since only calls need these modules; `flow_with_server` imports them while the server starts.
    from prefect_tune.ownership import with_experiment_name
    from prefect_tune.parameters.search_plan import SearchPlan
    from prefect_tune.tuner.run_search import run_search

    plan = SearchPlan(**parameters)
    return run_search(with_experiment_name(plan) if experiment is None else plan)
