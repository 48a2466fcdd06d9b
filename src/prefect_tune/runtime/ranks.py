"""Which process this is: the trial's own one, a rank of distributed training, or another one that it has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from prefect_tune.core.errors import InvalidInput

if TYPE_CHECKING:
    from prefect_tune.core.messages.process_messages import Rank, Start

_VARIABLE: Final = "PREFECT_TUNE_TRIAL_PROCESS"
RANKS_AT: Final = "PREFECT_TUNE_RANKS_AT"
"""The environment variable with the path of the attempt's socket for ranks; empty if there is none."""
_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, accelerate, DeepSpeed; Lightning sets no RANK on one machine
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
)
"""The variables by which a launcher gives a process its rank, the number of ranks, and its rank on this machine."""
LEADS: Final = "PREFECT_TUNE_LEADS"
"""The environment variable that the trial's own process sets if it is rank 0: what it starts is no rank 0."""
# MPI's rank on this machine stays: a worker that mpirun has started may choose its GPU by it.
SCRIPT: Final = "PREFECT_TUNE_SCRIPT"
"""The environment variable with `sys.argv[0]` of the user's script, for second copies of a trial's program."""
_OF_ANOTHER_TRAINING: Final = (*_LAUNCHERS[0], *chain.from_iterable(each[:2] for each in _LAUNCHERS[1:]), LEADS)
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


def claim_process(start: Start, lead: Callable[[int], None]) -> None:
    """Mark this process as the trial's own, in its environment; it starts second copies of itself as ranks only.

    Variables of ranks that it inherited are those of another training. `lead` is called before a copy is started,
    with the number of ranks: this process is rank 0 then.
    """
    global _lead, _refuses_copies  # noqa: PLW0603 - of the trial that this process trains; one hook per process
    _lead = lead
    os.environ[_VARIABLE] = f"{os.getpid()} {start.trial}"
    for name in _OF_ANOTHER_TRAINING:
        os.environ.pop(name, None)
    os.environ |= {**start.rank.variables, RANKS_AT: start.ranks_at, SCRIPT: "".join(sys.argv[:1])}
    if not _refuses_copies:  # only an audit hook sees all ways of starting a process; it cannot be removed
        _refuses_copies = True
        sys.addaudithook(_audit)


def started_by() -> TrialProcess | None:
    """Return the trial's process that is an ancestor of this one; None if there is none."""
    process, _, name = os.environ.get(_VARIABLE, "").partition(" ")
    return TrialProcess(int(process), name) if process.isdecimal() and int(process) != os.getpid() else None


def rank_here() -> Rank:
    """Return the rank that `torch.distributed`, or a launcher's variables, give to this process."""
    from prefect_tune.core.messages.process_messages import Rank  # flows import this module, and need no messages

    found = (each for each in _LAUNCHERS if os.environ.keys() >= {*each[:2]})
    rank_name, size_name, local_name = next(found, _LAUNCHERS[0])
    local_rank = _number(local_name)
    if (distributed := _initialized_group()) is not None:
        rank, size = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, size = _number(rank_name) or local_rank, max(1, _number(size_name))
    return Rank(rank=rank, world_size=size, local_rank=local_rank)


def may_be_rank() -> bool:
    """Whether `rank_here` may find more than one rank, or `is_launched` one: a quick answer, for each report."""
    return _initialized_group() is not None or any(size in os.environ for _, size, _ in _LAUNCHERS)


def _initialized_group() -> Any:
    """Return `torch.distributed` if this process has initialized it; else None."""
    found: Any = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


def is_launched() -> bool:
    """Whether a launcher in the trial has given this process a rank, maybe the only one."""
    return started_by() is not None and any(os.environ.keys() >= {rank, size} for rank, size, _ in _LAUNCHERS)


def _number(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


# Second copies.
#
# Launchers of ranks (Lightning's, Fabric's) execute `sys.argv` again, expecting the user's script. Here it is the
# program that serves one trial. With the variables of a rank it trains as that rank; without them it is refused.

_lead: Callable[[int], None] | None = None
_refuses_copies = False


def is_copy_for_rank() -> bool:
    """Whether this process is a second copy of a trial's program, which a launcher has started as a rank."""
    return started_by() is not None and _ranks_in(os.environ) > 1


def _ranks_in(environment: Mapping[Any, Any]) -> int:
    """Return the number of ranks if a process with this environment finds its rank there, and its trial; else 1."""
    found = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    size = found.get("WORLD_SIZE", "") if "LOCAL_RANK" in found and found.get(RANKS_AT) else ""
    return int(size) if size.isdecimal() else 1


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        command, environment = arguments[1], arguments[-1]  # executable, arguments, ..., environment
        if not isinstance(command, list | tuple) or not is_program_of_trials():
            return
        words = [os.fsdecode(each) for each in command if isinstance(each, str | bytes | os.PathLike)]
        again = (
            ["-m", _program_name(), *sys.argv[1:]],  # with the same arguments: a search inside a trial has others
            [str(getattr(PROGRAM, "__file__", "")), *sys.argv[1:]],
        )
        if words != sys.orig_argv and words[1:] not in again:
            return
        ranks = _ranks_in(environment if isinstance(environment, Mapping) else os.environ)
        if ranks == 1 or _lead is None:
            raise InvalidInput(
                f"expected another program, found a second copy of the trial's process ({' '.join(words)[:200]}), as a "
                f"launcher of ranks starts it. {START_RANKS}"
            )
        _lead(ranks)


def _program_name() -> str:
    return str(getattr(getattr(PROGRAM, "__spec__", None), "name", ""))
