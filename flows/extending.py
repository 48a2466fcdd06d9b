"""Samples that each run of a search adds to those of earlier runs: a schedule that goes on and on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, TaskRun, TaskRunResult
from prefect.context import FlowRunContext

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.events import Extended
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.search.random_search import DEFAULT_SAMPLES, ENDLESS, RandomSearch, default_samples
from prefect_tune.core.search.search import Search
from prefect_tune.flows.asked import Asked, only_in_code, space_of
from prefect_tune.flows.spelled import search_from

__all__ = ["DEFAULT_SAMPLES", "extended", "place_of_run", "require_one_count", "search_of", "with_default_samples"]


def place_of_run() -> str:
    """Return what stays the same when this run, or one that has called it, is started again: by whatever means.

    A run that is started again keeps its id. What it calls may be a new run then, in the place of the one before:
    the same call of the same flow, counted from the first one. A run that calls the search every night calls it
    in a new place each time.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("only a flow run can add samples")
    run, places = context.flow_run, deque[str]()
    with get_client(sync_client=True) as client:
        while run.parent_task_run_id is not None:
            call = client.read_task_run(run.parent_task_run_id)
            places.appendleft(_place(run, call))
            if call.flow_run_id is None:
                break
            run = client.read_flow_run(call.flow_run_id)
    return "/".join([str(run.id), *places])


def _place(run: FlowRun, call: TaskRun) -> str:
    """Calls from a task are not counted, by Prefect: how many there were before depends on how tasks overtake."""
    callers = call.task_inputs.get("__parents__", ())
    task = next((str(each.id) for each in callers if isinstance(each, TaskRunResult)), None)
    return f"{run.flow_id}-{task or call.dynamic_key}"


def require_one_count(num_samples: int | None, samples_per_run: int | None) -> None:
    """Find out before anything is read whether it is clear how many samples there are to be.

    Raises:
        InvalidInput: it is not.
    """
    if samples_per_run is None:
        return
    if num_samples is not None:
        raise InvalidInput(
            f"num_samples={num_samples} says how many there are in all, samples_per_run={samples_per_run} how many "
            "this run adds: give one of them"
        )
    if samples_per_run < 1:
        raise InvalidInput(f"samples_per_run: expected 1 or more, found {samples_per_run}")


def extended(asked: Asked, state: Experiment, place_of_run: Callable[[], str]) -> tuple[Asked, Sequence[Extended]]:
    """Return `asked` with the samples that there are to be in all, and what the journal has to be told of it.

    What earlier runs were to propose and did not, this one proposes too. A run that is started again adds
    nothing again.

    Raises:
        InvalidInput: there is no number to add to.
    """
    added = asked.samples_per_run
    if added is None:
        return with_default_samples(asked, state), ()
    run = place_of_run()
    before, chosen = _samples_before(asked, state), asked.num_samples or 0  # by a person, while the run was suspended
    if run in state.extensions:
        return replace(asked, num_samples=max(before, chosen)), ()
    return replace(asked, num_samples=max(before + added, chosen)), (Extended(run=run, samples=added),)


def with_default_samples(asked: Asked, state: Experiment) -> Asked:
    """Return `asked` with the default number of samples where that is not ten, for the journal to keep.

    A journal without a number means ten, whatever its space: an experiment that was begun with ten keeps them.
    """
    if asked.num_samples is not None or asked.samples_per_run is not None or not _leaves_count_open(asked.search):
        return asked
    default, settings = default_samples(space_of(asked.space or {})), state.settings
    if default == DEFAULT_SAMPLES:
        return asked
    before = settings.get("num_samples", DEFAULT_SAMPLES) if _leaves_count_open(settings.get("search")) else None
    return replace(asked, num_samples=DEFAULT_SAMPLES if settings and before == DEFAULT_SAMPLES else default)


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


def search_of(asked: Asked) -> Search:
    """Return who proposes, with the samples that were asked for.

    Raises:
        InvalidInput: it is no search, or cannot be told how many.
    """
    if asked.search is None:
        return RandomSearch(asked.num_samples)
    return search_from(asked.search, asked.num_samples)


def _samples_before(asked: Asked, state: Experiment) -> int:
    """How many earlier runs were to propose in all."""
    if not state.settings:
        return 0
    search = state.settings.get("search", asked.search if "search" in only_in_code(state.settings) else None)
    said: Any = state.settings.get("num_samples")
    counted: Any = said if said is not None else search_of(replace(asked, search=search, num_samples=None))
    found = getattr(counted, "num_samples", counted)
    if found is None and _leaves_count_open(search):
        return DEFAULT_SAMPLES
    if not isinstance(found, int) or found == ENDLESS:
        raise InvalidInput(
            f"samples_per_run: experiment {state.name!r} was not begun with a number of samples that some could be "
            "added to; leave it out, or take another name"
        )
    return found
