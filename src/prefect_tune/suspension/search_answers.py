"""How a suspended search continues: the form, and the request extended by a person's choice."""

from __future__ import annotations

from dataclasses import replace

from prefect_tune.blocks import resolve_target
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.resume_options import ResumeChoice, Standing
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.core.search.objective import objective_of
from prefect_tune.parameters import samples_per_run
from prefect_tune.parameters.resume_compatibility import code_note
from prefect_tune.parameters.resume_mode import read_known
from prefect_tune.parameters.search_request import SearchRequest
from prefect_tune.parameters.training_request import experiment_name
from prefect_tune.prefect_api.call_path import call_path
from prefect_tune.retry_policy import with_retries
from prefect_tune.suspension.answers import standing_of, stop_after
from prefect_tune.suspension.resume_forms import InputForm, form_of_search, page_of
from prefect_tune.suspension.suspend_flow_run import last_form
from prefect_tune.suspension.suspend_loop import ResumeQuestion, Turn, first_turn

__all__ = ["QUESTION", "first_search_turn"]


def first_search_turn(request: SearchRequest, known: LoadedJournal | None) -> Turn:
    """Return the first turn of a search's flow run, with the samples that it adds. Raises what `first_turn` raises."""
    name, shown = experiment_name(request.experiment), last_form()
    if shown is None and request.samples_per_run is None:
        return Turn(
            request if known is None else samples_per_run.with_default_samples(request, known.experiment), name, known
        )
    known = known or with_retries(lambda: read_known(resolve_target(request.target), name))
    request, _ = samples_per_run.extended(request, known.experiment, call_path)
    return first_turn(Turn(request, name, known), QUESTION, shown)


def _standing(request: SearchRequest, _state: Experiment) -> Standing:
    return standing_of(request.stop, samples=_samples(request)).model_copy(update={"hours": 0.0})


def _samples(request: SearchRequest) -> int:
    return request.num_samples or (0 if request.search is not None else samples_per_run.DEFAULT_SAMPLES)


def _extended(request: SearchRequest, choice: ResumeChoice) -> SearchRequest:
    if choice.way != "extend":
        return request
    return replace(
        request,
        num_samples=choice.samples if choice.samples > _samples(request) else request.num_samples,
        stop=stop_after(request.stop, choice.model_copy(update={"hours": 0.0})),
        time_budget_seconds=3600 * choice.hours if choice.hours else request.time_budget_seconds,
    )


def _form(request: SearchRequest, state: Experiment, why: str) -> InputForm:
    target = resolve_target(request.target)
    page = page_of(state, target.uri, objective_of(request.metric, request.mode), code_note(state, request), why)
    return form_of_search(_standing(samples_per_run.with_default_samples(request, state), state), page)


QUESTION = ResumeQuestion(_standing, _extended, _form)
"""How to continue a search."""
