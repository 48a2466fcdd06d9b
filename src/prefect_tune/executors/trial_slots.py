"""Slots: how many trials train at once, and the resources of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prefect_tune.attempt.machine_limits import PROCESSES, cpu_count_here, gpus_in
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.resources import Machine, processes_on, resources_of, slots_on
from prefect_tune.parameters.search_plan import SearchPlan


def machine_here() -> Machine:
    """Return the processors that this process may use, and the GPUs that it sees."""
    return Machine(cpu_count=cpu_count_here(), gpus=gpus_in(os.environ))


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots in which trials train."""

    count: int
    environments: Sequence[Mapping[str, str]] = ()
    """The environment variables of each slot, such as its GPUs; empty if trials inherit those of this process."""
    cpu_count: int | None = None
    """The processors that all slots share; None if that is not known here."""


def slots_elsewhere(plan: SearchPlan) -> Slots:
    """Return the slots of attempts whose resources a task runner or a work pool assigns."""
    return Slots(plan.max_concurrent_trials or os.cpu_count() or 1)


def slots_here(plan: SearchPlan, max_workers: int | None = None) -> Slots:
    """Return the slots of this machine.

    Args:
        plan: the plan, which may limit their number.
        max_workers: the limit of the flow's task runner; None if it has none.

    Raises:
        InvalidInput: the machine is too small for one trial, or `resources_total` is not valid.
    """
    limits = [each for each in (plan.max_concurrent_trials, max_workers) if each is not None]
    cpu_count = cpu_count_here()
    return replace(_slots_here(plan, min(limits, default=None), cpu_count), cpu_count=cpu_count)


def _slots_here(plan: SearchPlan, bound: int | None, cpu_count: int) -> Slots:
    if (needed := plan.resources) is None:
        return _equal_slots(cpu_count, bound, plan)
    if needed.gpu and plan.isolation == "thread":
        raise InvalidInput("resources_per_trial: with isolation='thread' all trials share the GPUs of this process")
    slots = slots_on(_machine(plan.resources_total), needed, bound)
    if plan.isolation == "thread":
        return Slots(len(slots))
    return Slots(len(slots), [{**_share(plan, needed.cpu, len(gpus)), **_devices(gpus)} for gpus in slots])


def _equal_slots(cpu_count: int, bound: int | None, plan: SearchPlan) -> Slots:
    """Return the slots of trials that request no resources: one for each CPU, or `bound` ones.

    The trials that train at a time share the CPUs: those of all slots, or of the whole search if they are fewer.
    """
    count = bound or max(1, cpu_count // processes_on(plan.processes_per_trial, 1))
    trial_count = None if plan.samples_per_run else plan.trial_count  # with it the total is known only to the journal
    share = max(1, cpu_count // min(count, trial_count or count))
    has_all = share >= (os.cpu_count() or 1) and plan.processes_per_trial == 1
    gpus = 0 if isinstance(plan.processes_per_trial, int) else len(gpus_in(os.environ)) // count
    return Slots(count, [] if has_all or plan.isolation == "thread" else [_share(plan, share, gpus)] * count)


def _share(plan: SearchPlan, cpu_count: float, gpu_count: int) -> Mapping[str, str]:
    """Return the variables of a slot with these processors and GPUs: the threads and the number of its processes."""
    processes = processes_on(plan.processes_per_trial, gpu_count or int(cpu_count))
    named = {} if isinstance(plan.processes_per_trial, int) else {PROCESSES: str(processes)}
    return {**_threads(cpu_count / processes), **named}


def _machine(total: Mapping[str, float] | None) -> Machine:
    """Return the detected resources of this machine; `resources_total` overrides them."""
    if total is None:
        return machine_here()
    resources_of(total, "resources_total")
    if any(amount != int(amount) for amount in total.values()):
        raise InvalidInput(f"resources_total: expected whole numbers, found {dict(total)}")
    found = machine_here()
    gpu_count = int(total.get("gpu", len(found.gpus)))
    beyond = tuple(str(number) for number in range(len(found.gpus), gpu_count))
    return Machine(int(total.get("cpu", found.cpu_count)), (found.gpus + beyond)[:gpu_count])


def _devices(gpus: Sequence[str]) -> Mapping[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _threads(cpu_count: float) -> Mapping[str, str]:
    """Limit the threads of numeric libraries to the trial's CPUs; their default is all CPUs of the machine.

    Threads of several trials that outnumber the CPUs take twice the CPU time: they wait for each other actively.
    """
    is_said = "OMP_NUM_THREADS" in os.environ or not cpu_count
    return {} if is_said else {"OMP_NUM_THREADS": str(max(1, int(cpu_count)))}
