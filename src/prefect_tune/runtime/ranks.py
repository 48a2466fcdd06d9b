"""Which process this is: the trial's own one, a rank of distributed training, or another one that it has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.messages.process_messages import Rank, Start

_VARIABLE: Final = "PREFECT_TUNE_TRIAL_PROCESS"
RANKS_AT: Final = "PREFECT_TUNE_RANKS_AT"
"""The environment variable with the path of the attempt's socket for ranks; empty if there is none."""
_RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MAIN_MODULES: Final = frozenset(
    {"prefect_tune.runtime.processes.trial_process", "prefect_tune.runtime.processes.fork_server"}
)
PROGRAM: Final = sys.modules["__main__"]
"""The main module that this process was started with; that of a trial is replaced by what its script defines."""
START_RANKS: Final = (
    "To train a trial with N processes, pass processes_per_trial=N to pt.tune or pt.durable_trainable, and N devices "
    "to the framework (Lightning: Trainer(devices=pt.get_trial().world_size)); for one process, devices=1"
)
"""Advice for errors of frameworks that train with another number of processes than the trial."""


@dataclass(frozen=True, slots=True)
class TrialProcess:
    """The process that trains a trial."""

    process: int
    """Its process id."""
    name: str
    """The trial's name."""


def is_program_of_trials() -> bool:
    """Whether this process was started for trials: it is not a script's or notebook's with `isolation="thread"`."""
    return _program_name() in _MAIN_MODULES


def claim_process(start: Start) -> None:
    """Mark this process as the trial's own, in its environment; refuse to start a second copy of it.

    Variables of ranks that it inherited are those of another training.
    """
    os.environ[_VARIABLE] = f"{os.getpid()} {start.trial}"
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= {**start.rank.variables, RANKS_AT: start.ranks_at}
    _refuse_relaunch()


def started_by() -> TrialProcess | None:
    """Return the trial's process that is an ancestor of this one; None if there is none."""
    process, _, name = os.environ.get(_VARIABLE, "").partition(" ")
    return TrialProcess(int(process), name) if process.isdecimal() and int(process) != os.getpid() else None


def rank_here() -> Rank:
    """Return the rank that `torch.distributed`, or a launcher's variables, give to this process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, size = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, size = _number("RANK") or _number("LOCAL_RANK"), max(1, _number("WORLD_SIZE"))
    return Rank(rank=rank, world_size=size, local_rank=_number("LOCAL_RANK"))


@contextmanager
def reached(socket: Path) -> Iterator[str]:
    """Yield a short path to a socket: a path of more than 107 bytes can be neither bound nor connected."""
    if not sys.platform.startswith("linux"):
        yield str(socket)
        return
    folder = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{socket.name}"
    finally:
        os.close(folder)


def _number(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


# ---------------------------------------------------------------------------------------------------- second copies

_refuses_relaunch = False


def _refuse_relaunch() -> None:
    """From now on refuse to start the program of this process again.

    Launchers of ranks (Lightning's, Fabric's) execute `sys.argv` again, expecting the user's script. Here it is the
    program that serves one trial, which cannot run twice. Only an audit hook sees all ways of starting a process; it
    cannot be removed, so it is added once.
    """
    global _refuses_relaunch  # noqa: PLW0603 - one hook per process
    if not _refuses_relaunch:
        _refuses_relaunch = True
        sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        command = arguments[1]  # executable, arguments, ...
        if isinstance(command, list | tuple) and _is_this_program(command):
            raise InvalidInput(
                f"expected another program, found a second copy of the trial's process ({_shown(command)}), as a "
                f"launcher of ranks starts it. {START_RANKS}"
            )


def _is_this_program(command: Sequence[object]) -> bool:
    """Whether it runs this process's main module with the same arguments; a search inside a trial has others."""
    words = _words(command)
    again = [
        [*program, *sys.argv[1:]] for program in (["-m", _program_name()], [str(getattr(PROGRAM, "__file__", ""))])
    ]
    return is_program_of_trials() and (words == sys.orig_argv or words[1:] in again)


def _program_name() -> str:
    return str(getattr(getattr(PROGRAM, "__spec__", None), "name", ""))


def _words(command: Sequence[object]) -> list[str]:
    return [os.fsdecode(each) for each in command if isinstance(each, str | bytes | os.PathLike)]


def _shown(command: Sequence[object]) -> str:
    return " ".join(_words(command))[:200]
