"""A pool of trial processes that starts before its flow: it imports the trainable while a Prefect server starts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from prefect_tune.supervisor.processes.process_channel import AS_IT_IS
from prefect_tune.supervisor.processes.process_output import Log
from prefect_tune.supervisor.processes.process_pool import TrialProcessPool
from prefect_tune.supervisor.trial_spec import Reuse


class _LateLog(logging.LoggerAdapter[logging.Logger]):
    """A log that keeps its messages until the flow run has one: an import prints before that."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger(__name__))
        self._run_log: Log | None = None
        self._early: list[tuple[Any, ...]] = []
        self._guard = threading.Lock()

    def forward_to(self, log: Log) -> None:
        with self._guard:
            self._run_log = log
            for level, message, *arguments in self._early:
                log.log(level, message, *arguments)

    def log(self, level: int, msg: object, *args: object, **_: Any) -> None:
        with self._guard:
            if self._run_log is None:
                self._early.append((level, msg, *args))
            else:
                self._run_log.log(level, msg, *args)


@dataclass(slots=True)
class _Prestarted:
    pool: TrialProcessPool
    serves: tuple[int, Reuse]
    log: _LateLog
    is_taken: bool = False


_prestarted: ContextVar[_Prestarted | None] = ContextVar("prestarted", default=None)


@contextmanager
def prestarting(
    trainable: str, *, slots: int, reuse: Reuse = "never", environment: Mapping[str, str] = AS_IT_IS
) -> Iterator[None]:
    """Begin to import `trainable` in a pool, which the first `process_pool` within the block returns if it fits.

    Args:
        trainable: as in `Start`.
        slots: see `TrialProcessPool`; so for `reuse`.
        reuse: how the import is shared.
        environment: variables of the first trial.
    """
    log = _LateLog()
    with TrialProcessPool(slots=slots, reuse=reuse) as pool:
        pool.prepare(trainable, log, environment)
        before = _prestarted.set(_Prestarted(pool, (slots, reuse), log))
        try:
            yield
        finally:
            _prestarted.reset(before)


def process_pool(log: Log, *, slots: int, reuse: Reuse = "never") -> TrialProcessPool:
    """Return a pool of trial processes: the one that was started before, if it has these slots and this `reuse`.

    Args:
        log: receives what the import has printed so far.
        slots: see `TrialProcessPool`.
        reuse: see `TrialProcessPool`.
    """
    begun = _prestarted.get()
    if begun is not None and not begun.is_taken:
        begun.is_taken = True
        if begun.serves == (slots, reuse):
            begun.log.forward_to(log)
            return begun.pool
        begun.pool.close()
    return TrialProcessPool(slots=slots, reuse=reuse)
