"""The trainable of a drill: the user's trainable, with a probe that records states and makes the planned kills.

The probe runs in the trial's process. It writes a record after each step as a line of a file on this machine, so a kill
loses no record. A record has digests of all states on which the next step may depend: the random generators of Python,
NumPy and PyTorch, and either a class's attributes or a function's local variables at a report. The drill compares the
digests of a resumed run with those of the undisturbed run, and names the states that were not restored.
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

from prefect_tune.runtime.group_session import ON_JOIN_ENV
from prefect_tune.runtime.load_named import load_trainable
from prefect_tune.runtime.session import TrialSession, WorkerRankSession
from prefect_tune.runtime.trainable import Trainable, get_trial

Victim: TypeAlias = Literal["trial", "rank", "search", "upload"]
"""The process that a kill ends: the trial (its rank 0), another rank, the search, or the search during an upload."""

_PLAN_VARIABLE = "PREFECT_TUNE_DRILL"
_MAX_STATES = 4000
_MAX_TEXT_CHARACTERS = 100
_MAX_HASHED_BYTES = 1 << 28
_MAX_PICKLED_BYTES = 1 << 20
_MAX_DEPTH = 3
_STATE_METHODS = ("getstate", "get_state", "state_dict")
"""The methods of generators, models and optimizers that return their state."""
_DIGEST_BYTES = 8
_MAX_COPIED_BYTES = 1 << 26
_MAX_COPIED_ENTRIES = 5_000


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of one run of a drill; the processes of the run get it in an environment variable."""

    trainable: str
    """`package.module:Name`, see `pt.durable_trainable`."""
    folder: str
    """The folder on this machine for the records and kills of the run."""
    kills: tuple[tuple[int, Victim], ...] = ()
    """For each kill, in order, the step after which it is due, and the victim."""
    search_pid: int = 0
    """The process id of the search; 0 before the search begins."""

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable that contains the plan."""
        return {_PLAN_VARIABLE: json.dumps([self.trainable, self.folder, self.kills, self.search_pid])}

    @classmethod
    def from_environment(cls) -> RunPlan:
        """Return the plan in the environment of this process."""
        trainable, folder, kills, search = json.loads(os.environ[_PLAN_VARIABLE])
        return cls(trainable, folder, tuple((step, victim) for step, victim in kills), search)

    @property
    def records_path(self) -> Path:
        return Path(self.folder, "records.jsonl")

    def next_due_kill(self, step: int, *victims: Victim) -> int | None:
        """Return the number of the next kill if it is due after `step` and kills one of `victims`; otherwise None."""
        for number, (at, victim) in enumerate(self.kills):
            if not Path(self.folder, f"kill-{number}").exists():  # the first kill that was not made is next
                return number if step >= at and victim in victims else None
        return None

    def read_kills(self) -> Iterator[tuple[Victim, float]]:
        """Yield the victim and the Unix time of each kill that was made."""
        for number, (_, victim) in enumerate(self.kills):
            with suppress(FileNotFoundError, ValueError):
                yield victim, float(Path(self.folder, f"kill-{number}").read_text(encoding="ascii"))

    def kill(self, number: int, pid: int) -> None:
        """Record the time of kill `number`, then send SIGKILL to the process `pid`."""
        Path(self.folder, f"kill-{number}").write_text(str(time.time()), encoding="ascii")
        os.kill(pid, signal.SIGKILL)


def __getattr__(name: str) -> object:
    """Return `Probed`: the trainable of this process's plan, with a probe added. Each call returns the same object."""
    if name != "Probed":
        raise AttributeError(name)
    plan = RunPlan.from_environment()
    loaded = load_trainable(plan.trainable)
    train = cast(Callable[..., object], loaded)
    wrapped = _wrap_class(loaded, plan) if isinstance(loaded, type) else _wrap_function(train, plan)
    globals()[name] = wrapped  # so that pickle finds the class by its name
    return wrapped


# -------------------------------------------------------------------------------------------- around the trainable


def _wrap_class(kind: type[Any], plan: RunPlan) -> type[Trainable]:
    probe = _Probe(plan)  # not stored in the trainable, because a trainable may save all of its attributes

    class Probed(kind):  # type: ignore[misc]  # a base class loaded at runtime
        def setup(self, config: dict[str, Any]) -> None:
            copy_and_enter_directory(Path(plan.folder, f"directory-{get_trial().attempt}"))
            super().setup(config)

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            super().load_checkpoint(checkpoint_dir)
            probe.write_record(get_trial().step, vars(self), is_restored=True)

        def step(self) -> Mapping[str, object]:
            probe.on_step_begin()
            metrics = cast(Mapping[str, object], super().step())
            probe.on_step_end()
            probe.write_record(get_trial().step + 1, vars(self))
            return metrics

    Probed.__name__, Probed.__qualname__, Probed.__module__ = kind.__name__, "Probed", __name__
    Probed.__doc__ = kind.__doc__
    return cast(type[Trainable], Probed)


def _wrap_function(train: Callable[..., object], plan: RunPlan) -> Callable[..., object]:
    """Return the function with a probe at each report, including reports by callbacks of a framework."""
    code = getattr(inspect.unwrap(getattr(train, "func", train)), "__code__", None)  # None for a callable object

    @functools.wraps(train)
    def train_with_probe(config: dict[str, Any]) -> object:
        copy_and_enter_directory(Path(plan.folder, f"directory-{get_trial().attempt}"))
        os.environ[ON_JOIN_ENV] = f"{__name__}:{probe_rank.__name__}"
        _probe_reports(plan, lambda frame: frame.f_code is code)
        return train(config)

    return train_with_probe


def probe_rank() -> None:
    """Probe the reports of this process, which is a rank that the trial's launcher started; see `_wrap_function`."""
    # Probe the frame of the launched program, which reports directly or through a framework.
    _probe_reports(RunPlan.from_environment(), lambda frame: frame.f_globals.get("__name__") == "__main__")


def _probe_reports(plan: RunPlan, is_probed_frame: Callable[[FrameType], bool]) -> None:
    """From now on, write a record at each report of this process and of its forks.

    A record has the local variables of the innermost frame for which `is_probed_frame` returns True.
    """
    probe = _Probe(plan)

    def wrap_report(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def report_and_record(session: TrialSession, *args: Any, **options: Any) -> None:
            probe.on_step_end()
            frame = inspect.currentframe()
            while frame is not None and not is_probed_frame(frame):
                frame = frame.f_back
            probe.write_record(session.step + 1, {} if frame is None else frame.f_locals)
            try:
                method(session, *args, **options)
            finally:
                probe.on_step_begin()

        return report_and_record

    for kind in (TrialSession, WorkerRankSession):
        for name in ("report", "report_step"):
            if not hasattr(method := vars(kind)[name], "__wrapped__"):
                setattr(kind, name, wrap_report(method))
    probe.on_step_begin()


class _Probe:
    """Records the steps of rank 0 of one attempt, and makes the planned kills."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._began = self._ended = time.time()
        self._waited = 0.0
        self._step = 0

    def on_step_begin(self) -> None:
        """Measure the time since the last step, which has been reported by now; make a kill that is due after it."""
        now = time.time()
        self._waited, self._began = now - self._ended, now
        trial = get_trial()
        victims: tuple[Victim, ...] = ("rank",) if trial.rank else ("trial", "search")
        number = self._plan.next_due_kill(self._step, *victims)
        if number is None or (trial.rank and trial.rank != 1 + number % (trial.world_size - 1)):
            return
        is_search = self._plan.kills[number][1] == "search"
        self._plan.kill(number, self._plan.search_pid if is_search else os.getpid())
        if is_search:
            time.sleep(600)  # wait: this process ends soon, because the search has ended

    def on_step_end(self) -> None:
        self._ended = time.time()

    def write_record(self, step: int, objects: Mapping[str, object], *, is_restored: bool = False) -> None:
        """On rank 0, record the states after `step` or, if `is_restored`, after the load of that step's checkpoint."""
        self._step, trial = step, get_trial()
        if trial.rank:
            return
        line = {
            "step": step,
            "attempt": trial.attempt,
            "restored": is_restored,
            "ended_at": self._ended,
            "seconds": self._ended - self._began,
            "wait_seconds": self._waited,
            "states": dict(collect_states(objects)),
        }
        with self._plan.records_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._ended = time.time()  # so that writing the record does not count as training time


# ------------------------------------------------------------------------------------------------- digests of states


def collect_states(objects: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield pairs of `"kind name"` and a value or digest, for this process's random generators and for `objects`."""
    yield "global random", _compute_digest(random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "global numpy.random", _compute_digest(numpy.random.get_state())
    if (torch := sys.modules.get("torch")) is not None:
        yield "global torch", _compute_digest(torch.get_rng_state())
        if torch.cuda.is_initialized():  # otherwise, the next line would take GPU memory from a CPU training
            for number, state in enumerate(torch.cuda.get_rng_state_all()):
                yield f"global torch.cuda:{number}", _compute_digest(state)
    yield from islice((item for name, value in objects.items() for item in _iter_states(name, value)), _MAX_STATES)


def _iter_states(name: str, value: Any, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, str]]:
    kind = _classify_value(value)
    if kind is None:
        return
    parts: Mapping[Any, object] | None = None
    if kind == "state" and depth:
        if isinstance(value, Mapping):
            parts = value
        elif isinstance(value, list | tuple):
            parts = dict(enumerate(value))
        elif not any(hasattr(value, part) for part in (*_STATE_METHODS, "dtype")) and hasattr(value, "__dict__"):
            parts = vars(value)
    if parts:
        for key, part in parts.items():
            yield from _iter_states(f"{name}.{key}", part, depth - 1)
    else:
        # The state of an iterator of PyTorch's DataLoader is the number of yielded batches.
        state = value._num_yielded if kind == "data" else _read_state(value)  # noqa: SLF001 - no public attribute
        with suppress(Exception):  # if NumPy cannot represent a tensor, the drill only loses a hint
            for path, leaf in iter_leaves(state, name):
                yield f"{kind} {path}", _format_leaf(leaf)


def _classify_value(value: object) -> str | None:
    """Return the kind of a value, for messages of the drill; None for a module, a class or a function."""
    if inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value):
        return None
    names = {base.__name__ for base in type(value).__mro__}
    for kind, class_names in (
        ("rng", {"Random", "RandomState"}),
        ("rng", {"Generator"} if hasattr(value, "bit_generator") or hasattr(value, "get_state") else set[str]()),
        ("optimizer", {"Optimizer"}),
        ("schedule", {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"}),
        ("scaler", {"GradScaler"}),
        ("data", {"_BaseDataLoaderIter"}),
        ("model", {"Module"}),
    ):
        if names & class_names:
            return kind
    if isinstance(value, bool | int | float | str):
        return "counter" if isinstance(value, int) and not isinstance(value, bool) else "value"
    return "state"


def _read_state(value: Any) -> object:
    if hasattr(value, "bit_generator"):
        return _compute_digest(value.bit_generator.state)
    for method in _STATE_METHODS:
        read_state = getattr(value, method, None)
        if callable(read_state):
            try:
                return read_state() if method == "state_dict" else _compute_digest(read_state())
            except Exception:  # noqa: BLE001 - code of a library, called for a hint only
                return None
    return value


def iter_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and sequences with their paths, such as `state.3.exp_avg`."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from iter_leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and value:
        yield from iter_leaves(dict(enumerate(value)), name)
    else:
        yield name, to_array(value)


def to_array(value: Any) -> Any:
    """Return a tensor as an array, and any other value unchanged. Floats that NumPy lacks are widened without loss."""
    if not all(hasattr(value, name) for name in ("detach", "is_floating_point")):
        return value
    local = value.to_local() if hasattr(value, "to_local") else value  # this rank's part of a DTensor
    array = local.detach().cpu()
    array = array.to_dense() if getattr(array, "is_sparse", False) else array
    try:
        return array.numpy()
    except TypeError:
        return array.float().numpy()


def _format_leaf(value: object) -> str:
    if isinstance(value, bool | int | float | str) or value is None:
        text = repr(value)
        return text if len(text) <= _MAX_TEXT_CHARACTERS else _compute_digest(text)
    return _compute_digest(value)


class _HashFile:
    """A writable file that hashes its data; `write` raises `OverflowError` once the total exceeds `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._left = max_bytes

    def write(self, data: Any) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise OverflowError
        self._hash.update(data)

    def __str__(self) -> str:
        return self._hash.hexdigest()


def _compute_digest(value: Any) -> str:
    """Return a digest; for an array without axes, its number; for a value too large or not picklable, its type."""
    if getattr(value, "nbytes", 0) > _MAX_HASHED_BYTES:
        return f"<{type(value).__name__} of {value.nbytes:,} bytes>"
    value = to_array(value)
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return repr(value.item())
    try:
        if callable(tobytes := getattr(value, "tobytes", None)) and not isinstance(value, memoryview):
            digest = _HashFile(_MAX_HASHED_BYTES)
            digest.write(tobytes())
        else:
            digest = _HashFile(_MAX_PICKLED_BYTES)
            pickler = pickle.Pickler(digest)
            pickler.fast = True  # without a memo, equal values have equal bytes, whether they are one object or two
            pickler.dump(value)
    except Exception:  # noqa: BLE001 - an iterator, an open file or a cycle cannot be pickled
        return f"<{type(value).__name__}>"
    return str(digest)


# -------------------------------------------------------------------------------------- a directory for each attempt
#
# An attempt leaves files in its working directory. On another machine, the next attempt would not have these files, so
# a training that reads them must fail the drill. Therefore, each attempt trains in its own copy of the directory.
#
#     /home/me/project          the working directory of the drill; its attempts do not write there
#     FOLDER/home/me/project    its copy, in which an attempt trains
#     FOLDER/home/me/data       a link, so that `../data` exists
#
# Small files are copied. Hidden directories, and files and directories that are too large for a copy per attempt, are
# linked, so all attempts share their content.


def copy_and_enter_directory(folder: Path) -> None:
    """Copy the working directory to a path in `folder`, unless another rank has done so; then enter the copy."""
    original = Path.cwd().resolve()
    copied = Path(folder, *original.parts[1:])
    if not folder.exists():
        own_copy = folder.with_name(f"{folder.name}-{os.getpid()}")
        _link_parents(original, own_copy)
        _copy_directory(original, Path(own_copy, *original.parts[1:]), excluded=folder.parent.resolve())
        with suppress(OSError):  # another rank was faster
            own_copy.rename(folder)
    os.chdir(copied)
    os.environ["PWD"] = str(copied)


def _link_parents(original: Path, folder: Path) -> None:
    """Make the parent directories of the copy; in them, link all other entries of the original parent directories."""
    for depth, part in enumerate(original.parts[1:], 1):
        above, copied = Path(*original.parts[:depth]), Path(folder, *original.parts[1:depth])
        copied.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):  # this process has no permission to read the directory
            for entry in os.scandir(above):
                if entry.name != part:
                    (copied / entry.name).symlink_to(above / entry.name)


def _copy_directory(original: Path, copied: Path, excluded: Path) -> None:
    """Copy a directory level by level up to a limit; link the rest, hidden directories, and parents of `excluded`."""
    left_bytes, left_entries = _MAX_COPIED_BYTES, _MAX_COPIED_ENTRIES
    copied.mkdir(parents=True)
    directories = deque([(original, copied)])
    while directories:
        source, destination = directories.popleft()
        with os.scandir(source) as scan:
            entries = sorted(scan, key=lambda entry: entry.is_dir(follow_symlinks=False))  # files first
        for entry in entries:
            path, target = Path(entry.path), destination / entry.name
            left_entries -= 1
            with suppress(OSError):  # the file is gone, or its path is too long
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
                    and not excluded.is_relative_to(path)
                ):
                    target.mkdir()
                    directories.append((path, target))
                else:
                    target.symlink_to(path)
