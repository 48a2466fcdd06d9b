"""Turns of a search: the request of each, from the flow run's parameters and from persons' answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefect_tune.blocks import resolve_target
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.resume_options import Standing
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.core.search.objective import objective_of
from prefect_tune.parameters import samples_per_run
from prefect_tune.parameters.resume_compatibility import code_note
from prefect_tune.parameters.resume_mode import read_known
from prefect_tune.parameters.search_request import SearchRequest
from prefect_tune.parameters.training_request import experiment_name
from prefect_tune.prefect_api.call_path import call_path
from prefect_tune.results.results import Results
from prefect_tune.retry_policy import with_retries
from prefect_tune.suspension.answers import chosen_before, extended, hear, standing_of
from prefect_tune.suspension.resume_forms import InputForm, form_of_search, page_of
from prefect_tune.suspension.suspend_flow_run import last_form
from prefect_tune.suspension.suspend_loop import Turn, answers_of_persons

__all__ = ["SearchTurn", "first_turn", "next_turn"]


@dataclass
class SearchTurn(Turn):
    """A turn of a search: its request, and what is known of its experiment."""

    asked: SearchRequest
    experiment: str
    known: LoadedJournal | None = None
    stops: bool = False
    """Whether no trial is to start any more."""


def first_turn(asked: SearchRequest, known: LoadedJournal | None) -> SearchTurn:
    """Return the first turn of a flow run, which may be new, retried or resumed.

    Raises:
        Pause: the person's answer is invalid: the run is suspended again with the form.
        ResumeFailed: the experiment cannot be read. No new one was started.
    """
    name, shown = experiment_name(asked.experiment), last_form()
    if shown is None and asked.samples_per_run is None:
        asked = asked if known is None else samples_per_run.with_default_samples(asked, known.experiment)
        return SearchTurn(asked, name, known)
    known = known or with_retries(lambda: read_known(resolve_target(asked.target), name))
    asked, _ = samples_per_run.extended(asked, known.experiment, call_path)
    if shown is None:
        return SearchTurn(asked, name, known)
    state, chosen = known.experiment, list(chosen_before(known.experiment))
    for choice in chosen:
        asked = extended(asked, choice, _standing(asked))
    heard = hear(shown, state, _standing(asked), lambda why: _form(asked, state, why))
    if heard.choice is not None:
        chosen.append(heard.choice)
        asked = extended(asked, heard.choice, _standing(asked))
    stops = bool(chosen) and chosen[-1].way == "stop here"
    return SearchTurn(asked, name, known, stops, news=heard.news)


def next_turn(turn: SearchTurn, results: Results) -> SearchTurn | None:
    """Return the next turn, with new answers; None without any. Raises `Pause` if the run is suspended for one."""
    state = results.experiment
    news = answers_of_persons(state, lambda: _form(turn.asked, state))
    return replace(turn, known=None, news=news, answered=True, state=state) if news else None


def _standing(asked: SearchRequest) -> Standing:
    samples = asked.num_samples or (0 if asked.search is not None else samples_per_run.DEFAULT_SAMPLES)
    return standing_of(asked.stop, samples=samples).model_copy(update={"hours": 0.0})


def _form(asked: SearchRequest, state: Experiment, why: str = "") -> InputForm:
    target = resolve_target(asked.target)
    code = code_note(state, asked)
    page = page_of(state, target.uri, objective_of(asked.metric, asked.mode), code, why)
    return form_of_search(_standing(samples_per_run.with_default_samples(asked, state)), page)
