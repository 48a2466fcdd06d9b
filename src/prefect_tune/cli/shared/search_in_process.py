"""The search that `run` and `resume` run in this process: its checks before, and its errors as one line."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from prefect_tune.cli.inspect.show import show_search
from prefect_tune.cli.shared.app import WrongUsage
from prefect_tune.core.errors import InvalidInput, SearchFailed, TuneError
from prefect_tune.core.messages.live_status import ExperimentView

if TYPE_CHECKING:
    from prefect_tune.results.results import Results

_SOME_ERRORED = 3
_INTERRUPTED = 130


def checked(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the trainable, space, scheduler, search and stop before a server is used; return `parameters` unchanged.

    Raises:
        WrongUsage: one of them is not valid.
    """
    from prefect_tune.parameters.checks.argument_checks import stopper_for, valid_trainable
    from prefect_tune.parameters.checks.import_check import require_importable
    from prefect_tune.parameters.json_specs import scheduler_from, search_from, with_samples
    from prefect_tune.parameters.search_plan import space_of

    def importable(trainable: str) -> None:
        valid_trainable(trainable)
        if parameters.get("trials") != "deployment":
            require_importable(trainable, parameters.get("isolation", "process"), logging.getLogger(__name__))

    checks: Mapping[str, Callable[[Any], object]] = {
        "trainable": importable,
        "space": space_of,
        "scheduler": scheduler_from,
        "search": lambda given: with_samples(search_from(given), parameters.get("num_samples")),
        "stop": stopper_for,
    }
    try:
        for name in [each for each in checks if each in parameters]:
            checks[name](parameters[name])
    except InvalidInput as error:
        raise WrongUsage(str(error)) from error
    return parameters


def resume_command(target: str, experiment: str, trainable: str | None) -> str:
    """Return the command that resumes; it names the trainable, which a journal on a bucket may not choose."""
    named = ["--trainable", trainable] if trainable else []
    return shlex.join(["prefect-tune", "resume", target, experiment, *named])


def search_in_this_process(search: Callable[[], Results], again: str, *, as_json: bool) -> None:
    """Search, print the results, and exit with 3 if trials errored. `again` is the command that resumes."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: MODULE may be a file in this folder
    with _short_errors(again):
        results = _results_of(search)
    show_search(ExperimentView(results.experiment, datetime.now(UTC).isoformat()), as_json=as_json)
    if results.errors:
        raise typer.Exit(_SOME_ERRORED)


def _results_of(search: Callable[[], Results]) -> Results:
    """Return the results also of a search in which every trial errored: they show the errors."""
    try:
        return search()
    except SearchFailed as failed:
        results = cast("Results", failed.results)
        if len(results.errors) < len(results.trials):  # no report had the metric
            raise
        return results


@contextmanager
def _short_errors(again: str) -> Iterator[None]:
    """Print an interrupt and Prefect's errors as one line; after an interrupt, with the command that resumes."""
    import httpx
    from prefect.exceptions import PrefectException, TerminationSignal
    from pydantic import ValidationError

    try:
        with _without_traces():
            yield
    except (KeyboardInterrupt, TerminationSignal):
        print(f"stopped; resume with: {again}", file=sys.stderr)
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
