"""The resources of a trial and of a machine, and the slots of a machine for trials that need equal resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prefect_tune.core.display_text import did_you_mean
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import is_number, short_repr, to_plain_scalar

Processes: TypeAlias = int | tuple[int, int]
"""The number of processes of a trial; or their minimum and maximum number, if there is one process per device."""

MAX_PROCESSES = 1024
"""The maximum number of ranks of a trial on one machine."""
_RESOURCE_NAMES = ("cpu", "gpu")


@dataclass(frozen=True, slots=True)
class Resources:
    """The CPUs and GPUs of a trial: whole numbers, or fractions below 1 of a device that several trials share."""

    cpu: float = 1
    gpu: float = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of a machine: the number of its CPUs, and its GPUs by their CUDA names."""

    cpu_count: int
    gpus: tuple[str, ...] = ()


def parse_resources(requested: Mapping[str, object], where: str) -> Resources:
    """Return the resources in a mapping such as `{"cpu": 2, "gpu": 0.5}`; `cpu` is 1 by default, `gpu` is 0.

    Raises:
        InvalidInput: `requested` has another key or an impossible amount.
    """
    amounts: dict[str, float] = {}
    for name, value in requested.items():
        if name not in _RESOURCE_NAMES:
            hint = did_you_mean(name, _RESOURCE_NAMES)
            raise InvalidInput(f"{where}: expected {' or '.join(map(repr, _RESOURCE_NAMES))}, found {name!r}{hint}")
        amount = to_plain_scalar(value)
        if not is_number(amount) or amount < 0:
            raise InvalidInput(f"{where}: {name}: expected a number of at least 0, found {short_repr(amount)}")
        if amount > 1 and amount != int(amount):
            raise InvalidInput(f"{where}: {name}: expected a whole number, or a fraction below 1, found {amount!r}")
        amounts[name] = amount
    return Resources(**amounts)


def parse_processes(value: object, where: str = "processes_per_trial", example: str = "(1, 8)") -> Processes:
    """Return a number of processes, or a minimum and a maximum; raise `InvalidInput` for any other `value`.

    A text such as `1-8` is a minimum and a maximum.
    """
    value = to_plain_scalar(value)
    parts: Sequence[object] = value.split("-") if isinstance(value, str) else [value]
    if isinstance(value, list | tuple):
        parts = [*map(to_plain_scalar, value)]
    numbers = [int(text) for part in parts if (text := str(part)).isascii() and text.isdecimal()]
    is_valid = all(isinstance(part, int | str) for part in parts) and len(numbers) == len(parts) in (1, 2)
    if not is_valid or not 1 <= numbers[0] <= numbers[-1] <= MAX_PROCESSES:
        raise InvalidInput(
            f"{where}: expected a number from 1 to {MAX_PROCESSES}, or a minimum and a maximum such as {example}, "
            f"found {short_repr(value)}"
        )
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def compute_process_count(wanted: Processes, devices: int) -> int:
    """Return the number of processes of a trial that has `devices` GPUs, or CPUs if it has no GPU."""
    if isinstance(wanted, int):
        return wanted
    minimum, maximum = wanted
    return min(maximum, max(minimum, devices))


def divide_into_slots(machine: Machine, needed: Resources, max_slots: int | None) -> Sequence[tuple[str, ...]]:
    """Return the slots of a machine, at most `max_slots` if this is not None. Each slot is the tuple of its GPUs.

    Slots share GPUs only if a trial needs less than one GPU; then each GPU gets one slot before any gets a second.

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
            f"resources_per_trial: a trial needs {_format_device_counts(needed.cpu, needed.gpu)}, but this process may "
            f"use {_format_device_counts(machine.cpu_count, len(machine.gpus))}; if that is wrong, set "
            "resources_total={'cpu': ..., 'gpu': ...}"
        )
    count = min([*counts, *([] if max_slots is None else [max_slots])], default=machine.cpu_count)
    return gpus[:count] if gpus is not None else [()] * count


def _format_device_counts(cpus: float, gpus: float) -> str:
    return f"{cpus:g} {'CPU' if cpus == 1 else 'CPUs'} and {gpus:g} {'GPU' if gpus == 1 else 'GPUs'}"
