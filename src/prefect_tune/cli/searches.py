"""`run` and `resume`: searches from a command line, as flow runs in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefect_tune.cli.app import AsJson, ExperimentName, app
from prefect_tune.cli.spoken import space_from, spelling_from, stop_from
from prefect_tune.core.errors import TuneError

if TYPE_CHECKING:
    from prefect_tune.flows.results import Results

__all__: list[str] = []

_SOME_ERRORED = 3
_INTERRUPTED = 130


class _Trials(StrEnum):
    TASKS = "tasks"
    DEPLOYMENT = "deployment"


class _Isolation(StrEnum):
    PROCESS = "process"
    THREAD = "thread"


_Where = Annotated[str, typer.Option("--target", help="Where it lives, or will.", show_default=False)]
_Stop = Annotated[list[str] | None, typer.Option("--stop", help="step=100, or module:name.", show_default=False)]
_Space = Annotated[Path | None, typer.Option("--space", help="The space: a JSON or YAML file.", show_default=False)]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="A parameter: lr=loguniform(1e-4,1e-1), layers=choice(1,2), x=3.", show_default=False),
]
_AtOnce = Annotated[
    int | None, typer.Option("--max-concurrent-trials", help="Default: one per processor.", show_default=False)
]
_Budget = Annotated[float | None, typer.Option("--time-budget-seconds", help="Then save and end.", show_default=False)]
_Scheduler = Annotated[
    str | None, typer.Option("--scheduler", help='ASHA, or {"ASHA": {"max_t": 27}}.', show_default=False)
]
_Search = Annotated[
    str | None, typer.Option("--search", help="Likewise. Default: random and grid.", show_default=False)
]


@app.command()
def run(
    trainable: Annotated[str, typer.Argument(metavar="MODULE:NAME", show_default=False)],
    target: _Where,
    experiment: Annotated[str, typer.Option("--experiment", help="Its name there.", show_default=False)],
    space: _Space = None,
    settings: _Set = None,
    metric: Annotated[list[str] | None, typer.Option(help="What trials are compared by.", show_default=False)] = None,
    mode: Annotated[list[str] | None, typer.Option(help="min or max. Default: min.", show_default=False)] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="How many configurations are tried.")] = 10,
    scheduler: _Scheduler = None,
    search: _Search = None,
    seed: Annotated[int | None, typer.Option(show_default=False)] = None,
    stop: _Stop = None,
    max_concurrent_trials: _AtOnce = None,
    time_budget_seconds: _Budget = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=1, help="Steps.", show_default=False)] = None,
    keep_last: Annotated[int | None, typer.Option(min=1, help="Checkpoints per trial.", show_default=False)] = None,
    max_failures: Annotated[int, typer.Option(min=0, help="Failures of your code that are tried again.")] = 0,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="End at the first trial that errors.")] = False,
    callback: Annotated[list[str] | None, typer.Option(help="module:Name.", show_default=False)] = None,
    trials: Annotated[_Trials, typer.Option(help="On this machine, or a flow run each.")] = _Trials.TASKS,
    trial_deployment: Annotated[str, typer.Option(help="For --trials deployment.")] = "train-trial/train-trial",
    isolation: Annotated[_Isolation, typer.Option(help="Where a trial trains.")] = _Isolation.PROCESS,
    as_json: AsJson = False,
) -> None:
    """Search a space for the best configuration of MODULE:NAME; go on where an earlier run of EXPERIMENT ended.

    For example: prefect-tune run my_project.train:Net --target ./runs --experiment first
    --set "lr=loguniform(1e-4,1e-1)" --metric loss --num-samples 20 --scheduler ASHA --stop step=100
    """
    asked: dict[str, Any] = {
        "target": target,
        "experiment": experiment,
        "metric": _one_or_more(metric),
        "mode": _one_or_more(mode) or "min",
        "num_samples": num_samples,
        "scheduler": spelling_from(scheduler, "--scheduler"),
        "search": spelling_from(search, "--search"),
        "seed": seed,
        "stop": stop_from(stop or ()),
        "max_concurrent_trials": max_concurrent_trials,
        "time_budget_seconds": time_budget_seconds,
        "fail_fast": fail_fast,
        "callbacks": callback,
        "trials": trials.value,
        "trial_deployment": trial_deployment,
        "isolation": isolation.value,
        **_policies(checkpoint_every, keep_last, max_failures),
    }
    found = space_from(space, settings or ())
    _searched(lambda: _tuned(trainable, found, asked), target, experiment, as_json=as_json)


@app.command()
def resume(
    experiment: ExperimentName,
    target: _Where,
    rerun_errored: Annotated[bool, typer.Option("--rerun-errored", help="Try errored trials again.")] = False,
    num_samples: Annotated[int | None, typer.Option(min=1, help="More than before.", show_default=False)] = None,
    stop: _Stop = None,
    space: _Space = None,
    settings: _Set = None,
    max_concurrent_trials: _AtOnce = None,
    time_budget_seconds: _Budget = None,
    trainable: Annotated[str | None, typer.Option(help="module:Name, if moved.", show_default=False)] = None,
    scheduler: _Scheduler = None,
    search: _Search = None,
    as_json: AsJson = False,
) -> None:
    """Go on with the search EXPERIMENT as its journal describes it; what is given here is changed.

    Nothing is ever started afresh. A space given here takes the place of the whole earlier one.
    """
    asked: dict[str, Any] = {
        "target": target,
        "rerun_errored": rerun_errored,
        "num_samples": num_samples,
        "stop": stop_from(stop or ()),
        "space": space_from(space, settings or ()) or None,
        "max_concurrent_trials": max_concurrent_trials,
        "time_budget_seconds": time_budget_seconds,
        "trainable": trainable,
        "scheduler": spelling_from(scheduler, "--scheduler"),
        "search": spelling_from(search, "--search"),
    }
    _searched(lambda: _resumed(experiment, asked), target, experiment, as_json=as_json)


def _tuned(trainable: str, space: dict[str, Any], asked: Mapping[str, Any]) -> Results:
    from prefect_tune.flows.tune import tune

    found: Results = tune(trainable, space, **asked)
    return found


def _resumed(experiment: str, asked: Mapping[str, Any]) -> Results:
    from prefect_tune.flows.resume import resume as flow

    found: Results = flow(experiment, **asked)
    return found


def _one_or_more(given: list[str] | None) -> str | list[str] | None:
    return given[0] if given and len(given) == 1 else given or None


def _policies(checkpoint_every: int | None, keep_last: int | None, max_failures: int) -> Mapping[str, Any]:
    from prefect_tune.core.cadence import Cadence
    from prefect_tune.core.failures import FailurePolicy
    from prefect_tune.core.retention import Retention

    return {
        "checkpoint": Cadence(every_steps=checkpoint_every) if checkpoint_every else None,
        "retention": Retention(last=keep_last) if keep_last else None,
        "failures": FailurePolicy(max_failures=max_failures) if max_failures else None,
    }


def _searched(search: Callable[[], Results], target: str, experiment: str, *, as_json: bool) -> None:
    """Search, print how it stands then, and end with 3 if trials errored."""
    from prefect_tune.cli.standing import show_search

    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: MODULE may be a file that lies here
    with _told(target, experiment):
        results = search()
    show_search(results.experiment, as_json=as_json)
    if results.errors:
        raise typer.Exit(_SOME_ERRORED)


@contextmanager
def _told(target: str, experiment: str) -> Iterator[None]:
    """Say in one line what ended a search from outside, and how it goes on."""
    import httpx
    from prefect.exceptions import PrefectException, TerminationSignal
    from pydantic import ValidationError

    try:
        yield
    except (KeyboardInterrupt, TerminationSignal):
        print(f"stopped; go on with: prefect-tune resume {experiment} --target {target}", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except (httpx.HTTPError, PrefectException) as error:
        raise TuneError(f"Prefect: {_first_line(error)}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        raise TuneError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    except RuntimeError as error:
        if "API" in str(error):  # what Prefect raises when no server answers
            raise TuneError(f"Prefect: {_first_line(error)}") from error
        raise


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
