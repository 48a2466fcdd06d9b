"""The limits of one run of an experiment, and checks of a plan before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefect.logging import get_run_logger

from prefect_tune.artifact_sync.trial_artifacts import TrialArtifacts
from prefect_tune.core.errors import BadMetric
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_stoppers import RAYS_NAMES, Stopper, limits_in
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.models import leaves
from prefect_tune.core.search.domains import domains_in
from prefect_tune.core.search.objective import Objective, usual_mode
from prefect_tune.core.search.space import valid_space
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.registry import BUILT_IN
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.supervisor.trial_spec import TrialSpec


@dataclass(frozen=True)
class SearchLimits:
    """The limits of one run of an experiment."""

    options: SearchPlan
    """The plan: its limits, such as `fail_fast`, are read from here where they apply."""
    max_concurrent_trials: int
    """The number of slots, which the options only bound."""
    why_end: Callable[[Experiment, BadMetric | None], str] = lambda _state, _undecided: ""
    """Returns why the run ends now, empty while it continues, from its state and the error of a scheduler that could
    not decide, if it could not."""
    has_had_enough: Callable[[Trial], bool] = lambda _: True
    """Whether a finished trial meets today's stop criterion too; otherwise it is requeued."""


def warn_of_limits(stopper: Stopper, objective: Objective | None, log: Log) -> None:
    """Log a warning for each stop limit that is probably not meant.

    That of a metric that is minimized ends most trials at once. That of a name which Ray Tune adds to each report
    makes every trial fail, unless the trainable reports it itself.
    """
    modes = dict(zip(objective.metrics, objective.modes, strict=True)) if objective else {}
    for name, limit in limits_in(stopper).items():
        if name in RAYS_NAMES:
            log.warning(
                "stop={'%s': %g} limits a metric of this name, and trials that do not report it fail. Ray Tune's %s is "
                "%s here",
                *(name, limit, name, RAYS_NAMES[name]),
            )
        if modes.get(name) == "min":
            log.warning(
                "stop={'%s': %g} ends a trial as soon as %s >= %g, but the metric is minimized: most trials end at "
                "their first step. To end a trial that is good enough: stop=lambda metrics: metrics['%s'] <= %g",
                *(name, limit) * 3,
            )


def warn_of_mode(plan: SearchPlan, log: Log) -> None:
    """Log a warning if the names of metrics say that the other direction is good: an accuracy that is minimized.

    A `min` that was given, or a list with a mode for each metric, is meant: checked are the default and a single `max`.
    """
    objective, given = plan.objective, plan.mode
    if objective is None or isinstance(given, list) or given == "min":
        return
    found = dict(zip(objective.metrics, objective.modes, strict=True))
    usual = {name: usual_mode(name) or mode for name, mode in found.items()}
    wrong = [name for name in found if usual[name] != found[name]]
    if wrong:
        is_max, names = given == "max", " and ".join(wrong)
        meant: object = list(usual.values()) if len(usual) > 1 else usual[wrong[0]]
        as_it_is: object = [given] * len(found) if is_max else "min"
        log.warning(
            "%s: by its name %s values are good, and the search takes the %s ones for the best (mode=%s). Did you mean "
            "mode=%r? If not, mode=%r says so without this warning",
            *(names, "small" if is_max else "large", "largest" if is_max else "smallest"),
            *("'max'" if is_max else "'min', the default", meant, as_it_is),
        )


def warn_of_constants(plan: SearchPlan, log: Log) -> None:
    """Log a warning if the search has several trials and nothing to draw: all of them train the same.

    A search of the user, or `Repeated` with its index, may propose what the space does not have.
    """
    space = valid_space(plan.space or {})
    proposes_more = type(plan.proposer).__name__ not in BUILT_IN["search"]
    if plan.trial_count == 1 or any(domains_in(space)) or proposes_more:
        return
    count = "" if plan.trial_count is None else f"{plan.trial_count} "
    lists = [(name, value) for name, value in leaves(space) if isinstance(value, list)]
    meant = "draw a value, such as pt.uniform(0, 1)"
    if lists:
        name, value = lists[0]
        meant = f"{name}={value!r} is one value; did you mean pt.choice({value!r}) or pt.grid_search({value!r})?"
    log.warning(
        "the space has no distribution, so all %strials train the same configuration. To train it once: "
        "num_samples=1. Otherwise: %s",
        *(count, meant),
    )


def require_possible(spec: TrialSpec) -> None:
    """Check the sync settings of a specification before anything is written.

    Raises:
        InvalidInput: the syncer or the upload target is invalid.
    """
    TrialArtifacts(spec, Path(), get_run_logger())
