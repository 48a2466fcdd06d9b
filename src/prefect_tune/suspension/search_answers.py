"""How a suspended search continues: the form, and the plan extended by a person's choice."""

from __future__ import annotations

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.resume_options import ResumeChoice, Standing
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.core.search.random_search import DEFAULT_SAMPLES
from prefect_tune.parameters import samples_per_run
from prefect_tune.parameters.checks.code_change import code_note
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.flow_runs.call_path import call_path
from prefect_tune.storage_retries import with_retries
from prefect_tune.suspension.answers import standing_of, stop_after
from prefect_tune.suspension.resume_forms import InputForm, form_of_search, page_of
from prefect_tune.suspension.suspend_flow_run import last_form
from prefect_tune.suspension.suspend_loop import ResumeQuestion, Turn, first_turn
from prefect_tune.tasks.existing_experiment import read_known


def first_search_turn(plan: SearchPlan, known: LoadedJournal | None) -> Turn:
    """Return the first turn of a search's flow run, with the samples that it adds. Raises what `first_turn` raises."""
    shown = last_form()
    if shown is None and plan.samples_per_run is None:
        return Turn(plan if known is None else samples_per_run.with_default_samples(plan, known.experiment), known)
    known = known or with_retries(lambda: read_known(plan.target, plan.experiment))
    plan, _ = samples_per_run.extended(plan, known.experiment, call_path)
    return first_turn(Turn(plan, known), QUESTION, shown)


def _standing(plan: SearchPlan, _state: Experiment) -> Standing:
    return standing_of(plan.stop, samples=_samples(plan)).model_copy(update={"hours": 0.0})


def _samples(plan: SearchPlan) -> int:
    return plan.num_samples or (0 if plan.search is not None else DEFAULT_SAMPLES)


def _extended(plan: SearchPlan, choice: ResumeChoice) -> SearchPlan:
    if choice.way != "extend":
        return plan
    return plan.extended(
        num_samples=choice.samples if choice.samples > _samples(plan) else plan.num_samples,
        stop=stop_after(plan.stop, choice.model_copy(update={"hours": 0.0})),
        time_budget_seconds=3600 * choice.hours if choice.hours else plan.time_budget_seconds,
    )


def _form(plan: SearchPlan, state: Experiment, why: str) -> InputForm:
    page = page_of(state, plan.target.uri, plan.objective, code_note(state, plan), why)
    return form_of_search(_standing(samples_per_run.with_default_samples(plan, state), state), page)


QUESTION = ResumeQuestion(_standing, _extended, _form)
"""How to continue a search."""
