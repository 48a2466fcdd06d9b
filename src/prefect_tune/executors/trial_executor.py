"""Trial executors: run attempts of trials on this machine or on other machines, and return their messages."""

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
from prefect_tune.attempt.search_channel import EventsSubmitted, InProcessChannel, SearchChannel, TrialMessage
from prefect_tune.attempt.trial_spec import AttemptRequest, TrialSpec
from prefect_tune.attempt.usage_meter import PROCESSES_VARIABLE, list_gpus
from prefect_tune.core.errors import CommitUnknown, InvalidInput, TrialFailed
from prefect_tune.core.journal_events import AttemptEvent
from prefect_tune.core.messages.process_messages import ContinueTraining, StopTrial
from prefect_tune.core.resources import Machine, compute_process_count, divide_into_slots, parse_resources
from prefect_tune.linux import count_available_cpus
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.prefect_api.task_runs import ending_slot_waits, run_task_to_state
from prefect_tune.tasks.trials import run_attempt, run_node

_POLL_TIMEOUT = timedelta(seconds=0.5)
# The time for a supervisor to write the last journal entry after its trial's grace period.
_FINAL_WRITE_TIMEOUT = timedelta(seconds=3)


@dataclass(frozen=True, slots=True)
class AttemptExited:
    """An attempt's task has ended, with `error` if it raised one. If no end is journaled, the attempt is lost."""

    trial: str
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class PostArrived:
    """A post from the outbox of an attempt on another machine. The post is not yet journaled."""

    trial: str
    number: int
    events: tuple[AttemptEvent, ...]


@dataclass(frozen=True, slots=True)
class RemoteAttemptStarted:
    """An attempt on another machine has started at a milestone. It may wait for an answer, which must be resent."""

    trial: str


class AttemptCancelledError(Exception):
    """The user has cancelled the flow run of an attempt, so the trial must stop. The message names the flow run."""


Message: TypeAlias = TrialMessage | PostArrived | AttemptExited | RemoteAttemptStarted


_AttemptTask: TypeAlias = Task[[TrialSpec, AttemptRequest, SearchChannel], State[Any]]
_NodeTask: TypeAlias = Task[[TrialSpec, AttemptRequest, int, SearchChannel], State[Any]]


@cache  # for a short trial, `with_options` is expensive, because Prefect reads the function's source each time
def make_attempt_task(tags: tuple[str, ...]) -> _AttemptTask:
    """Return an attempt's task, without task retries, since the experiment's owner decides and journals retries."""
    return run_attempt.with_options(retries=0, tags=tags)


@cache
def make_node_task() -> _NodeTask:
    """Return the task of a node other than node 0. The task has no tags, so no tag concurrency limit delays it."""
    return run_node.with_options(retries=0)


class TrialExecutor(Protocol):
    """Runs attempts of trials."""

    @property
    def is_remote(self) -> bool:
        """Whether attempts run on other machines, and post their events to outboxes."""

    @property
    def attempts_outlive_search(self) -> bool:
        """Whether an attempt continues when the search that started it has ended; implies `is_remote`."""

    def __len__(self) -> int: ...

    def __contains__(self, trial: str) -> bool: ...

    def start_attempt(self, spec: TrialSpec, request: AttemptRequest) -> None:
        """Start the requested attempt of a trial, or find the attempt if it already runs on another machine."""

    def send_answer(self, trial: str, answer: ContinueTraining | StopTrial, step: int | None = None) -> None:
        """Answer a trial that waits at `step` (None: an unsolicited answer). Do nothing if the trial has ended."""

    def stop_all(self) -> None:
        """Ask every trial to save and end."""

    def poll_messages(self, timeout: timedelta) -> list[Message]:
        """Return the messages since the last call; wait up to `timeout` for the first message."""

    def remove_attempt(self, trial: str) -> None:
        """Remove an attempt that has ended, and free its slot."""

    def reject_events(self) -> None:
        """Reject all further events of attempts, because the search is over and writes nothing more."""


def stop_and_wait(
    executor: TrialExecutor, grace: timedelta, journal: Callable[[Sequence[EventsSubmitted]], None]
) -> None:
    """Ask every trial to save and end; wait up to `grace` plus 3 s, and journal the events that the trials submit.

    Each call of `journal` gets the new events, possibly none. If attempts outlive their search, this function does
    nothing, because the next owner takes over these attempts. Raises the errors of `stop_all`.
    """
    if executor.attempts_outlive_search:
        return
    try:
        executor.stop_all()
        deadline = time.monotonic() + (grace + _FINAL_WRITE_TIMEOUT).total_seconds()
        while len(executor) and time.monotonic() < deadline:
            messages = executor.poll_messages(_POLL_TIMEOUT)
            journal([message for message in messages if isinstance(message, EventsSubmitted)])
            for message in messages:
                if isinstance(message, AttemptExited):
                    executor.remove_attempt(message.trial)
    finally:
        executor.reject_events()


OnAttemptEnd: TypeAlias = Callable[[BaseException | None], None]
"""Called when an attempt has ended, with the error of its task, if any."""
LaunchAttempt: TypeAlias = Callable[[TrialSpec, AttemptRequest, SearchChannel, OnAttemptEnd], None]
"""Starts an attempt, and calls the `OnAttemptEnd` when the attempt has ended."""


def make_thread_pool_launcher(threads: Executor) -> LaunchAttempt:
    """Return a `LaunchAttempt` that runs each attempt's task in a thread of the pool `threads`."""

    def launch(spec: TrialSpec, request: AttemptRequest, channel: SearchChannel, on_end: OnAttemptEnd) -> None:
        threads.submit(copy_context().run, _run_task, make_attempt_task(spec.tags), spec, request, channel, on_end)

    return launch


def launch_in_thread(spec: TrialSpec, request: AttemptRequest, channel: SearchChannel, on_end: OnAttemptEnd) -> None:
    """Run an attempt's task, including its task retries, in a thread that does not delay the process's exit."""
    task = run_attempt.with_options(tags=spec.tags) if spec.tags else run_attempt
    work = (_run_task, task, spec, request, channel, on_end)
    threading.Thread(target=copy_context().run, args=work, name="run-trial", daemon=True).start()


def _run_task(
    task: _AttemptTask, spec: TrialSpec, request: AttemptRequest, channel: SearchChannel, on_end: OnAttemptEnd
) -> None:
    try:
        with ending_slot_waits(channel.run_stop):
            on_end(task_error(run_task_to_state(task, spec, request, channel)))
    except BaseException as error:  # noqa: BLE001  the driver handles the error
        on_end(error)


def task_error(state: State[Any]) -> BaseException | None:
    """Return the error that an attempt's task raised; None if the task raised nothing or `TrialFailed`."""
    if state.is_completed() or state.is_cancelled():  # do not call `result`, which needs Prefect's event loop
        return None
    result = state.result(raise_on_failure=False)
    return result if isinstance(result, BaseException) and not isinstance(result, TrialFailed) else None


class LocalExecutor:
    """Runs attempts on this machine, each as a task in a thread that supervises a separate process."""

    is_remote = False
    attempts_outlive_search = False

    def __init__(
        self, pool: TrialProcessPool, environments: Sequence[Mapping[str, str]] = (), *, launch: LaunchAttempt
    ) -> None:
        """Args: environments: the environment variables of each slot; an attempt takes the lowest free slot."""
        self._pool, self._environments, self._launch = pool, environments, launch
        self._slots: dict[str, int] = {}
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._is_closed = False
        self._guard = threading.Lock()
        self._awaited_events: dict[str, EventsSubmitted] = {}
        """For each trial that waits until its events are journaled: the last events that it submitted."""
        self._channels: dict[str, InProcessChannel] = {}

    def __len__(self) -> int:
        return len(self._channels)

    def __contains__(self, trial: str) -> bool:
        return trial in self._channels

    def start_attempt(self, spec: TrialSpec, request: AttemptRequest) -> None:
        trial, used_slots = spec.trial.trial, self._slots.values()
        channel = self._channels[trial] = InProcessChannel(trial, self._on_message, self._pool)
        if self._environments:  # take the lowest free slot, to reuse an idle process with its devices
            slot = next(slot for slot in range(len(self._environments)) if slot not in used_slots)
            self._slots[trial] = slot
            request = replace(request, environment={**request.environment, **self._environments[slot]})
        self._launch(spec, request, channel, lambda error: self._inbox.put(AttemptExited(trial, error)))

    def send_answer(self, trial: str, answer: ContinueTraining | StopTrial, step: int | None = None) -> None:
        del step  # not needed, since the channel belongs to the waiting attempt
        if trial in self._channels:
            self._channels[trial].send_answer(answer)

    def stop_all(self) -> None:
        for channel in self._channels.values():
            channel.run_stop.set()

    def poll_messages(self, timeout: timedelta) -> list[Message]:
        messages: list[Message] = []
        try:
            messages.append(self._inbox.get(timeout=timeout.total_seconds()))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def remove_attempt(self, trial: str) -> None:
        del self._channels[trial]
        self._slots.pop(trial, None)
        self._awaited_events.pop(trial, None)  # free the experiment's state, which is the result of the events' future

    def reject_events(self) -> None:
        with self._guard:
            self._is_closed = True
            self._reject_awaited_events()

    def _on_message(self, message: Message) -> None:
        self._inbox.put(message)
        with self._guard:
            if isinstance(message, EventsSubmitted) and message.is_awaited:
                self._awaited_events[message.trial] = message
            if self._is_closed:
                self._reject_awaited_events()

    def _reject_awaited_events(self) -> None:
        for submitted in self._awaited_events.values():
            if not submitted.entry_written.done():
                error = CommitUnknown("the search has ended: further events are not journaled")
                submitted.entry_written.set_exception(error)


# Slots: how many trials train in parallel, and the resources of each trial.


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots in which trials train."""

    count: int
    environments: Sequence[Mapping[str, str]] = ()
    """The environment variables of each slot, such as its GPUs; empty if all trials inherit the same variables."""
    cpu_count: int | None = None
    """The number of processors that all slots share; None if unknown."""


def make_remote_slots(plan: SearchPlan) -> Slots:
    """Return the slots of attempts for which a task runner or a work pool assigns the resources."""
    return Slots(plan.max_concurrent_trials or os.cpu_count() or 1)


def make_local_slots(plan: SearchPlan, max_workers: int | None = None) -> Slots:
    """Return the slots of this machine.

    Without `resources_per_trial`, the number of slots is the lower limit of the plan and the task runner; if both have
    none, it is the number of CPUs divided by a trial's processes. The slots (or fewer trials) share the CPUs equally.

    Args:
        plan: the plan, which may limit the number of slots.
        max_workers: the limit of the flow's task runner; None if it has no limit.

    Raises:
        InvalidInput: the machine is too small for one trial, or `resources_total` is not valid.
    """
    max_slots = min((limit for limit in (plan.max_concurrent_trials, max_workers) if limit is not None), default=None)
    cpu_count, needed, is_thread = count_available_cpus(), plan.resources, plan.isolation == "thread"
    if needed is None:
        count = max_slots or max(1, cpu_count // compute_process_count(plan.processes_per_trial, 1))
        trial_count = None if plan.samples_per_run else plan.trial_count  # None if the plan lacks the total
        share = max(1, cpu_count // min(count, trial_count or count))
        has_all = share >= (os.cpu_count() or 1) and plan.processes_per_trial == 1
        gpu_count = 0 if isinstance(plan.processes_per_trial, int) else len(list_gpus(os.environ)) // count
        environments = [] if has_all or is_thread else [_make_slot_variables(plan, share, gpu_count)] * count
        return Slots(count, environments, cpu_count)
    if needed.gpu and is_thread:
        raise InvalidInput("resources_per_trial: with isolation='thread' all trials share the GPUs of this process")
    slots = divide_into_slots(get_local_machine(plan.resources_total), needed, max_slots)
    environments = [
        _make_slot_variables(plan, needed.cpu, len(gpus)) | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        for gpus in slots
    ]
    return Slots(len(slots), [] if is_thread else environments, cpu_count)


def get_local_machine(total: Mapping[str, float] | None = None) -> Machine:
    """Return the processors and GPUs that this process may use; `total` overrides the numbers."""
    machine = Machine(cpu_count=count_available_cpus(), gpus=list_gpus(os.environ))
    if total is None:
        return machine
    parse_resources(total, "resources_total")
    if any(amount != int(amount) for amount in total.values()):
        raise InvalidInput(f"resources_total: expected whole numbers, found {dict(total)}")
    gpu_count = int(total.get("gpu", len(machine.gpus)))
    additional = tuple(str(number) for number in range(len(machine.gpus), gpu_count))
    return Machine(int(total.get("cpu", machine.cpu_count)), (machine.gpus + additional)[:gpu_count])


def _make_slot_variables(plan: SearchPlan, cpu_count: float, gpu_count: int) -> dict[str, str]:
    """Return a slot's environment variables: its number of processes, and how many threads their libraries may start.

    By default, a numeric library uses all CPUs of the machine. If the threads of several trials outnumber the CPUs,
    the busy waiting of these threads doubles the CPU time.
    """
    processes = compute_process_count(plan.processes_per_trial, gpu_count or int(cpu_count))
    variables = {} if isinstance(plan.processes_per_trial, int) else {PROCESSES_VARIABLE: str(processes)}
    if cpu_count and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, int(cpu_count / processes)))
    return variables
