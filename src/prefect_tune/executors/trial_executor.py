"""Trial executors: run attempts of trials in slots, and return their messages from one queue."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any, Protocol, TypeAlias

from prefect import Task
from prefect.client.schemas.objects import State

from prefect_tune.attempt.machine_limits import cpu_count_here, gpus_in
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.search_link import InProcessLink, LatestReport, SearchLink, TrialMessage
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.core.errors import InvalidInput, TrialFailed
from prefect_tune.core.messages.process_messages import Leave, Proceed
from prefect_tune.core.resources import Machine, resources_of, slots_on
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.task_runs import run_to_state
from prefect_tune.storage_retries import skip_prefect_introspection
from prefect_tune.tasks.trials import run_attempt

_PATIENCE = timedelta(seconds=0.5)
# Time that a supervisor needs after its trial's grace period, to write a last journal entry.
_LAST_WORDS = timedelta(seconds=3)


@dataclass(frozen=True, slots=True)
class AttemptExited:
    """An attempt has ended, with the error of its task if there was one; its journal holds how the trial ended."""

    trial: str
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class RemoteAttemptStarted:
    """An attempt has started on another machine: it may have missed answers, and may wait for one at its milestone."""

    trial: str


Message: TypeAlias = TrialMessage | LatestReport | AttemptExited | RemoteAttemptStarted


_AttemptTask: TypeAlias = Task[[TrialSpec, AttemptRequest, SearchLink], State[Any]]


def attempt_of(spec: TrialSpec) -> _AttemptTask:
    """Return the task of one attempt, without task retries: the owner of the experiment decides and journals those."""
    return _tagged(spec.tags)


@cache  # `with_options` is one of the most expensive steps of a short trial: Prefect reads the function's source again
def _tagged(tags: tuple[str, ...]) -> _AttemptTask:
    return run_attempt.with_options(retries=0, tags=tags)


class TrialExecutor(Protocol):
    """Runs attempts of trials."""

    @property
    def survives_search(self) -> bool:
        """Whether an attempt continues when the search that started it has ended."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, trial: str) -> bool: ...

    def start(self, spec: TrialSpec, request: AttemptRequest, attempt: int, absorbed: int) -> None:
        """Start attempt number `attempt`; `absorbed` is the last entry of the trial's journal that is known."""
        ...

    def answer(self, trial: str, said: Proceed | Leave, step: int | None = None) -> None:
        """Send an answer to a trial: to its question at `step`, or unasked if `step` is None.

        An answer to a trial that has ended meanwhile has no effect.
        """
        ...

    def stop(self) -> None:
        """Request every trial to save and end."""
        ...

    def poll(self, patience: timedelta) -> list[Message]:
        """Return the messages since the last call; wait up to `patience` for the first one."""
        ...

    def forget(self, trial: str) -> None:
        """Forget an attempt that has ended, and free its slot."""
        ...


def have_ended(executor: TrialExecutor, grace: timedelta) -> None:
    """Request every trial to save and end, and wait for that for `grace` and 3 s at most.

    Attempts that outlive their search continue: the next owner answers them. Raises what `TrialExecutor.stop` raises.
    """
    if executor.survives_search:
        return
    executor.stop()
    until = time.monotonic() + (grace + _LAST_WORDS).total_seconds()
    while len(executor) and time.monotonic() < until:
        for message in executor.poll(_PATIENCE):
            if isinstance(message, AttemptExited):
                executor.forget(message.trial)


Ended: TypeAlias = Callable[[BaseException | None], None]
"""Called when an attempt has ended, with the error of its task if there was one."""
Launch: TypeAlias = Callable[[TrialSpec, AttemptRequest, SearchLink, Ended], None]
"""Starts an attempt."""


def attempts_on(threads: Executor) -> Launch:
    """Return a launch that runs each attempt's task in one of `threads`."""

    def launch(spec: TrialSpec, request: AttemptRequest, link: SearchLink, ended: Ended) -> None:
        threads.submit(copy_context().run, _call, attempt_of(spec), spec, request, link, ended)

    return launch


def call_attempt(spec: TrialSpec, request: AttemptRequest, link: SearchLink, ended: Ended) -> None:
    """Call an attempt's task, with the task's own retries, in a thread that does not delay the process's exit."""
    work = (_call, run_attempt, spec, request, link, ended)
    threading.Thread(target=copy_context().run, args=work, name="run-trial", daemon=True).start()


def _call(task: _AttemptTask, spec: TrialSpec, request: AttemptRequest, link: SearchLink, ended: Ended) -> None:
    quote = skip_prefect_introspection
    try:
        ended(error_in(run_to_state(task, quote(spec), quote(request), quote(link))))
    except BaseException as error:  # noqa: BLE001  the driver handles the error
        ended(error)


def error_in(state: State[Any]) -> BaseException | None:
    """Return the error that an attempt's task raised; None if it returned the state of its end."""
    if state.is_completed() or state.is_cancelled():  # reading a result takes Prefect's event loop
        return None
    found = state.result(raise_on_failure=False)
    return found if isinstance(found, BaseException) and not isinstance(found, TrialFailed) else None


class LocalExecutor:
    """Runs attempts on this machine, each as a task in a thread that supervises a process of its own."""

    survives_search = False

    def __init__(
        self,
        pool: TrialProcessPool,
        environments: Sequence[Mapping[str, str]] = (),
        *,
        launch: Launch,
    ) -> None:
        """Args: environments: environment variables of each slot; an attempt takes the lowest free slot."""
        self._pool = pool
        self._environments = environments
        self._launch = launch
        self._places: dict[str, int] = {}
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._links: dict[str, InProcessLink] = {}

    def __len__(self) -> int:
        return len(self._links)

    def __contains__(self, trial: str) -> bool:
        return trial in self._links

    def start(self, spec: TrialSpec, request: AttemptRequest, attempt: int, absorbed: int) -> None:
        del attempt, absorbed  # a local attempt sends every entry through the queue
        trial = spec.trial.trial
        link = InProcessLink(trial, self._inbox.put, self._pool)
        self._links[trial] = link
        self._launch(
            spec, self._placed(trial, request), link, lambda error: self._inbox.put(AttemptExited(trial, error))
        )

    def answer(self, trial: str, said: Proceed | Leave, step: int | None = None) -> None:
        del step  # the connection belongs to the attempt that asked
        if trial in self._links:
            self._links[trial].answer(said)

    def stop(self) -> None:
        for link in self._links.values():
            link.stop.set()

    def poll(self, patience: timedelta) -> list[Message]:
        messages: list[Message] = []
        try:
            messages.append(self._inbox.get(timeout=patience.total_seconds()))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def forget(self, trial: str) -> None:
        del self._links[trial]
        self._places.pop(trial, None)

    def _placed(self, trial: str, request: AttemptRequest) -> AttemptRequest:
        """Take the lowest free slot: a kept process of that slot uses the same devices."""
        if not self._environments:
            return request
        taken = self._places.values()
        self._places[trial] = next(place for place in range(len(self._environments)) if place not in taken)
        return replace(request, environment={**request.environment, **self._environments[self._places[trial]]})


# Slots: how many trials train at once, and the resources of each.


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
    return Slots(len(slots), [{**_threads(needed.cpu / plan.processes_per_trial), **_devices(gpus)} for gpus in slots])


def _equal_slots(cpu_count: int, bound: int | None, plan: SearchPlan) -> Slots:
    """Return the slots of trials that request no resources: one for each CPU, or `bound` ones.

    The trials that train at a time share the CPUs: those of all slots, or of the whole search if they are fewer.
    """
    count = bound or max(1, cpu_count // plan.processes_per_trial)
    trial_count = None if plan.samples_per_run else plan.trial_count  # with it the total is known only to the journal
    share = max(1, cpu_count // min(count, trial_count or count))
    has_all = share >= (os.cpu_count() or 1) and plan.processes_per_trial == 1
    return Slots(
        count, [] if has_all or plan.isolation == "thread" else [_threads(share / plan.processes_per_trial)] * count
    )


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
