"""Slots: how many trials train at once, and the resources of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.resources import Machine, Resources, resources_of, slots_on
from prefect_tune.parameters.search_request import SearchRequest
from prefect_tune.supervisor.devices import machine_here

__all__ = ["Slots", "resources_asked", "slots_elsewhere", "slots_here", "valid_bound"]


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots in which trials train."""

    count: int
    environments: Sequence[Mapping[str, str]] = ()
    """The environment variables of each slot, such as its GPUs; empty if trials inherit those of this process."""


def resources_asked(asked: SearchRequest) -> Resources | None:
    """Return the resources of each trial; None if none were given.

    Raises:
        InvalidInput: they are not valid.
    """
    given = asked.resources_per_trial
    return None if given is None else resources_of(given, "resources_per_trial")


def slots_elsewhere(asked: SearchRequest) -> Slots:
    """Return the slots of attempts whose resources a task runner or a work pool assigns."""
    return Slots(valid_bound(asked.max_concurrent_trials) or os.cpu_count() or 1)


def slots_here(asked: SearchRequest) -> Slots:
    """Return the slots of this machine.

    Raises:
        InvalidInput: the machine is too small for one trial, or the given resources are not valid.
    """
    bound, needed = valid_bound(asked.max_concurrent_trials), resources_asked(asked)
    if needed is None:
        return Slots(bound or os.cpu_count() or 1)
    if needed.gpu and asked.isolation == "thread":
        raise InvalidInput("resources_per_trial: with isolation='thread' all trials share the GPUs of this process")
    slots = slots_on(_machine(asked), needed, bound)
    if asked.isolation == "thread":
        return Slots(len(slots))
    return Slots(len(slots), [{**_threads(needed), **_devices(gpus)} for gpus in slots])


def valid_bound(bound: int | None) -> int | None:
    """Return the given bound on trials that train at once; None if none was given.

    Raises:
        InvalidInput: it is less than 1.
    """
    if bound is not None and bound < 1:
        raise InvalidInput(f"max_concurrent_trials: expected 1 or more, found {bound}")
    return bound


def _machine(asked: SearchRequest) -> Machine:
    """Return the detected resources of this machine; `resources_total` overrides them."""
    said = asked.resources_total
    if said is None:
        return machine_here()
    resources_of(said, "resources_total")
    if any(amount != int(amount) for amount in said.values()):
        raise InvalidInput(f"resources_total: expected whole numbers, found {dict(said)}")
    found = machine_here()
    gpu_count = int(said.get("gpu", len(found.gpus)))
    beyond = tuple(str(number) for number in range(len(found.gpus), gpu_count))
    return Machine(int(said.get("cpu", found.cpu_count)), (found.gpus + beyond)[:gpu_count])


def _devices(gpus: Sequence[str]) -> Mapping[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _threads(needed: Resources) -> Mapping[str, str]:
    """Limit the threads of numeric libraries to the trial's CPUs; their default is all CPUs of the machine."""
    is_said = "OMP_NUM_THREADS" in os.environ or needed.cpu < 1
    return {} if is_said else {"OMP_NUM_THREADS": str(int(needed.cpu))}
