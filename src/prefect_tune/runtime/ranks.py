"""Identify this process: the trial's own process, a rank of distributed training, or another process of the trial."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from prefect_tune.core.errors import InvalidInput

if TYPE_CHECKING:
    from prefect_tune.core.messages.process_messages import RankInfo, Start

_TRIAL_PROCESS_ENV: Final = "PREFECT_TUNE_TRIAL_PROCESS"
RANK_SOCKET_ENV: Final = "PREFECT_TUNE_RANKS_AT"
"""The environment variable with the path of the attempt's socket for ranks; empty if there is none."""
_LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, accelerate, DeepSpeed; Lightning sets no RANK on one machine
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
)
"""The variables with which a launcher tells a process its rank, the number of ranks, and its rank on this machine."""
RANK_0_ENV: Final = "PREFECT_TUNE_LEADS"
"""The environment variable by which the trial's own process, as rank 0, tells its children that they are not rank 0."""
SCRIPT_ENV: Final = "PREFECT_TUNE_SCRIPT"
"""The environment variable from which a copy of a trial's program restores `sys.argv[0]` of the user's script."""
# A trial removes these variables. MPI's local rank stays, since a program that mpirun starts may choose its GPU by it.
_INHERITED_VARIABLES: Final = (*_LAUNCHERS[0], *chain.from_iterable(it[:2] for it in _LAUNCHERS[1:]), RANK_0_ENV)
_TRIAL_PROGRAMS: Final = ("prefect_tune.runtime.processes.trial_process", "prefect_tune.runtime.processes.fork_server")
INITIAL_MAIN_MODULE: Final = sys.modules["__main__"]
"""The main module with which this process was started. In a trial, the script's module replaces `__main__` later."""
RANKS_ADVICE: Final = (
    "To train a trial with N processes, pass processes_per_trial=N to pt.tune or pt.durable_trainable, and N devices "
    "to the framework (Lightning: Trainer(devices=pt.get_trial().world_size)); for one process, devices=1"
)
"""Advice if a framework and its trial have different numbers of processes."""


@dataclass(frozen=True, slots=True)
class TrialProcess:
    """The process that trains a trial."""

    pid: int
    trial_name: str


def is_trial_program() -> bool:
    """Return whether this process was started to run trials; False for a script or a notebook."""
    return _get_main_module_name() in _TRIAL_PROGRAMS


def mark_as_trial_process(start: Start, become_rank_0: Callable[[int], None]) -> None:
    """Mark this process in `os.environ` as the trial's own; from now on, it can start copies of itself only as ranks.

    Inherited rank variables are removed, since they belong to another training. Before this process starts a copy,
    `become_rank_0` is called with the number of ranks; from then on, this process is rank 0.
    """
    global _become_rank_0, _has_audit_hook  # noqa: PLW0603 - of the trial of this process; one hook per process
    _become_rank_0 = become_rank_0
    os.environ[_TRIAL_PROCESS_ENV] = f"{os.getpid()} {start.trial}"
    for name in _INHERITED_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= {**start.rank.variables, RANK_SOCKET_ENV: start.rank_socket, SCRIPT_ENV: "".join(sys.argv[:1])}
    if not _has_audit_hook:  # an audit hook sees every start of a process; it is added once, since it cannot be removed
        _has_audit_hook = True
        sys.addaudithook(_on_audit_event)


def find_ancestor_trial() -> TrialProcess | None:
    """Return the ancestor of this process that is a trial's own process; None if there is none."""
    process, _, name = os.environ.get(_TRIAL_PROCESS_ENV, "").partition(" ")
    return TrialProcess(int(process), name) if process.isdecimal() and int(process) != os.getpid() else None


def detect_rank() -> RankInfo:
    """Return the rank of this process, from `torch.distributed` or from a launcher's variables."""
    from prefect_tune.core.messages.process_messages import RankInfo  # here, so that flows do not import this module

    present = (variables for variables in _LAUNCHERS if os.environ.keys() >= {*variables[:2]})
    rank_name, size_name, local_name = next(present, _LAUNCHERS[0])
    local_rank = _read_env_number(local_name)
    if (distributed := _get_torch_distributed()) is not None:
        rank, size = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, size = _read_env_number(rank_name) or local_rank, max(1, _read_env_number(size_name))
    return RankInfo(rank=rank, world_size=size, local_rank=local_rank)


def has_rank_info() -> bool:
    """Return whether this process may have a rank: a fast check before `detect_rank` and `is_launched_rank`."""
    return _get_torch_distributed() is not None or any(size in os.environ for _, size, _ in _LAUNCHERS)


def _get_torch_distributed() -> Any:
    """Return `torch.distributed` if this process has initialized it; else None."""
    module: Any = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def is_launched_rank() -> bool:
    """Return whether a launcher in the trial has assigned this process a rank, even if it is the only rank."""
    return find_ancestor_trial() is not None and any(os.environ.keys() >= {rank, size} for rank, size, _ in _LAUNCHERS)


def _read_env_number(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


# Copies of a trial's program.
# To start the user's script as ranks, launchers (of Lightning, Fabric) execute `sys.argv` again. In a trial, this
# starts a copy of the trial's program. A copy with a rank's variables trains as that rank; any other copy is refused.

_become_rank_0: Callable[[int], None] | None = None
_has_audit_hook = False


def is_relaunched_as_rank() -> bool:
    """Return whether this process is a copy of a trial's program that a launcher has started as a rank."""
    return find_ancestor_trial() is not None and _read_rank_count(os.environ) > 1


def _read_rank_count(environment: Mapping[Any, Any]) -> int:
    """Return the number of ranks if `environment` names a rank and the socket of its trial; else 1."""
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    size = variables.get("WORLD_SIZE", "") if "LOCAL_RANK" in variables and variables.get(RANK_SOCKET_ENV) else ""
    return int(size) if size.isdecimal() else 1


def _on_audit_event(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
        command, environment = arguments[1], arguments[-1]  # the arguments are executable, command, ..., environment
        if not isinstance(command, list | tuple) or not is_trial_program():
            return
        words = [os.fsdecode(word) for word in command if isinstance(word, str | bytes | os.PathLike)]
        own_commands = (
            ["-m", _get_main_module_name(), *sys.argv[1:]],  # an inner search starts this program with other arguments
            [str(getattr(INITIAL_MAIN_MODULE, "__file__", "")), *sys.argv[1:]],
        )
        if words != sys.orig_argv and words[1:] not in own_commands:
            return
        ranks = _read_rank_count(environment if isinstance(environment, Mapping) else os.environ)
        if ranks == 1 or _become_rank_0 is None:
            raise InvalidInput(
                f"expected another program, found a copy of the trial's own program ({' '.join(words)[:200]}), which a "
                f"launcher of ranks starts. {RANKS_ADVICE}"
            )
        _become_rank_0(ranks)


def _get_main_module_name() -> str:
    return str(getattr(getattr(INITIAL_MAIN_MODULE, "__spec__", None), "name", ""))
