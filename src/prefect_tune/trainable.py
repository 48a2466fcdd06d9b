"""What users write against: the class API, and the functions of the function API."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.wire import Question, TrialEnded
from prefect_tune.ranks import started_by

if TYPE_CHECKING:
    from prefect_tune.checkpoint import Checkpoint
    from prefect_tune.core.questions import Scalar

__all__ = [
    "Trainable",
    "TrialInfo",
    "TrialOver",
    "ask",
    "get_checkpoint",
    "get_trial",
    "report",
    "report_step",
    "require_trainable",
    "save_last_step",
]


class Trainable:
    """A model that trains step by step. Override `setup`, `step`, `save_checkpoint` and `load_checkpoint`.

    Each attempt makes one object in a process of its own: `setup`, then `load_checkpoint` where
    there is something to go on from, then `step` until a stop criterion is met.
    Whatever the next step depends on (weights, optimizer, random state, place in the data)
    belongs into the checkpoint: then a resumed run ends with the very weights of an undisturbed one.
    """

    def setup(self, config: Mapping[str, object]) -> None:
        """Build the model from the trial's configuration."""

    def step(self) -> Mapping[str, object]:
        """Train one step and return its metrics: finite numbers, text, or JSON made of these.

        `{"done": True}` ends the trial after this step; `{"should_checkpoint": True}` saves it.
        """
        raise NotImplementedError(f"{type(self).__name__}.step: train one step and return its metrics")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the whole state into the empty directory `checkpoint_dir`. Nothing else may go on writing there."""
        raise NotImplementedError(f"{type(self).__name__}.save_checkpoint: write the state into checkpoint_dir")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Read back what `save_checkpoint` wrote. The directory is gone later: copy what will still be needed."""
        raise NotImplementedError(f"{type(self).__name__}.load_checkpoint: read the state from checkpoint_dir")

    def reset_config(self, config: Mapping[str, object]) -> bool:
        """Become another trial with this configuration and return True; False (the default) where that cannot be."""
        del config
        return False

    def cleanup(self) -> None:
        """Let go of what `setup` took. Called when the trial ends in order, not when its process dies.

        What it raises once the trial is done, and its last checkpoint committed, is only said in the log.
        """


def require_trainable(kind: type) -> type[Trainable]:
    """Return a class, seen to be one that can be trained.

    Raises:
        InvalidInput: it is no subclass of `Trainable`, or trains nothing.
    """
    if not issubclass(kind, Trainable):
        raise InvalidInput(
            f"trainable {kind.__name__}: expected a subclass of pt.Trainable with a `step` method, or a function of "
            f"the configuration, found another class; write class {kind.__name__}(pt.Trainable)"
        )
    if kind.step is Trainable.step:
        raise InvalidInput(f"trainable {kind.__name__}: it has no `step`; write one that trains and returns metrics")
    return kind


@dataclass(frozen=True)
class TrialInfo:
    """The trial that is being trained here. What changes while it trains is as it is when it is read."""

    id: str
    """Its name in the experiment."""
    experiment: str
    """The experiment's name."""
    attempt: int
    """From 1; each retry and resume adds one."""
    directory: Path
    """For the trial's own files (logs, plots): synced to the target as artifacts, and back on a resume."""
    config: Mapping[str, object]
    """Its configuration."""
    _session: Session = field(repr=False)

    @property
    def step(self) -> int:
        """Steps trained so far, those before a resume among them."""
        return self._session.step

    @property
    def should_checkpoint(self) -> bool:
        """Whether the trial was asked to stop: report a checkpoint next, and the run ends with nothing lost."""
        return self._session.is_asked_to_stop()

    def new_checkpoint_dir(self) -> Path:
        """Return a new empty directory for one checkpoint, taken over when it is reported.

        A directory of one's own is copied by `commit="async"` before `pt.report` returns; this one is not.
        """
        return self._session.new_directory()


class TrialOver(BaseException):
    """Unwinds the user's function when the trial is to end; not an Exception, so that no broad except stops it."""

    def __init__(
        self,
        reason: str,
        *,
        interrupted: bool = False,
        paused: bool = False,
        left: bool = False,
        question: Question | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.interrupted = interrupted
        self.paused = paused
        self.left = left
        self.question = question

    def ended(self, *, waits: bool = False) -> TrialEnded:
        """Return the message that ends the attempt."""
        return TrialEnded(
            reason=self.reason,
            interrupted=self.interrupted,
            paused=self.paused,
            left=self.left,
            question=self.question,
            waits=waits,
        )


class Session(Protocol):
    """The trial that runs in this process, as these functions see it."""

    step: int

    def is_asked_to_stop(self) -> bool: ...

    def new_directory(self) -> Path: ...

    def report(self, metrics: Mapping[str, object], checkpoint: Checkpoint | None) -> None: ...

    def report_step(self, metrics: Mapping[str, object], save: Callable[[str], None]) -> None: ...

    def save_last_step(self, save: Callable[[str], None]) -> None: ...

    def ask(
        self,
        question: str,
        fields: Mapping[str, object] | None,
        key: str | None,
        save: Callable[[str], None] | None,
    ) -> dict[str, Scalar]: ...

    def restored(self) -> Path | None: ...

    def info(self) -> TrialInfo: ...


# A thread started by the trainable sees no context variable of its starter: `_in_process` is for those.
_in_context: ContextVar[Session] = ContextVar("prefect_tune_session")
_in_process: list[Session] = []
# In a process that serves trial after trial: threads that earlier ones have left running.
_of_earlier_trials: WeakSet[threading.Thread] = WeakSet()


def report(metrics: Mapping[str, object], *, checkpoint: Checkpoint | None = None) -> None:
    """Tell the metrics of one step, and hand over a checkpoint of the state after it.

    Without a checkpoint it returns at once. With one it returns when the checkpoint is committed
    on the target (`commit="sync"`), or when a local copy is made (`commit="async"`, one upload at a time);
    a directory from `pt.get_trial().new_checkpoint_dir()` is taken over without a copy.

    Args:
        metrics: finite numbers, text, or JSON made of these.
        checkpoint: a local directory, as `pt.Checkpoint.from_directory(path)`.

    Threads of the trainable may report too: their reports are taken one after another, each as a step of its own. When
    the trial ends, each of them leaves by `TrialOver` at its next report; the trainable itself has 20 seconds to return
    where only such a thread was told. A thread that lives on cannot report to the next trial of its process. Other
    processes return what they have to the trial's own, which reports it.

    Raises:
        BadMetric: a value is NaN, infinite, or cannot be stored.
        InvalidInput: no trial runs here, this is another process than the trial's own or not its first rank, this
            thread is an earlier trial's, or the checkpoint is not a local directory.
    """
    _reporting_session("pt.report").report(metrics, checkpoint)


def report_step(metrics: Mapping[str, object], save: Callable[[str], None]) -> None:
    """Tell the metrics of one step, and have `save` write the state after it when that is due.

    It is due when the `Cadence` of the flow says so, at the last step, when somebody asks the trial to stop, and when
    a scheduler wants the state: a function that reports like this is saved as a class trainable is. `save` is called
    with an empty directory, before this returns.

    Raises:
        BadMetric: a value is NaN, infinite, or cannot be stored.
        InvalidInput: no trial runs here.
    """
    _reporting_session("pt.report_step").report_step(metrics, save)


def save_last_step(save: Callable[[str], None]) -> None:
    """Have `save` write the state after the last step told by `report_step`, where it has not been saved.

    For a loop that ends by itself: nobody knew at its last step that there would be no other.
    """
    _session("prefect_tune.trainable.save_last_step").save_last_step(save)


def ask(
    question: str,
    fields: Mapping[str, object] | None = None,
    *,
    key: str | None = None,
    save: Callable[[str], None] | None = None,
) -> dict[str, Scalar]:
    """Ask a person, and return the answer: from the journal where it was given before, however often it is asked.

    Where there is no answer yet, it does not return: everything of the experiment saves and ends, and the flow run is
    Suspended, with a form. After *Resume* the trial goes on from its newest checkpoint, and what comes between that and
    the question is trained again; then this returns. So save first: a function reports a checkpoint, a class passes
    `save`. A flow run without a deployment waits, Paused with the same form, or asks in the terminal.

    Args:
        question: what the person reads.
        fields: by name the default (a truth value, a number, a text), or a list of texts to choose from. Default:
            `{"go_on": True}`.
        key: which question it is: the same key has the same answer. Default: its text and the step that was reported
            last.
        save: writes the state after the last step told, such as `self.save_checkpoint`; for use where nothing has
            changed since, at the beginning of `step`.

    Raises:
        InvalidInput: no trial runs here, or a field is none that a form could show.
    """
    return _reporting_session("pt.ask").ask(question, fields, key, save)


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint to go on from, as a local directory; None on a fresh start.

    Raises:
        InvalidInput: no trial runs here.
    """
    from prefect_tune.checkpoint import Checkpoint

    restored = _session("pt.get_checkpoint").restored()
    return Checkpoint.from_directory(restored) if restored else None


def get_trial() -> TrialInfo:
    """Return the trial that is being trained here.

    Raises:
        InvalidInput: no trial runs here.
    """
    return _session("pt.get_trial").info()


def enter(session: Session, *, whole_process: bool) -> None:
    """Make `session` the trial of this context, and of every thread of this process where it has one to itself."""
    _in_context.set(session)
    if whole_process:
        _of_earlier_trials.update(each for each in threading.enumerate() if each is not threading.current_thread())
        _in_process[:] = [session]


def _reporting_session(caller: str) -> Session:
    """Return the trial whose step is told; what a thread of an earlier trial has to say is not this one's."""
    if threading.current_thread() in _of_earlier_trials:
        raise InvalidInput(
            f"{caller}(): expected a thread that this trial has started, found {threading.current_thread().name!r}, "
            "which runs since an earlier trial of this process. Have cleanup end the threads that report, or "
            "reset_config start them anew"
        )
    return _session(caller)


def _session(caller: str) -> Session:
    session = _in_context.get(None) or next(iter(_in_process), None)
    if session is not None:
        return session
    if (trial := started_by()) is not None:
        raise InvalidInput(
            f"{caller}(): expected process {trial.process}, which trains trial {trial.name!r}, found process "
            f"{os.getpid()}, which that one, or a launcher that it called, has started. One process trains a trial: "
            "return results to that process (through a queue, a pipe or a pool) and report them there"
        )
    hint = (
        ""
        if threading.current_thread() is threading.main_thread()
        else '. A thread that the trainable starts with isolation="thread" needs its context: '
        "Thread(target=contextvars.copy_context().run, args=(work,))"
    )
    raise InvalidInput(
        f"{caller}() was called where no trial runs. Call it inside the function that you pass to "
        f"pt.durable_trainable(train, ...), not around it{hint}"
    )
