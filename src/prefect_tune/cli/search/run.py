"""The command `run`: run a search as a flow run in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefect_tune.cli.shared.app import AsJson, asks, command
from prefect_tune.cli.shared.option_parsing import space_from
from prefect_tune.cli.shared.search_in_process import checked, resume_command, search_in_this_process
from prefect_tune.cli.shared.search_options import RUN, parameters_from, takes

if TYPE_CHECKING:
    from prefect_tune.results.results import Results


@command
@takes(RUN)
def run(
    trainable: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="The trainable: a function or a class.", show_default=False)
    ],
    target: Annotated[str, asks("--target", "TARGET", "Where it is stored.")],
    experiment: Annotated[str, asks("--experiment", "EXPERIMENT", "Its name there.")],
    *,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Search a space for the best configuration of MODULE:NAME; resume EXPERIMENT if it exists.

    For example:

    prefect-tune run my_project.train:Net --target ./runs --experiment first
      --set "lr=loguniform(1e-4,1e-1)" --metric loss --num-samples 20
      --scheduler '{"ASHA": {"max_t": 100}}'
    """
    space = space_from(options.pop("space"), options.pop("settings") or ())
    named = {"trainable": trainable, "target": target, "experiment": experiment}
    parameters = {"space": space, **named, **parameters_from(options)}
    again = resume_command(target, experiment, trainable)
    search_in_this_process(lambda: _tuned(checked(parameters)), again, as_json=as_json)


def _tuned(parameters: Mapping[str, Any]) -> Results:
    from prefect_tune.flows.tune import tune

    found: Results = tune(**parameters)
    return found
