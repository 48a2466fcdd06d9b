"""What persons have answered a run, and what that makes of what it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from prefect.runtime import flow_run

from prefect_tune.core.choices import Choice, Standing, choice_of, stop_extended
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.events import Answered, Questioned
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.questions import answer_to
from prefect_tune.core.stoppers import AnyOf, MaxTime, Stopper
from prefect_tune.core.values import digest_of
from prefect_tune.flows.asked import Asked
from prefect_tune.flows.request import stopper_for
from prefect_tune.flows.resume_forms import Form, form_of_question
from prefect_tune.flows.spelled import spelled_stop
from prefect_tune.flows.suspension import Shown, leave_with

__all__ = [
    "HOW_TO_GO_ON",
    "Heard",
    "about",
    "answers_for",
    "chosen_before",
    "extended",
    "hear",
    "standing_of",
    "stop_after",
    "unheard",
]

HOW_TO_GO_ON = "how-to-go-on"
"""What the form is about that every suspended run is resumed with."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What was answered, and is not in the journal yet."""

    choice: Choice | None = None
    """How to go on, where that was asked."""
    news: tuple[Answered, ...] = ()


def about(question: Questioned) -> str:
    """Return what the form of a question is about, as a reply tells it."""
    return f"ask-{digest_of(f'{question.trial} {question.key}'.encode())[:16]}"


def chosen_before(known: Experiment) -> Sequence[Choice]:
    """Return how this flow run was to go on so far, oldest first."""
    mine = (each for each in known.answers if each.trial is None and each.flow_run == flow_run.id)
    return [Choice.model_validate(each.answer) for each in mine]


def hear(shown: Shown, known: Experiment, standing: Standing, form: Callable[[str], Form]) -> Heard:
    """Return what this flow run was resumed with, where that is not in the journal.

    Args:
        shown: the form that it was last left with; all before it were answered, and are in the journal.
        known: the experiment, before it is opened.
        standing: what there is to choose from.
        form: of how to go on, with why it has to be answered again.

    Raises:
        Pause: the answer cannot be followed: it is asked for once more, and the reason is said.
    """
    if shown.answer is None or shown.key in {each.key for each in known.answers}:
        return Heard()
    if shown.about == HOW_TO_GO_ON:
        return _how_to_go_on(shown.key, shown.answer, standing, form)
    question = next((each for each in known.questions.values() if about(each) == shown.about), None)
    return _answered(shown.answer, question, known) if question else Heard()


def _how_to_go_on(key: str, answer: Mapping[str, object], standing: Standing, form: Callable[[str], Form]) -> Heard:
    try:
        choice = choice_of(answer, standing)
    except InvalidInput as bad:
        leave_with(form(str(bad)), HOW_TO_GO_ON)
    answered = Answered(key=key, answer=choice.model_dump(mode="json"), flow_run=flow_run.id)
    return Heard(choice, (answered,))


def _answered(given: Mapping[str, object], question: Questioned, known: Experiment) -> Heard:
    try:
        answer = answer_to(question.fields, given)
    except InvalidInput as bad:
        leave_with(form_of_question(question, known.name, str(bad)), about(question))
    return Heard(None, (Answered(key=question.key, answer=answer, trial=question.trial, flow_run=flow_run.id),))


def unheard(news: Sequence[Answered], state: Experiment) -> Sequence[Answered]:
    """Return those of `news` that the journal does not hold, as it was found when it was opened.

    Two starts of one run find the same answer. Only the first one is to carry it out.
    """
    heard = {(each.trial, each.key) for each in state.answers}
    heard -= {(name, each.key) for name, each in state.questions.items()}  # asked once more: it waits for an answer
    return [each for each in news if (each.trial, each.key) not in heard]


# ------------------------------------------------------------------------------------------------ what it makes of it


def standing_of(stop: object, *, samples: int = 0, checkpoints: Sequence[int] = ()) -> Standing:
    """Return what there is to choose from."""
    stopper = stopper_for(stop)  # type: ignore[arg-type]  # it raises what is wrong with it
    said = spelled_stop(stop) if stop is not None else {}
    return Standing(
        samples=samples,
        steps=stopper.step_count or 0,
        hours=_hours_in(stopper),
        checkpoints=tuple(checkpoints),
        stop_is_code=said is None or isinstance(said, str),
    )


def _hours_in(stopper: Stopper) -> float:
    parts = stopper.stoppers if isinstance(stopper, AnyOf) else (stopper,)
    return min((each.time.total_seconds() / 3600 for each in parts if isinstance(each, MaxTime)), default=0.0)


def stop_after(stop: object, choice: Choice, standing: Standing) -> object:
    """Return the stop criterion of a training that goes on as it was chosen."""
    if choice.way != "extend":
        return stop
    steps = choice.steps if choice.steps > standing.steps else 0
    hours = choice.hours if choice.hours > standing.hours else 0
    return stop_extended(spelled_stop(stop), steps, hours) if steps or hours else stop


def extended(asked: Asked, choice: Choice, standing: Standing) -> Asked:
    """Return what a search is asked for that goes on as it was chosen."""
    if choice.way != "extend":
        return asked
    steps_only = choice.model_copy(update={"hours": 0.0})
    return replace(
        asked,
        num_samples=choice.samples if choice.samples > standing.samples else asked.num_samples,
        stop=stop_after(asked.stop, steps_only, standing),
        time_budget_seconds=3600 * choice.hours if choice.hours else asked.time_budget_seconds,
    )


def answers_for(trial: str, answers: Sequence[Answered]) -> Mapping[str, Mapping[str, object]]:
    """Return what a trial was answered, by the keys of its questions."""
    return {each.key: each.answer for each in answers if each.trial == trial}
