"""A search: many trials, proposed, scheduled, each as durable as a single one; resumed exactly."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

from prefect import flow
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target
from prefect_tune.callbacks import SearchInfo
from prefect_tune.core.cadence import Cadence
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.failures import FailurePolicy
from prefect_tune.core.layout import TrialKey
from prefect_tune.core.objective import Mode, Objective, objective_of
from prefect_tune.core.retention import Retention
from prefect_tune.core.schedulers.fifo import FIFO
from prefect_tune.core.schedulers.scheduler import Schedule, Scheduler
from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.core.values import digest_of
from prefect_tune.flows.audience import Audience
from prefect_tune.flows.callbacks import callbacks_for
from prefect_tune.flows.council import Council
from prefect_tune.flows.crew import Crew, LocalCrew
from prefect_tune.flows.driver import Driver
from prefect_tune.flows.elsewhere import OnDeployment, on_task_runner
from prefect_tune.flows.limits import Limits
from prefect_tune.flows.remote_crew import RemoteCrew
from prefect_tune.flows.request import experiment_name, name_of, stopper_for, valid_trainable
from prefect_tune.flows.results import Results
from prefect_tune.tasks import restore_experiment_state
from prefect_tune.tasks.book import Book
from prefect_tune.tasks.experiment_state import check_target, write_directly
from prefect_tune.tasks.interruption import interruptible
from prefect_tune.tasks.nursery import Nursery
from prefect_tune.tasks.plan import TrialPlan, payload
from prefect_tune.tasks.stamp import new_stamp, this_owner

__all__ = ["tune"]

_LOOK_EVERY = timedelta(seconds=0.5)
_NAMELESS = Objective(metrics=("unnamed",), modes=("min",))


@flow(name="tune", persist_result=False)
def tune(
    trainable: Any,
    space: dict[str, Any] | None = None,
    *,
    target: StorageTarget | str,
    experiment: str | None = None,
    metric: str | list[str] | None = None,
    mode: Mode | list[Mode] = "min",
    num_samples: int = 10,
    search: Any = None,
    scheduler: Any = None,
    seed: int | None = None,
    stop: Any = None,
    max_concurrent_trials: int | None = None,
    time_budget_seconds: float | None = None,
    checkpoint: Cadence | None = None,
    retention: Retention | None = None,
    failures: FailurePolicy | None = None,
    fail_fast: bool = False,
    sync: SyncConfig | None = None,
    callbacks: list[Any] | None = None,
    trials: Literal["tasks", "deployment"] = "tasks",
    trial_deployment: str = "train-trial/train-trial",
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
        trainable: a subclass of `pt.Trainable`, a function `train(config)`, or `"package.module:Name"`.
        space: a configuration in which some values are drawn: `{"lr": pt.loguniform(1e-4, 1)}`.
        target: where checkpoints and state live: a block, a `"block-type/name"` slug, or a URI.
        experiment: its name on the target. Default: the id of the root flow run, which a Retry keeps.
        metric: the reported metric, or several, that trials are compared by.
        mode: whether a small metric is good (`"min"`), or a large one (`"max"`); one for all, or one for each.
        num_samples: how many configurations the built-in search tries, or how often each point of a grid.
        search: who proposes, in place of the built-in random and grid search.
        scheduler: who decides which trials go on, such as `pt.ASHA(max_t=81)`. Default: all.
        seed: what all draws hang on. Default: one that hangs on the experiment's name.
        stop: when a single trial has had enough; as in `durable_trainable`.
        max_concurrent_trials: how many train at once. Default: one for each processor.
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
        isolation: `"process"` trains each trial in a child process; `"thread"` in this one, for debuggers.
        grace_period_seconds: how long trials may take to save once SIGTERM or a cancellation arrives.
        silence_timeout_seconds: without a report for so long a trial is taken for hung and started again.

    Returns:
        Results: the best configuration and its checkpoint, every trial, every error.

    Raises:
        InvalidInput: what was asked for cannot be done; nothing was started.
        Superseded: another run has taken the experiment over.
        ResumeFailed: the experiment exists and cannot be read.
    """
    name = experiment_name(experiment)
    objective = objective_of(metric, mode)
    stopper = stopper_for(stop)
    plan = TrialPlan(
        target=resolve_target(target),
        trial=TrialKey(experiment=name, trial="any"),
        trainable=payload(valid_trainable(trainable)),
        fingerprint=name_of(trainable),
        stopper=payload(stopper),
        needs_curve=stopper.looks_back,
        cadence=checkpoint or Cadence(),
        retention=retention or Retention(),
        sync=sync or SyncConfig(),
        isolation=isolation,
        grace=timedelta(seconds=grace_period_seconds),
        silence=None if silence_timeout_seconds is None else timedelta(seconds=silence_timeout_seconds),
        apart=True,
    )
    limits = Limits(
        max_concurrent_trials=max_concurrent_trials or os.cpu_count() or 1,
        failures=failures or FailurePolicy(),
        fail_fast=fail_fast,
        time=None if time_budget_seconds is None else timedelta(seconds=time_budget_seconds),
    )
    drawn = _seed(seed, name)
    proposals = (search or RandomSearch(num_samples)).begin(space or {}, objective, drawn)
    council = Council(proposals, _begun(scheduler or FIFO(), objective, drawn))
    crew = _crew(plan, limits, OnDeployment(trial_deployment) if trials == "deployment" else None)
    audience = Audience(plan.target, SearchInfo(name, plan.target.uri, objective), callbacks_for(callbacks))
    return Results(_search(plan, limits, council, crew, audience), plan.target, objective)


def _crew(plan: TrialPlan, limits: Limits, deployment: OnDeployment | None) -> AbstractContextManager[Crew]:
    """Who trains: threads of this process beside it, or others elsewhere."""
    if deployment is not None:
        deployment.require(plan)
        return nullcontext(RemoteCrew(plan.target, deployment, _LOOK_EVERY))
    context = FlowRunContext.get()
    if context is not None and not isinstance(context.task_runner, ThreadPoolTaskRunner):
        return nullcontext(RemoteCrew(plan.target, on_task_runner, _LOOK_EVERY))
    return _local_crew(plan, limits)


@contextmanager
def _local_crew(plan: TrialPlan, limits: Limits) -> Iterator[Crew]:
    with Nursery(slots=limits.max_concurrent_trials) as nursery:
        if plan.isolation == "process":
            nursery.prepare()
        yield LocalCrew(nursery)


def _search(
    plan: TrialPlan, limits: Limits, council: Council, crew: AbstractContextManager[Crew], audience: Audience
) -> Experiment:
    def search(stop: threading.Event) -> Experiment:
        check_target(plan.target)
        state = restore_experiment_state(plan.target, plan.trial.experiment, this_owner(), new_stamp())
        book = Book(plan.target, state, write_directly, lambda _events, _state: None)
        with crew as who, audience.listening(book, stop, log := get_run_logger()) as listener:
            return Driver(plan, limits, council, who, book, log, listener).run(stop.is_set)

    return interruptible(search, grace=plan.grace)


def _begun(scheduler: Scheduler, objective: Objective | None, seed: int) -> Schedule:
    if objective is None and not isinstance(scheduler, FIFO):
        raise InvalidInput(f"metric: {type(scheduler).__name__} compares trials by a metric; name it: metric='loss'")
    return scheduler.begin(objective or _NAMELESS, seed)


def _seed(given: int | None, experiment: str) -> int:
    return given if given is not None else int(digest_of(experiment.encode())[:8], 16)
