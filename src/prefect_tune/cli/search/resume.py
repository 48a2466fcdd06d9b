"""The command `resume`: resume a search as a flow run in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prefect_tune.cli.shared.app import AsJson, ExperimentName, Target, command
from prefect_tune.cli.shared.open_target import existing_place, opened
from prefect_tune.cli.shared.option_parsing import space_from
from prefect_tune.cli.shared.search_in_process import checked, resume_command, search_in_this_process
from prefect_tune.cli.shared.search_options import RESUME, flag_of, parameters_from, takes
from prefect_tune.core.errors import InvalidInput

if TYPE_CHECKING:
    from prefect_tune.results.results import Results


@command
@takes(RESUME)
def resume(target: Target, experiment: ExperimentName, *, as_json: AsJson = False, **options: Any) -> None:
    """Resume the search EXPERIMENT with the settings in its journal; options given here replace them.

    It never starts a new experiment.
    A space given here replaces the whole earlier one.
    """
    space = space_from(options.pop("space"), options.pop("settings") or ())
    parameters = {"target": target, **({"space": space} if space else {}), **parameters_from(options)}
    again = resume_command(target, parameters.get("fork", experiment), parameters.get("trainable"))
    search_in_this_process(lambda: _resumed(experiment, parameters), again, as_json=as_json)


def _possible(experiment: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the parameters, and that the experiment can be resumed with them, before a flow run begins."""
    from prefect_tune.parameters.checks.resume_compatibility import require_search
    from prefect_tune.parameters.samples_per_run import require_no_fewer
    from prefect_tune.parameters.search_plan import require_stored

    if "at" in parameters and "fork" not in parameters:
        raise InvalidInput(
            "--at: a resume starts at the last entry; to start at another one, name the fork: --fork NAME"
        )
    checked({"experiment": experiment, **parameters})
    with opened(parameters["target"], experiment) as (_, state):
        require_search(state, existing_place(parameters["target"]).uri)
        if not {"fork", "search"} & parameters.keys():
            require_no_fewer(parameters.get("num_samples"), state)
        if "fork" not in parameters:  # an existing fork has settings of its own
            require_stored(state.settings, parameters)
    return parameters


def _resumed(experiment: str, parameters: Mapping[str, Any]) -> Results:
    from prefect_tune.flows.resume import resume as flow
    from prefect_tune.parameters.search_plan import NotInJournal

    try:
        found: Results = flow(experiment, **_possible(experiment, parameters))
    except NotInJournal as error:
        raise InvalidInput(
            f"the journal of experiment {experiment!r} does not store {', '.join(map(repr, error.names))}; pass "
            f"{' '.join(map(flag_of, error.names))}"
        ) from error
    return found
