"""Turns of a search: the plan of each, from the flow run's parameters and from persons' answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.resume_options import Standing
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.parameters import samples_per_run
from prefect_tune.parameters.resume_compatibility import code_note
from prefect_tune.parameters.resume_mode import read_known
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.results.results import Results
from prefect_tune.retry_policy import with_retries
from prefect_tune.suspension.answers import chosen_before, extended, hear, standing_of
from prefect_tune.suspension.resume_forms import InputForm, form_of_search, page_of
from prefect_tune.suspension.suspend_flow_run import last_form
from prefect_tune.suspension.suspend_loop import Turn, answers_of_persons

__all__ = ["SearchTurn", "first_turn", "next_turn"]


@dataclass
class SearchTurn(Turn):
    """A turn of a search: its plan, and what is known of its experiment."""

    plan: SearchPlan
    known: LoadedJournal | None = None
    stops: bool = False
    """Whether no trial is to start any more."""


def first_turn(plan: SearchPlan, known: LoadedJournal | None) -> SearchTurn:
    """Return the first turn of a flow run, which may be new, retried or resumed.

    Raises:
        Pause: the person's answer is invalid: the run is suspended again with the form.
        ResumeFailed: the experiment cannot be read. No new one was started.
    """
    shown = last_form()
    if shown is None and plan.samples_per_run is None:
        plan = plan if known is None else samples_per_run.with_default_samples(plan, known.experiment)
        return SearchTurn(plan, known)
    known = known or with_retries(lambda: read_known(plan.target, plan.experiment))
    plan, _ = samples_per_run.extended(plan, known.experiment, samples_per_run.place_of_run)
    if shown is None:
        return SearchTurn(plan, known)
    state, chosen = known.experiment, list(chosen_before(known.experiment))
    for choice in chosen:
        plan = extended(plan, choice, _standing(plan))
    heard = hear(shown, state, _standing(plan), lambda why: _form(plan, state, why))
    if heard.choice is not None:
        chosen.append(heard.choice)
        plan = extended(plan, heard.choice, _standing(plan))
    stops = bool(chosen) and chosen[-1].way == "stop here"
    return SearchTurn(plan, known, stops, news=heard.news)


def next_turn(turn: SearchTurn, results: Results) -> SearchTurn | None:
    """Return the next turn, with new answers; None without any. Raises `Pause` if the run is suspended for one."""
    state = results.experiment
    news = answers_of_persons(state, lambda: _form(turn.plan, state))
    return replace(turn, known=None, news=news, answered=True, state=state) if news else None


def _standing(plan: SearchPlan) -> Standing:
    samples = plan.num_samples or (0 if plan.search is not None else samples_per_run.DEFAULT_SAMPLES)
    return standing_of(plan.stop, samples=samples).model_copy(update={"hours": 0.0})


def _form(plan: SearchPlan, state: Experiment, why: str = "") -> InputForm:
    page = page_of(state, plan.target.uri, plan.objective, code_note(state, plan), why)
    return form_of_search(_standing(samples_per_run.with_default_samples(plan, state)), page)
