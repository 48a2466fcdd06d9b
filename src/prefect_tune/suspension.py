"""Suspend a flow run with a form, and resume it in the way that the user chose in the form.

Searches and trainings have different forms (`ResumeQuestion`). The journal stores each answer, so that a run applies it
only once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeAlias, cast
from uuid import uuid4

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause, TerminationSignal
from prefect.input import RunInput
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Suspended
from pydantic import Field, ValidationError, create_model

from prefect_tune.attempt.graceful_stop import flush_log
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget
from prefect_tune.blocks.resolve_target import current_deployment_id
from prefect_tune.clock import new_write_stamp
from prefect_tune.core.display_text import pluralize
from prefect_tune.core.errors import CheckpointNotFound, InvalidInput, ResumeFailed, Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.stoppers import AnyOf, MaxTime, TrialBudget, extract_experiment_stoppers
from prefect_tune.core.experiment.summary import count_by_status, format_best_label, rank_trials
from prefect_tune.core.experiment.trial_transitions import (
    ENDED_PHASES,
    Trial,
    make_clone_ref,
    newest_checkpoint,
    newest_checkpoint_key,
)
from prefect_tune.core.journal_events import (
    CheckpointCloned,
    CheckpointRef,
    Event,
    FinishKind,
    FormAnswered,
    TrialFinished,
    TrialRequeued,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import DEFAULT_NUM_SAMPLES
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.values import Value, argument_error
from prefect_tune.journal_access import (
    JournalWriter,
    missing_experiment_message,
    read_experiment_by_name,
    read_experiment_to_resume,
)
from prefect_tune.ownership import make_next_owner
from prefect_tune.parameters import plan_checks
from prefect_tune.parameters.argument_checks import compute_source_digest, make_stopper, stop_to_json
from prefect_tune.parameters.plan_checks import format_code_note
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.call_paths import current_call_path, current_flow_run
from prefect_tune.prefect_api.flow_runs import (
    get_suspension_state,
    has_resume_state,
    is_flow_run_suspended,
    set_state_with_form,
    sort_states,
)
from prefect_tune.prefect_api.task_runs import skip_prefect_introspection
from prefect_tune.reporting.page import escape_markdown
from prefect_tune.storage_retries import with_retries
from prefect_tune.tasks.experiments import acquire_experiment
from prefect_tune.tasks.maintenance import find_checkpoint_damage
from prefect_tune.terminal.formatting import format_counts, format_trial

# Parse and check the answer to a form, and put the limits in the answer into the stop criterion.

ResumeAction: TypeAlias = Literal["continue", "extend", "other checkpoint", "stop here"]


class ResumeChoice(Value):
    """The user's choice of how to resume. If a number is 0, its limit stays unchanged."""

    action: ResumeAction = "continue"
    samples: int = Field(default=0, ge=0)
    """The new total number of samples."""
    steps: int = Field(default=0, ge=0)
    """The new total number of steps of each trial."""
    hours: float = Field(default=0, ge=0, le=1e6, allow_inf_nan=False)
    """In a search, the hours until this run saves and ends; in a training, the total hours of training."""
    checkpoint: int = Field(default=0, ge=0)
    """The step of the checkpoint to resume from."""


class ResumeLimits(Value):
    """The current limits and checkpoints of a suspended run; 0 means no limit."""

    samples: int = 0
    max_trials: int = 0
    """The maximum number of trials that the stop criterion allows."""
    steps: int = 0
    hours: float = 0
    checkpoints: tuple[int, ...] = ()
    """The steps of the checkpoints from which a training can resume."""
    stop_is_code: bool = False
    """Whether the stop criterion is the user's own function or stopper class. If so, no number can change it."""
    scheduler_max_steps: int = 0
    """The step at which the scheduler ends every trial."""


_NUMBER_FIELDS = {"samples", "steps", "hours"}


def parse_choice(answer: Mapping[str, object], limits: ResumeLimits) -> ResumeChoice:
    """Return the choice in the `answer` to a form.

    Raises:
        InvalidInput: the choice is impossible, or ignores a number that the user entered. A new form shows the message.
    """
    try:
        choice = ResumeChoice.model_validate(answer)
    except ValidationError as error:
        raise argument_error(error) from error
    requested, current = choice.model_dump(include=_NUMBER_FIELDS), limits.model_dump(include=_NUMBER_FIELDS)
    changed = [name for name, value in requested.items() if value not in {0, current[name]}]
    if changed and choice.action != "extend":
        numbers = ", ".join(f"{name} {requested[name]:g} (now {current[name]:g})" for name in changed)
        raise InvalidInput(f"{choice.action}: changes no limits, but the form has {numbers}; choose extend to use them")
    newest_step = max(limits.checkpoints, default=0)
    if choice.action != "other checkpoint" and choice.checkpoint not in {0, newest_step}:
        raise InvalidInput(
            f"{choice.action}: uses the newest checkpoint, of step {newest_step}, but the form has step "
            f"{choice.checkpoint}; choose other checkpoint to resume from that step"
        )
    if choice.action == "extend":
        _validate_extension(choice, limits, requested, current)
    if choice.action == "other checkpoint" and choice.checkpoint not in limits.checkpoints:
        steps = ", ".join(map(str, limits.checkpoints)) or "none"
        raise InvalidInput(f"checkpoint: expected the step of a checkpoint ({steps}), found {choice.checkpoint}")
    return choice


def _validate_extension(
    choice: ResumeChoice, limits: ResumeLimits, requested: Mapping[str, float], current: Mapping[str, float]
) -> None:
    if smaller := [name for name, value in requested.items() if 0 < value < current[name]]:
        numbers = ", ".join(f"{name} {requested[name]:g} (now {current[name]:g})" for name in smaller)
        raise InvalidInput(f"extend: less than before: {numbers}; enter larger numbers, or 0 for no change")
    if not any(value > current[name] for name, value in requested.items()):
        raise InvalidInput(
            "extend: no number is larger than before; enter more samples, steps or hours, or choose continue"
        )
    if choice.samples and not limits.samples:
        raise InvalidInput("samples: a form cannot change the number of samples of this search")
    if 0 < limits.max_trials < choice.samples:
        raise InvalidInput(
            f"samples: the stop criterion TrialBudget ends the search after {limits.max_trials} trials, but the form "
            f"has {choice.samples}; to change the criterion, run the deployment 'resume' with another stop"
        )
    if limits.stop_is_code and choice.steps:
        raise InvalidInput("steps: the stop criterion of this run is code, so a number cannot change it")
    if limits.scheduler_max_steps and choice.steps > max(limits.scheduler_max_steps, limits.steps):
        raise InvalidInput(
            f"steps: the scheduler ends each trial at step {limits.scheduler_max_steps}, but the form has "
            f"{choice.steps}; to train longer, run the deployment 'resume' with a scheduler that has a larger max_t"
        )


def replace_stop_limits(stop: object, steps: int, hours: float) -> Sequence[object]:
    """Return `stop` as JSON, with `steps` and `hours` in place of its own limits; a 0 keeps the limit of `stop`."""
    limits: list[object] = [{"step": steps}] if steps else []
    limits += [{"MaxTime": {"time_seconds": 3600 * hours}}] if hours else []
    replaced = {*(("step", "MaxSteps") if steps else ()), *(("MaxTime",) if hours else ())}
    parts = stop if isinstance(stop, list | tuple) else [stop]
    kept = (
        {name: limit for name, limit in part.items() if name not in replaced} if isinstance(part, Mapping) else part
        for part in parts
    )
    return [*(part for part in kept if part), *limits]


# Suspend a flow run with an input form, and read the answer to the form.

_PAUSE_KEY_PREFIX = "prefect-tune-"
InputForm = type[RunInput]


@dataclass(frozen=True, slots=True)
class LastForm:
    """The last form of a suspended flow run, and the answer to the form."""

    key: str
    """Identifies this form."""
    answer: Mapping[str, object] | None
    """The answer, by field; None if the run has not been resumed."""


def is_flow_run_resumable() -> bool:
    """Return whether *Resume* can start this flow run again: it must have a deployment, and not be a subflow."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return current_deployment_id() is not None and run is not None and run.parent_task_run_id is None


def suspend_with_form(form: InputForm) -> NoReturn:
    """Set the flow run to Suspended with `form`, and end the run in this process.

    Raises:
        Pause: the run is Suspended. This process must end; *Resume* starts the run again.
        Abort: the run has ended, or was resumed in another process.
    """
    state: State[Any] = Suspended(pause_key=f"{_PAUSE_KEY_PREFIX}{uuid4().hex[:12]}")
    with get_client(sync_client=True) as client:
        set_state_with_form(client, current_flow_run().id, state, form)
    raise Pause(state=state)


def read_last_form() -> LastForm | None:
    """Return the last form of this flow run, and the answer to the form; None if the run was never suspended.

    The form is found through the states of the run, because Prefect lists all states, but only the oldest 200 inputs.
    """
    if not is_flow_run_resumable():
        return None
    run_id = current_flow_run().id
    with get_client(sync_client=True) as client:
        states = sort_states(client.read_flow_run_states(run_id))
        keys = [str(state.state_details.pause_key) if state.is_paused() else "" for state in states]
        suspensions = [index for index, key in enumerate(keys) if key.startswith(_PAUSE_KEY_PREFIX)]
        if not suspensions:
            return None
        last = suspensions[-1]
        input_key = (states[last].state_details.run_input_keyset or {})["response"]
        stored = client.filter_flow_run_input(run_id, key_prefix=input_key, limit=1, exclude_keys=set())
    answer = stored[0].decoded_value if stored else None
    if not isinstance(answer, Mapping):  # if a form is sent unchanged, Prefect stores no input
        answer = {} if has_resume_state(states[last:]) else None
    return LastForm(keys[last], answer)


_MAX_SHOWN_STEPS = 20


class _SearchForm(RunInput):
    """How to continue the search."""

    action: Literal["continue", "extend", "stop here"] = Field(
        default="continue",
        title="How to continue",
        description="continue: with the same settings. extend: with the larger numbers below. stop here: train no "
        "more, publish the results, and end; unfinished trials can be resumed later.",
    )
    samples: int = Field(default=0, title="Total samples", description="To extend: more than now.")
    steps: int = Field(
        default=0, title="Steps of each trial", description="To extend: finished trials continue too. 0: unchanged."
    )
    hours: float = Field(
        default=0, title="Hours for this run", description="To extend: after this time, the run ends. 0: unchanged."
    )


class _TrainingForm(RunInput):
    """How to continue the training."""

    action: Literal["continue", "extend", "other checkpoint", "stop here"] = Field(
        default="continue",
        title="How to continue",
        description="continue: from the newest checkpoint. extend: with the larger numbers below. other checkpoint: "
        "from the step below; later checkpoints are kept. stop here: the training ends.",
    )
    steps: int = Field(default=0, title="Total steps", description="To extend: more than before. 0: unchanged.")
    hours: float = Field(
        default=0, title="Total hours of training", description="To extend: more than before. 0: unchanged."
    )
    checkpoint: int = Field(
        default=0, title="Step of the checkpoint", description="For other checkpoint: one of the steps listed above."
    )


def _fill_form(form: InputForm, description: str, **defaults: float) -> InputForm:
    """Return `form` with these defaults; `with_initial_data` could set them, too, but would lose the fields' titles."""
    fields: dict[str, Any] = {
        name: (
            field.annotation,
            Field(default=defaults.get(name, field.default), title=field.title, description=field.description),
        )
        for name, field in form.model_fields.items()
    }
    form_class = cast(
        "InputForm", create_model(form.__name__.strip("_").removesuffix("Form"), __base__=RunInput, **fields)
    )
    return form_class.with_initial_data(description=description)


def format_form_description(
    state: Experiment, uri: str, objective: Objective | None, code_note: str, retry_reason: str = ""
) -> str:
    """Return the text above the fields of a form; it describes the state of the experiment."""
    trials, facts = list(state.trials.values()), list[str]()
    if len(trials) != 1 or trials[0].proposed_by_search:
        facts.append(f"trials: {len(trials)} ({format_counts(count_by_status(state))})")
    if objective is not None and (compared := rank_trials(trials, objective)):
        best = compared[0][0]
        best_trial = escape_markdown(f"{format_best_label(objective)}: {format_trial(best, objective.metrics)}")
        facts.append(f"{best_trial} at step {best.step}")
    if len(trials) == 1:
        (trial,) = trials
        facts.append(f"step {trial.step}, attempt {trial.attempt}, recomputed steps: {trial.recomputed_steps_text}")
        steps = [str(checkpoint.step) for checkpoint in reversed(trial.checkpoints)]
        older = f", and {len(steps) - _MAX_SHOWN_STEPS} older ones" if len(steps) > _MAX_SHOWN_STEPS else ""
        facts.append(f"checkpoints, newest first: {', '.join(steps[:_MAX_SHOWN_STEPS]) or 'none'}{older}")
    else:
        saved = sum(bool(trial.checkpoints) for trial in trials)
        count = sum(len(trial.checkpoints) for trial in trials)
        facts.append(f"checkpoints: {count}, of {pluralize(saved, 'trial', 'trials')}")
    notice = [f"⚠️ **Please answer again**: {escape_markdown(retry_reason)}", ""] if retry_reason else []
    lines = [*notice, f"**{state.name}** at `{uri}` is saved.", ""]
    return "\n".join([*lines, *(f"- {fact}" for fact in [*facts, escape_markdown(code_note)])])


# Read the answers of a suspended run, and apply them to a stop criterion.


@dataclass(frozen=True, slots=True)
class NewAnswer:
    """An answer that is not in the journal yet."""

    choice: ResumeChoice
    event: FormAnswered
    """The event to journal."""


def get_earlier_choices(state: Experiment) -> Sequence[ResumeChoice]:
    """Return the journaled choices of this flow run, oldest first."""
    answers = (answer for answer in state.answers if answer.flow_run == flow_run.id)
    return [ResumeChoice.model_validate(answer.answer) for answer in answers]


def is_form_answered(state: Experiment, key: str) -> bool:
    """Return whether the journal has the answer to a form; if so, a run that starts again must not apply it again."""
    return any(answer.key == key for answer in state.answers)


def make_resume_limits(stop: object, *, samples: int = 0, checkpoints: Sequence[int] = ()) -> ResumeLimits:
    """Return the limits of the stop criterion `stop`, this number of samples, and these steps of checkpoints."""
    stopper = make_stopper(stop)  # type: ignore[arg-type]  # it raises if the type is wrong
    parts = stopper.stoppers if isinstance(stopper, AnyOf) else (stopper,)
    trial_budgets = [part.trials for part in extract_experiment_stoppers(stopper) if isinstance(part, TrialBudget)]
    stop_json = stop_to_json(stop) if stop is not None else {}
    return ResumeLimits(
        samples=samples,
        max_trials=min(trial_budgets, default=0),
        steps=stopper.step_count or 0,
        hours=min((part.time.total_seconds() / 3600 for part in parts if isinstance(part, MaxTime)), default=0.0),
        checkpoints=tuple(checkpoints),
        stop_is_code=stop_json is None or isinstance(stop_json, str),
    )


def apply_choice_to_stop(stop: object, choice: ResumeChoice) -> object:
    """Return `stop`. If the action is "extend", each limit in `choice` that is larger replaces the limit of `stop`."""
    if choice.action != "extend":
        return stop
    limits = make_resume_limits(stop)
    steps = choice.steps if choice.steps > limits.steps else 0
    hours = choice.hours if choice.hours > limits.hours else 0
    return replace_stop_limits(stop_to_json(stop), steps, hours) if steps or hours else stop


# The work of a flow run from one suspension to the next.

STOPPED_ON_RESUME = make_reason("stopped-on-resume")


@dataclass
class RunSegment:
    """The work of a flow run from one start until the run is suspended or done."""

    plan: SearchPlan
    """The flow run's parameters, extended by the user's choices so far."""
    loaded_experiment: Experiment | None = None
    """The state of the experiment, if it has been read."""
    answer: NewAnswer | None = None
    """The answer to the last form; None if there is no answer, or if the journal has it already."""
    is_stopping: bool = False
    """Whether the search must start no more trials."""
    initial_experiment: Experiment | None = None
    """The experiment before this run changed it."""
    journal_writer: JournalWriter | None = None
    """Writes the journal, and holds the latest state; None until the run owns the experiment."""

    def set_journal_writer(self, journal_writer: JournalWriter) -> JournalWriter:
        """Set and return the writer; set `initial_experiment` to the state before the writer's first entry."""
        self.initial_experiment, self.journal_writer = journal_writer.experiment, journal_writer
        return journal_writer


@dataclass(frozen=True, slots=True)
class ResumeQuestion:
    """How a suspended run asks the user: functions for the present limits, the form, and the effect of a choice."""

    get_limits: Callable[[SearchPlan, Experiment], ResumeLimits]
    """Returns the current limits, and the steps of the checkpoints that can be chosen."""
    extend_plan: Callable[[SearchPlan, ResumeChoice], SearchPlan]
    """Returns the plan, changed as the user chose."""
    make_form: Callable[[SearchPlan, Experiment, str], InputForm]
    """Makes the form. The last argument is the reason to show the form again; "" the first time."""
    refusal_reason: Callable[[StorageTarget, Experiment, ResumeChoice], str | None] = lambda *_: None
    """Returns why a choice is impossible; None if it is possible."""


def apply_answers(segment: RunSegment, question: ResumeQuestion, form: LastForm | None) -> RunSegment:
    """Apply the answers of this flow run, and return the new segment. The run may be new, retried or resumed.

    Args:
        segment: has the plan, and the experiment if it has been read.
        question: the question that the form asks.
        form: the last form of the run. The journal has the answers to earlier forms.

    Raises:
        Pause: the answer is invalid. The run is suspended again, with a form that shows the reason.
        ResumeFailed: the experiment cannot be read, or no longer exists. No new experiment is started.
    """
    if form is None:
        return segment
    plan, target = segment.plan, segment.plan.target
    state = segment.loaded_experiment or with_retries(lambda: read_experiment_to_resume(target, plan.experiment))
    if not state.entry_count:
        missing = missing_experiment_message(target, plan.experiment)
        advice = "Was it deleted, or is the target wrong? Nothing was started: start a new run to train from step 0"
        raise ResumeFailed(f"this run was suspended, and now {missing}. {advice}")
    choices = list(get_earlier_choices(state))
    for choice in choices:
        plan = question.extend_plan(plan, choice)
    answer: NewAnswer | None = None
    limits = question.get_limits(plan, state)
    if form.answer is not None and not is_form_answered(state, form.key):
        try:
            choice = parse_choice(form.answer, limits)
        except InvalidInput as error:
            suspend_with_form(question.make_form(plan, state, str(error)))
        if reason := question.refusal_reason(target, state, choice):
            suspend_with_form(question.make_form(plan, state, reason))
        event = FormAnswered(key=form.key, answer=choice.model_dump(mode="json"), flow_run=flow_run.id)
        answer = NewAnswer(choice, event)
        choices.append(choice)
        plan = question.extend_plan(plan, choice)
    return RunSegment(plan, state, answer, is_stopping=bool(choices) and choices[-1].action == "stop here")


def raise_pause_if_suspended(plan: SearchPlan, question: ResumeQuestion, state: Experiment) -> None:
    """Raise `Pause` if the flow run was suspended; first show the form if *Resume* can start the run again."""
    if not is_flow_run_suspended():
        return
    if not is_flow_run_resumable():
        raise Pause(state=get_suspension_state())  # show no form; the flow run keeps its present state
    suspend_with_form(question.make_form(plan, state, ""))


# The ownership of an experiment, and the end of a run.


def acquire_run_ownership(segment: RunSegment, experiment: Experiment, slots: int) -> Experiment:
    """Make this run the owner of its experiment, and return the new state. The run trains `slots` trials at a time.

    `experiment`: as the caller has just read it. Raises the errors of `make_next_owner` and `acquire_experiment`.
    """
    plan = segment.plan
    owner = make_next_owner(experiment, plan.failure_policy.max_restarts)
    owner, loaded = owner.model_copy(update={"slots": slots}), skip_prefect_introspection(experiment)
    return acquire_experiment(plan.target, experiment.key, owner, new_write_stamp(), loaded)


@contextmanager
def handling_takeover_and_interrupt(segment: RunSegment) -> Iterator[None]:
    """If another process of this flow run took the experiment over, let that process set the run's state.

    On an interruption, say what can be resumed, and how: on SIGTERM, in the log; on Ctrl-C, in the `KeyboardInterrupt`.

    Raises:
        Abort: instead of `Superseded`, if the new owner is another process of the same flow run.
        KeyboardInterrupt: after Ctrl-C. Python prints its message last; outside the main thread, the log has it, too.
    """
    try:
        yield
    except Superseded as error:
        owner = None
        if is_flow_run_resumable():
            with suppress(TuneError):
                owner = read_experiment_by_name(segment.plan.target, segment.plan.experiment).owner
        if owner is None or owner.flow_run != flow_run.id:
            raise
        get_run_logger().warning("%s", error)
        raise Abort(str(error)) from error
    except (TerminationSignal, KeyboardInterrupt) as interrupt:
        state = segment.journal_writer.experiment if segment.journal_writer else None
        message = format_resume_advice(state) if state and state.trials else "the run had not started: run it again"
        is_interrupt = isinstance(interrupt, KeyboardInterrupt)
        if not is_interrupt or threading.current_thread() is not threading.main_thread():
            get_run_logger().warning("%s", message)
            flush_log()
        if is_interrupt:  # so that a script prints the message last, and the run's state contains it
            raise KeyboardInterrupt(message) from None
        raise


def format_resume_advice(state: Experiment) -> str:
    """Return a message that says which trials of an experiment can be resumed, and how."""
    trials = list(state.trials.values())
    unfinished = [trial for trial in trials if trial.phase not in ENDED_PHASES]
    steps = [newest.step if (newest := newest_checkpoint(trial)) else 0 for trial in unfinished]
    action = "press Retry, or run it" if current_deployment_id() is not None else "run it"  # scripts have no *Retry*
    advice = f"{action} again under the same experiment name, to resume"
    if not unfinished:
        return f"experiment {state.name!r}: all {pluralize(len(trials), 'trial has', 'trials have')} ended; {advice}"
    if len(trials) == 1:
        return f"experiment {state.name!r}: resumable at step {steps[0]}; {advice}"
    saved, fresh = sorted(filter(None, steps)), steps.count(0)
    where = f", at steps {saved[0]} to {saved[-1]}" if len(set(saved)) > 1 else f", at step {saved[0]}" if saved else ""
    rest = f"; {pluralize(fresh, 'begins', 'begin')} again, without a checkpoint" if fresh else ""
    summary = f"{len(saved)} of {pluralize(len(trials), 'trial', 'trials')} resumable{where}{rest}"
    return f"experiment {state.name!r}: {summary}; {advice}"


def prepare_search_segment(plan: SearchPlan, experiment: Experiment | None) -> RunSegment:
    """Return the segment for a starting flow run of a search; its plan includes the answers and the added samples."""
    form = read_last_form()
    if form is None and plan.samples_per_run is None:
        plan = plan if experiment is None else plan_checks.with_default_samples(plan, experiment)
        return RunSegment(plan, experiment)
    experiment = experiment or with_retries(lambda: read_experiment_to_resume(plan.target, plan.experiment))
    plan, _ = plan_checks.with_added_samples(plan, experiment, lambda: current_call_path(plan.experiment).key)
    return apply_answers(RunSegment(plan, experiment), SEARCH_QUESTION, form)


def _get_search_limits(plan: SearchPlan, _state: Experiment) -> ResumeLimits:
    limits = make_resume_limits(plan.stop, samples=_get_total_samples(plan))
    return limits.model_copy(update={"hours": 0.0, "scheduler_max_steps": getattr(plan.scheduler, "max_t", 0)})


def _get_total_samples(plan: SearchPlan) -> int:
    """Return the total number of samples; 0 if the number is not fixed, or if a form cannot change the number."""
    if plan.search is None:
        return plan.num_samples or DEFAULT_NUM_SAMPLES
    if "num_samples" not in getattr(plan.search, "__dataclass_fields__", ()):
        return 0  # `with_samples` cannot change such a search
    total = plan.num_samples or getattr(plan.search, "num_samples", None)
    return total if isinstance(total, int) and total > 0 else 0


def _extend_search(plan: SearchPlan, choice: ResumeChoice) -> SearchPlan:
    if choice.action != "extend":
        return plan
    return plan.with_changes(
        num_samples=choice.samples if choice.samples > _get_total_samples(plan) else plan.num_samples,
        stop=apply_choice_to_stop(plan.stop, choice.model_copy(update={"hours": 0.0})),
        time_budget_seconds=3600 * choice.hours if choice.hours else plan.time_budget_seconds,
    )


def _make_search_form(plan: SearchPlan, state: Experiment, retry_reason: str) -> InputForm:
    note = format_code_note(state, plan)
    description = format_form_description(state, plan.target.uri, plan.objective, note, retry_reason)
    limits = _get_search_limits(plan_checks.with_default_samples(plan, state), state)
    return _fill_form(_SearchForm, description, samples=limits.samples, steps=limits.steps)


SEARCH_QUESTION = ResumeQuestion(_get_search_limits, _extend_search, _make_search_form)
"""Asks how a suspended search continues."""


def _unusable_checkpoint_reason(target: StorageTarget, state: Experiment, choice: ResumeChoice) -> str | None:
    """Return why a training cannot resume from the chosen checkpoint; None if it can, or if none was chosen."""
    if choice.action != "other checkpoint":
        return None
    (trial,) = state.trials.values()
    ref = _find_checkpoint(trial, choice.checkpoint)
    damage = find_checkpoint_damage(target, state.trial_key(trial.id).checkpoint_key(ref))
    return damage and f"checkpoint: step {choice.checkpoint} cannot be used: {damage}"


def make_answer_events(spec: TrialSpec, state: Experiment, segment: RunSegment) -> Sequence[Event]:
    """Return the event of the new answer and the events that apply the answer; () if there is no new answer.

    The caller writes all these events in one entry, so that a kill cannot separate them.
    """
    answer = segment.answer
    if answer is None or is_form_answered(state, answer.event.key):
        return ()
    trial, choice, events = state.trials.get(spec.trial.trial), answer.choice, list[Event]([answer.event])
    if trial is None:
        return events
    name = trial.id
    if choice.action == "stop here" and trial.phase not in ENDED_PHASES:
        events.append(TrialFinished(trial=name, reason=STOPPED_ON_RESUME, kind=FinishKind.STOPPED))
    elif choice.action == "other checkpoint":  # a clone of the chosen checkpoint becomes the newest checkpoint
        step = choice.checkpoint
        clone = make_clone_ref(trial, _find_checkpoint(trial, step), name)
        reason = make_reason("went-back", step=step)
        events.append(TrialRequeued(trial=name, reason=make_reason("goes-back", step=step)))
        events.append(CheckpointCloned(trial=name, checkpoint=clone, source=name, reason=reason))
    return events


def _find_checkpoint(trial: Trial, step: int) -> CheckpointRef:
    """Return the newest checkpoint of a step; raise `CheckpointNotFound` if it was retired after the user's choice."""
    if refs := [ref for ref in trial.checkpoints if ref.step == step]:
        return refs[-1]
    raise CheckpointNotFound(
        f"trial {trial.id!r}: the checkpoint of step {step} was deleted; press Retry to choose again"
    )


def _get_training_limits(plan: SearchPlan, state: Experiment) -> ResumeLimits:
    steps = [checkpoint.step for trial in state.trials.values() for checkpoint in trial.checkpoints]
    return make_resume_limits(plan.stop, checkpoints=sorted(set(steps)))


def _make_training_form(plan: SearchPlan, state: Experiment, retry_reason: str) -> InputForm:
    warnings = (
        code_change_warning(plan.target, state.trial_key(name), trial, plan.trainable)
        for name, trial in state.trials.items()
    )
    warning = next(filter(None, warnings), None)
    note = f"⚠️ {warning}" if warning else "code: no known change since the newest checkpoint"
    description = format_form_description(state, plan.target.uri, None, note, retry_reason)
    limits = _get_training_limits(plan, state)
    newest_step = max(limits.checkpoints, default=0)
    return _fill_form(_TrainingForm, description, steps=limits.steps, hours=limits.hours, checkpoint=newest_step)


def code_change_warning(target: StorageTarget, folder: TrialKey, trial: Trial, trainable: object) -> str:
    """Return a warning if the trainable's source has changed since the newest checkpoint; "" if not, or if unknown."""
    key, digest = newest_checkpoint_key(folder, trial), compute_source_digest(trainable)
    if key is None or not digest:
        return ""
    try:
        with target.open(timeout=timedelta(seconds=30)) as store:
            saved = read_manifest(store, key).metadata.fingerprint.get("code", "")
    except TuneError:  # the target cannot be read now, so it is unknown whether the source changed
        return ""
    change = f"the source of the trainable has changed since the checkpoint of step {key.step} ({saved} -> {digest})"
    return change if saved and saved != digest else ""


TRAINING_QUESTION = ResumeQuestion(
    _get_training_limits,
    lambda plan, choice: plan.with_changes(stop=apply_choice_to_stop(plan.stop, choice)),
    _make_training_form,
    _unusable_checkpoint_reason,
)
"""Asks how a suspended training continues."""
