"""The limits of one run of an experiment, and checks of a plan before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from prefect_tune.attempt.commit_worker import TrialArtifacts
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.trial_spec import TrialSpec, pickled_or_path
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.stoppers import RAYS_NAMES, Stopper, limits_in, of_experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.reasons import AnyReason
from prefect_tune.core.search.domains import domains_in
from prefect_tune.core.search.objective import Objective, usual_mode
from prefect_tune.core.search.random_search import DEFAULT_SAMPLES, ENDLESS, RandomSearch, default_samples
from prefect_tune.core.search.space import valid_space
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.values import leaves
from prefect_tune.parameters.argument_checks import existing_limits
from prefect_tune.parameters.json_specs import search_from
from prefect_tune.parameters.search_plan import OPTIONS, SearchPlan, only_in_code
from prefect_tune.prefect_api.call_paths import callers_tags
from prefect_tune.registry import BUILT_IN

# `samples_per_run`: each run of a search, such as a scheduled one, adds samples to those of earlier runs.


def require_one_count(num_samples: int | None, samples_per_run: int | None) -> None:
    """Check that at most one of the two counts is passed, before anything is read.

    Raises:
        InvalidInput: both are passed.
    """
    if num_samples is not None and samples_per_run is not None:
        raise InvalidInput(
            f"num_samples={num_samples} is the total, samples_per_run={samples_per_run} is what this run adds: "
            "give one of them"
        )


def require_no_fewer(num_samples: int | None, state: Experiment) -> None:
    """Check that the new total of samples is not smaller than that of the experiment, as in the form of a resume.

    Raises:
        InvalidInput: it is smaller.
    """
    known = state.settings.get("num_samples")
    if num_samples is None or (known is None and "search" in only_in_code(state.settings)):
        return
    before = _total_in(known, state.settings.get("search"))
    if isinstance(before, int) and ENDLESS not in (before, num_samples) and num_samples < before:
        raise InvalidInput(
            f"num_samples: experiment {state.name!r} has {before} already, and this run passes {num_samples}: it is "
            f"the new total, with a grid that of each point. Pass {before} or more, or "
            f"samples_per_run={num_samples} to add {num_samples}"
        )


def extended(plan: SearchPlan, state: Experiment, call_path: Callable[[], str]) -> tuple[SearchPlan, Mapping[str, int]]:
    """Return `plan` with the total number of samples, and by run the samples that this run adds, for the journal.

    This run also proposes the samples that earlier runs were to propose and did not. A run that is started again
    adds none again.

    Raises:
        InvalidInput: the experiment has no number of samples to add to.
    """
    added = plan.samples_per_run
    if added is None:
        return with_default_samples(plan, state), {}
    run, before = call_path(), _samples_before(plan, state)
    chosen = plan.num_samples or 0  # in a resume form
    if run in state.extensions:
        return plan.extended(num_samples=max(before, chosen)), {}
    return plan.extended(num_samples=max(before + added, chosen)), {run: added}


def with_default_samples(plan: SearchPlan, state: Experiment) -> SearchPlan:
    """Return `plan` with the default number of samples if that is not ten, so that the journal stores it.

    A journal without a number means ten, whatever the space: an experiment that was begun with ten keeps them.
    """
    if plan.num_samples is not None or plan.samples_per_run is not None or not _leaves_count_open(plan.search):
        return plan
    default, settings = default_samples(plan.space or {}), state.settings
    if default == DEFAULT_SAMPLES:
        return plan
    before = settings.get("num_samples", DEFAULT_SAMPLES) if _leaves_count_open(settings.get("search")) else None
    return plan.extended(num_samples=DEFAULT_SAMPLES if settings and before == DEFAULT_SAMPLES else default)


def _leaves_count_open(search: object) -> bool:
    match search:
        case None | "RandomSearch":
            return True
        case RandomSearch(num_samples=samples) | {"RandomSearch": {"num_samples": samples}}:
            return samples is None
        case {"RandomSearch": {}}:
            return True
        case _:
            return False


def _samples_before(plan: SearchPlan, state: Experiment) -> int:
    """Return how many samples earlier runs were to propose in all."""
    if not state.settings:
        return 0
    search = state.settings.get("search", plan.search if "search" in only_in_code(state.settings) else None)
    found = _total_in(state.settings.get("num_samples"), search)
    if not isinstance(found, int) or found == ENDLESS:
        raise InvalidInput(
            f"samples_per_run: experiment {state.name!r} was not begun with a fixed number of samples to add to; "
            "leave samples_per_run out, or choose another experiment name"
        )
    return found


def _total_in(num_samples: Any, search: Any) -> object:
    """Return the total number of samples in an experiment's settings; None if they fix none."""
    if num_samples is not None:
        return num_samples
    return DEFAULT_SAMPLES if _leaves_count_open(search) else getattr(search_from(search), "num_samples", None)


@dataclass(frozen=True)
class SearchLimits:
    """The limits of one run of an experiment."""

    options: SearchPlan
    """The plan: its limits, such as `fail_fast`, are read from here where they apply."""
    max_concurrent_trials: int
    """The number of slots, which the options only bound."""
    end_reason: AnyReason | None = None
    """Why the run ends before it trains; None if it trains."""
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


def warn_of_no_metric(plan: SearchPlan, log: Log) -> None:
    """Log a warning if several trials are searched without a metric: none of them is the best."""
    if plan.objective is None and plan.trial_count != 1:
        log.warning(
            "no metric: trials are not compared, and results.best is an error. Pass the name of a reported metric, "
            "as in metric='loss'; or name it later: results.best_trial('loss')"
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


# The specification of a plan's trials.


def trial_spec(plan: SearchPlan, stopper: Stopper) -> TrialSpec:
    """Return how the trials of a search are trained, with a placeholder for the trial.

    An option of the trial is a field of both, under one name.

    Raises:
        InvalidInput: a concurrency limit does not exist, or the trainable cannot be sent to a process.
    """
    names = OPTIONS.keys() & {each.name for each in fields(TrialSpec)}
    of_the_trial: dict[str, Any] = {name: value for name in names if (value := getattr(plan, name)) is not None}
    silence = plan.silence_timeout_seconds
    meant = {
        "trainable": pickled_or_path(plan.trainable),
        "concurrency_limits": existing_limits(plan.concurrency_limits or ()),
    }
    return TrialSpec(
        **{**of_the_trial, **meant},
        trial=TrialKey(experiment=plan.experiment, generation=1, trial="any"),
        fingerprint=plan.fingerprint,
        stopper=pickled_or_path(stopper),
        needs_curve=stopper.looks_back,
        cadence=plan.checkpoint or Cadence(),
        grace=timedelta(seconds=plan.grace_period_seconds),
        silence=None if silence is None else timedelta(seconds=silence),
        tags=tuple(dict.fromkeys([*(plan.trial_tags or ()), *sorted(callers_tags())])),
        required_metrics=plan.objective.metrics if plan.objective and not plan.allow_missing_metric else (),
        of_search=True,
    )


def spec_of_one_trial(plan: SearchPlan, trial: str) -> tuple[TrialSpec, Stopper]:
    """As `trial_spec`, of a trial whose attempts write the experiment's journal; and its stop criterion.

    Raises:
        InvalidInput: also if the criterion ends a search of many trials, or as `require_possible`.
    """
    stopper = plan.stopper
    if found := of_experiment(stopper):
        raise InvalidInput(
            f"stop: {found[0]} is for a search of many trials; for one trial use MaxSteps, MaxTime or Plateau"
        )
    spec = trial_spec(plan, stopper)
    spec = replace(spec, trial=spec.trial.of_experiment.trial_key(trial), of_search=False)
    require_possible(spec)
    return spec, stopper


def require_possible(spec: TrialSpec) -> None:
    """Check the sync settings of a specification before anything is written.

    Raises:
        InvalidInput: the syncer or the upload target is invalid.
    """
    TrialArtifacts(spec, Path(), get_run_logger())
