"""Suspend a run with an input form, and read its answer: fields, the text above them, and Prefect's side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast
from uuid import UUID, uuid4

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.states import Suspended
from pydantic import Field, create_model

from prefect_tune.blocks.resolve_target import deployment_of_run
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.resume_choice import ResumeChoice, ResumeLimits, choice_of, stop_extended
from prefect_tune.core.experiment.stoppers import AnyOf, MaxTime, Stopper, TrialBudget, of_experiment
from prefect_tune.core.experiment.summary import best_label, counted, ranked
from prefect_tune.core.experiment.trial_transitions import Trial, newest_checkpoint
from prefect_tune.core.journal_events import Answered
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.shown_text import plural
from prefect_tune.core.values import metric_in
from prefect_tune.parameters.argument_checks import stop_to_json, stopper_for
from prefect_tune.prefect_api.flow_runs import in_order, is_resumed, set_with_form, suspended_state
from prefect_tune.reporting.page import escaped

# Suspend a flow run with an input form, and read its answer.

_PREFIX = "prefect-tune-"
InputForm = type[RunInput]


@dataclass(frozen=True, slots=True)
class Shown:
    """A form with which a flow run was suspended."""

    key: str
    """Identifies this form."""
    answer: Mapping[str, object] | None
    """The answer, by field; None if the run has not been resumed."""


def can_be_suspended() -> bool:
    """Whether this flow run can be suspended: it is of a deployment, whose worker starts it again, and no subflow."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return deployment_of_run() is not None and run is not None and run.parent_task_run_id is None


def leave_with(form: InputForm) -> NoReturn:
    """Set the flow run to Suspended with `form`, and end this process's part in it.

    Raises:
        Pause: the run is Suspended: the process is to end, and *Resume* starts the run again.
        Abort: the run was resumed in another process, or has ended, meanwhile.
    """
    state: State[Any] = Suspended(pause_key=f"{_PREFIX}{uuid4().hex[:12]}")
    with get_client(sync_client=True) as client:
        set_with_form(client, _run_id(), state, form)
    raise Pause(state=state)


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
    return Shown(str(details.pause_key), answer)


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


def page_of(state: Experiment, uri: str, objective: Objective | None, code: str, why: str = "") -> str:
    """Return the text above the form that asks how to continue: the state of the experiment."""
    lines = [*_refused(why), f"**{state.name}** at `{uri}` is saved.", ""]
    return "\n".join([*lines, *(f"- {fact}" for fact in _facts(state, objective, code))])


def _refused(why: str) -> list[str]:
    return [f"⚠️ **Please answer again**: {escaped(why)}", ""] if why else []


def _facts(state: Experiment, objective: Objective | None, code: str) -> Iterator[str]:
    trials = list(state.trials.values())
    if len(trials) != 1 or trials[0].of_search:
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


@dataclass(frozen=True, slots=True)
class NewAnswer:
    """A form's answer that the journal does not hold yet."""

    choice: ResumeChoice
    """How to continue."""
    event: Answered
    """The event to journal."""


def chosen_before(known: Experiment) -> Sequence[ResumeChoice]:
    """Return the choices that this flow run was resumed with so far, oldest first."""
    mine = (each for each in known.answers if each.flow_run == flow_run.id)
    return [ResumeChoice.model_validate(each.answer) for each in mine]


def new_answer(
    shown: Shown, known: Experiment, limits: ResumeLimits, form: Callable[[str], InputForm]
) -> NewAnswer | None:
    """Return the answer that this flow run was resumed with; None if there is none, or the journal holds it already.

    Args:
        shown: the last form that the run was suspended with; answers to earlier forms are in the journal.
        known: the experiment, before it is opened.
        limits: the values that the form offers to change.
        form: makes the form, from the reason why it is shown again.

    Raises:
        Pause: the answer is invalid: the run suspends again with the same form, which shows the reason.
    """
    if shown.answer is None or is_answered(known, shown.key):
        return None
    try:
        choice = choice_of(shown.answer, limits)
    except InvalidInput as bad:
        leave_with(form(str(bad)))
    return NewAnswer(choice, Answered(key=shown.key, answer=choice.model_dump(mode="json"), flow_run=flow_run.id))


def is_answered(state: Experiment, key: str) -> bool:
    """Whether the journal holds the answer to a form: of two starts of one run, only the first applies it."""
    return any(answer.key == key for answer in state.answers)


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
