"""Turn SIGTERM, Ctrl-C and *Suspend* into a request to save and end, so that they never interrupt a commit.

How long trials may then save: `grace_period_seconds`, whose default is in `parameters/search_plan.py`, the flows,
`tasks/trials.py` and `trial_spec.py`. After it, `attempt/supervisor.py` kills them. A stop that is asked for from
outside comes another way: `tuner/stop_requests.py`.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from typing import TypeVar

from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler

from prefect_tune.prefect_api.flow_runs import (
    ignoring_suspension,
    is_suspended,
    outlive_log_reader,
    raise_cancellation,
    watching_cancellation,
)
from prefect_tune.prefect_api.held_signals import raise_held_signal, saving_on_signals
from prefect_tune.storage_retries import retrying_until
from prefect_tune.terminal.live_display import end_display

_T = TypeVar("_T")
# For the trial's last journal entry, which is written after its end or after the grace period.
_LAST_WORDS = timedelta(seconds=3)
_SLICE_SECONDS = 0.1
_LAST_MOMENT_SECONDS = 1.0


def interruptible(work: Callable[[threading.Event], _T], *, grace: timedelta, request_period: timedelta) -> _T:
    """Run `work(stop)` in a thread and return its result; a signal sets `stop` and is raised after `work` has ended.

    The signal handlers of Prefect and Python stay in place: their exception arrives in the main thread, which only
    waits here, so it interrupts no commit, and Prefect still recognizes a cancellation from the UI. In another thread
    the same exception is raised here, and the main thread gets the signal afterwards (`prefect_api/held_signals.py`).
    After the signal `work` has `grace` plus 3 s; then the exception is raised even if `work` still runs, and nothing in
    it is retried any more, since the process waits for its threads at exit. A second Ctrl-C kills the trials and is
    raised within 1 s; if `work` still runs 1 s after the end of the main thread, for example since its target does not
    respond, the process then ends by SIGINT, without it.

    *Cancel* of the flow run, which is looked for once per `request_period`, has the effect of SIGTERM, and the run ends
    as Cancelled. Suspending the flow run sets `stop` too: trials have their grace, and the result of `work` is returned
    when it has ended, and `is_suspended()` tells the caller why. `work` also outlives the reader of this process's log.
    """
    outlive_log_reader()
    stop, abandoned = threading.Event(), threading.Event()
    done: Future[_T] = Future()
    with saving_on_signals(), watching_cancellation(request_period) as is_cancelled:
        try:
            _begin(work, stop, done, abandoned)
            while not _wait(done, _SLICE_SECONDS):
                if is_suspended():
                    stop.set()
                    get_run_logger().warning(
                        "suspended: every trial saves and ends, and then a form asks how to continue"
                    )
                    _wait(done)
                if is_cancelled():
                    raise_cancellation()
        except BaseException:  # a signal, Ctrl-C, or the timeout of the flow
            try:
                stop.set()
                _wait_out(done, grace)
            except KeyboardInterrupt:
                abandoned.set()  # the supervisor of each trial kills it
                _give_up(done)
                raise
            finally:
                abandoned.set()
            send_log()
            raise
    return done.result()


def send_log() -> None:
    """Send the log lines so far to the Prefect server, for 5 s at most.

    Prefect sends them every 2 s and at the interpreter's exit. A process that SIGTERM ends has no such exit, since
    Prefect raises the signal again with its default handler, and a cancelled run is killed after 30 s.
    """
    APILogHandler().flush()


def _wait(done: Future[_T], seconds: float = math.inf) -> bool:
    """Return whether `done` is done within `seconds`. Raises signals that were held back for this thread.

    It waits in slices of 0.1 s: Python handles a signal that arrives just before a wait only after that wait.
    """
    until = time.monotonic() + seconds
    while not done.done() and (remaining := until - time.monotonic()) > 0:
        raise_held_signal()
        wait([done], min(remaining, _SLICE_SECONDS))
    return done.done()


def _begin(
    work: Callable[[threading.Event], _T], stop: threading.Event, done: Future[_T], abandoned: threading.Event
) -> None:
    def run() -> None:
        try:
            with ignoring_suspension(), retrying_until(abandoned):
                done.set_result(work(stop))
        except BaseException as error:  # noqa: BLE001 - the thread's edge: raised by `done.result()`
            done.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="durable-trainable", daemon=True).start()


def _wait_out(done: Future[_T], grace: timedelta) -> None:
    """Wait for the end. Further SIGTERMs change nothing (clusters send several); a second Ctrl-C ends the wait."""
    log, until = get_run_logger(), time.monotonic() + (grace + _LAST_WORDS).total_seconds()
    is_logged = is_waited = False
    while not is_waited:
        with suppress(TerminationSignal):
            if not is_logged:
                is_logged = True
                log.warning("asked to stop: every trial saves and ends within %g s", grace.total_seconds())
            _wait(done, until - time.monotonic())
            is_waited = True
    if not done.done():
        log.error("the trial did not end in time; a resume continues from its last commit")
    elif error := done.exception():
        log.error("the trial failed while it was stopping: %s: %s", type(error).__name__, error)


def _give_up(done: Future[_T]) -> None:
    """Remove the live table, and give the ends of the killed trials 1 s to be journaled."""
    # It is called before Python waits for the threads of executors. Prefect uses the same function.
    at_exit: Callable[[Callable[[], None]], None] = vars(threading)["_register_atexit"]  # no public hook is as early
    at_exit(partial(_end_without, done, frozenset(threading.enumerate())))
    end_display()
    get_run_logger().warning("interrupted again: every trial is killed")
    _wait(done, _LAST_MOMENT_SECONDS)


def _end_without(done: Future[_T], known: frozenset[threading.Thread]) -> None:
    """At the exit of the interpreter: end the process by SIGINT if `done` is not done within 1 s.

    Threads that are not `known` are waited for: a script that has caught the interrupt has started them since.
    """
    logging.raiseExceptions = False  # what still logs would print that Prefect can no longer send it
    if not _wait(done, _LAST_MOMENT_SECONDS):
        for each in threading.enumerate():
            if not each.daemon and each not in known:
                each.join()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # it is closed, or None
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
