"""Turns of a flow run: each ends when no work is left, or when a person has to answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from prefect.exceptions import Abort, TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_tune.attempt.cancel_and_suspend import send_log
from prefect_tune.blocks import StorageTarget
from prefect_tune.blocks.resolve_target import deployment_of_run
from prefect_tune.core.errors import InvalidInput, ResumeFailed, Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.resume_choice import ResumeChoice, ResumeLimits
from prefect_tune.core.experiment.trial_transitions import ENDED, newest_checkpoint
from prefect_tune.core.journal.journal import LoadedJournal
from prefect_tune.core.journal_events import Answered, Question, Scalar, answer_to, default_of
from prefect_tune.core.shown_text import plural, visible
from prefect_tune.core.storage.generations import require_not_deleted
from prefect_tune.journal_access import new_write_id, no_experiment_at, read_journal, read_known
from prefect_tune.ownership import owner_after
from prefect_tune.parameters.search_plan import SearchPlan
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
    leave_with,
    leave_without,
    new_answers,
    pause_with,
)
from prefect_tune.tasks.experiments import open_experiment

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


STOPPED_HERE = "stopped, as chosen on Resume"
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
        if isinstance(signal, KeyboardInterrupt):
            raise KeyboardInterrupt(said) from None  # the last line of a script, and the message of the state
        get_run_logger().warning("%s", said)
        send_log()
        raise


def resumable(state: Experiment) -> str:
    """Return a sentence: what can be resumed of an experiment, and how."""
    trials = list(state.trials.values())
    open_ones = [each for each in trials if each.phase not in ENDED]
    saved = [newest.step if (newest := newest_checkpoint(each)) else 0 for each in open_ones]
    again = "press Retry, or run it" if deployment_of_run() is not None else "run it"  # only such a run has *Retry*
    again = f"{again} again under the same experiment name, to resume"
    if not open_ones:
        return f"experiment {state.name!r}: all {len(trials)} trials have ended; {again}"
    if len(trials) == 1:
        return f"experiment {state.name!r}: resumable at step {saved[0]}; {again}"
    steps = sorted(filter(None, saved))
    where = f", at steps {steps[0]} to {steps[-1]}" if len(set(steps)) > 1 else f", at step {steps[0]}" if steps else ""
    rest = f"; {plural(saved.count(0), 'begins', 'begin')} again, without a checkpoint" if 0 in saved else ""
    resume = f"{len(steps)} of {len(trials)} trials resumable{where}{rest}"
    return f"experiment {state.name!r}: {resume}; {again}"
