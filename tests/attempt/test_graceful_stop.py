"""An exception or signal in the flow's main thread ends the trial first."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import copy_context
from datetime import timedelta

import pytest
from prefect.exceptions import TerminationSignal

from prefect_tune import storage_retries
from prefect_tune.attempt import graceful_stop
from prefect_tune.attempt.graceful_stop import run_interruptible
from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.storage_retries import is_retryable, is_work_abandoned, retrying_refusals, with_retries


class FlowTimedOut(TimeoutError):
    """Raised by a signal handler during a wait, like Prefect's."""


def _raise_timeout(number: int, _frame: object) -> None:
    raise FlowTimedOut(number)


HANGING_SCRIPT = """
import logging, os, signal, threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from prefect_tune.attempt import graceful_stop

def work(stop):
    os.kill(os.getpid(), signal.SIGINT)
    stop.wait()
    os.kill(os.getpid(), signal.SIGINT)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(threading.Event().wait)  # for ever, as for a hung file system

graceful_stop.get_run_logger = logging.getLogger
try:
    graceful_stop.run_interruptible(work, grace=timedelta(hours=1), poll_interval=timedelta(seconds=5))
except KeyboardInterrupt:
    print("caught")
"""


@pytest.fixture(autouse=True)
def timeout_by_signal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graceful_stop, "get_run_logger", logging.getLogger)
    before = signal.signal(signal.SIGUSR1, _raise_timeout)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_a_flow_that_times_out_has_its_trial_save_and_end_first(seconds: float) -> None:
    ended = threading.Event()

    def work(stop: threading.Event) -> str:
        time.sleep(seconds)  # none: the thread may not even have been begun yet
        os.kill(os.getpid(), signal.SIGUSR1)
        if stop.wait(20):
            ended.set()
        return "saved"

    with pytest.raises(FlowTimedOut):
        run_interruptible(work, grace=timedelta(seconds=20), poll_interval=timedelta(seconds=5))
    assert ended.is_set()


def test_however_many_sigterms_arrive_the_trial_saves_and_ends() -> None:
    saved = []

    def work(stop: threading.Event) -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR2)
            stop.wait(20)
            time.sleep(0.1)  # the main thread waits again by then, or has given up
        saved.append("saved")

    def raise_termination(number: int, _frame: object) -> None:
        raise TerminationSignal(number)

    before = signal.signal(signal.SIGUSR2, raise_termination)
    try:
        with pytest.raises(TerminationSignal):
            run_interruptible(work, grace=timedelta(seconds=20), poll_interval=timedelta(seconds=5))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert saved == ["saved"]


def test_a_signal_that_does_not_wake_the_main_thread_is_not_missed() -> None:
    stopped = []

    def work(stop: threading.Event) -> None:
        time.sleep(0.1)  # the main thread sleeps by now
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # taken by this thread: nothing wakes the other
        stopped.append(stop.wait(20))

    with pytest.raises(FlowTimedOut):
        run_interruptible(work, grace=timedelta(seconds=20), poll_interval=timedelta(seconds=5))
    assert stopped == [True]


@pytest.mark.parametrize("error", [StoreUnavailable("503"), StoreRefused("expired")], ids=repr)
def test_what_still_waits_for_its_target_when_the_grace_is_over_is_not_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_retries, "_PAUSES_SECONDS", (60.0, 60.0))
    monkeypatch.setattr(graceful_stop, "_FINAL_WRITE_TIMEOUT", timedelta(seconds=0.1))
    ended, retryable = threading.Event(), []

    def refuse() -> None:
        raise error

    def retry_until_abandoned() -> None:
        try:
            with_retries(refuse)
        except type(error):
            retryable.append(is_retryable(error))
        ended.set()

    def work(stop: threading.Event) -> None:
        with retrying_refusals():
            threading.Thread(target=copy_context().run, args=(retry_until_abandoned,), daemon=True).start()
            retryable.append(is_retryable(error))
            os.kill(os.getpid(), signal.SIGUSR1)
            stop.wait(20)
            ended.wait(20)

    with pytest.raises(FlowTimedOut):
        run_interruptible(work, grace=timedelta(0), poll_interval=timedelta(seconds=5))
    assert ended.wait(10), "a thread of a task runner would keep the process from its end"
    assert retryable == [True, False]


def test_a_second_interrupt_abandons_the_work_and_waits_for_its_last_entry() -> None:
    journaled = threading.Event()

    def work(stop: threading.Event) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        stop.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        while not is_work_abandoned():
            time.sleep(0.001)
        journaled.set()

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(work, grace=timedelta(hours=1), poll_interval=timedelta(seconds=5))
    assert journaled.wait(60)


@pytest.mark.timeout(300)
def test_after_a_second_interrupt_the_process_does_not_wait_for_threads_that_wait_for_a_target() -> None:
    command = [sys.executable, "-c", HANGING_SCRIPT]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == -signal.SIGINT, process.stderr
    assert process.stdout == "caught\n"  # the exception is raised as any other
    assert "Traceback" not in process.stderr
