"""Suspend a run with an input form, and read its answer: fields, the text above them, and Prefect's side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar, cast
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.states import Paused, Suspended
from pydantic import Field, create_model

from prefect_tune.blocks.resolve_target import deployment_of_run
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.resume_choice import ResumeChoice, ResumeLimits, choice_of, stop_extended
from prefect_tune.core.experiment.stoppers import AnyOf, MaxTime, Stopper, TrialBudget, of_experiment
from prefect_tune.core.experiment.summary import best_label, counted, ranked
from prefect_tune.core.experiment.trial_transitions import Trial, newest_checkpoint
from prefect_tune.core.journal_events import Answered, Question, answer_to, default_of, valid_fields
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.shown_text import plural
from prefect_tune.core.values import digest_of, metric_in
from prefect_tune.parameters.argument_checks import stopper_for
from prefect_tune.parameters.json_specs import stop_to_json
from prefect_tune.prefect_api.api_client import is_temporary
from prefect_tune.prefect_api.flow_runs import in_order, is_resumed, set_with_form, suspended_state
from prefect_tune.reporting.render import escaped

# Suspend or pause a flow run with an input form, and read its answer: the Prefect side of questions to a person.

_PREFIX = "prefect-tune-"
_POLL_INTERVAL = timedelta(seconds=2)
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Shown:
    """A form with which a flow run was suspended."""

    key: str
    """Identifies this form."""
    about: str
    """The topic of the form, as given to `leave_with`."""
    answer: Mapping[str, object] | None
    """The answer, by field; None if the run has not been resumed."""


def can_be_suspended() -> bool:
    """Whether this flow run can be suspended: it is of a deployment, whose worker starts it again, and no subflow."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return deployment_of_run() is not None and run is not None and run.parent_task_run_id is None


def leave_with(form: type[RunInput], about: str) -> NoReturn:
    """Set the flow run to Suspended with `form`, and end this process's part in it.

    Args:
        about: the topic that `last_form` returns: small letters, digits and dashes.

    Raises:
        Pause: the run is Suspended: the process is to end, and *Resume* starts the run again.
        Abort: the run was resumed in another process, or has ended, meanwhile.
    """
    state: State[Any] = Suspended(pause_key=f"{_PREFIX}{about}-{uuid4().hex[:12]}")
    with get_client(sync_client=True) as client:
        set_with_form(client, _run_id(), state, form)
    raise Pause(state=state)


def pause_with(form: type[RunInput], timeout: timedelta) -> Mapping[str, object]:
    """Set the flow run Paused with `form`, wait in this process for *Resume*, and return the answer.

    Returns:
        The answer, by field; empty if the form was submitted unchanged.

    Raises:
        Abort: the run has ended, or was cancelled before or while it waited.
    """
    state: State[Any] = Paused(timeout_seconds=int(timeout.total_seconds()), pause_key=uuid4().hex)
    run_id = _run_id()
    with get_client(sync_client=True) as client:
        set_with_form(client, run_id, state, form)
        resumed = _state_after_pause(client, run_id)
        if not resumed.is_running():
            raise Abort(f"The flow run is {resumed.name} now, without an answer: its process ends.")
        return _read_patiently(lambda: _stored_answer(client, run_id, state.state_details.run_input_keyset or {})) or {}


def _state_after_pause(client: SyncPrefectClient, run_id: UUID) -> State[Any]:
    while (now := _read_patiently(lambda: client.read_flow_run(run_id).state)) is None or now.is_paused():
        time.sleep(_POLL_INTERVAL.total_seconds())
    return now


def _read_patiently(ask: Callable[[], _Read]) -> _Read:
    """Return the API's answer; retry without limit while it fails: the run waits there, Paused or resumed."""
    while True:
        try:
            return ask()
        except httpx.HTTPError as error:
            if not is_temporary(error):
                raise
        time.sleep(_POLL_INTERVAL.total_seconds())


def leave_without() -> NoReturn:
    """End this process's part in a suspended flow run, whose state stays. Always raises `Pause`."""
    raise Pause(state=suspended_state())


def last_form() -> Shown | None:
    """Return the form with which this flow run was last suspended, and its answer; None if it never was.

    The form is found by the run's states, all of which Prefect lists; of inputs it lists only the oldest 200.
    """
    if not can_be_suspended():
        return None
    run = _run_id()
    with get_client(sync_client=True) as client:
        states = in_order(client.read_flow_run_states(run))
        since = max((number for number, each in enumerate(states) if _is_ours(each)), default=None)
        if since is None:
            return None
        details = states[since].state_details
        answer = _stored_answer(client, run, details.run_input_keyset or {})
    if answer is None and is_resumed(states[since:]):
        answer = {}  # Prefect stores no input for an untouched form
    key = str(details.pause_key)
    return Shown(key, key.removeprefix(_PREFIX).rpartition("-")[0], answer)


def _is_ours(state: State[Any]) -> bool:
    return state.is_paused() and str(state.state_details.pause_key).startswith(_PREFIX)


def _stored_answer(client: SyncPrefectClient, run: UUID, keyset: Mapping[str, str]) -> Mapping[str, object] | None:
    found = client.filter_flow_run_input(run, key_prefix=keyset["response"], limit=1, exclude_keys=set())
    answer = found[0].decoded_value if found else None
    return answer if isinstance(answer, Mapping) else None


def _run_id() -> UUID:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("only a flow run can be suspended")
    return context.flow_run.id


InputForm = type[RunInput]
_MOST_STEPS = 20


class _Search(RunInput):
    """How to continue the search."""

    way: Literal["continue", "extend", "stop here"] = Field(
        default="continue",
        title="How to continue",
        description="continue: with the same settings. extend: with the larger numbers below. stop here: save nothing "
        "more, publish the results, and end; unfinished trials can be resumed later.",
    )
    samples: int = Field(default=0, title="Total samples", description="To extend: more than now.")
    steps: int = Field(
        default=0, title="Steps of each trial", description="To extend: finished trials continue too. 0: unchanged."
    )
    hours: float = Field(
        default=0, title="Hours for this run", description="To extend: after these, all trials save. 0: unchanged."
    )


class _Training(RunInput):
    """How to continue the training."""

    way: Literal["continue", "extend", "other checkpoint", "stop here"] = Field(
        default="continue",
        title="How to continue",
        description="continue: from the newest checkpoint. extend: with the larger numbers below. other checkpoint: "
        "go back to the step below; later checkpoints are kept. stop here: the training ends.",
    )
    steps: int = Field(default=0, title="Total steps", description="To extend: more than before. 0: unchanged.")
    hours: float = Field(
        default=0, title="Total hours of training", description="To extend: more than before. 0: unchanged."
    )
    checkpoint: int = Field(
        default=0, title="Step of the checkpoint", description="To go back: one of the steps listed above."
    )


def form_of_search(limits: ResumeLimits, page: str) -> InputForm:
    """Return the form of a suspended search; its fields show the current numbers."""
    return _filled(_Search, page, samples=limits.samples, steps=limits.steps)


def form_of_training(limits: ResumeLimits, page: str) -> InputForm:
    """Return the form of a suspended training; its fields show the current numbers."""
    newest = max(limits.checkpoints, default=0)
    return _filled(_Training, page, steps=limits.steps, hours=limits.hours, checkpoint=newest)


def _filled(form: InputForm, page: str, **defaults: float) -> InputForm:
    """Return the form with these defaults. Prefect's `with_initial_data` drops the fields' titles and descriptions."""
    fields: dict[str, Any] = {
        name: (
            info.annotation,
            Field(default=defaults.get(name, info.default), title=info.title, description=info.description),
        )
        for name, info in form.model_fields.items()
    }
    filled = cast("InputForm", create_model(form.__name__.strip("_"), __base__=RunInput, **fields))
    return filled.with_initial_data(description=page)


def form_of_question(trial: str, asked: Question, experiment: str, why: str = "") -> InputForm:
    """Return the form of a trial's question. Raises `InvalidInput` for fields that `pt.ask` does not allow."""
    fields: dict[str, Any] = {name: _field(value) for name, value in valid_fields(asked.fields).items()}
    form = cast("InputForm", create_model("Answer", __base__=RunInput, **fields))
    question = map(escaped, asked.question.splitlines())
    page = [*_refused(why), f"**{experiment}, trial {trial}**, asks:", "", *question]
    return form.with_initial_data(description="\n".join(page))


def _field(value: object) -> tuple[Any, Any]:
    if isinstance(value, list | tuple):
        return Literal[tuple(value)], value[0]
    return type(value), default_of(value)


def page_of(state: Experiment, uri: str, objective: Objective | None, code: str, why: str = "") -> str:
    """Return the text above the form that asks how to continue: the state of the experiment."""
    lines = [*_refused(why), f"**{state.name}** at `{uri}` is saved.", ""]
    return "\n".join([*lines, *(f"- {fact}" for fact in _facts(state, objective, code))])


def _refused(why: str) -> list[str]:
    return [f"⚠️ **Please answer again**: {escaped(why)}", ""] if why else []


def _facts(state: Experiment, objective: Objective | None, code: str) -> Iterator[str]:
    trials = list(state.trials.values())
    if len(trials) != 1 or trials[0].own_journal:
        counts = ", ".join(f"{count} {status}" for status, count in counted(state).items())
        yield f"trials: {len(trials)} ({counts})"
    if objective is not None and (compared := ranked(trials, objective)):
        best = compared[0][0]
        metrics = ", ".join(f"{escaped(name)} {metric_in(best.metrics, name):.6g}" for name in objective.metrics)
        yield f"{escaped(best_label(objective))}: trial {best.trial}, {metrics} at step {best.step}"
    yield from _of_one(trials[0]) if len(trials) == 1 else _newest(trials)
    yield escaped(code)


def _of_one(trial: Trial) -> Iterator[str]:
    yield f"step {trial.step}, attempt {trial.attempt}, steps redone: {trial.wasted_count}"
    steps = [str(each.step) for each in reversed(trial.checkpoints)]
    more = f", and {len(steps) - _MOST_STEPS} older ones" if len(steps) > _MOST_STEPS else ""
    yield f"checkpoints, newest first: {', '.join(steps[:_MOST_STEPS]) or 'none'}{more}"


def _newest(trials: list[Trial]) -> Iterator[str]:
    saved = [(newest, each.trial) for each in trials if (newest := newest_checkpoint(each)) is not None]
    yield f"checkpoints: {sum(len(each.checkpoints) for each in trials)}, of {plural(len(saved), 'trial', 'trials')}"


# Read the form answers of a suspended run, and apply them to a stop criterion.

HOW_TO_CONTINUE = "how-to-continue"
"""The subject of the form that asks how a suspended run continues, as opposed to a trial's question."""


@dataclass(frozen=True, slots=True)
class NewAnswers:
    """A form answer that the journal does not hold yet."""

    choice: ResumeChoice | None = None
    """How to continue; None if the form was a trial's question."""
    news: tuple[Answered, ...] = ()
    """The events to journal."""


def about(trial: str, question: Question) -> str:
    """Return the subject of a question's form, by which its answer is matched to the question."""
    return f"ask-{digest_of(f'{trial} {question.key}'.encode())[:16]}"


def chosen_before(known: Experiment) -> Sequence[ResumeChoice]:
    """Return the choices that this flow run was resumed with so far, oldest first."""
    mine = (each for each in known.answers if each.trial is None and each.flow_run == flow_run.id)
    return [ResumeChoice.model_validate(each.answer) for each in mine]


def new_answers(shown: Shown, known: Experiment, limits: ResumeLimits, form: Callable[[str], InputForm]) -> NewAnswers:
    """Return the answer that this flow run was resumed with, unless the journal holds it already.

    Args:
        shown: the last form that the run was suspended with; answers to earlier forms are in the journal.
        known: the experiment, before it is opened.
        limits: the values that the form offers to change.
        form: makes the form of how to continue, from the reason why it is shown again.

    Raises:
        Pause: the answer is invalid: the run suspends again with the same form, which shows the reason.
    """
    if shown.answer is None or shown.key in {each.key for each in known.answers}:
        return NewAnswers()
    if shown.about == HOW_TO_CONTINUE:
        return _how_to_continue(shown.key, shown.answer, limits, form)
    asked = next((each for each in known.questions.items() if about(*each) == shown.about), None)
    return _answered(shown.answer, *asked, known) if asked else NewAnswers()


def _how_to_continue(
    key: str, answer: Mapping[str, object], limits: ResumeLimits, form: Callable[[str], InputForm]
) -> NewAnswers:
    try:
        choice = choice_of(answer, limits)
    except InvalidInput as bad:
        leave_with(form(str(bad)), HOW_TO_CONTINUE)
    answered = Answered(key=key, answer=choice.model_dump(mode="json"), flow_run=flow_run.id)
    return NewAnswers(choice, (answered,))


def _answered(given: Mapping[str, object], trial: str, question: Question, known: Experiment) -> NewAnswers:
    try:
        answer = answer_to(question.fields, given)
    except InvalidInput as bad:
        leave_with(form_of_question(trial, question, known.name, str(bad)), about(trial, question))
    return NewAnswers(None, (Answered(key=question.key, answer=answer, trial=trial, flow_run=flow_run.id),))


def unjournaled(news: Sequence[Answered], state: Experiment) -> Sequence[Answered]:
    """Return those of `news` that the opened journal does not hold.

    Two starts of one run read the same answer. Only the first one applies it.
    """
    known = {(each.trial, each.key) for each in state.answers}
    known -= {(name, each.key) for name, each in state.questions.items()}  # asked again: no answer yet
    return [each for each in news if (each.trial, each.key) not in known]


# ------------------------------------------------------------------------------------------------ applying a choice


def limits_of(stop: object, *, samples: int = 0, checkpoints: Sequence[int] = ()) -> ResumeLimits:
    """Return the present limits, and the checkpoints, that the form of how to continue offers to change."""
    stopper = stopper_for(stop)  # type: ignore[arg-type]  # it raises if the type is wrong
    said = stop_to_json(stop) if stop is not None else {}
    return ResumeLimits(
        samples=samples,
        stop_trials=min((part.trials for part in of_experiment(stopper) if isinstance(part, TrialBudget)), default=0),
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
    limits = limits_of(stop)
    steps = choice.steps if choice.steps > limits.steps else 0
    hours = choice.hours if choice.hours > limits.hours else 0
    return stop_extended(stop_to_json(stop), steps, hours) if steps or hours else stop
