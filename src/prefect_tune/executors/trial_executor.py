"""Trial executors: run attempts of trials on this machine or other machines, and return their messages."""

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

from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.attempt.search_link import EventsSubmitted, InProcessLink, SearchLink, TrialMessage
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.attempt.usage_meter import PROCESSES, gpus_in
from prefect_tune.core.errors import CommitUnknown, InvalidInput, TrialFailed
from prefect_tune.core.journal_events import AttemptEvent
from prefect_tune.core.messages.process_messages import Leave, Proceed
from prefect_tune.core.resources import Machine, processes_on, resources_of, slots_on
from prefect_tune.linux import cpu_count_here
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.task_runs import ending_waits, run_to_state
from prefect_tune.tasks.trials import run_attempt, run_node

_POLL_TIMEOUT = timedelta(seconds=0.5)
# The time for a supervisor to write the last journal entry after its trial's grace period.
_LAST_WORDS = timedelta(seconds=3)


@dataclass(frozen=True, slots=True)
class AttemptExited:
    """An attempt has ended, with the error of its task, if any; the journal records how the trial ended."""

    trial: str
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class PostReceived:
    """A post from the outbox of an attempt on another machine, not yet journaled."""

    trial: str
    number: int
    events: tuple[AttemptEvent, ...]


@dataclass(frozen=True, slots=True)
class RemoteAttemptStarted:
    """An attempt has started on another machine; it may have missed decisions, and may wait at its milestone."""

    trial: str


class AttemptCancelledError(Exception):
    """The user has cancelled the flow run of an attempt, which the message names: the trial must stop."""


Message: TypeAlias = TrialMessage | PostReceived | AttemptExited | RemoteAttemptStarted


_AttemptTask: TypeAlias = Task[[TrialSpec, AttemptRequest, SearchLink], State[Any]]
_NodeTask: TypeAlias = Task[[TrialSpec, AttemptRequest, int, SearchLink], State[Any]]


@cache  # `with_options` is expensive for a short trial: Prefect reads the function's source again
def attempt_task(tags: tuple[str, ...]) -> _AttemptTask:
    """Return the task of an attempt, without task retries: the owner of the experiment decides and journals retries."""
    return run_attempt.with_options(retries=0, tags=tags)


@cache
def node_task() -> _NodeTask:
    """Return the task of another node of an attempt; without tags, so that a limit for them cannot block it."""
    return run_node.with_options(retries=0)


class TrialExecutor(Protocol):
    """Runs attempts of trials."""

    @property
    def is_remote(self) -> bool:
        """Whether attempts run on other machines, and post their events to outboxes."""
        ...

    @property
    def survives_search(self) -> bool:
        """Whether an attempt continues when the search that started it has ended."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, trial: str) -> bool: ...

    def start(self, spec: TrialSpec, request: AttemptRequest) -> None:
        """Start the requested attempt of a trial; find it if it already runs on another machine."""
        ...

    def answer(self, trial: str, said: Proceed | Leave, step: int | None = None) -> None:
        """Send a decision to a trial, which waits for it at `step`; unsolicited if `step` is None.

        It has no effect if the trial has already ended.
        """
        ...

    def stop(self) -> None:
        """Request every trial to save and end."""
        ...

    def poll(self, patience: timedelta) -> list[Message]:
        """Return the messages since the last call; wait up to `patience` for the first one."""
        ...

    def forget(self, trial: str) -> None:
        """Remove an attempt that has ended, and free its slot."""
        ...

    def refuse(self) -> None:
        """Reject all further events of attempts: the search is over, and writes nothing further."""
        ...


def have_ended(executor: TrialExecutor, grace: timedelta, journal: Callable[[Sequence[EventsSubmitted]], None]) -> None:
    """Request every trial to save and end, wait up to `grace` plus 3 s, and journal the events that they submit.

    `journal` is called with the events since the last call, which may be empty.

    If attempts survive their search, do nothing: the next owner continues them. Raises errors of `TrialExecutor.stop`.
    """
    if executor.survives_search:
        return
    try:
        executor.stop()
        deadline = time.monotonic() + (grace + _LAST_WORDS).total_seconds()
        while len(executor) and time.monotonic() < deadline:
            messages = executor.poll(_POLL_TIMEOUT)
            journal([message for message in messages if isinstance(message, EventsSubmitted)])
            for message in messages:
                if isinstance(message, AttemptExited):
                    executor.forget(message.trial)
    finally:
        executor.refuse()


Ended: TypeAlias = Callable[[BaseException | None], None]
"""Called when an attempt has ended, with the error of its task, if any."""
Launch: TypeAlias = Callable[[TrialSpec, AttemptRequest, SearchLink, Ended], None]
"""Starts an attempt."""


def attempts_on(threads: Executor) -> Launch:
    """Return a `Launch` that runs each attempt's task in one of `threads`."""

    def launch(spec: TrialSpec, request: AttemptRequest, link: SearchLink, ended: Ended) -> None:
        threads.submit(copy_context().run, _run_task, attempt_task(spec.tags), spec, request, link, ended)

    return launch


def call_attempt(spec: TrialSpec, request: AttemptRequest, link: SearchLink, ended: Ended) -> None:
    """Run an attempt's task, including its task retries, in a thread that does not delay the process's exit."""
    task = run_attempt.with_options(tags=spec.tags) if spec.tags else run_attempt
    work = (_run_task, task, spec, request, link, ended)
    threading.Thread(target=copy_context().run, args=work, name="run-trial", daemon=True).start()


def _run_task(task: _AttemptTask, spec: TrialSpec, request: AttemptRequest, link: SearchLink, ended: Ended) -> None:
    try:
        with ending_waits(link.stop):
            ended(error_in(run_to_state(task, spec, request, link)))
    except BaseException as error:  # noqa: BLE001  the driver handles the error
        ended(error)


def error_in(state: State[Any]) -> BaseException | None:
    """Return the error that an attempt's task raised; None if the task returned a final state."""
    if state.is_completed() or state.is_cancelled():  # avoids `result`, which needs Prefect's event loop
        return None
    result = state.result(raise_on_failure=False)
    return result if isinstance(result, BaseException) and not isinstance(result, TrialFailed) else None


class LocalExecutor:
    """Runs attempts on this machine, each as a task in a thread that supervises a separate process."""

    is_remote = False
    survives_search = False

    def __init__(
        self,
        pool: TrialProcessPool,
        environments: Sequence[Mapping[str, str]] = (),
        *,
        launch: Launch,
    ) -> None:
        """Args: environments: the environment variables of each slot; an attempt takes the lowest free slot."""
        self._pool = pool
        self._environments = environments
        self._launch = launch
        self._slots: dict[str, int] = {}
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._refuses = False
        self._guard = threading.Lock()
        self._awaited_events: dict[str, EventsSubmitted] = {}  # by trial: the events whose entry it waits for
        self._links: dict[str, InProcessLink] = {}

    def __len__(self) -> int:
        return len(self._links)

    def __contains__(self, trial: str) -> bool:
        return trial in self._links

    def start(self, spec: TrialSpec, request: AttemptRequest) -> None:
        trial = spec.trial.trial
        link = self._links[trial] = InProcessLink(trial, self._receive, self._pool)
        if self._environments:  # the lowest free slot: an idle process of that slot has the same devices
            used_slots = self._slots.values()
            slot = next(slot for slot in range(len(self._environments)) if slot not in used_slots)
            self._slots[trial] = slot
            request = replace(request, environment={**request.environment, **self._environments[slot]})
        self._launch(spec, request, link, lambda error: self._inbox.put(AttemptExited(trial, error)))

    def answer(self, trial: str, said: Proceed | Leave, step: int | None = None) -> None:
        del step  # the channel belongs to the waiting attempt
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
        self._slots.pop(trial, None)
        self._awaited_events.pop(trial, None)  # its future holds a state of the experiment

    def refuse(self) -> None:
        with self._guard:
            self._refuses = True
            self._refuse_awaited()

    def _receive(self, message: Message) -> None:
        self._inbox.put(message)
        with self._guard:
            if isinstance(message, EventsSubmitted) and message.is_awaited:
                self._awaited_events[message.trial] = message
            if self._refuses:
                self._refuse_awaited()

    def _refuse_awaited(self) -> None:
        for submitted in self._awaited_events.values():
            if not submitted.written.done():
                submitted.written.set_exception(CommitUnknown("the search has ended: further events are not journaled"))


# Slots: how many trials train in parallel, and the resources of each.


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots in which trials train."""

    count: int
    environments: Sequence[Mapping[str, str]] = ()
    """The environment variables of each slot, such as its GPUs; empty if trials only inherit this process's."""
    cpu_count: int | None = None
    """The number of processors that all slots share; None if unknown."""


def slots_elsewhere(plan: SearchPlan) -> Slots:
    """Return the slots of attempts for which a task runner or a work pool assigns the resources."""
    return Slots(plan.max_concurrent_trials or os.cpu_count() or 1)


def slots_here(plan: SearchPlan, max_workers: int | None = None) -> Slots:
    """Return the slots of this machine.

    Without `resources_per_trial` there is one slot per CPU, or as many as the limits allow. Trials that train at the
    same time share the CPUs: as many trials as there are slots, or all trials of the search if these are fewer.

    Args:
        plan: the plan, which may limit the number of slots.
        max_workers: the limit of the flow's task runner; None if it has no limit.

    Raises:
        InvalidInput: the machine is too small for one trial, or `resources_total` is not valid.
    """
    max_slots = min((limit for limit in (plan.max_concurrent_trials, max_workers) if limit is not None), default=None)
    cpu_count, needed, is_thread = cpu_count_here(), plan.resources, plan.isolation == "thread"
    if needed is None:
        count = max_slots or max(1, cpu_count // processes_on(plan.processes_per_trial, 1))
        trial_count = None if plan.samples_per_run else plan.trial_count  # then only the journal knows the total
        share = max(1, cpu_count // min(count, trial_count or count))
        has_all = share >= (os.cpu_count() or 1) and plan.processes_per_trial == 1
        gpu_count = 0 if isinstance(plan.processes_per_trial, int) else len(gpus_in(os.environ)) // count
        environments = [] if has_all or is_thread else [_slot_variables(plan, share, gpu_count)] * count
        return Slots(count, environments, cpu_count)
    if needed.gpu and is_thread:
        raise InvalidInput("resources_per_trial: with isolation='thread' all trials share the GPUs of this process")
    slots = slots_on(machine_here(plan.resources_total), needed, max_slots)
    environments = [
        {**_slot_variables(plan, needed.cpu, len(gpus)), **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
        for gpus in slots
    ]
    return Slots(len(slots), [] if is_thread else environments, cpu_count)


def machine_here(total: Mapping[str, float] | None = None) -> Machine:
    """Return the processors and GPUs that this process may use; `total` overrides their numbers."""
    machine = Machine(cpu_count=cpu_count_here(), gpus=gpus_in(os.environ))
    if total is None:
        return machine
    resources_of(total, "resources_total")
    if any(amount != int(amount) for amount in total.values()):
        raise InvalidInput(f"resources_total: expected whole numbers, found {dict(total)}")
    gpu_count = int(total.get("gpu", len(machine.gpus)))
    additional = tuple(str(number) for number in range(len(machine.gpus), gpu_count))
    return Machine(int(total.get("cpu", machine.cpu_count)), (machine.gpus + additional)[:gpu_count])


def _slot_variables(plan: SearchPlan, cpu_count: float, gpu_count: int) -> Mapping[str, str]:
    """Return the variables of a slot: the number of its processes, and the threads of their numeric libraries.

    By default such a library uses all CPUs of the machine. If the threads of several trials outnumber the CPUs, they
    take twice the CPU time, because of busy waiting.
    """
    processes = processes_on(plan.processes_per_trial, gpu_count or int(cpu_count))
    variables = {} if isinstance(plan.processes_per_trial, int) else {PROCESSES: str(processes)}
    if cpu_count and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, int(cpu_count / processes)))
    return variables
