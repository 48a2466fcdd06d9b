"""A search: many trials, proposed, scheduled, each as durable as a single one; resumed exactly."""

from __future__ import annotations

from typing import Any, Literal

from prefect_tune.blocks import StorageTarget, SyncConfig
from prefect_tune.core.cadence import Cadence
from prefect_tune.core.failures import FailurePolicy
from prefect_tune.core.objective import Mode
from prefect_tune.core.retention import Retention
from prefect_tune.flows.asked import Asked
from prefect_tune.flows.own_server import flow_with_server
from prefect_tune.flows.results import Results
from prefect_tune.flows.search import searched

__all__ = ["tune"]


@flow_with_server(name="tune", persist_result=False)
def tune(
    trainable: Any,
    space: dict[str, Any] | None = None,
    *,
    target: StorageTarget | str,
    experiment: str | None = None,
    metric: str | list[str] | None = None,
    mode: Mode | list[Mode] = "min",
    num_samples: int | None = None,
    search: Any = None,
    scheduler: Any = None,
    seed: int | None = None,
    stop: Any = None,
    max_concurrent_trials: int | None = None,
    resources_per_trial: dict[str, float] | None = None,
    resources_total: dict[str, float] | None = None,
    time_budget_seconds: float | None = None,
    checkpoint: Cadence | None = None,
    retention: Retention | None = None,
    failures: FailurePolicy | None = None,
    fail_fast: bool = False,
    sync: SyncConfig | None = None,
    callbacks: list[Any] | None = None,
    trials: Literal["tasks", "deployment"] = "tasks",
    trial_deployment: str = "train-trial/train-trial",
    trial_job_variables: dict[str, Any] | None = None,
    trial_tags: list[str] | None = None,
    concurrency_limits: list[str] | None = None,
    isolation: Literal["process", "thread"] = "process",
    grace_period_seconds: float = 25,
    silence_timeout_seconds: float | None = None,
    resume: bool | str = "auto",
    rerun_errored: bool | Literal["only"] = False,
    warm_start: list[str] | None = None,
    on_code_change: Literal["warn", "refuse"] = "warn",
) -> Results:
    """Search `space` for the configuration with which `trainable` does best; go on wherever an earlier run ended.

    Every proposal and every decision is in the journal on `target` before it is acted on, and every
    trial has a journal of its own. Started again with the same experiment name, by whatever means,
    trials that were cut off go on from their newest committed checkpoints, and the search proposes
    what it would have proposed.

    Args:
        trainable: a subclass of `pt.Trainable`, a function `train(config)`, or `"package.module:Name"`.
        space: a configuration in which some values are drawn: `{"lr": pt.loguniform(1e-4, 1)}`.
        target: where checkpoints and state live: a block, a `"block-type/name"` slug, or a URI.
        experiment: its name on the target. Default: the id of the root flow run, which a Retry keeps.
        metric: the reported metric, or several, that trials are compared by.
        mode: whether a small metric is good (`"min"`), or a large one (`"max"`); one for all, or one for each.
        num_samples: how many configurations the search tries; the built-in one, how often each point of a grid.
            Default: 10, or what `search` says.
        search: who proposes, in place of the built-in random and grid search.
        scheduler: who decides which trials go on, such as `pt.ASHA(max_t=81)`. Default: all.
        seed: what all draws hang on. Default: one that hangs on the experiment's name.
        stop: when a single trial has had enough, as in `durable_trainable`; and when the experiment has:
            `pt.MaxSteps(100) | pt.MaxFailures(5)`, in JSON `{"step": 100, "MaxFailures": {"failures": 5}}`.
        max_concurrent_trials: how many train at once. Default: one for each processor, or for each that has what it
            needs.
        resources_per_trial: what each trial has for itself, as in `{"cpu": 2, "gpu": 1}`; of a GPU also a part. On this
            machine trials wait until it is free, and see only their GPUs (CUDA_VISIBLE_DEVICES); Dask and Ray are told.
        resources_total: what this machine may give, where that is not all that is found: `{"cpu": 8, "gpu": 2}`.
        time_budget_seconds: after so long in this run everything saves and ends; running it again goes on.
        checkpoint: when a class trainable saves. Default: every 60 s and at the end.
        retention: which checkpoints of a trial stay. Default: all.
        failures: the retry budgets of a trial. Default: none for its own failures, 10 for the machine's.
        fail_fast: end the experiment at the first trial that errors; the others save and can be resumed.
        sync: periods, timeouts, artifacts, and `commit="async"`.
        callbacks: who hears of the trials, such as `pt.CSVLogger()`; from a deployment `"package.module:Name"`.
        trials: `"tasks"` runs them on the flow's task runner (threads, Dask, Ray); `"deployment"` gives each attempt a
            flow run of its own, on whatever work pool `trial_deployment` is deployed to.
        trial_deployment: a deployment of `prefect_tune.flows.train_trial.train_trial`.
        trial_job_variables: for its runs: what a trial has of a machine, in the words of the work pool.
        trial_tags: of each attempt's task run, and of its flow run as a deployment. Prefect's tag limits hold.
        concurrency_limits: Prefect's global concurrency limits; each attempt waits for a place, and holds it.
        isolation: `"process"` trains each trial in a child process; `"thread"` in this one, for debuggers.
        grace_period_seconds: how long trials may take to save once SIGTERM or a cancellation arrives.
        silence_timeout_seconds: without a report for so long a trial is taken for hung and started again.
        resume: `"auto"` goes on where the experiment is there, and begins where it is not; True or `"must"` is an error
            where it is not there, False or `"never"` where it is. Ray's words are understood too: `"auto+errored"`.
        rerun_errored: try trials again that errored in an earlier run; `"only"` those, and nothing else.
        warm_start: experiments whose finished trials the search learns from: names on the same target, or
            `"s3://bucket/folder/name"`. Their trials are kept in this experiment's journal, and count as no samples.
        on_code_change: whether an experiment whose trainable has another source than before goes on, or is refused.

    Returns:
        Results: the best configuration and its checkpoint, every trial, every error.

    Raises:
        InvalidInput: what was asked for cannot be done; nothing was started.
        Superseded: another run has taken the experiment over.
        ResumeFailed: the experiment exists and cannot be read; or it does not exist, and must.
    """
    given = dict(locals())  # the parameters: `Asked` names them alike
    return searched(Asked(**given))
