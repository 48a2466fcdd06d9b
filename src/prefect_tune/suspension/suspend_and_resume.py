"""A flow run that is suspended with a form, and resumed with a person's choice of how to continue.

The choice is carried out once. A search has one `ResumeQuestion`, and a training another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from prefect.exceptions import Abort, TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_tune.attempt.graceful_stop import send_log
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget
from prefect_tune.blocks.resolve_target import deployment_of_run
from prefect_tune.core.errors import CheckpointNotFound, ResumeFailed, Superseded, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.resume_choice import ResumeChoice, ResumeLimits
from prefect_tune.core.experiment.trial_transitions import ENDED, Trial, clone_for, newest_checkpoint, newest_key
from prefect_tune.core.journal_events import (
    CheckpointRef,
    Cloned,
    Event,
    Finished,
    FinishKind,
    Requeued,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.search.random_search import DEFAULT_SAMPLES
from prefect_tune.core.shown_text import plural
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.journal_access import new_write_id, no_experiment_at, read_journal, read_known
from prefect_tune.ownership import owner_after
from prefect_tune.parameters import plan_checks
from prefect_tune.parameters.argument_checks import code_of
from prefect_tune.parameters.plan_checks import code_note
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.call_paths import call_path
from prefect_tune.prefect_api.flow_runs import is_suspended
from prefect_tune.storage_retries import skip_prefect_introspection, with_retries
from prefect_tune.suspension.resume_forms import (
    InputForm,
    NewAnswer,
    Shown,
    can_be_suspended,
    chosen_before,
    form_of_search,
    form_of_training,
    is_answered,
    last_form,
    leave_with,
    leave_without,
    limits_of,
    new_answer,
    page_of,
    stop_after,
)
from prefect_tune.tasks.experiments import open_experiment
from prefect_tune.tasks.maintenance import damage_of_checkpoint

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
    if is_suspended():
        leave_with(question.form(plan, state, "")) if can_be_suspended() else leave_without()


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
        owner = read_journal(target, experiment).owner
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


def first_search_turn(plan: SearchPlan, known: Experiment | None) -> Turn:
    """Return the first turn of a search's flow run, with the samples that it adds. Raises what `first_turn` raises."""
    shown = last_form()
    if shown is None and plan.samples_per_run is None:
        return Turn(plan if known is None else plan_checks.with_default_samples(plan, known), known)
    known = known or with_retries(lambda: read_known(plan.target, plan.experiment))
    plan, _ = plan_checks.extended(plan, known, lambda: call_path(plan.experiment).key)
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
    return form_of_search(_search_limits(plan_checks.with_default_samples(plan, state), state), page)


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
    trial = state.trials.get(spec.trial.trial)
    return [turn.answer.event, *(_follows(trial, turn.answer.choice) if trial else ())]


def _follows(trial: Trial, choice: ResumeChoice) -> Sequence[Event]:
    match choice.way:
        case "stop here":
            finished = Finished(trial=trial.trial, reason=STOPPED_HERE, kind=FinishKind.STOPPED)
            return [] if trial.phase in ENDED else [finished]
        case "other checkpoint":
            back = Requeued(trial=trial.trial, reason=make_reason("goes-back", step=choice.checkpoint))
            return [back, _copy(trial, choice.checkpoint)]
        case "continue" | "extend":
            return []


def _copy(trial: Trial, step: int) -> Cloned:
    """Clone an earlier checkpoint of the trial as its newest; later checkpoints stay."""
    copy = clone_for(trial, _checkpoint_at(trial, step), trial.trial)
    return Cloned(trial=trial.trial, checkpoint=copy, source=trial.trial, reason=make_reason("went-back", step=step))


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
