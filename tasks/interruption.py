"""SIGTERM, Ctrl-C and *Suspend* as a request to save and end, in place of an exception in the middle of a commit."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from datetime import timedelta
from typing import TypeVar

from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger

from prefect_tune.tasks.suspension import is_suspended, undisturbed
from prefect_tune.tasks.transient import retrying_until

__all__ = ["interruptible"]

_T = TypeVar("_T")
# What is left to write once the trial has ended or its grace is over: its last journal entry.
_LAST_WORDS = timedelta(seconds=3)
_SLICE_SECONDS = 0.5


def interruptible(work: Callable[[threading.Event], _T], *, grace: timedelta) -> _T:
    """Return `work(stop)`, done in a thread of its own; a signal sets `stop` and is raised here once it has ended.

    The signals stay with whoever handles them (Prefect, Python): what they raise in the main thread reaches
    it here, where it breaks nothing, and where a cancellation from the UI is still seen to be one. `work` has
    `grace` and a few seconds from then on; then the signal is raised whatever it is doing, be it a target that
    does not answer, and what fails is not tried again: the process waits for its threads. A second Ctrl-C does not
    wait.

    A flow run that is suspended sets `stop` too. Nobody is in a hurry then: what `work` returns once everything has
    ended is returned, and `is_suspended()` says why it ended.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        return work(stop)  # no signal arrives here
    done: Future[_T] = Future()
    abandoned = threading.Event()
    try:
        _begin(work, stop, done, abandoned)
        while not _wait(done, _SLICE_SECONDS):
            if is_suspended():
                _suspend(stop, done)
    except BaseException:  # a signal, Ctrl-C, or the timeout of the flow
        stop.set()
        try:
            _wait_out(done, grace + _LAST_WORDS)
        finally:
            abandoned.set()
        raise
    return done.result()


def _wait(done: Future[_T], seconds: float = math.inf) -> bool:
    """Return whether it is done within `seconds`.

    In slices: of a signal that arrives just before the thread falls asleep, Python is told at the next waking.
    """
    until = time.monotonic() + seconds
    while not done.done() and (remaining := until - time.monotonic()) > 0:
        wait([done], min(remaining, _SLICE_SECONDS))
    return done.done()


def _begin(
    work: Callable[[threading.Event], _T], stop: threading.Event, done: Future[_T], abandoned: threading.Event
) -> None:
    def run() -> None:
        try:
            with undisturbed(), retrying_until(abandoned):
                done.set_result(work(stop))
        except BaseException as error:  # noqa: BLE001 - the thread's edge: raised by `done.result()`
            done.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="durable-trainable", daemon=True).start()


def _suspend(stop: threading.Event, done: Future[_T]) -> None:
    stop.set()
    get_run_logger().warning("suspended: every trial saves and ends, and then you are asked how to go on")
    _wait(done)


def _wait_out(done: Future[_T], patience: timedelta) -> None:
    """Whoever asks twice by SIGTERM (a whole group, a cluster) means the same; by Ctrl-C, means now."""
    log = get_run_logger()
    log.warning("asked to stop: the trial saves and ends")
    try:
        ended = _wait(done, patience.total_seconds())
    except TerminationSignal:
        ended = _wait(done, patience.total_seconds())
    if not ended:
        log.error("the trial did not end in time; a resume goes on from its last commit")
    elif error := done.exception():
        log.error("the trial could not end in order: %s: %s", type(error).__name__, error)
