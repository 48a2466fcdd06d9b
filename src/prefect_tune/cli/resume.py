"""The command `resume`: resume a search as a flow run in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefect_tune.cli.shared.app import SEARCH, AsJson, ExperimentName, Target, app, asks
from prefect_tune.cli.shared.option_parsing import space_from, spelling_from, stop_from
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
    samples_per_run: SamplesPerRun = None,
    stop: StopCriteria = None,
    space: SpaceFile = None,
    settings: Parameters = None,
    max_concurrent_trials: MaxConcurrentTrials = None,
    time_budget_seconds: TimeBudget = None,
    trainable: Annotated[
        str | None, asks("--trainable", "MODULE:NAME", "Replaces the journal's; needed on a bucket.")
    ] = None,
    scheduler: Scheduler = None,
    search: SearchAlgorithm = None,
    callbacks: CallbackNames = None,
    as_json: AsJson = False,
) -> None:
    """Resume the search EXPERIMENT with the settings in its journal; options given here replace them.

    It never starts a new experiment.
    A space given here replaces the whole earlier one.
    """
    parameters: dict[str, Any] = {
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
    again = resume_command(target, fork or experiment, trainable)
    search_in_this_process(lambda: _resumed(experiment, checked(parameters)), again, as_json=as_json)


def _resumed(experiment: str, parameters: Mapping[str, Any]) -> Results:
    from prefect_tune.flows.resume import resume as flow

    found: Results = flow(experiment, **parameters)
    return found
