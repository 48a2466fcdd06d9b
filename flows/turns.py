"""A run in turns: each ends when there is nothing more to do, or when a person has to say how it goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from prefect.exceptions import Abort, TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import InvalidInput, Superseded, TuneError
from prefect_tune.core.events import Answered, Questioned
from prefect_tune.core.experiment import Experiment
from prefect_tune.core.questions import answer_to
from prefect_tune.core.trial import ENDED, newest_checkpoint
from prefect_tune.flows.going_on import HOW_TO_GO_ON, about
from prefect_tune.flows.resume_forms import Form, form_of_question
from prefect_tune.flows.suspension import can_be_suspended, leave_with, leave_without, pause_with
from prefect_tune.flows.terminal_form import asked_in_terminal
from prefect_tune.tasks.experiment_state import read_experiment
from prefect_tune.tasks.suspension import is_suspended

__all__ = ["STOPPED_HERE", "Turn", "answers_of_persons", "as_one_owner", "say_what_is_resumable"]

STOPPED_HERE = "stopped here, as was chosen when the run was resumed"
_PATIENCE = timedelta(days=30)


@dataclass(kw_only=True)
class Turn:
    """What is to be done until a person has to say something, or it is over."""

    news: Sequence[Answered] = ()
    """What persons have answered, and the journal does not hold yet."""
    answered: bool = False
    """Whether a person has answered this very process, which goes on."""
    state: Experiment | None = None
    """The experiment as it was last seen to be."""

    def reached(self, state: Experiment) -> None:
        """Take note of how it stands."""
        self.state = state


def answers_of_persons(state: Experiment, form: Callable[[], Form]) -> Sequence[Answered]:
    """Return what has to be known before the run can have another turn; nothing where it is over.

    Args:
        state: the experiment after this turn.
        form: of how to go on.

    Raises:
        Pause: the process is to end: the run is Suspended, and a person is asked.
    """
    if is_suspended():
        leave_with(form(), HOW_TO_GO_ON) if can_be_suspended() else leave_without()
    question = next(iter(state.questions.values()), None)
    if question is None:
        return ()
    if can_be_suspended():
        get_run_logger().warning("trial %s asks a person: %s", question.trial, question.question)
        leave_with(form_of_question(question, state.name), about(question))
    return [_asked_here(question, state.name)]


def _asked_here(question: Questioned, experiment: str) -> Answered:
    """Ask, and wait: there is no worker that would start this run again."""
    if sys.stdin is not None and sys.stdin.isatty():
        answer: Mapping[str, object] = asked_in_terminal(question)
        return Answered(key=question.key, answer=answer, trial=question.trial, flow_run=flow_run.id)
    why = ""
    while True:
        get_run_logger().warning("trial %s asks a person, and waits for Resume: %s", question.trial, question.question)
        form = form_of_question(question, experiment, why)
        try:
            answer = answer_to(question.fields, pause_with(form, _PATIENCE))
        except InvalidInput as bad:
            why = str(bad)
        else:
            return Answered(key=question.key, answer=answer, trial=question.trial, flow_run=flow_run.id)


# ---------------------------------------------------------------------------------------------------- how it ends


@contextmanager
def as_one_owner(target: StorageTarget, experiment: str) -> Iterator[None]:
    """Where this very run was started once more meanwhile, by mistake, leave it to whoever has it now.

    What this process says of the run would be said of the other's.

    Raises:
        Abort: in place of `Superseded` by the same flow run: the process ends, and reports no state.
    """
    try:
        yield
    except Superseded as lost:
        if can_be_suspended() and _is_ours_again(target, experiment):
            get_run_logger().warning("%s", lost)
            raise Abort(str(lost)) from lost
        raise


def _is_ours_again(target: StorageTarget, experiment: str) -> bool:
    try:
        owner = read_experiment(target, experiment).owner
    except TuneError:
        return False
    return owner is not None and owner.flow_run == flow_run.id


@contextmanager
def say_what_is_resumable(look: Callable[[], Experiment | None]) -> Iterator[None]:
    """Where the process is told to end, say last what can be resumed, from the state that `look` returns."""
    try:
        yield
    except (TerminationSignal, KeyboardInterrupt):
        state = look()
        get_run_logger().warning("%s", resumable(state) if state else "it had not begun: run it again")
        raise


def resumable(state: Experiment) -> str:
    """Say what of an experiment can be resumed, and how."""
    trials = list(state.trials.values())
    open_ones = [each for each in trials if each.status not in ENDED]
    saved = [newest.step if (newest := newest_checkpoint(each)) else 0 for each in open_ones]
    again = "run it again, with Retry or under the same experiment name, to go on"
    if not open_ones:
        return f"experiment {state.name!r}: all {len(trials)} trials have ended; {again}"
    if len(trials) == 1:
        return f"experiment {state.name!r}: resumable at step {saved[0]}; {again}"
    steps = f"step {saved[0]}" if len(set(saved)) == 1 else f"steps {min(saved)} to {max(saved)}"
    return f"experiment {state.name!r}: {len(open_ones)} of {len(trials)} trials resumable, at {steps}; {again}"
