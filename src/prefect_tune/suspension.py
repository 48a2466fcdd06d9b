"""Suspend a flow run with a form, and resume it with a person's choice of how to continue, which is carried out once.

A search has one `ResumeQuestion`, and a training another. The journal holds each answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NoReturn, TypeAlias, cast
from uuid import UUID, uuid4

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause, TerminationSignal
from prefect.input import RunInput
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Suspended
from pydantic import Field, ValidationError, create_model

from prefect_tune.attempt.graceful_stop import send_log
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget
from prefect_tune.blocks.resolve_target import deployment_of_run
from prefect_tune.clock import new_write_id
from prefect_tune.core.errors import CheckpointNotFound, InvalidInput, ResumeFailed, Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.stoppers import AnyOf, MaxTime, TrialBudget, of_experiment
from prefect_tune.core.experiment.summary import best_label, counted, ranked
from prefect_tune.core.experiment.trial_transitions import ENDED, Trial, clone_for, newest_checkpoint, newest_key
from prefect_tune.core.journal_events import Answered, CheckpointRef, Cloned, Event, Finished, FinishKind, Requeued
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import DEFAULT_SAMPLES
from prefect_tune.core.shown_text import plural
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.values import Value, argument_error
from prefect_tune.journal_access import JournalWriter, no_experiment_at, read_journal, read_known
from prefect_tune.ownership import owner_after
from prefect_tune.parameters import plan_checks
from prefect_tune.parameters.argument_checks import code_of, stop_to_json, stopper_for
from prefect_tune.parameters.plan_checks import code_note
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.call_paths import call_path
from prefect_tune.prefect_api.flow_runs import in_order, is_resumed, is_suspended, set_with_form, suspended_state
from prefect_tune.prefect_api.task_runs import skip_prefect_introspection
from prefect_tune.reporting.page import escaped
from prefect_tune.storage_retries import with_retries
from prefect_tune.tasks.experiments import open_experiment
from prefect_tune.tasks.maintenance import damage_of_checkpoint
from prefect_tune.terminal.formatting import format_counts, format_trial

# What a person may choose, the check of an answer, and its effect on the stop criterion.

Way: TypeAlias = Literal["continue", "extend", "other checkpoint", "stop here"]


class ResumeChoice(Value):
    """The chosen way to resume. A number of 0 leaves that limit unchanged."""

    way: Way = "continue"
    samples: int = Field(default=0, ge=0)
    """The new total of samples."""
    steps: int = Field(default=0, ge=0)
    """The new total of steps of each trial."""
    hours: float = Field(default=0, ge=0, le=1e6, allow_inf_nan=False)
    """For a search: hours until this run saves and ends. For a single training: its total training hours."""
    checkpoint: int = Field(default=0, ge=0)
    """The step of the checkpoint to resume from."""


class ResumeLimits(Value):
    """The present limits and checkpoints of a suspended run; 0 where there is no such limit."""

    samples: int = 0
    stop_trials: int = 0
    """The trials after which the stop criterion proposes no more."""
    steps: int = 0
    hours: float = 0
    checkpoints: tuple[int, ...] = ()
    """The steps of the checkpoints that a training can go back to."""
    stop_is_code: bool = False
    """Whether its stop criterion is a function or a stopper class of the user, which no number can change."""
    scheduler_steps: int = 0
    """The step at which the scheduler ends every trial."""


_NUMBERS = {"samples", "steps", "hours"}


def choice_of(answer: Mapping[str, object], limits: ResumeLimits) -> ResumeChoice:
    """Return the choice that a form's `answer` makes.

    Raises:
        InvalidInput: the choice is impossible, or does not use a number that was typed. The message is shown to the
            person who answered.
    """
    try:
        choice = ResumeChoice.model_validate(answer)
    except ValidationError as invalid:
        raise argument_error(invalid) from invalid
    asked, present = choice.model_dump(include=_NUMBERS), limits.model_dump(include=_NUMBERS)
    changed = [name for name, value in asked.items() if value not in {0, present[name]}]
    if changed and choice.way != "extend":
        numbers = ", ".join(f"{name} {asked[name]:g} (it has {present[name]:g})" for name in changed)
        raise InvalidInput(f"{choice.way}: changes no numbers, and the form has {numbers}; choose extend to use them")
    newest = max(limits.checkpoints, default=0)
    if choice.way != "other checkpoint" and choice.checkpoint not in {0, newest}:
        raise InvalidInput(
            f"{choice.way}: uses the newest checkpoint, of step {newest}, and the form has step {choice.checkpoint}; "
            "choose other checkpoint to go back to it"
        )
    if choice.way == "extend":
        _require_more(choice, limits, asked, present)
    if choice.way == "other checkpoint" and choice.checkpoint not in limits.checkpoints:
        steps = ", ".join(map(str, limits.checkpoints)) or "none"
        raise InvalidInput(f"checkpoint: expected the step of a checkpoint ({steps}), found {choice.checkpoint}")
    return choice


def _require_more(
    choice: ResumeChoice, limits: ResumeLimits, asked: Mapping[str, float], present: Mapping[str, float]
) -> None:
    if less := [name for name, value in asked.items() if 0 < value < present[name]]:
        numbers = ", ".join(f"{name} {asked[name]:g} (it has {present[name]:g})" for name in less)
        raise InvalidInput(f"extend: less than before: {numbers}")
    if not any(value > present[name] for name, value in asked.items()):
        raise InvalidInput("extend: nothing is larger than before; give more samples, steps or hours, or continue")
    if choice.samples and not limits.samples:
        raise InvalidInput("samples: the search of this run has no number of samples that a form can change")
    if 0 < limits.stop_trials < choice.samples:
        raise InvalidInput(
            f"samples: the stop criterion TrialBudget ends the search after {limits.stop_trials} trials, and the form "
            f"has {choice.samples}; a run of the deployment resume can pass another stop"
        )
    if limits.stop_is_code and choice.steps:
        raise InvalidInput("steps: the stop criterion of this run is code, which a number cannot change")
    if limits.scheduler_steps and choice.steps > max(limits.scheduler_steps, limits.steps):
        raise InvalidInput(
            f"steps: the scheduler ends each trial at step {limits.scheduler_steps}, and the form has {choice.steps}; "
            "a run of the deployment resume can pass a scheduler with a larger max_t"
        )


def stop_extended(stop: object, steps: int, hours: float) -> Sequence[object]:
    """Return a stop criterion in its JSON form, with these limits in place of its own; 0 keeps a limit."""
    limits: list[object] = [{"step": steps}] if steps else []
    limits += [{"MaxTime": {"time_seconds": 3600 * hours}}] if hours else []
    replaced = {*(("step", "MaxSteps") if steps else ()), *(("MaxTime",) if hours else ())}
    parts = stop if isinstance(stop, list | tuple) else [stop]
    rest = (
        {name: limit for name, limit in part.items() if name not in replaced} if isinstance(part, Mapping) else part
        for part in parts
    )
    return [*(part for part in rest if part), *limits]


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


def last_form() -> Shown | None:
    """Return the form with which this flow run was last suspended, and its answer; None if it never was.

    The form is found by the run's states, all of which Prefect lists; of inputs it lists only the oldest 200.
    """
    if not can_be_suspended():
        return None
    run = _run_id()
    with get_client(sync_client=True) as client:
        states = in_order(client.read_flow_run_states(run))
        ours = [
            number
            for number, each in enumerate(states)
            if each.is_paused() and str(each.state_details.pause_key).startswith(_PREFIX)
        ]
        if not ours:
            return None
        details = states[ours[-1]].state_details
        key = (details.run_input_keyset or {})["response"]
        stored = client.filter_flow_run_input(run, key_prefix=key, limit=1, exclude_keys=set())
    answer = stored[0].decoded_value if stored else None
    if isinstance(answer, Mapping):
        return Shown(str(details.pause_key), answer)
    # Prefect stores no input for an untouched form.
    return Shown(str(details.pause_key), {} if is_resumed(states[ours[-1] :]) else None)


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
    trials, facts = list(state.trials.values()), list[str]()
    if len(trials) != 1 or trials[0].of_search:
        facts.append(f"trials: {len(trials)} ({format_counts(counted(state))})")
    if objective is not None and (compared := ranked(trials, objective)):
        best = compared[0][0]
        best_trial = escaped(f"{best_label(objective)}: {format_trial(best, objective.metrics)}")
        facts.append(f"{best_trial} at step {best.step}")
    if len(trials) == 1:
        (trial,) = trials
        facts.append(f"step {trial.step}, attempt {trial.attempt}, steps redone: {trial.wasted_count}")
        steps = [str(each.step) for each in reversed(trial.checkpoints)]
        more = f", and {len(steps) - _MOST_STEPS} older ones" if len(steps) > _MOST_STEPS else ""
        facts.append(f"checkpoints, newest first: {', '.join(steps[:_MOST_STEPS]) or 'none'}{more}")
    else:
        saved = sum(bool(each.checkpoints) for each in trials)
        count = sum(len(each.checkpoints) for each in trials)
        facts.append(f"checkpoints: {count}, of {plural(saved, 'trial', 'trials')}")
    refused = [f"⚠️ **Please answer again**: {escaped(why)}", ""] if why else []
    lines = [*refused, f"**{state.name}** at `{uri}` is saved.", ""]
    return "\n".join([*lines, *(f"- {fact}" for fact in [*facts, escaped(code)])])


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


def limits_of(stop: object, *, samples: int = 0, checkpoints: Sequence[int] = ()) -> ResumeLimits:
    """Return the present limits, and the checkpoints, that the form of how to continue offers to change."""
    stopper = stopper_for(stop)  # type: ignore[arg-type]  # it raises if the type is wrong
    parts = stopper.stoppers if isinstance(stopper, AnyOf) else (stopper,)
    said = stop_to_json(stop) if stop is not None else {}
    return ResumeLimits(
        samples=samples,
        stop_trials=min((part.trials for part in of_experiment(stopper) if isinstance(part, TrialBudget)), default=0),
        steps=stopper.step_count or 0,
        hours=min((each.time.total_seconds() / 3600 for each in parts if isinstance(each, MaxTime)), default=0.0),
        checkpoints=tuple(checkpoints),
        stop_is_code=said is None or isinstance(said, str),
    )


def stop_after(stop: object, choice: ResumeChoice) -> object:
    """Return the stop criterion of a trial, extended by the choice; unchanged for any choice but "extend"."""
    if choice.way != "extend":
        return stop
    limits = limits_of(stop)
    steps = choice.steps if choice.steps > limits.steps else 0
    hours = choice.hours if choice.hours > limits.hours else 0
    return stop_extended(stop_to_json(stop), steps, hours) if steps or hours else stop


# The turns of a flow run, from one suspension to the next.

STOPPED_HERE = make_reason("stopped-on-resume")


@dataclass
class Turn:
    """The work of one start of a flow run, until it is suspended or none is left."""

    plan: SearchPlan
    """The flow run's parameters, extended by the persons' choices so far."""
    known: Experiment | None = None
    """Its journal, if it has been read."""
    answer: NewAnswer | None = None
    """A person's choice of how to continue, which is not carried out yet."""
    stops: bool = False
    """Whether no trial of a search is to start any more."""
    found: Experiment | None = None
    """The experiment as this run found it, before it changed anything."""
    journal_writer: JournalWriter | None = None
    """What writes its journal, and holds its last state; None until the run owns it."""

    def begin_writing(self, journal_writer: JournalWriter) -> JournalWriter:
        """Keep the writer of the journal, whose state is still that which was found, and return it."""
        self.found, self.journal_writer = journal_writer.experiment, journal_writer
        return journal_writer


@dataclass(frozen=True, slots=True)
class ResumeQuestion:
    """The question of how a suspended run continues, of a search or of a single training."""

    limits: Callable[[SearchPlan, Experiment], ResumeLimits]
    """Returns the values that the form offers to change."""
    extended: Callable[[SearchPlan, ResumeChoice], SearchPlan]
    """Returns the plan, extended by a choice."""
    form: Callable[[SearchPlan, Experiment, str], InputForm]
    """Makes the form, with the reason why it is shown again; empty if it is not."""
    why_not: Callable[[StorageTarget, Experiment, ResumeChoice], str] = lambda _target, _state, _choice: ""
    """Returns why a choice cannot be carried out; empty if it can."""


def first_turn(turn: Turn, question: ResumeQuestion, shown: Shown | None) -> Turn:
    """Return the first turn of a flow run, which may be new, retried or resumed, from one without answers.

    Args:
        turn: the plan, and what is known of the experiment.
        question: what the run is asked if it is suspended.
        shown: the form with which it was suspended last.

    Raises:
        Pause: the person's answer is invalid: the run is suspended again with the form.
        ResumeFailed: the experiment cannot be read, or is gone. No new one was started.
    """
    if shown is None:
        return turn
    plan, target = turn.plan, turn.plan.target
    known = turn.known or with_retries(lambda: read_known(target, plan.experiment))
    if not known.number:
        none = no_experiment_at(target, plan.experiment)
        again = "Nothing was started: run the flow anew to train from step 0"
        raise ResumeFailed(f"this run was suspended, and now {none}. Was it deleted, or is the target another? {again}")
    state, chosen = known, list(chosen_before(known))
    for choice in chosen:
        plan = question.extended(plan, choice)
    form = partial(question.form, plan, state)
    answer = new_answer(shown, state, question.limits(plan, state), form)
    if answer is not None:
        if why := question.why_not(target, state, answer.choice):
            leave_with(form(why))
        chosen.append(answer.choice)
        plan = question.extended(plan, answer.choice)
    return Turn(plan, known, answer, stops=bool(chosen) and chosen[-1].way == "stop here")


def ask_if_suspended(plan: SearchPlan, question: ResumeQuestion, state: Experiment) -> None:
    """Raise `Pause` if the flow run was suspended: it then waits with the form, if it can be resumed."""
    if not is_suspended():
        return
    if not can_be_suspended():
        raise Pause(state=suspended_state())  # its state stays
    leave_with(question.form(plan, state, ""))


# ---------------------------------------------------------------------------------------------------- how it ends


def take_over(turn: Turn, known: Experiment, slots: int) -> Experiment:
    """Make this run, which trains `slots` trials at a time, the owner of its experiment, and return the state.

    `known` is the journal as it was just read.

    Raises what `owner_after` and `open_experiment` raise.
    """
    plan = turn.plan
    owner = owner_after(known, plan.failure_policy.max_restarts)
    owner, read = owner.model_copy(update={"slots": slots}), skip_prefect_introspection(known)
    return open_experiment(plan.target, known.key, owner, new_write_id(), read)


@contextmanager
def as_one_owner(turn: Turn) -> Iterator[None]:
    """End this process without a state if another process of the same flow run has taken over the experiment.

    A state from this process would overwrite the state of the other. On SIGTERM or Ctrl-C, log as the last line what
    can be resumed.

    Raises:
        Abort: instead of `Superseded`, if the new owner is the same flow run.
        KeyboardInterrupt: with that line as its message, which Python prints last of all.
    """
    try:
        yield
    except Superseded as lost:
        owner = None
        if can_be_suspended():
            with suppress(TuneError):
                owner = read_journal(turn.plan.target, turn.plan.experiment).owner
        if owner is None or owner.flow_run != flow_run.id:
            raise
        get_run_logger().warning("%s", lost)
        raise Abort(str(lost)) from lost
    except (TerminationSignal, KeyboardInterrupt) as signal:
        state = turn.journal_writer.experiment if turn.journal_writer else None
        said = resumable(state) if state and state.trials else "the run had not begun: run it again"
        is_interrupt = isinstance(signal, KeyboardInterrupt)
        if not is_interrupt or threading.current_thread() is not threading.main_thread():
            get_run_logger().warning("%s", said)
            send_log()
        if is_interrupt:  # the last line of a script that calls in its main thread, and the message of the state
            raise KeyboardInterrupt(said) from None
        raise


def resumable(state: Experiment) -> str:
    """Return a sentence: what can be resumed of an experiment, and how."""
    trials = list(state.trials.values())
    open_ones = [each for each in trials if each.phase not in ENDED]
    saved = [newest.step if (newest := newest_checkpoint(each)) else 0 for each in open_ones]
    again = "press Retry, or run it" if deployment_of_run() is not None else "run it"  # only such a run has *Retry*
    again = f"{again} again under the same experiment name, to resume"
    if not open_ones:
        return f"experiment {state.name!r}: all {plural(len(trials), 'trial has', 'trials have')} ended; {again}"
    if len(trials) == 1:
        return f"experiment {state.name!r}: resumable at step {saved[0]}; {again}"
    steps = sorted(filter(None, saved))
    where = f", at steps {steps[0]} to {steps[-1]}" if len(set(steps)) > 1 else f", at step {steps[0]}" if steps else ""
    rest = f"; {plural(saved.count(0), 'begins', 'begin')} again, without a checkpoint" if 0 in saved else ""
    resume = f"{len(steps)} of {plural(len(trials), 'trial', 'trials')} resumable{where}{rest}"
    return f"experiment {state.name!r}: {resume}; {again}"


def first_search_turn(plan: SearchPlan, known: Experiment | None) -> Turn:
    """Return the first turn of a search's flow run, with the samples that it adds. Raises what `first_turn` raises."""
    shown = last_form()
    if shown is None and plan.samples_per_run is None:
        return Turn(plan if known is None else plan_checks.with_default_samples(plan, known), known)
    known = known or with_retries(lambda: read_known(plan.target, plan.experiment))
    plan, _ = plan_checks.with_added_samples(plan, known, lambda: call_path(plan.experiment).key)
    return first_turn(Turn(plan, known), SEARCH_QUESTION, shown)


def _search_limits(plan: SearchPlan, _state: Experiment) -> ResumeLimits:
    limits = limits_of(plan.stop, samples=_samples(plan))
    return limits.model_copy(update={"hours": 0.0, "scheduler_steps": getattr(plan.scheduler, "max_t", 0)})


def _samples(plan: SearchPlan) -> int:
    """Return the total of samples; 0 if the search has no fixed number of them, or none that can be changed."""
    if plan.search is None:
        return plan.num_samples or DEFAULT_SAMPLES
    if "num_samples" not in getattr(plan.search, "__dataclass_fields__", ()):
        return 0  # as `with_samples` has it
    total = plan.num_samples or getattr(plan.search, "num_samples", None)
    return total if isinstance(total, int) and total > 0 else 0


def _search_extended(plan: SearchPlan, choice: ResumeChoice) -> SearchPlan:
    if choice.way != "extend":
        return plan
    return plan.extended(
        num_samples=choice.samples if choice.samples > _samples(plan) else plan.num_samples,
        stop=stop_after(plan.stop, choice.model_copy(update={"hours": 0.0})),
        time_budget_seconds=3600 * choice.hours if choice.hours else plan.time_budget_seconds,
    )


def _search_form(plan: SearchPlan, state: Experiment, why: str) -> InputForm:
    page = page_of(state, plan.target.uri, plan.objective, code_note(state, plan), why)
    limits = _search_limits(plan_checks.with_default_samples(plan, state), state)
    return _filled(_Search, page, samples=limits.samples, steps=limits.steps)


SEARCH_QUESTION = ResumeQuestion(_search_limits, _search_extended, _search_form)
"""How to continue a search."""


def _why_not_back(target: StorageTarget, state: Experiment, choice: ResumeChoice) -> str:
    """Return why the training cannot resume from the chosen checkpoint; empty if it can, or none was chosen."""
    if choice.way != "other checkpoint":
        return ""
    (trial,) = state.trials.values()
    ref = _checkpoint_at(trial, choice.checkpoint)
    damage = damage_of_checkpoint(target, state.trial_key(trial.trial).checkpoint_key(ref))
    return damage and f"checkpoint: step {choice.checkpoint} cannot be used: {damage}"


def follow_up(spec: TrialSpec, state: Experiment, turn: Turn) -> Sequence[Event]:
    """Return the answer's events, and those that carry it out: one entry, so that a retry after a kill does it.

    Nothing if another start of this run has carried out the answer.
    """
    if turn.answer is None or is_answered(state, turn.answer.event.key):
        return ()
    trial, choice, events = state.trials.get(spec.trial.trial), turn.answer.choice, list[Event]([turn.answer.event])
    if trial is None:
        return events
    name = trial.trial
    if choice.way == "stop here" and trial.phase not in ENDED:
        events.append(Finished(trial=name, reason=STOPPED_HERE, kind=FinishKind.STOPPED))
    elif choice.way == "other checkpoint":  # an earlier one becomes the newest by a clone; later ones stay
        step = choice.checkpoint
        copy = clone_for(trial, _checkpoint_at(trial, step), name)
        events.append(Requeued(trial=name, reason=make_reason("goes-back", step=step)))
        events.append(Cloned(trial=name, checkpoint=copy, source=name, reason=make_reason("went-back", step=step)))
    return events


def _checkpoint_at(trial: Trial, step: int) -> CheckpointRef:
    """Return the newest checkpoint of a step. Raises `CheckpointNotFound` if it was retired since the choice."""
    found = [each for each in trial.checkpoints if each.step == step]
    if not found:
        raise CheckpointNotFound(
            f"trial {trial.trial!r}: the checkpoint of step {step} is gone; press Retry to choose again"
        )
    return found[-1]


def _training_limits(plan: SearchPlan, state: Experiment) -> ResumeLimits:
    steps = [each.step for trial in state.trials.values() for each in trial.checkpoints]
    return limits_of(plan.stop, checkpoints=sorted(set(steps)))


def _training_form(plan: SearchPlan, state: Experiment, why: str) -> InputForm:
    changed = (
        code_changed(plan.target, state.trial_key(name), each, plan.trainable) for name, each in state.trials.items()
    )
    warning = next(filter(None, changed), None)
    code = f"⚠️ {warning}" if warning else "code: unchanged since the newest checkpoint, as far as can be told"
    page = page_of(state, plan.target.uri, None, code, why)
    return form_of_training(_training_limits(plan, state), page)


def code_changed(target: StorageTarget, folder: TrialKey, trial: Trial, trainable: object) -> str:
    """Return a warning if the trainable's source has changed since the newest checkpoint.

    Empty if it has not, or if one of the two is unknown.
    """
    key, now = newest_key(folder, trial), code_of(trainable)
    if key is None or not now:
        return ""
    try:
        with target.open(timeout=timedelta(seconds=30)) as store:
            before = read_manifest(store, key).about.fingerprint.get("code", "")
    except TuneError:  # it cannot be read now
        return ""
    if not before or before == now:
        return ""
    return f"the source of the trainable has changed since the checkpoint of step {key.step} ({before} -> {now})"


TRAINING_QUESTION = ResumeQuestion(
    _training_limits,
    lambda plan, choice: plan.extended(stop=stop_after(plan.stop, choice)),
    _training_form,
    _why_not_back,
)
"""How to continue a single training."""
