"""The command `run`: run a search as a flow run in this process."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefect_tune.cli.shared.app import SEARCH, AsJson, app, asks
from prefect_tune.cli.shared.option_parsing import numbers_from, space_from, spelling_from, stop_from, values_from
from prefect_tune.cli.shared.search_options import (
    CallbackNames,
    MaxConcurrentTrials,
    Parameters,
    SamplesPerRun,
    Scheduler,
    SearchAlgorithm,
    SpaceFile,
    StopCriteria,
    TimeBudget,
    checked,
    resume_command,
    search_in_this_process,
)

if TYPE_CHECKING:
    from prefect_tune.results.results import Results


class _Mode(StrEnum):
    MIN = "min"
    MAX = "max"


class _TrialExecution(StrEnum):
    TASKS = "tasks"
    DEPLOYMENT = "deployment"


class _Isolation(StrEnum):
    PROCESS = "process"
    THREAD = "thread"


class _Resume(StrEnum):
    AUTO = "auto"
    MUST = "must"
    NEVER = "never"


class _OnCodeChange(StrEnum):
    WARN = "warn"
    REFUSE = "refuse"


_Where = Annotated[str, asks("--target", "TARGET", "Storage of the experiment.")]
_Samples = Annotated[
    int | None, asks("--num-samples", "N", "Trials; of a grid: of each point. Default: 10; grid alone: 1.", at_least=1)
]
_Every = Annotated[int | None, asks("--checkpoint-every", "STEPS", "Default: every 60 s, and at the end.", at_least=1)]
_Kept = Annotated[int | None, asks("--keep-last", "N", "Checkpoints to keep per trial. Default: all.", at_least=1)]
_Failures = Annotated[int, asks("--max-failures", "N", "Retries of code that failed. Default: 0.", at_least=0)]
_Runs = Annotated[
    _TrialExecution, typer.Option(metavar="WHERE", help="tasks of this run, or deployment: a flow run each.")
]
_Deployment = Annotated[str, asks("--trial-deployment", "NAME", "For --trials deployment.")]
_Resources = Annotated[list[str] | None, asks("--resource", "NAME=N", "Per trial, as gpu=0.5 or cpu=2.")]
_Variables = Annotated[list[str] | None, asks("--job-variable", "NAME=VALUE", "For each run of the deployment.")]
_Tags = Annotated[list[str] | None, asks("--tag", "TAG", "Tag of each task run, for Prefect's tag limits.")]
_Limits = Annotated[list[str] | None, asks("--concurrency-limit", "NAME", "Global limit that each attempt waits for.")]
_Grace = Annotated[float, asks("--grace-period-seconds", "S", "Time to save after a stop signal. Default: 25.")]
_Silence = Annotated[float | None, asks("--silence-timeout-seconds", "S", "Restart a trial after S of silence.")]
_Beginning = Annotated[_Resume, typer.Option(metavar="HOW", help="auto; must: it exists; never: it is new.")]
_Changed = Annotated[_OnCodeChange, typer.Option(metavar="WHAT", help="If the source changed: warn, or refuse.")]
_In = Annotated[_Isolation, typer.Option(metavar="WHAT", help="process of its own, or thread.")]


@app.command(rich_help_panel=SEARCH)
def run(
    trainable: Annotated[str, typer.Argument(metavar="MODULE:NAME", show_default=False)],
    target: _Where,
    experiment: Annotated[str, asks("--experiment", "EXPERIMENT", "Name of the experiment.")],
    space: SpaceFile = None,
    settings: Parameters = None,
    metric: Annotated[list[str] | None, asks("--metric", "NAME", "The metric that compares trials.")] = None,
    mode: Annotated[list[_Mode] | None, asks("--mode", "min|max", "Direction of the metric. Default: min.")] = None,
    num_samples: _Samples = None,
    samples_per_run: SamplesPerRun = None,
    scheduler: Scheduler = None,
    search: SearchAlgorithm = None,
    warm_start: Annotated[list[str] | None, asks("--warm-start", "NAME", "Learn from this experiment.")] = None,
    seed: Annotated[int | None, asks("--seed", "N", "Seed of all draws. Default: from EXPERIMENT.")] = None,
    stop: StopCriteria = None,
    max_concurrent_trials: MaxConcurrentTrials = None,
    time_budget_seconds: TimeBudget = None,
    checkpoint_every: _Every = None,
    keep_last: _Kept = None,
    max_failures: _Failures = 0,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first trial that errors.")] = False,
    callbacks: CallbackNames = None,
    trials: _Runs = _TrialExecution.TASKS,
    trial_deployment: _Deployment = "train-trial/train-trial",
    trial_job_variables: _Variables = None,
    trial_tags: _Tags = None,
    concurrency_limits: _Limits = None,
    resources_per_trial: _Resources = None,
    isolation: _In = _Isolation.PROCESS,
    grace_period_seconds: _Grace = 25,
    silence_timeout_seconds: _Silence = None,
    resume: _Beginning = _Resume.AUTO,
    on_code_change: _Changed = _OnCodeChange.WARN,
    as_json: AsJson = False,
) -> None:
    """Search a space for the best configuration of MODULE:NAME; resume EXPERIMENT if it exists.

    For example:

    prefect-tune run my_project.train:Net --target ./runs --experiment first
      --set "lr=loguniform(1e-4,1e-1)" --metric loss --num-samples 20
      --scheduler '{"ASHA": {"max_t": 100}}'
    """
    given = dict(locals())  # the options, most of them called as the flow's parameters
    found = space_from(space, settings or ())
    parameters = {"trainable": trainable, **_of_flow(given)}
    search_in_this_process(
        lambda: _tuned(found, checked(parameters)), resume_command(target, experiment, trainable), as_json=as_json
    )


def _of_flow(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `run`'s options as the parameters of the flow."""
    others = {"trainable", "space", "settings", "as_json", "checkpoint_every", "keep_last", "max_failures"}
    parameters = {name: each.value if isinstance(each, StrEnum) else each for name, each in given.items()}
    return {
        **{name: each for name, each in parameters.items() if name not in others},
        "metric": _one_or_more(given["metric"]),
        "mode": _one_or_more([each.value for each in given["mode"] or ()]) or "min",
        "scheduler": spelling_from(given["scheduler"], "--scheduler"),
        "search": spelling_from(given["search"], "--search"),
        "stop": stop_from(given["stop"] or ()),
        "trial_job_variables": values_from(given["trial_job_variables"] or (), "--job-variable"),
        "resources_per_trial": numbers_from(given["resources_per_trial"] or (), "--resource"),
        **_policies(given["checkpoint_every"], given["keep_last"], given["max_failures"]),
    }


def _tuned(space: dict[str, Any], parameters: Mapping[str, Any]) -> Results:
    from prefect_tune.flows.tune import tune

    found: Results = tune(space=space, **parameters)
    return found


def _one_or_more(given: list[str] | None) -> str | list[str] | None:
    return given[0] if given and len(given) == 1 else given or None


def _policies(checkpoint_every: int | None, keep_last: int | None, max_failures: int) -> Mapping[str, Any]:
    from prefect_tune.core.checkpoints.cadence import Cadence
    from prefect_tune.core.experiment.failure_policy import FailurePolicy
    from prefect_tune.core.experiment.retention import Retention

    return {
        "checkpoint": Cadence(every_steps=checkpoint_every) if checkpoint_every else None,
        "retention": Retention(last=keep_last) if keep_last else None,
        "failures": FailurePolicy(max_failures=max_failures) if max_failures else None,
    }
