"""Turn SIGTERM, Ctrl-C and *Suspend* into a request to save and end, so that they never interrupt a commit.

Trials then have `grace_period_seconds` to save (the defaults are in `parameters/search_plan.py`, the flows,
`tasks/trials.py` and `trial_spec.py`). After that time, `attempt/supervisor.py` kills the trials' processes.
`tuner/stop_requests.py` handles stop requests from other processes.
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
    ignore_broken_log_pipe,
    ignoring_suspension,
    is_flow_run_suspended,
    raise_cancellation,
    watching_cancellation,
)
from prefect_tune.prefect_api.held_signals import raise_held_signal, saving_on_signals
from prefect_tune.storage_retries import stopping_retries_on
from prefect_tune.terminal.live_display import end_display

_T = TypeVar("_T")
# Additional time for the trial's last journal entry, which is written after the trial or the grace period has ended.
_FINAL_WRITE_TIMEOUT = timedelta(seconds=3)
_WAIT_SLICE_SECONDS = 0.1
_ABANDON_TIMEOUT_SECONDS = 1.0


def run_interruptible(work: Callable[[threading.Event], _T], *, grace: timedelta, poll_interval: timedelta) -> _T:
    """Run `work(stop)` in a thread and return its result. A signal sets `stop`; its exception is raised at the end.

    The signal handlers of Prefect and Python stay in place, and raise an exception in the main thread. That thread
    only waits here, so the exception interrupts no commit, and Prefect still recognizes a cancellation from the UI. If
    a thread other than the main thread calls this function, the exception is raised in that thread, and the main thread
    gets the signal later (`prefect_api/held_signals.py`). After the signal, `work` has `grace` plus 3 s to end. Then
    the exception is raised even if `work` still runs; from then on, `work` retries no request, because the process
    waits for its threads at exit. A second Ctrl-C kills the trials and is raised within 1 s. If the main thread then
    ends, and `work` still runs 1 s later, for example because its target hangs, SIGINT ends the process.

    *Cancel* of the flow run, polled once per `poll_interval`, acts like SIGTERM, and the run ends as Cancelled.
    *Suspend* also sets `stop`: trials get the grace period, then the result of `work` is returned, and
    `is_flow_run_suspended()` tells the caller why. If the reader of this process's log exits, `work` continues.
    """
    ignore_broken_log_pipe()
    stop, abandoned = threading.Event(), threading.Event()
    done: Future[_T] = Future()

    def run_work() -> None:
        try:
            with ignoring_suspension(), stopping_retries_on(abandoned):
                done.set_result(work(stop))
        except BaseException as error:  # noqa: BLE001 - `done.result()` raises it
            done.set_exception(error)

    with saving_on_signals(), watching_cancellation(poll_interval) as is_cancelled:
        try:
            threading.Thread(target=copy_context().run, args=(run_work,), name="durable-trainable", daemon=True).start()
            while not _wait_until_done(done, _WAIT_SLICE_SECONDS):
                if is_flow_run_suspended():
                    stop.set()
                    line = "suspended: every trial saves and ends, then a form offers the ways to continue"
                    get_run_logger().warning(line)
                    _wait_until_done(done)
                if is_cancelled():
                    raise_cancellation()
        except BaseException:  # raised by a signal, Ctrl-C, or the timeout of the flow
            try:
                stop.set()
                _wait_for_work(done, grace)
            except KeyboardInterrupt:
                abandoned.set()  # makes each supervisor kill its trial
                _abandon_work(done)
                raise
            finally:
                abandoned.set()
            flush_log()
            raise
    return done.result()


def flush_log() -> None:
    """Send the queued log lines to the Prefect server; take 5 s at most.

    Prefect sends them every 2 s and at the interpreter's exit. After SIGTERM there is no such exit, because Prefect
    raises the signal again with the default handler, and because a cancelled run is killed after 30 s.
    """
    APILogHandler().flush()


def _wait_until_done(done: Future[_T], seconds: float = math.inf) -> bool:
    """Wait up to `seconds` for `done`; return whether `done` is done. Raise signals that are held for this thread.

    Wait in slices of 0.1 s, because Python handles a signal that arrives just before a slice only after that slice.
    """
    until = time.monotonic() + seconds
    while not done.done() and (remaining := until - time.monotonic()) > 0:
        raise_held_signal()
        wait([done], min(remaining, _WAIT_SLICE_SECONDS))
    return done.done()


def _wait_for_work(done: Future[_T], grace: timedelta) -> None:
    """Wait for the end of the work. Ignore further SIGTERMs (clusters send several); a second Ctrl-C ends the wait."""
    log, until = get_run_logger(), time.monotonic() + (grace + _FINAL_WRITE_TIMEOUT).total_seconds()
    is_logged = has_waited = False
    while not has_waited:
        with suppress(TerminationSignal):
            if not is_logged:
                is_logged = True
                log.warning("stop requested: every trial saves and ends within %g s", grace.total_seconds())
            _wait_until_done(done, until - time.monotonic())
            has_waited = True
    if not done.done():
        log.error("the trial did not end in time; a resume continues from its last checkpoint")
    elif error := done.exception():
        log.error("the trial failed while stopping: %s: %s", type(error).__name__, error)


def _abandon_work(done: Future[_T]) -> None:
    """Remove the live table, and give the supervisors of the killed trials 1 s to journal the attempts' ends."""
    # Python calls what is registered here before it waits for executors' threads. Prefect uses this function, too.
    at_exit: Callable[[Callable[[], None]], None] = vars(threading)["_register_atexit"]  # no public hook runs as early
    at_exit(partial(_exit_unless_done, done, frozenset(threading.enumerate())))
    end_display()
    get_run_logger().warning("interrupted again: every trial is killed")
    _wait_until_done(done, _ABANDON_TIMEOUT_SECONDS)


def _exit_unless_done(done: Future[_T], known_threads: frozenset[threading.Thread]) -> None:
    """At the interpreter's exit, wait 1 s for `done`; if it is still not done, end the process with SIGINT.

    Before the signal, join the threads not in `known_threads`, because the script started them after the interrupt.
    """
    logging.raiseExceptions = False  # otherwise each late log call prints that Prefect can no longer send the line
    if not _wait_until_done(done, _ABANDON_TIMEOUT_SECONDS):
        for thread in threading.enumerate():
            if not thread.daemon and thread not in known_threads:
                thread.join()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # the stream may be closed, or None
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
