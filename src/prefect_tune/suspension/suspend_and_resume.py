"""Turns of a flow run: each ends when no work is left, or when a person has to answer.

A form asks how to continue, and the choice of a person is carried out once. A search has one `ResumeQuestion`, and a
training another.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from prefect.exceptions import Abort, TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_tune.attempt.graceful_stop import send_log
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget
from prefect_tune.blocks.resolve_target import deployment_of_run
from prefect_tune.core.errors import CheckpointNotFound, InvalidInput, ResumeFailed, Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.resume_choice import ResumeChoice, ResumeLimits
from prefect_tune.core.experiment.trial_transitions import ENDED, Trial, newest_checkpoint, newest_key
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.core.journal_events import (
    Answered,
    Cloned,
    Event,
    Finished,
    FinishKind,
    Question,
    Requeued,
    Scalar,
    answer_to,
    default_of,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.search.random_search import DEFAULT_SAMPLES
from prefect_tune.core.shown_text import plural, visible
from prefect_tune.core.storage.generations import require_not_deleted
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.journal_access import new_write_id, no_experiment_at, read_journal, read_known
from prefect_tune.ownership import owner_after
from prefect_tune.parameters import search_limits
from prefect_tune.parameters.argument_checks import code_of
from prefect_tune.parameters.resume_compatibility import code_note
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.call_paths import call_path
from prefect_tune.prefect_api.flow_runs import is_suspended
from prefect_tune.storage_retries import on_target, skip_prefect_introspection, with_retries
from prefect_tune.suspension.resume_forms import (
    HOW_TO_CONTINUE,
    InputForm,
    Shown,
    about,
    can_be_suspended,
    chosen_before,
    form_of_question,
    form_of_search,
    form_of_training,
    last_form,
    leave_with,
    leave_without,
    limits_of,
    new_answers,
    page_of,
    pause_with,
    stop_after,
    unjournaled,
)
from prefect_tune.tasks.checkpoints import clone_checkpoint
from prefect_tune.tasks.experiments import open_experiment
from prefect_tune.tasks.maintenance import damage_of_checkpoint

# Ask a trial's question in the terminal of the script that started the search.

_YES, _NO = frozenset({"y", "yes", "true", "1"}), frozenset({"n", "no", "false", "0"})


def asked_in_terminal(trial: str, question: Question) -> Mapping[str, Scalar]:
    """Read the answer from the terminal, field by field; an empty line is the default."""
    asked = visible(question.question)
    print(f"\nTrial {trial} asks: {asked}", flush=True)  # noqa: T201 - a prompt
    return {name: _field(name, field) for name, field in question.fields.items()}


def _field(name: str, field: object) -> Scalar:
    choices = f" ({', '.join(field)})" if isinstance(field, list | tuple) else ""
    while True:
        typed = input(visible(f"  {name}{choices} [{default_of(field)}]: ")).strip()
        try:
            return answer_to({name: field}, {name: _read(typed, default_of(field))} if typed else {})[name]
        except (InvalidInput, ValueError) as bad:
            print(f"  {visible(str(bad))}", flush=True)  # noqa: T201 - a prompt


def _read(typed: str, default: Scalar) -> Scalar:
    if isinstance(default, bool):
        said = typed.lower()
        return said in _YES if said in _YES | _NO else typed
    return type(default)(typed) if isinstance(default, int | float) else typed


STOPPED_HERE = make_reason("stopped-on-resume")
_PATIENCE = timedelta(days=30)


@dataclass
class Turn:
    """One turn of a flow run: the work until a person has to answer, or none is left."""

    plan: SearchPlan
    """The flow run's parameters, extended by the persons' answers so far."""
    known: LoadedJournal | None = None
    """Its journal, if it has been read."""
    choice: ResumeChoice | None = None
    """A person's choice of how to continue, which is not carried out yet."""
    stops: bool = False
    """Whether no trial of a search is to start any more."""
    news: Sequence[Answered] = ()
    """Answers of persons that the journal does not hold yet."""
    answered: bool = False
    """Whether a person has answered in this process, without a suspension."""
    found: Experiment | None = None
    """The experiment as this run found it, before it changed anything."""
    state: Experiment | None = None
    """The last known state of the experiment."""

    def reached(self, state: Experiment) -> None:
        """Keep `state` as the last known one, and the first one as what was found."""
        self.found = self.found or state
        self.state = state


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
    if not known.experiment.number:
        none = no_experiment_at(target, plan.experiment)
        again = "Nothing was started: run the flow anew to train from step 0"
        raise ResumeFailed(f"this run was suspended, and now {none}. Was it deleted, or is the target another? {again}")
    state, chosen = known.experiment, list(chosen_before(known.experiment))
    for choice in chosen:
        plan = question.extended(plan, choice)
    form = partial(question.form, plan, state)
    new = new_answers(shown, state, question.limits(plan, state), form)
    if new.choice is not None:
        if why := question.why_not(target, state, new.choice):
            leave_with(form(why), HOW_TO_CONTINUE)
        chosen.append(new.choice)
        plan = question.extended(plan, new.choice)
    stops = bool(chosen) and chosen[-1].way == "stop here"
    return Turn(plan, known, new.choice, stops, new.news)


def next_turn(turn: Turn, question: ResumeQuestion, state: Experiment) -> Turn | None:
    """Return the next turn, with new answers; None without any. Raises `Pause` if the run is suspended for one."""
    news = _answers_of_persons(state, lambda: question.form(turn.plan, state, ""))
    return replace(turn, known=None, choice=None, news=news, answered=True, state=state) if news else None


def _answers_of_persons(state: Experiment, form: Callable[[], InputForm]) -> Sequence[Answered]:
    """Return the answers with which the run takes another turn; nothing if no question is open.

    Args:
        state: the experiment after this turn.
        form: makes the form that asks how to continue.

    Raises:
        Pause: the run is Suspended with a question, and the process is to end.
    """
    if is_suspended():
        leave_with(form(), HOW_TO_CONTINUE) if can_be_suspended() else leave_without()
    if not state.questions:
        return ()
    trial, question = next(iter(state.questions.items()))
    if can_be_suspended():
        get_run_logger().warning("trial %s asks a person: %s", trial, visible(question.question))
        leave_with(form_of_question(trial, question, state.name), about(trial, question))
    return [_asked_here(trial, question, state.name)]


def _asked_here(trial: str, question: Question, experiment: str) -> Answered:
    """Ask and wait in this process, since no worker would start the run again."""
    if sys.stdin is not None and sys.stdin.isatty():
        answer: Mapping[str, object] = asked_in_terminal(trial, question)
        return Answered(key=question.key, answer=answer, trial=trial, flow_run=flow_run.id)
    why = ""
    while True:
        asked = visible(question.question)
        get_run_logger().warning("trial %s asks a person, and waits for Resume: %s", trial, asked)
        form = form_of_question(trial, question, experiment, why)
        try:
            answer = answer_to(question.fields, pause_with(form, _PATIENCE))
        except InvalidInput as bad:
            why = str(bad)
        else:
            return Answered(key=question.key, answer=answer, trial=trial, flow_run=flow_run.id)


# ---------------------------------------------------------------------------------------------------- how it ends


def take_over(turn: Turn, known: LoadedJournal, slots: int) -> Experiment:
    """Make this run, which trains `slots` trials at a time, the owner of its experiment, and return the state.

    `known` is the journal as it was just read.

    Raises what `owner_after` and `open_experiment` raise, and `Superseded` if the experiment of the turn
    before was deleted since: the answer of a person is for no other experiment, and begins none.
    """
    plan, before = turn.plan, turn.state
    if before is not None and before.key != known.experiment.key:
        on_target(plan.target, lambda store: require_not_deleted(store, before.key))
    owner = owner_after(known.experiment, plan.failure_policy.max_restarts, answered=turn.answered)
    owner, read = owner.model_copy(update={"slots": slots}), skip_prefect_introspection(known)
    return open_experiment(plan.target, known.experiment.key, owner, new_write_id(), read)


@contextmanager
def as_one_owner(turn: Turn) -> Iterator[None]:
    """End this process without a state if another process of the same flow run has taken over the experiment.

    A state from this process would overwrite the state of the other. On SIGTERM or Ctrl-C, log as the last line what
    can be resumed.

    Raises:
        Abort: instead of `Superseded`, if the new owner is the same flow run.
        KeyboardInterrupt: with that line as its message, which Python prints last of all.
    """
    target, experiment = turn.plan.target, turn.plan.experiment
    try:
        with _log_resumable(turn):
            yield
    except Superseded as lost:
        if can_be_suspended() and _is_ours_again(target, experiment):
            get_run_logger().warning("%s", lost)
            raise Abort(str(lost)) from lost
        raise


def _is_ours_again(target: StorageTarget, experiment: str) -> bool:
    try:
        owner = read_journal(target, experiment).experiment.owner
    except TuneError:
        return False
    return owner is not None and owner.flow_run == flow_run.id


@contextmanager
def _log_resumable(turn: Turn) -> Iterator[None]:
    try:
        yield
    except (TerminationSignal, KeyboardInterrupt) as signal:
        state = turn.state
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


def first_search_turn(plan: SearchPlan, known: LoadedJournal | None) -> Turn:
    """Return the first turn of a search's flow run, with the samples that it adds. Raises what `first_turn` raises."""
    shown = last_form()
    if shown is None and plan.samples_per_run is None:
        return Turn(plan if known is None else search_limits.with_default_samples(plan, known.experiment), known)
    known = known or with_retries(lambda: read_known(plan.target, plan.experiment))
    plan, _ = search_limits.extended(plan, known.experiment, lambda: call_path(plan.experiment).key)
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
    return form_of_search(_search_limits(search_limits.with_default_samples(plan, state), state), page)


SEARCH_QUESTION = ResumeQuestion(_search_limits, _search_extended, _search_form)
"""How to continue a search."""


def _why_not_back(target: StorageTarget, state: Experiment, choice: ResumeChoice) -> str:
    """Return why the training cannot resume from the chosen checkpoint; empty if it can, or none was chosen."""
    if choice.way != "other checkpoint":
        return ""
    (trial,) = state.trials.values()
    key = _checkpoint_at(state.trial_key(trial.trial), trial, choice.checkpoint)
    damage = damage_of_checkpoint(target, key)
    return damage and f"checkpoint: step {choice.checkpoint} cannot be used: {damage}"


def follow_up(spec: TrialSpec, state: Experiment, turn: Turn) -> Sequence[Event]:
    """Return the answer's events, and those that carry it out: one entry, so that a retry after a kill does it.

    Nothing if another start of this run has carried out the answer.
    """
    if not (news := unjournaled(turn.news, state)):
        return ()
    trial = state.trials.get(spec.trial.trial)
    return [*news, *(_follows(spec, state, trial, turn.choice) if trial and turn.choice else ())]


def _follows(spec: TrialSpec, state: Experiment, trial: Trial, choice: ResumeChoice) -> Sequence[Event]:
    match choice.way:
        case "stop here":
            finished = Finished(trial=trial.trial, reason=STOPPED_HERE, kind=FinishKind.STOPPED)
            return [] if trial.phase in ENDED else [finished]
        case "other checkpoint":
            back = Requeued(trial=trial.trial, reason=make_reason("goes-back", step=choice.checkpoint))
            return [back, _copy(spec, state, trial, choice.checkpoint)]
        case "continue" | "extend":
            return []


def _copy(spec: TrialSpec, state: Experiment, trial: Trial, step: int) -> Cloned:
    """Clone an earlier checkpoint of the trial as its newest. It writes one manifest; later checkpoints stay."""
    key = _checkpoint_at(state.trial_key(trial.trial), trial, step)
    cloned = clone_checkpoint(spec.target, key, skip_prefect_introspection(state), trial.trial, new_write_id())
    reason = make_reason("went-back", step=step)
    return Cloned(trial=trial.trial, checkpoint=cloned.checkpoint, source=cloned.source, reason=reason)


def _checkpoint_at(place: TrialKey, trial: Trial, step: int) -> CheckpointKey:
    """Return the newest checkpoint of a step. Raises `CheckpointNotFound` if it was retired since the choice."""
    found = [each for each in trial.checkpoints if each.step == step]
    if not found:
        raise CheckpointNotFound(f"{place.folder}: the checkpoint of step {step} is gone; press Retry to choose again")
    return place.checkpoint_key(found[-1])


def _training_limits(plan: SearchPlan, state: Experiment) -> ResumeLimits:
    steps = [each.step for trial in state.trials.values() for each in trial.checkpoints]
    return limits_of(plan.stop, checkpoints=sorted(set(steps)))


def _training_extended(plan: SearchPlan, choice: ResumeChoice) -> SearchPlan:
    return plan.extended(stop=stop_after(plan.stop, choice))


def _training_form(plan: SearchPlan, state: Experiment, why: str) -> InputForm:
    page = page_of(state, plan.target.uri, None, _code_note(plan.target, plan.trainable, state), why)
    return form_of_training(_training_limits(plan, state), page)


def _code_note(target: StorageTarget, trainable: object, state: Experiment) -> str:
    for name, trial in state.trials.items():
        if changed := code_changed(target, state.trial_key(name), trial, trainable):
            return f"⚠️ {changed}"
    return "code: unchanged since the newest checkpoint, as far as can be told"


def code_changed(target: StorageTarget, folder: TrialKey, trial: Trial, trainable: object) -> str:
    """Return a warning if the trainable's source has changed since the newest checkpoint.

    Empty if it has not, or if one of the two is unknown.
    """
    key, now = newest_key(folder, trial), code_of(trainable)
    before = _code_of_checkpoint(target, key) if key and now else ""
    if key is None or not before or before == now:
        return ""
    return f"the source of the trainable has changed since the checkpoint of step {key.step} ({before} -> {now})"


def _code_of_checkpoint(target: StorageTarget, key: CheckpointKey) -> str:
    """Return the digest of the trainable's source that wrote `key`; empty if it is unknown or cannot be read now."""
    try:
        with target.open(timeout=timedelta(seconds=30)) as store:
            return read_manifest(store, key).about.fingerprint.get("code", "")
    except TuneError:
        return ""


TRAINING_QUESTION = ResumeQuestion(_training_limits, _training_extended, _training_form, _why_not_back)
"""How to continue a single training."""
