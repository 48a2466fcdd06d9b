"""Resources of a trial and of a machine, and the slots that a machine has for trials with equal needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import is_number, plain_scalar, shown
from prefect_tune.core.shown_text import did_you_mean

Processes: TypeAlias = int | tuple[int, int]
"""How many processes train a trial; or the fewest and the most: each attempt has as many as there are devices."""

MOST_PROCESSES = 1024
"""The most ranks of one trial on one machine."""
_KINDS = ("cpu", "gpu")


@dataclass(frozen=True, slots=True)
class Resources:
    """The CPUs and GPUs of a trial: a whole number, or a fraction of one that several trials share."""

    cpu: float = 1
    gpu: float = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of a machine: its number of CPUs, and its GPUs as CUDA names them."""

    cpu_count: int
    gpus: tuple[str, ...] = ()


def resources_of(given: Mapping[str, object], where: str) -> Resources:
    """Return the resources of a mapping such as `{"cpu": 2, "gpu": 0.5}`; `cpu` is 1 by default, `gpu` 0.

    Raises:
        InvalidInput: it has another key, or an impossible amount.
    """
    amounts: dict[str, float] = {}
    for name, value in given.items():
        if name not in _KINDS:
            hint = did_you_mean(name, _KINDS)
            raise InvalidInput(f"{where}: expected {' or '.join(map(repr, _KINDS))}, found {name!r}{hint}")
        amount = plain_scalar(value)
        if not is_number(amount) or amount < 0:
            raise InvalidInput(f"{where}: {name}: expected a number of at least 0, found {shown(amount)}")
        if amount > 1 and amount != int(amount):
            raise InvalidInput(f"{where}: {name}: expected a whole number, or a part of one, found {amount!r}")
        amounts[name] = amount
    return Resources(**amounts)


def valid_processes(given: object, where: str = "processes_per_trial", example: str = "(1, 8)") -> Processes:
    """Return a number of processes, or the fewest and the most of them; a text such as `1-8` is a range.

    Raises:
        InvalidInput: it is neither.
    """
    given = plain_scalar(given)
    parts: Sequence[object] = given.split("-") if isinstance(given, str) else [given]
    if isinstance(given, list | tuple):
        parts = [*map(plain_scalar, given)]
    numbers = [int(text) for each in parts if (text := str(each)).isascii() and text.isdecimal()]
    possible = all(isinstance(each, int | str) for each in parts) and len(numbers) == len(parts) in (1, 2)
    if not possible or not 1 <= numbers[0] <= numbers[-1] <= MOST_PROCESSES:
        raise InvalidInput(
            f"{where}: expected a number from 1 to {MOST_PROCESSES}, or the fewest and the most, such as {example}, "
            f"found {shown(given)}"
        )
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def processes_on(wanted: Processes, devices: int) -> int:
    """Return how many processes train a trial that has `devices` GPUs, or processors where there are none."""
    if isinstance(wanted, int):
        return wanted
    fewest, most = wanted
    return min(most, max(fewest, devices))


def slots_on(machine: Machine, needed: Resources, at_most: int | None) -> Sequence[tuple[str, ...]]:
    """Return a slot for each trial that the machine can train at once: the GPUs of that slot.

    A whole GPU belongs to one slot. Fractions are assigned so that each GPU has one slot before any has two.

    Args:
        at_most: the largest number of slots; None for as many as the machine has.

    Raises:
        InvalidInput: the machine lacks the resources for a single trial.
    """
    counts: list[int] = [int(machine.cpu_count / needed.cpu + 1e-9)] if needed.cpu else []
    gpus: Sequence[tuple[str, ...]] | None = None
    if needed.gpu >= 1:
        size = int(needed.gpu)
        gpus = [machine.gpus[first : first + size] for first in range(0, len(machine.gpus) - size + 1, size)]
    elif needed.gpu:
        gpus = [(gpu,) for _ in range(int(1 / needed.gpu + 1e-9)) for gpu in machine.gpus]
    counts += [] if gpus is None else [len(gpus)]
    if 0 in counts:
        raise InvalidInput(
            f"resources_per_trial: a trial needs {_counted(needed.cpu, needed.gpu)}, but this process may use "
            f"{_counted(machine.cpu_count, len(machine.gpus))}; if that is wrong, set "
            "resources_total={'cpu': ..., 'gpu': ...}"
        )
    count = min([*counts, *([] if at_most is None else [at_most])], default=machine.cpu_count)
    return gpus[:count] if gpus is not None else [()] * count


def _counted(cpus: float, gpus: float) -> str:
    return f"{cpus:g} {'CPU' if cpus == 1 else 'CPUs'} and {gpus:g} {'GPU' if gpus == 1 else 'GPUs'}"
