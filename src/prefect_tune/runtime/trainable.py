"""The API for training code: `pt.Trainable`, and the functions `pt.report`, `pt.get_checkpoint` and so on."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakSet

from prefect_tune.core.display_text import describe_signature_mismatch
from prefect_tune.core.errors import InvalidInput
from prefect_tune.runtime.ranks import find_ancestor_trial

if TYPE_CHECKING:
    from prefect_tune.core.experiment.retention import Cadence
    from prefect_tune.core.journal_events import Outcome
    from prefect_tune.runtime.checkpoint import Checkpoint
    from prefect_tune.runtime.session import TrialSession

Reuse: TypeAlias = Literal["auto", "never"]
"""Whether trials share the import of their trainable's module.

- `auto`: one process imports the module; trials are forked from that process, if its forks are safe.
- `never`: each trial's process imports the module.

On systems other than Linux, each trial's process imports the module.
"""


class Trainable:
    """A model that trains step by step. Override `setup`, `step`, `save_checkpoint` and `load_checkpoint`.

    The trial's process calls `setup` (or `reset_config` of an object that served another trial), then
    `load_checkpoint` if there is a checkpoint, then `step` until a stop criterion is met.
    Save all state that the next step depends on (weights, optimizer, random state, position in the data), so that a
    resumed run ends with exactly the weights of an uninterrupted run.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Build the model from the trial's configuration."""

    def step(self) -> Mapping[str, object]:
        """Train one step and return its metrics: finite numbers, text, or JSON made of these.

        `{"done": True}` ends the trial after this step; `{"should_checkpoint": True}` saves a checkpoint.
        """
        raise NotImplementedError(f"{type(self).__name__}.step: train one step and return its metrics")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the whole state into the empty directory `checkpoint_dir`. All writes must be complete on return.

        Return nothing: a returned state or path is refused. `load_checkpoint` receives a directory with the same files.
        """
        raise NotImplementedError(f"{type(self).__name__}.save_checkpoint: write the state into checkpoint_dir")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Read the files that `save_checkpoint` wrote. The directory is removed later: copy what you still need."""
        raise NotImplementedError(f"{type(self).__name__}.load_checkpoint: read the state from checkpoint_dir")

    def reset_config(self, config: dict[str, Any]) -> bool:
        """Reset this object for another trial with `config` and return True; return False if that is impossible."""
        del config
        return False

    def cleanup(self) -> None:
        """Release the resources of `setup`. This is called at a regular end of the trial, not if its process is killed.

        If `cleanup` raises after the trial finished and the last checkpoint was committed, the error is only logged.
        """


_DEF_ADVICE = "Use `def`; in it, call asyncio.run(...) for code that awaits, and pt.report(...) for each step"


def _describe_async_or_generator(function: object) -> str | None:
    """Return a description of a function whose call trains nothing; None for any other function."""
    if inspect.iscoroutinefunction(function):
        return "a function with `async def`, whose call returns a coroutine"
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        return "a function with `yield`, whose call returns a generator"
    return None


def require_no_coroutine(returned: object) -> None:
    """Raise InvalidInput if a function returned a coroutine or a generator, since its call has then trained nothing."""
    if isinstance(returned, Coroutine | Generator | AsyncGenerator):
        if not isinstance(returned, AsyncGenerator):
            returned.close()  # else Python warns that the coroutine was never awaited
        raise InvalidInput(f"trainable: expected metrics or None, found a {type(returned).__name__}. {_DEF_ADVICE}")


METHOD_ARGUMENT_COUNTS = {
    "__init__": 1,
    "setup": 2,
    "step": 1,
    "save_checkpoint": 2,
    "load_checkpoint": 2,
    "reset_config": 2,
    "cleanup": 1,
}
"""The number of arguments, including `self`, with which a trial calls each method of a trainable class."""


def require_trainable(trainable: object, original: object) -> object:
    """Return `trainable` if it is a function or a trainable class; `original` is the value that the user passed.

    Raises:
        InvalidInput: `trainable` is neither a function of one argument nor a subclass of `Trainable` with `step`.
    """
    if isinstance(trainable, type):
        return require_trainable_class(trainable)
    if callable(trainable):
        called: object = trainable
        while isinstance(called, partial):
            called = called.func
        call = inspect.getattr_static(type(called), "__call__", None)
        if kind := _describe_async_or_generator(called) or _describe_async_or_generator(call):
            raise InvalidInput(f"trainable: expected a function that trains when called, found {kind}. {_DEF_ADVICE}")
        if parameters := describe_signature_mismatch(trainable, 1):
            raise InvalidInput(f"trainable: expected a function of one argument, the configuration, found {parameters}")
        return trainable
    raise InvalidInput(
        f"trainable {original!r}: expected a function of the configuration, a subclass of pt.Trainable, or the name "
        f"'package.module:Name' of either, found {type(trainable).__name__}"
    )


def require_trainable_class(kind: type) -> type[Trainable]:
    """Return `kind` if it is a trainable class.

    Raises:
        InvalidInput: `kind` is not a subclass of `Trainable`, does not override `step`, or has a method that does not
            accept the arguments with which a trial calls it.
    """
    if not issubclass(kind, Trainable):
        raise InvalidInput(
            f"trainable {kind.__name__}: expected a subclass of pt.Trainable with a `step` method, or a function of "
            f"the configuration, found another class; write class {kind.__name__}(pt.Trainable)"
        )
    if kind.step is Trainable.step:
        raise InvalidInput(f"trainable {kind.__name__}: it has no `step`; add a method that trains and returns metrics")
    for name, count in METHOD_ARGUMENT_COUNTS.items():
        method = inspect.getattr_static(kind, name)
        if kind_of_method := _describe_async_or_generator(getattr(method, "__func__", method)):
            raise InvalidInput(
                f"trainable {kind.__name__}: expected a method {name} that returns when it is done, "
                f"found {kind_of_method}. {_DEF_ADVICE}"
            )
        if inspect.isfunction(method) and (signature := describe_signature_mismatch(method, count)):
            expected = ", ".join(("self", "config" if name in ("setup", "reset_config") else "checkpoint_dir")[:count])
            raise InvalidInput(f"trainable {kind.__name__}: expected {name}({expected}), found {signature}")
    return kind


def require_save_checkpoint(kind: type, cadence: Cadence) -> None:
    """Raise InvalidInput if `cadence` requires saves but the class `kind` does not override `save_checkpoint`.

    Otherwise the first save would raise, after some training.
    """
    if getattr(kind, "save_checkpoint", None) is Trainable.save_checkpoint and not cadence.never_saves:
        raise InvalidInput(
            f"trainable {kind.__name__}: expected the method `save_checkpoint`, since its cadence saves, found none; "
            f"write {kind.__name__}.save_checkpoint and {kind.__name__}.load_checkpoint, or pass "
            "checkpoint=pt.Cadence(every_seconds=None, at_end=False) to save nothing and restart on each resume"
        )


@dataclass(frozen=True)
class TrialInfo:
    """The trial that this process trains. `step` and `should_checkpoint` are current at each access."""

    id: str
    """The trial's name in the experiment."""
    experiment: str
    """The experiment's name."""
    attempt: int
    """The number of the attempt, from 1; each retry and resume adds one."""
    directory: Path
    """The directory for the trial's own files, such as logs. They are synced as artifacts, and restored on a resume."""
    config: Mapping[str, Any]
    """The trial's configuration."""
    rank: int
    """The rank of this process among the trial's processes; 0 if there is only one."""
    world_size: int
    """The number of processes that train the trial together."""
    local_rank: int
    """The rank of this process among the trial's processes on this machine."""
    _session: TrialSession = field(repr=False)

    @property
    def step(self) -> int:
        """The number of steps trained so far, including those before a resume."""
        return self._session.step

    @property
    def should_checkpoint(self) -> bool:
        """Whether a stop was requested. If so, report a checkpoint next: the run then ends without losing work."""
        return self._session.poll_stop_request()

    def new_checkpoint_dir(self) -> Path:
        """Make an empty directory for one checkpoint. After `pt.report`, the directory belongs to prefect-tune.

        `pt.report` does not copy this directory. With `commit="async"`, it copies other directories before it returns.
        """
        return self._session.make_checkpoint_directory()


class StopTraining(BaseException):
    """Ends the user's function when the trial must end. As a BaseException, it is not caught by `except Exception`."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome.reason))
        self.outcome = outcome
        """How the attempt ends."""


# A thread that the trainable starts does not inherit context variables, so it uses `_process_sessions`.
_context_session: ContextVar[TrialSession] = ContextVar("prefect_tune_session")
_process_sessions: list[TrialSession] = []
# If a process serves several trials, the threads that an earlier trial left running must not report to a later trial.
# Threads that ran before the first trial, such as a pool of the trainable's module, serve all trials.
_earlier_trial_threads: WeakSet[threading.Thread] = WeakSet()
_import_threads: WeakSet[threading.Thread] = WeakSet()


def report(metrics: Mapping[str, object], *, checkpoint: Checkpoint | None = None) -> None:
    """Report the metrics of one step, and optionally a checkpoint of the state after this step.

    Without a checkpoint, the call returns at once. With a checkpoint, it returns when the checkpoint is committed on
    the target (`commit="sync"`), or when a local copy is made (`commit="async"`, one upload at a time). At a milestone,
    it also waits for the decision. A directory from `pt.get_trial().new_checkpoint_dir()` is used without a copy.

    ```python
    def train(config):
        for step in range(10):
            pt.report({"loss": config["lr"] * 0.9**step})
    ```

    Args:
        metrics: finite numbers, text, or JSON made of these.
        checkpoint: a local directory, passed as `pt.Checkpoint.from_directory(path)`.

    Threads of the trainable may report too: each report is one step, and the reports are handled one after another.
    When the trial ends, each thread receives `StopTraining` at its next report. The trainable must return within 20
    seconds after one of its threads has received `StopTraining`. A thread left running cannot report to a later trial.
    Other processes must return their results to the trial's own process, since only that process can report.

    Raises:
        BadMetric: a value is NaN, infinite, or cannot be stored.
        InvalidInput: no trial runs here, this is not the trial's own process or not rank 0, this thread belongs to an
            earlier trial, or the checkpoint is not a local directory.
    """
    _require_reporting_session("pt.report").report(metrics, checkpoint)


def report_step(metrics: Mapping[str, object], save: Callable[[str], None], *, allow_missing: bool = False) -> None:
    """Report the metrics of one step; if a checkpoint is due, call `save` to write the state after this step.

    A checkpoint is due at the same times as for a class trainable: when the flow's `Cadence` requires one, when a stop
    is requested, when a scheduler needs the state, or if `metrics` have `"should_checkpoint": True`. `save` is called
    with an empty directory, before this function returns. With `allow_missing`, the search's metric may be missing.

    ```python
    pt.report_step({"loss": 0.1}, lambda directory: Path(directory, "epoch").write_text("10"))
    ```

    Raises:
        BadMetric: a value is NaN, infinite, or cannot be stored.
        InvalidInput: no trial runs here.
    """
    _require_reporting_session("pt.report_step").report_step(metrics, save, allow_missing=allow_missing)


def save_last_step(save: Callable[[str], None]) -> None:
    """Call `save` to write the state after the last `report_step`, unless that state is already saved.

    Use it after a loop that ends by itself, since `report_step` could not know that the step was the last one.
    """
    _require_session("prefect_tune.runtime.trainable.save_last_step").save_last_step(save)


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint to resume from, as a local directory; None on a fresh start.

    ```python
    if checkpoint := pt.get_checkpoint():
        epoch = int(Path(checkpoint.path, "epoch").read_text())
    ```

    Raises:
        InvalidInput: no trial runs here.
    """
    from prefect_tune.runtime.checkpoint import Checkpoint

    restored = _require_session("pt.get_checkpoint").get_restored_directory()
    return Checkpoint.from_directory(restored) if restored else None


def get_trial() -> TrialInfo:
    """Return the trial that this process trains.

    ```python
    Path(pt.get_trial().directory, "notes.txt").write_text("a file of this trial")
    ```

    Raises:
        InvalidInput: no trial runs here.
    """
    return _require_session("pt.get_trial").make_trial_info()


def activate_session(session: TrialSession, *, whole_process: bool) -> None:
    """Make `session` the session of this context; with `whole_process`, of all threads of this process."""
    _context_session.set(session)
    if whole_process:
        others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
        if _process_sessions:
            _earlier_trial_threads.update(thread for thread in others if thread not in _import_threads)
        else:
            _import_threads.update(others)
        _process_sessions[:] = [session]


def get_process_session() -> TrialSession | None:
    """Return the session of the trial that this process trains; None otherwise, as in a trial's child process."""
    return next((session for session in _process_sessions if session.belongs_to_this_process), None)


def _require_reporting_session(caller: str) -> TrialSession:
    """Return the trial's session. Raise InvalidInput if no trial runs here, or if this thread is an earlier trial's."""
    if threading.current_thread() in _earlier_trial_threads:
        raise InvalidInput(
            f"{caller}(): expected a thread that this trial has started, found {threading.current_thread().name!r}, "
            "which belongs to an earlier trial of this process. End reporting threads in cleanup, or restart them in "
            "reset_config"
        )
    return _require_session(caller)


def _require_session(caller: str) -> TrialSession:
    from prefect_tune.runtime.group_session import join_as_rank

    if (joined := join_as_rank(caller)) is not None:
        return joined
    session = _context_session.get(None) or next(iter(_process_sessions), None)
    if session is not None:
        return session
    if (trial := find_ancestor_trial()) is not None:
        raise InvalidInput(
            f"{caller}(): expected process {trial.pid}, which trains trial {trial.trial_name!r}, found process "
            f"{os.getpid()}, which that process or its launcher started. One process trains a trial: "
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
        f"pt.tune(train, ...) or pt.durable_trainable(train, ...), not around it{hint}"
    )
