"""Import the trainable of a search once, while the Prefect server of its script starts.

    call of the flow ──► a pool, which imports ──► the server starts, the flow begins ──► `process_pool` takes the pool

Never: an error here that ends the flow, which reports what is wrong itself; a pool that serves two searches.
What only a call needs is imported by the call: all flows import this module.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from prefect_tune.core.errors import TuneError

if TYPE_CHECKING:
    from prefect_tune.attempt.processes.process_output import Log
    from prefect_tune.attempt.processes.process_pool import TrialProcessPool
    from prefect_tune.runtime.trainable import Reuse

_LATER = {"target": ".", "experiment": "prestart", "sync": None, "callbacks": None}
"""Parameters that the processes do not depend on: what they were given may be on the server."""
_HERE = ("process", "tasks")  # how a plan trains in processes of this machine: `isolation` and `trials`


class _LateLog(logging.LoggerAdapter[logging.Logger]):
    """A log that keeps its messages until the flow run has one."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger(__name__))
        self._run_log: Log | None = None
        self._early: list[tuple[int, object, tuple[object, ...], Mapping[str, Any]]] = []
        self._guard = threading.Lock()

    def forward_to(self, log: Log) -> None:
        with self._guard:
            self._run_log = log
            for level, message, arguments, options in self._early:
                log.log(level, message, *arguments, **options)

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        with self._guard:
            if self._run_log is None:
                self._early.append((level, msg, args, kwargs))
            else:
                self._run_log.log(level, msg, *args, **kwargs)


@dataclass(slots=True)
class _Prestarted:
    pool: TrialProcessPool
    serves: tuple[int, Reuse]
    log: _LateLog
    is_taken: bool = False


_prestarted: ContextVar[_Prestarted | None] = ContextVar("prestarted", default=None)


@contextmanager
def prestart_search(arguments: Mapping[str, Any], runner: TaskRunner[Any]) -> Iterator[None]:
    """Begin that for `pt.tune` with these arguments, if its trials train here."""
    with ExitStack() as started:
        from prefect_tune.attempt.trial_spec import pickled_or_path
        from prefect_tune.executors.trial_slots import slots_here
        from prefect_tune.parameters.search_plan import SearchPlan
        from prefect_tune.prefect_api.task_runs import max_workers_of

        with suppress(TuneError, OSError):
            plan = SearchPlan(**{**arguments, **_LATER})
            if (plan.isolation, plan.trials) == _HERE and isinstance(runner, ThreadPoolTaskRunner):
                slots = slots_here(plan, max_workers_of(runner))
                trainable = pickled_or_path(plan.trainable)
                environment = next(iter(slots.environments), {})
                started.enter_context(prestarting(trainable, slots.count, plan.reuse, environment))
        yield


@contextmanager
def prestarting(
    trainable: str, slots: int, reuse: Reuse, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Begin to import `trainable` (as in `Start`) in a pool, which the first `process_pool` in the block may return."""
    from prefect_tune.attempt.processes.process_pool import TrialProcessPool

    log = _LateLog()
    with TrialProcessPool(slots=slots, reuse=reuse) as pool:
        pool.prepare(trainable, log, environment or {})
        before = _prestarted.set(_Prestarted(pool, (slots, reuse), log))
        try:
            yield
        finally:
            _prestarted.reset(before)


def process_pool(log: Log, *, slots: int, reuse: Reuse) -> TrialProcessPool:
    """Return the pool that was started before, if it has these slots and this `reuse`, else a new one.

    `log` receives what the import has printed so far; for the others see `TrialProcessPool`.
    """
    from prefect_tune.attempt.processes.process_pool import TrialProcessPool

    begun = _prestarted.get()
    if begun is not None and not begun.is_taken:
        begun.is_taken = True
        if begun.serves == (slots, reuse):
            begun.log.forward_to(log)
            return begun.pool
        begun.pool.close()
    return TrialProcessPool(slots=slots, reuse=reuse)
