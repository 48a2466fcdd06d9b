"""`samples_per_run`: each run of a search, such as a scheduled one, adds samples to those of earlier runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal_events.experiment_events import Extended
from prefect_tune.core.search.random_search import DEFAULT_SAMPLES, ENDLESS, RandomSearch, default_samples
from prefect_tune.parameters.json_specs import search_from
from prefect_tune.parameters.search_plan import SearchPlan, only_in_code


def require_one_count(num_samples: int | None, samples_per_run: int | None) -> None:
    """Check that at most one of the two counts is passed, before anything is read.

    Raises:
        InvalidInput: both are passed, or `samples_per_run` is below 1.
    """
    if samples_per_run is None:
        return
    if num_samples is not None:
        raise InvalidInput(
            f"num_samples={num_samples} is the total, samples_per_run={samples_per_run} is what this run adds: "
            "give one of them"
        )
    if samples_per_run < 1:
        raise InvalidInput(f"samples_per_run: expected 1 or more, found {samples_per_run}")


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


def extended(
    plan: SearchPlan, state: Experiment, call_path: Callable[[], str]
) -> tuple[SearchPlan, Sequence[Extended]]:
    """Return `plan` with the total number of samples, and the event to journal if this run adds samples.

    This run also proposes the samples that earlier runs were to propose and did not. A run that is started again
    adds none again.

    Raises:
        InvalidInput: the experiment has no number of samples to add to.
    """
    added = plan.samples_per_run
    if added is None:
        return with_default_samples(plan, state), ()
    run, before = call_path(), _samples_before(plan, state)
    chosen = plan.num_samples or 0  # in a resume form
    if run in state.extensions:
        return plan.extended(num_samples=max(before, chosen)), ()
    return plan.extended(num_samples=max(before + added, chosen)), (Extended(run=run, samples=added),)


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
