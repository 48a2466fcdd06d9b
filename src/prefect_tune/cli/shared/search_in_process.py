"""The search that `run` and `resume` run in this process, and the checks before it."""

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
from prefect_tune.cli.shared.flow_errors import short_errors
from prefect_tune.cli.shared.search_options import with_flags
from prefect_tune.core.errors import SearchFailed, TuneError
from prefect_tune.core.messages.live_status import ExperimentView
from prefect_tune.core.models import valid_name
from prefect_tune.core.texts import visible

if TYPE_CHECKING:
    from prefect_tune.results.results import Results

_SOME_ERRORED = 3


def checked(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check, before a server is used, what can be checked without reading the target; return `parameters` unchanged.

    Raises:
        InvalidInput: one of them is not valid.
    """
    from prefect_tune.blocks import LocalTarget
    from prefect_tune.blocks.resolve_target import validate_target
    from prefect_tune.parameters.checks.import_check import require_importable
    from prefect_tune.parameters.samples_per_run import require_one_count
    from prefect_tune.parameters.search_plan import SearchPlan
    from prefect_tune.runtime.load_named import load_named
    from prefect_tune.tuner.warm_start import source_names

    validate_target(parameters["target"])
    valid_name(parameters.get("fork", parameters["experiment"]))
    require_one_count(parameters.get("num_samples"), parameters.get("samples_per_run"))
    given = {name: value for name, value in parameters.items() if name in SearchPlan.model_fields}
    # A saved block would be read from the server, and the journal's trainable from the target.
    plan = SearchPlan(**{"trainable": print, **given, "target": LocalTarget(path=str(Path.cwd()))})
    source_names(plan.warm_start or ())
    for callback in plan.callbacks or ():
        load_named(callback, "callback")
    if plan.trials != "deployment":
        require_importable(plan.trainable, plan.isolation, logging.getLogger(__name__))
    return parameters


def resume_command(target: str, experiment: str, trainable: str | None) -> str:
    """Return the command that resumes; it names the trainable, which a journal on a bucket may not choose."""
    named = ["--trainable", trainable] if trainable else []
    return shlex.join(["prefect-tune", "resume", target, experiment, *named])


def search_in_this_process(search: Callable[[], Results], again: str, *, as_json: bool) -> None:
    """Search, print the results, and exit with 3 if trials errored. `again` is the command that resumes."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: MODULE may be a file in this folder
    with short_errors(f"stopped; resume with: {again}"), _named_by_flags():
        results, error = _results_of(search)
    show_search(ExperimentView(results.experiment, datetime.now(UTC).isoformat()), as_json=as_json)
    if error:
        print(f"prefect-tune: {visible(error)}", file=sys.stderr)
    if results.errors:
        raise typer.Exit(_SOME_ERRORED)


@contextmanager
def _named_by_flags() -> Iterator[None]:
    """Name the options in the message of an error as the command line does."""
    try:
        yield
    except TuneError as error:
        error.args = (with_flags(str(error)), *error.args[1:])
        raise


def _results_of(search: Callable[[], Results]) -> tuple[Results, str]:
    """Return the results also of a search in which every trial errored, with the error, empty for others."""
    try:
        return search(), ""
    except SearchFailed as failed:
        results = cast("Results", failed.results)
        if len(results.errors) < len(results.trials):  # no report had the metric
            raise
        return results, with_flags(str(failed))
