"""The trainable of a drill: the user's own, which records its state after each step, and kills itself when planned.

It runs in the trial's process. Each record is a line of a file on this machine, so a kill loses none. A record has
digests of what the next step may depend on: the generators of Python, NumPy and PyTorch, and the objects that training
uses, which are the attributes of a class, or the local variables of a function at its reports. A run that resumes is
compared with the undisturbed one by these digests, and so the drill can name what was not restored.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias, cast

from prefect_tune.runtime.group_session import ON_JOIN
from prefect_tune.runtime.load_named import load_trainable
from prefect_tune.runtime.session import FollowingSession, TrialSession
from prefect_tune.runtime.trainable import Trainable, get_trial

Victim: TypeAlias = Literal["trial", "rank", "search", "upload"]
"""What a kill ends: the trial's process, which is rank 0 of several; another rank; the process of the search; that
process in the middle of an upload."""

_PLAN = "PREFECT_TUNE_DRILL"
_MOST_VALUES = 4000
_MOST_TEXT = 100
_MOST_BYTES = 1 << 28
_MOST_PICKLED_BYTES = 1 << 20
_DEPTH = 3
_STATES = ("getstate", "get_state", "state_dict")
"""The methods by which generators, and models and optimizers, return their state."""
_DIGEST_BYTES = 8
_MAX_COPIED_BYTES = 1 << 26
_MAX_COPIED_ENTRIES = 5_000


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the processes of one run of a drill do; it travels in an environment variable."""

    trainable: str
    """As in `pt.durable_trainable`: `package.module:Name`."""
    folder: str
    """Of the run, on this machine: its records, and the kills that were made."""
    kills: tuple[tuple[int, Victim], ...] = ()
    """After which step, and what; in order."""
    search: int = 0
    """The process id of the search; 0 if the plan is not in use yet."""

    def in_environment(self) -> dict[str, str]:
        """Return the environment variable that carries the plan."""
        return {_PLAN: json.dumps([self.trainable, self.folder, self.kills, self.search])}

    @classmethod
    def of_environment(cls) -> RunPlan:
        """Return the plan that this process was started with."""
        trainable, folder, kills, search = json.loads(os.environ[_PLAN])
        return cls(trainable, folder, tuple((step, victim) for step, victim in kills), search)

    @property
    def records(self) -> Path:
        """The file of the records, one JSON document per line."""
        return Path(self.folder, "records.jsonl")

    def is_due(self, step: int, *victims: Victim) -> int | None:
        """Return the number of the kill of one of these victims that is due after `step`; None if there is none."""
        for number, (at, victim) in enumerate(self.kills):
            if not Path(self.folder, f"kill-{number}").exists():  # one after another
                return number if step >= at and victim in victims else None
        return None

    def kills_made(self) -> Iterator[tuple[Victim, float]]:
        """Yield the kills that were made: what, and at what time of day in seconds."""
        for number, (_, victim) in enumerate(self.kills):
            with suppress(FileNotFoundError, ValueError):
                yield victim, float(Path(self.folder, f"kill-{number}").read_text(encoding="ascii"))

    def kill(self, number: int, process: int) -> None:
        """Note that kill `number` is made, and make it: SIGKILL to `process`."""
        Path(self.folder, f"kill-{number}").write_text(str(time.time()), encoding="ascii")
        os.kill(process, signal.SIGKILL)


def __getattr__(name: str) -> object:
    """Return the trainable that the plan of this process names, with the probe around it: the same at each call."""
    if name != "Probed":
        raise AttributeError(name)
    plan = RunPlan.of_environment()
    found = load_trainable(plan.trainable)
    probed = (
        _of_class(found, plan) if isinstance(found, type) else _of_function(cast(Callable[..., object], found), plan)
    )
    globals()[name] = probed  # a trainable that pickles itself is found again
    return probed


# -------------------------------------------------------------------------------------------- around the trainable


def _of_class(kind: type[Any], plan: RunPlan) -> type[Trainable]:
    probe = _Probe(plan)  # of this process, and no attribute: a trainable may save all of its attributes

    class Probed(kind):  # type: ignore[misc]  # a base that is known when it is loaded
        def setup(self, config: dict[str, Any]) -> None:
            enter_copied_directory(Path(plan.folder, f"directory-{get_trial().attempt}"))
            super().setup(config)

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            super().load_checkpoint(checkpoint_dir)
            probe.record(get_trial().step, vars(self), is_restored=True)

        def step(self) -> Mapping[str, object]:
            probe.begins()
            metrics = cast(Mapping[str, object], super().step())
            probe.ends()
            probe.record(get_trial().step + 1, vars(self))
            return metrics

    Probed.__name__, Probed.__qualname__, Probed.__module__ = kind.__name__, "Probed", __name__
    Probed.__doc__ = kind.__doc__
    return cast(type[Trainable], Probed)


def _of_function(train: Callable[..., object], plan: RunPlan) -> Callable[..., object]:
    """Return the function with a probe at each report, which may come from the callback of a framework."""
    code = getattr(inspect.unwrap(getattr(train, "func", train)), "__code__", None)  # an object that is called has none

    @functools.wraps(train)
    def run(config: dict[str, Any]) -> object:
        enter_copied_directory(Path(plan.folder, f"directory-{get_trial().attempt}"))
        os.environ[ON_JOIN] = f"{__name__}:{probe_rank.__name__}"
        _probe_reports(plan, lambda frame: frame.f_code is code)
        return train(config)

    return run


def probe_rank() -> None:
    """Probe the reports of this process, a rank that a launcher in the trial has started, as `run` does."""
    # The program reports, maybe through a framework.
    _probe_reports(RunPlan.of_environment(), lambda frame: frame.f_globals.get("__name__") == "__main__")


def _probe_reports(plan: RunPlan, is_frame: Callable[[FrameType], bool]) -> None:
    """Record at each report of this process, which ends with the trial; a fork inherits the probe.

    The objects of a record are the local variables of the innermost frame that `is_frame`.
    """
    probe = _Probe(plan)

    def probed(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def reports(session: TrialSession, *given: Any, **options: Any) -> None:
            probe.ends()
            frame = inspect.currentframe()
            while frame is not None and not is_frame(frame):
                frame = frame.f_back
            probe.record(session.step + 1, {} if frame is None else frame.f_locals)
            try:
                method(session, *given, **options)
            finally:
                probe.begins()

        return reports

    for kind in (TrialSession, FollowingSession):
        for name in ("report", "report_step"):
            if not hasattr(method := vars(kind)[name], "__wrapped__"):
                setattr(kind, name, probed(method))
    probe.begins()


class _Probe:
    """Records the steps of one attempt, those of rank 0, and kills its process when planned."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._began = self._ended = time.time()
        self._waited = 0.0
        self._step = 0

    def begins(self) -> None:
        """A step begins, and with it a kill that is due after the step before it: that one was reported and saved."""
        now = time.time()
        self._waited, self._began = now - self._ended, now
        trial = get_trial()
        victims: tuple[Victim, ...] = ("rank",) if trial.rank else ("trial", "search")
        number = self._plan.is_due(self._step, *victims)
        if number is None or (trial.rank and trial.rank != 1 + number % (trial.world_size - 1)):
            return
        is_search = self._plan.kills[number][1] == "search"
        self._plan.kill(number, self._plan.search if is_search else os.getpid())
        if is_search:
            time.sleep(600)  # this process ends with its search

    def ends(self) -> None:
        """A step is trained."""
        self._ended = time.time()

    def record(self, step: int, objects: Mapping[str, object], *, is_restored: bool = False) -> None:
        """Write a line: the state after this step, or after the checkpoint of this step was loaded."""
        self._step, trial = step, get_trial()
        if trial.rank:
            return
        line = {
            "step": step,
            "attempt": trial.attempt,
            "restored": is_restored,
            "at": self._ended,
            "seconds": self._ended - self._began,
            "waited": self._waited,
            "states": dict(states(objects)),
        }
        with self._plan.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._ended = time.time()  # the time that the record took is the drill's, and not the training's


# ------------------------------------------------------------------------------------------------- digests of states


def states(objects: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the state of the generators of this process and of `objects`, as `kind name` and a value or a digest."""
    yield "global random", _digest(random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "global numpy.random", _digest(numpy.random.get_state())
    if (torch := sys.modules.get("torch")) is not None:
        yield "global torch", _digest(torch.get_rng_state())
        if torch.cuda.is_initialized():  # a training on the CPU must not take memory of a GPU
            for number, state in enumerate(torch.cuda.get_rng_state_all()):
                yield f"global torch.cuda:{number}", _digest(state)
    yield from islice((found for name, each in objects.items() for found in _states_of(name, each)), _MOST_VALUES)


def _states_of(name: str, value: Any, depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    kind = _kind_of(value)
    if kind is None:
        return
    parts: Mapping[Any, object] | None = None
    if kind == "state" and depth:
        if isinstance(value, Mapping):
            parts = value
        elif isinstance(value, list | tuple):
            parts = dict(enumerate(value))
        elif not any(hasattr(value, each) for each in (*_STATES, "dtype")) and hasattr(value, "__dict__"):
            parts = vars(value)
    if parts:
        for key, each in parts.items():
            yield from _states_of(f"{name}.{key}", each, depth - 1)
    else:
        # Of an iterator of PyTorch's DataLoader: how many batches it has yielded.
        state = value._num_yielded if kind == "data" else _state_of(value)  # noqa: SLF001 - it has no public name
        with suppress(Exception):  # a class of tensors that NumPy cannot hold: a hint is lost, not the training
            for path, leaf in flat_values(state, name):
                yield f"{kind} {path}", _shown(leaf)


def _kind_of(value: object) -> str | None:
    """Return what a value is to training: the noun with which the drill names it; None for code and modules."""
    if inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value):
        return None
    names = {each.__name__ for each in type(value).__mro__}
    for kind, known in (
        ("rng", {"Random", "RandomState"}),
        ("rng", {"Generator"} if hasattr(value, "bit_generator") or hasattr(value, "get_state") else set[str]()),
        ("optimizer", {"Optimizer"}),
        ("schedule", {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"}),
        ("scaler", {"GradScaler"}),
        ("data", {"_BaseDataLoaderIter"}),
        ("model", {"Module"}),
    ):
        if names & known:
            return kind
    if isinstance(value, bool | int | float | str):
        return "counter" if isinstance(value, int) and not isinstance(value, bool) else "value"
    return "state"


def _state_of(value: Any) -> object:
    if hasattr(value, "bit_generator"):
        return _digest(value.bit_generator.state)
    for method in _STATES:
        found = getattr(value, method, None)
        if callable(found):
            try:
                return found() if method == "state_dict" else _digest(found())
            except Exception:  # noqa: BLE001 - code of a library, called for a hint only
                return None
    return value


def flat_values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and sequences with their paths, such as `state.3.exp_avg`."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat_values(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and value:
        yield from flat_values(dict(enumerate(value)), name)
    else:
        yield name, as_array(value)


def as_array(value: Any) -> Any:
    """Return a tensor as an array; NumPy has no bfloat16 and no 8-bit floats, so those are widened, which is exact."""
    if not all(hasattr(value, each) for each in ("detach", "is_floating_point")):
        return value
    own = value.to_local() if hasattr(value, "to_local") else value  # of a DTensor: the part of this rank
    plain = own.detach().cpu()
    plain = plain.to_dense() if getattr(plain, "is_sparse", False) else plain
    try:
        return plain.numpy()
    except TypeError:
        return plain.float().numpy()


def _shown(value: object) -> str:
    if isinstance(value, bool | int | float | str) or value is None:
        text = repr(value)
        return text if len(text) <= _MOST_TEXT else _digest(text)
    return _digest(value)


class _Hash:
    """A file that hashes what is written, and refuses what is too large."""

    def __init__(self, most_bytes: int) -> None:
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._left = most_bytes

    def write(self, data: Any) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise OverflowError
        self._hash.update(data)

    def __str__(self) -> str:
        return self._hash.hexdigest()


def _digest(value: Any) -> str:
    """Return a digest of the content; of what is too large, or cannot be pickled, its type, which says nothing."""
    if getattr(value, "nbytes", 0) > _MOST_BYTES:
        return f"<{type(value).__name__} of {value.nbytes:,} bytes>"
    value = as_array(value)
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return repr(value.item())
    try:
        if callable(tobytes := getattr(value, "tobytes", None)) and not isinstance(value, memoryview):
            digest = _Hash(_MOST_BYTES)
            digest.write(tobytes())
        else:
            digest = _Hash(_MOST_PICKLED_BYTES)
            pickler = pickle.Pickler(digest)
            pickler.fast = True  # no memo: equal values have equal bytes, whether they are one object or two
            pickler.dump(value)
    except Exception:  # noqa: BLE001 - an iterator, an open file, a cycle: it has no digest
        return f"<{type(value).__name__}>"
    return str(digest)


# -------------------------------------------------------------------------------------- a directory for each attempt
#
# On another machine the files that an attempt leaves in its working directory would not be there for the next one, so a
# training that reads them must not pass as exact.
#
#     /home/me/project          the working directory of the drill; its attempts do not write there
#     FOLDER/home/me/project    its copy, in which an attempt trains
#     FOLDER/home/me/data       a link, so that `../data` is found
#
# Small files are copied. Links take the place of hidden directories, and of what is too much to copy for each attempt:
# what is written below those is shared by all attempts.


def enter_copied_directory(folder: Path) -> None:
    """Make a copy of the working directory below `folder`, unless another rank has made it, and go there."""
    original = Path.cwd().resolve()
    copied = Path(folder, *original.parts[1:])
    if not folder.exists():
        own = folder.with_name(f"{folder.name}-{os.getpid()}")
        _link_surroundings(original, own)
        _copy_directory(original, Path(own, *original.parts[1:]), without=folder.parent.resolve())
        with suppress(OSError):  # another rank was faster
            own.rename(folder)
    os.chdir(copied)
    os.environ["PWD"] = str(copied)


def _link_surroundings(original: Path, folder: Path) -> None:
    """Make the directories above the copy, in which all other entries are links."""
    for depth, part in enumerate(original.parts[1:], 1):
        above, copied = Path(*original.parts[:depth]), Path(folder, *original.parts[1:depth])
        copied.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):  # of a directory that can be entered and not read
            for entry in os.scandir(above):
                if entry.name != part:
                    (copied / entry.name).symlink_to(above / entry.name)


def _copy_directory(original: Path, copied: Path, without: Path) -> None:
    """Copy a directory level by level as long as it is cheap; what is left is linked."""
    left_bytes, left_entries = _MAX_COPIED_BYTES, _MAX_COPIED_ENTRIES
    copied.mkdir(parents=True)
    directories = deque([(original, copied)])
    while directories:
        source, place = directories.popleft()
        with os.scandir(source) as found:
            entries = sorted(found, key=lambda entry: entry.is_dir(follow_symlinks=False))  # files first
        for entry in entries:
            path, target = Path(entry.path), place / entry.name
            left_entries -= 1
            with suppress(OSError):  # it was removed meanwhile, or its path is too long
                size = entry.stat(follow_symlinks=False).st_size
                is_readable = left_entries > 0 and os.access(path, os.R_OK)
                if is_readable and entry.is_file(follow_symlinks=False) and size <= left_bytes:
                    shutil.copy2(path, target)
                    left_bytes -= size
                elif (
                    is_readable
                    and entry.is_dir(follow_symlinks=False)
                    and os.access(path, os.X_OK)
                    and not entry.name.startswith(".")
                    and not without.is_relative_to(path)
                ):
                    target.mkdir()
                    directories.append((path, target))
                else:
                    target.symlink_to(path)
