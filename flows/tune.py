"""A search: many trials, proposed, scheduled, each as durable as a single one; resumed exactly."""

from __future__ import annotations

from typing import Any, Literal

from prefect_tune.core.cadence import Cadence
from prefect_tune.core.failures import FailurePolicy
from prefect_tune.core.retention import Retention
from prefect_tune.flows.asked import Asked
from prefect_tune.flows.extending import require_one_count
from prefect_tune.flows.forms import (
    CallbacksField,
    MetricField,
    ModeField,
    RerunField,
    ResumeField,
    SyncField,
    TargetField,
    TrainableField,
)
from prefect_tune.flows.own_server import flow_with_server
from prefect_tune.flows.results import Results

__all__ = ["tune"]


@flow_with_server(name="tune", persist_result=False)
def tune(
    trainable: TrainableField,
    space: dict[str, Any] | None = None,
    *,
    target: TargetField,
    experiment: str | None = None,
    metric: MetricField = None,
    mode: ModeField = "min",
    num_samples: int | None = None,
    samples_per_run: int | None = None,
    stop: Any = None,
    scheduler: Any = None,
    search: Any = None,
    seed: int | None = None,
    time_budget_seconds: float | None = None,
    max_concurrent_trials: int | None = None,
    resources_per_trial: dict[str, float] | None = None,
    resources_total: dict[str, float] | None = None,
    checkpoint: Cadence | None = None,
    retention: Retention | None = None,
    failures: FailurePolicy | None = None,
    fail_fast: bool = False,
    resume: ResumeField = "auto",
    rerun_errored: RerunField = False,
    warm_start: list[str] | None = None,
    on_code_change: Literal["warn", "refuse"] = "warn",
    trials: Literal["tasks", "deployment"] = "tasks",
    trial_deployment: str = "train-trial/train-trial",
    trial_job_variables: dict[str, Any] | None = None,
    trial_tags: list[str] | None = None,
    concurrency_limits: list[str] | None = None,
    sync: SyncField = None,
    callbacks: CallbacksField = None,
    isolation: Literal["process", "thread"] = "process",
    grace_period_seconds: float = 25,
    silence_timeout_seconds: float | None = None,
) -> Results:
    """Search `space` for the configuration with which `trainable` does best; go on wherever an earlier run ended.

    Every proposal and every decision is in the journal on `target` before it is acted on, and every
    trial has a journal of its own. Started again with the same experiment name, by whatever means,
    trials that were cut off go on from their newest committed checkpoints, and the search proposes
    what it would have proposed.

    Args:
        trainable: what is trained: `package.module:Name`, installed where the flow runs; in code also the function
            `train(config)` or the subclass of `pt.Trainable` itself.
        space: a configuration in which some values are drawn. In JSON `{"lr": {"loguniform": [1e-4, 0.1]},
            "layers": {"choice": [1, 2]}, "batch": 32}`, in code `{"lr": pt.loguniform(1e-4, 0.1)}`.
        target: where checkpoints and state live. A URI such as `s3://bucket/runs`, the `type/name` of a saved block,
            such as `s3-target/prod`, or the block. Secrets belong into blocks, where nobody sees them.
        experiment: its name on the target; the same name goes on. Default: the id of the root flow run, which a Retry
            keeps.
        metric: the reported metric that trials are compared by, such as `loss`, or `eval/loss` where it is nested; or
            several.
        mode: whether a small metric is good (`min`), or a large one (`max`); one for all, or one for each.
        num_samples: how many configurations are tried in all; with a grid, how often each point. Default: 10, for a
            grid alone (nothing else is drawn) 1, or what `search` says.
        samples_per_run: in place of `num_samples`: how many this run adds to those of earlier runs, for a schedule.
            What these left over comes first. A run that is started again (Retry, Resume, automation) adds nothing more.
        stop: when a trial has had enough: `{"step": 100}` or other limits of metrics, reached from below (`>=`, as
            Ray's). The experiment too: `{"step": 100, "MaxFailures": {"failures": 5}}`; in code
            `pt.MaxSteps(100) | pt.MaxFailures(5)`.
        scheduler: who decides which trials go on. In JSON `{"ASHA": {"max_t": 81}}`, in code `pt.ASHA(max_t=81)`.
            Default: all go on.
        search: who proposes. In JSON `{"OptunaSearch": {"num_samples": 40}}`. Default: random search, and grids.
        seed: what all draws hang on. Default: one that hangs on the experiment's name.
        time_budget_seconds: seconds, after which everything in this run saves and ends; running it again goes on.
            Default: none.
        max_concurrent_trials: how many train at once. Default: one for each processor, or for each that has what it
            needs.
        resources_per_trial: what each trial has for itself: `{"cpu": 2, "gpu": 1}`; of a GPU also a part. On this
            machine trials wait until it is free, and see only their GPUs (CUDA_VISIBLE_DEVICES); Dask and Ray are told.
        resources_total: what this machine may give, where that is not all that is found: `{"cpu": 8, "gpu": 2}`.
        checkpoint: when a class trainable saves. Default: every 60 s and at the end.
        retention: which checkpoints of a trial stay. Default: all.
        failures: the retry budgets of a trial. Default: none for its own failures, 10 for the machine's.
        fail_fast: end the experiment at the first trial that errors; the others save and can be resumed.
        resume: `auto` goes on where the experiment is there, and begins where it is not; `must` (or true) is an error
            where it is not there, `never` (or false) where it is. Ray's words are understood too: `auto+errored`.
        rerun_errored: try trials again that errored in an earlier run; `only` those, and nothing else.
        warm_start: experiments whose finished trials the search learns from: names on the same target, or
            `s3://bucket/folder/name`. Their trials are kept in this experiment's journal, and count as no samples.
        on_code_change: whether an experiment whose trainable has another source than before goes on, or is refused.
        trials: `tasks` runs them on the flow's task runner (threads, Dask, Ray); `deployment` gives each attempt a
            flow run of its own, on whatever work pool `trial_deployment` is deployed to.
        trial_deployment: a deployment of `prefect_tune.flows.train_trial.train_trial`, as `flow/deployment`.
        trial_job_variables: for its runs: what a trial has of a machine, in the words of the work pool.
        trial_tags: of each attempt's task run, and of its flow run as a deployment. Prefect's tag limits hold.
        concurrency_limits: Prefect's global concurrency limits; each attempt waits for a place, and holds it.
        sync: periods and timeouts in seconds, artifacts, and `commit="async"`, to train on during an upload.
        callbacks: who hears of the trials: `package.module:Name`; in code also `pt.CSVLogger()`.
        isolation: `process` trains each trial in a child process; `thread` in this one, for debuggers.
        grace_period_seconds: seconds that trials may take to save once SIGTERM or a cancellation arrives.
        silence_timeout_seconds: seconds without a report after which a trial is taken for hung and started again.
            Default: never.

    Returns:
        Results: the best configuration and its checkpoint, every trial, every error.

    Raises:
        InvalidInput: what was asked for cannot be done; nothing was started.
        Superseded: another run has taken the experiment over.
        ResumeFailed: the experiment exists and cannot be read; or it does not exist, and must.
        CrashLoop: automations started this run again and again, and nothing came of it.
        StoreUnavailable: the target did not answer for too long. Running it again goes on.
        StoreRefused: the target refuses, for its credentials say: from the start, or for too long. Running it again
            goes on.
    """
    given = dict(locals())  # the parameters: `Asked` names them alike
    require_one_count(num_samples, samples_per_run)
    from prefect_tune.flows.search import searched  # while a script's own server starts: `own_server`

    return searched(Asked(**given))
