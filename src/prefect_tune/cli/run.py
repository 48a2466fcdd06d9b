"""The commands `run` and `resume`: run or resume a search as a flow run in this process."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefect_tune.cli.app import SEARCH, AsJson, ExperimentName, Target, WrongUsage, app, asks
from prefect_tune.cli.option_parsing import numbers_from, space_from, spelling_from, stop_from, values_from
from prefect_tune.core.errors import InvalidInput, TuneError

if TYPE_CHECKING:
    from prefect_tune.results.results import Results

__all__: list[str] = []

_SOME_ERRORED = 3
_INTERRUPTED = 130


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
_Stop = Annotated[list[str] | None, asks("--stop", "step=N", "When a trial stops; or MODULE:NAME.")]
_Space = Annotated[Path | None, asks("--space", "FILE", "The search space, as JSON or YAML.")]
_Set = Annotated[list[str] | None, asks("--set", "NAME=VALUE", "A parameter, such as x=3, n=choice(1,2).")]
_AtOnce = Annotated[int | None, asks("--max-concurrent-trials", "N", "Trials at once. Default: one per CPU.")]
_Budget = Annotated[float | None, asks("--time-budget-seconds", "S", "After S all save and end, resumable.")]
_Scheduler = Annotated[str | None, asks("--scheduler", "JSON", 'Such as {"ASHA": {"max_t": 81}}.')]
_Search = Annotated[str | None, asks("--search", "JSON", "Likewise. Default: random and grid search.")]
_Samples = Annotated[
    int | None, asks("--num-samples", "N", "Trials; of a grid: of each point. Default: 10; grid alone: 1.", at_least=1)
]
_MoreSamples = Annotated[int | None, asks("--samples-per-run", "N", "Instead: N more than before.", at_least=1)]
_Heard = Annotated[list[str] | None, asks("--callback", "MODULE:NAME", "A callback for the search.")]
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
    space: _Space = None,
    settings: _Set = None,
    metric: Annotated[list[str] | None, asks("--metric", "NAME", "The metric that compares trials.")] = None,
    mode: Annotated[list[_Mode] | None, asks("--mode", "min|max", "Direction of the metric. Default: min.")] = None,
    num_samples: _Samples = None,
    samples_per_run: _MoreSamples = None,
    scheduler: _Scheduler = None,
    search: _Search = None,
    warm_start: Annotated[list[str] | None, asks("--warm-start", "NAME", "Learn from this experiment.")] = None,
    seed: Annotated[int | None, asks("--seed", "N", "Seed of all draws. Default: from EXPERIMENT.")] = None,
    stop: _Stop = None,
    max_concurrent_trials: _AtOnce = None,
    time_budget_seconds: _Budget = None,
    checkpoint_every: _Every = None,
    keep_last: _Kept = None,
    max_failures: _Failures = 0,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first trial that errors.")] = False,
    callbacks: _Heard = None,
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
    asked = {"trainable": trainable, **_of_flow(given)}
    _searched(lambda: _tuned(found, _understood(asked)), _again(target, experiment, trainable), as_json=as_json)


@app.command(rich_help_panel=SEARCH)
def resume(
    target: Target,
    experiment: ExperimentName,
    fork: Annotated[str | None, asks("--fork", "NAME", "Resume a copy of EXPERIMENT under this name.")] = None,
    at: Annotated[int | None, asks("--at", "ENTRY", "Fork at this journal entry. Default: the last.")] = None,
    rerun_errored: Annotated[bool, typer.Option("--rerun-errored", help="Retry errored trials.")] = False,
    only_errored: Annotated[bool, typer.Option("--only-errored", help="Retry those, and nothing else.")] = False,
    num_samples: Annotated[
        int | None, asks("--num-samples", "N", "Total trials; more than before.", at_least=1)
    ] = None,
    samples_per_run: _MoreSamples = None,
    stop: _Stop = None,
    space: _Space = None,
    settings: _Set = None,
    max_concurrent_trials: _AtOnce = None,
    time_budget_seconds: _Budget = None,
    trainable: Annotated[
        str | None, asks("--trainable", "MODULE:NAME", "Replaces the journal's; needed on a bucket.")
    ] = None,
    scheduler: _Scheduler = None,
    search: _Search = None,
    callbacks: _Heard = None,
    as_json: AsJson = False,
) -> None:
    """Resume the search EXPERIMENT with the settings in its journal; options given here replace them.

    It never starts a new experiment.
    A space given here replaces the whole earlier one.
    """
    asked: dict[str, Any] = {
        "target": target,
        "fork": fork,
        "at": at,
        "rerun_errored": "only" if only_errored else rerun_errored,
        "num_samples": num_samples,
        "samples_per_run": samples_per_run,
        "stop": stop_from(stop or ()),
        "space": space_from(space, settings or ()) or None,
        "max_concurrent_trials": max_concurrent_trials,
        "time_budget_seconds": time_budget_seconds,
        "trainable": trainable,
        "scheduler": spelling_from(scheduler, "--scheduler"),
        "search": spelling_from(search, "--search"),
        "callbacks": callbacks,
    }
    again = _again(target, fork or experiment, trainable)
    _searched(lambda: _resumed(experiment, _understood(asked)), again, as_json=as_json)


def _understood(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the trainable, scheduler, search and stop before a server is used; return `asked` unchanged.

    Raises:
        WrongUsage: one of them is not valid.
    """
    from prefect_tune.parameters.json_specs import scheduler_from, search_from, with_samples
    from prefect_tune.parameters.training_request import stopper_for, valid_trainable

    read: Mapping[str, Callable[[Any], object]] = {
        "trainable": valid_trainable,
        "scheduler": scheduler_from,
        "search": lambda given: with_samples(search_from(given), asked["num_samples"]),
        "stop": stopper_for,
    }
    try:
        for name, each in read.items():
            if asked[name] is not None:
                each(asked[name])
    except InvalidInput as error:
        raise WrongUsage(str(error)) from error
    return asked


def _of_flow(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `run`'s options as the parameters of the flow."""
    others = {"trainable", "space", "settings", "as_json", "checkpoint_every", "keep_last", "max_failures"}
    asked = {name: each.value if isinstance(each, StrEnum) else each for name, each in given.items()}
    return {
        **{name: each for name, each in asked.items() if name not in others},
        "metric": _one_or_more(given["metric"]),
        "mode": _one_or_more([each.value for each in given["mode"] or ()]) or "min",
        "scheduler": spelling_from(given["scheduler"], "--scheduler"),
        "search": spelling_from(given["search"], "--search"),
        "stop": stop_from(given["stop"] or ()),
        "trial_job_variables": values_from(given["trial_job_variables"] or (), "--job-variable"),
        "resources_per_trial": numbers_from(given["resources_per_trial"] or (), "--resource"),
        **_policies(given["checkpoint_every"], given["keep_last"], given["max_failures"]),
    }


def _tuned(space: dict[str, Any], asked: Mapping[str, Any]) -> Results:
    from prefect_tune.flows.tune import tune

    found: Results = tune(space=space, **asked)
    return found


def _resumed(experiment: str, asked: Mapping[str, Any]) -> Results:
    from prefect_tune.flows.resume import resume as flow

    found: Results = flow(experiment, **asked)
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


def _again(target: str, experiment: str, trainable: str | None) -> str:
    """Return the command that resumes; it names the trainable, which a journal on a bucket may not choose."""
    named = ["--trainable", trainable] if trainable else []
    return shlex.join(["prefect-tune", "resume", target, experiment, *named])


def _searched(search: Callable[[], Results], again: str, *, as_json: bool) -> None:
    """Search, print the results, and exit with 3 if trials errored. `again` is the command that resumes."""
    from prefect_tune.cli.ls import show_search

    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: MODULE may be a file in this folder
    with _told(again):
        results = search()
    show_search(results.experiment, as_json=as_json)
    if results.errors:
        raise typer.Exit(_SOME_ERRORED)


@contextmanager
def _told(again: str) -> Iterator[None]:
    """Print an interrupt and Prefect's errors as one line; after an interrupt, with the command that resumes."""
    import httpx
    from prefect.exceptions import PrefectException, TerminationSignal
    from pydantic import ValidationError

    try:
        with _without_traces():
            yield
    except (KeyboardInterrupt, TerminationSignal):
        print(f"stopped; go on with: {again}", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except (httpx.HTTPError, PrefectException) as error:
        raise TuneError(f"Prefect: {_in_one_line(error)}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        raise TuneError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    except RuntimeError as error:
        if "API" in str(error):  # what Prefect raises when no server answers
            raise TuneError(f"Prefect: {_in_one_line(error)}") from error
        raise


@contextmanager
def _without_traces() -> Iterator[None]:
    """Keep tracebacks of `TuneError` out of Prefect's log: `main` prints the message, and the state has it."""

    def says_more(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], TuneError))

    logger = logging.getLogger("prefect.flow_runs")
    logger.addFilter(says_more)
    try:
        yield
    finally:
        logger.removeFilter(says_more)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
