"""Read the form answers of a suspended run, and apply them to a stop criterion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.resume_options import (
    ResumeChoice,
    Standing,
    choice_of,
    ignored_numbers,
    stop_extended,
)
from prefect_tune.core.experiment.trial_stoppers import AnyOf, MaxTime, Stopper
from prefect_tune.core.journal_events.experiment_events import Answered, Questioned
from prefect_tune.core.journal_events.question_fields import answer_to
from prefect_tune.core.models import digest_of
from prefect_tune.parameters.checks.argument_checks import stopper_for
from prefect_tune.parameters.json_specs import stop_to_json
from prefect_tune.suspension.resume_forms import InputForm, form_of_question
from prefect_tune.suspension.suspend_flow_run import Shown, leave_with

HOW_TO_GO_ON = "how-to-go-on"
"""The subject of the form that asks how a suspended run continues, as opposed to a trial's question."""


@dataclass(frozen=True, slots=True)
class NewAnswers:
    """A form answer that the journal does not hold yet."""

    choice: ResumeChoice | None = None
    """How to continue; None if the form was a trial's question."""
    news: tuple[Answered, ...] = ()
    """The events to journal."""


def about(question: Questioned) -> str:
    """Return the subject of a question's form, by which its answer is matched to the question."""
    return f"ask-{digest_of(f'{question.trial} {question.key}'.encode())[:16]}"


def chosen_before(known: Experiment) -> Sequence[ResumeChoice]:
    """Return the choices that this flow run was resumed with so far, oldest first."""
    mine = (each for each in known.answers if each.trial is None and each.flow_run == flow_run.id)
    return [ResumeChoice.model_validate(each.answer) for each in mine]


def new_answers(shown: Shown, known: Experiment, standing: Standing, form: Callable[[str], InputForm]) -> NewAnswers:
    """Return the answer that this flow run was resumed with, unless the journal holds it already.

    Args:
        shown: the last form that the run was suspended with; answers to earlier forms are in the journal.
        known: the experiment, before it is opened.
        standing: the values that the form offers to change.
        form: makes the form of how to continue, from the reason why it is shown again.

    Raises:
        Pause: the answer is invalid: the run suspends again with the same form, which shows the reason.
    """
    if shown.answer is None or shown.key in {each.key for each in known.answers}:
        return NewAnswers()
    if shown.about == HOW_TO_GO_ON:
        return _how_to_go_on(shown.key, shown.answer, standing, form)
    question = next((each for each in known.questions.values() if about(each) == shown.about), None)
    return _answered(shown.answer, question, known) if question else NewAnswers()


def _how_to_go_on(
    key: str, answer: Mapping[str, object], standing: Standing, form: Callable[[str], InputForm]
) -> NewAnswers:
    try:
        choice = choice_of(answer, standing)
    except InvalidInput as bad:
        leave_with(form(str(bad)), HOW_TO_GO_ON)
    if ignored := ignored_numbers(choice, standing):
        get_run_logger().warning("Resume: %s does not change numbers, ignored: %s; choose extend", choice.way, ignored)
    answered = Answered(key=key, answer=choice.model_dump(mode="json"), flow_run=flow_run.id)
    return NewAnswers(choice, (answered,))


def _answered(given: Mapping[str, object], question: Questioned, known: Experiment) -> NewAnswers:
    try:
        answer = answer_to(question.fields, given)
    except InvalidInput as bad:
        leave_with(form_of_question(question, known.name, str(bad)), about(question))
    return NewAnswers(None, (Answered(key=question.key, answer=answer, trial=question.trial, flow_run=flow_run.id),))


def unjournaled(news: Sequence[Answered], state: Experiment) -> Sequence[Answered]:
    """Return those of `news` that the opened journal does not hold.

    Two starts of one run read the same answer. Only the first one applies it.
    """
    known = {(each.trial, each.key) for each in state.answers}
    known -= {(name, each.key) for name, each in state.questions.items()}  # asked again: no answer yet
    return [each for each in news if (each.trial, each.key) not in known]


# ------------------------------------------------------------------------------------------------ applying a choice


def standing_of(stop: object, *, samples: int = 0, checkpoints: Sequence[int] = ()) -> Standing:
    """Return the present limits, and the checkpoints, that the form of how to continue offers to change."""
    stopper = stopper_for(stop)  # type: ignore[arg-type]  # it raises if the type is wrong
    said = stop_to_json(stop) if stop is not None else {}
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


def stop_after(stop: object, choice: ResumeChoice) -> object:
    """Return the stop criterion of a trial, extended by the choice; unchanged for any choice but "extend"."""
    if choice.way != "extend":
        return stop
    standing = standing_of(stop)
    steps = choice.steps if choice.steps > standing.steps else 0
    hours = choice.hours if choice.hours > standing.hours else 0
    return stop_extended(stop_to_json(stop), steps, hours) if steps or hours else stop
