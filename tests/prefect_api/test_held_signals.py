"""A signal stops searches outside the main thread first, and then reaches the main thread."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from prefect_tune.attempt import graceful_stop
from prefect_tune.attempt.graceful_stop import run_interruptible
from tests.fakes.trial_processes import wait_until
from tests.flows.forked_programs import get_preloaded_context, start_own_session
from tests.long_cases import long_after

_PERIOD = timedelta(seconds=5)
_SIGNALS = [signal.SIGINT, signal.SIGTERM]


def _train_until_stopped(stop: threading.Event) -> None:
    print("trains", flush=True)
    assert stop.wait(300)
    time.sleep(0.2)
    print("saved", flush=True)


def _run_search() -> None:
    run_interruptible(_train_until_stopped, grace=timedelta(seconds=60), poll_interval=_PERIOD)


def _search_in_executor() -> None:
    with ThreadPoolExecutor() as threads:
        threads.submit(_run_search).result()


def _search_in_two_threads() -> None:
    threads = ThreadPoolExecutor()
    first, second = threads.submit(_run_search), threads.submit(_run_search)
    first.result()
    second.result()


def _search_in_daemon_thread() -> None:
    thread = threading.Thread(target=_run_search, daemon=True)
    thread.start()
    thread.join()


def _search_in_event_loop() -> None:
    async def train() -> None:
        await asyncio.to_thread(_run_search)

    asyncio.run(train())


def _search_beside_c_code() -> None:
    search = ThreadPoolExecutor().submit(_run_search)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # for ever, without Python's lock
    search.result()


def _search_beside_one_in_the_main_thread() -> None:
    threads = ThreadPoolExecutor()
    search = threads.submit(_run_search)
    _run_search()
    search.result()


def _search_with_own_handlers() -> None:
    _install_handlers()
    _search_in_executor()


def _search_with_handlers_that_come_later() -> None:
    threads = ThreadPoolExecutor()
    search = threads.submit(_run_search)
    time.sleep(0.5)
    _install_handlers()
    search.result()


def _install_handlers() -> None:
    def handle(_number: int, _frame: object) -> None:
        print("handled", flush=True)
        sys.exit(7)

    for number in _SIGNALS:
        signal.signal(number, handle)
    print("installed", flush=True)


def _search_beside_a_forked_process() -> None:
    search = ThreadPoolExecutor().submit(_run_search)
    time.sleep(0.5)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    child.start()
    child.terminate()
    child.join()
    print(f"child {child.exitcode}", flush=True)
    search.result()


def _never_stop() -> None:
    def work(_stop: threading.Event) -> None:
        print("trains", flush=True)
        time.sleep(300)

    ThreadPoolExecutor().submit(run_interruptible, work, grace=timedelta(seconds=300), poll_interval=_PERIOD).result()


_COUNTS = {"in_two_threads": 2, "beside_one_in_the_main_thread": 2}
"""The number of searches of a program."""
_READY = {"with_handlers_that_come_later": "installed", "beside_a_forked_process": "child -15"}
"""The text that a program prints before it receives the signal."""
_PROGRAMS: Mapping[str, Callable[[], None]] = {
    program.__name__.removeprefix("_search_"): program
    for program in (
        _search_in_executor,
        _search_in_two_threads,
        _search_in_daemon_thread,
        _search_in_event_loop,
        _search_beside_c_code,
        _search_beside_one_in_the_main_thread,
        _search_with_own_handlers,
        _search_with_handlers_that_come_later,
        _search_beside_a_forked_process,
    )
}


def _run_program(program: str, log: str) -> None:
    start_own_session(Path(log))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    setattr(graceful_stop, "get_run_logger", logging.getLogger)  # noqa: B010 - mypy; there is no run
    (_PROGRAMS.get(program) or _never_stop)()


@contextmanager
def _running_program(name: str, log: Path) -> Iterator[BaseProcess]:
    log.touch()
    process = get_preloaded_context().Process(target=_run_program, args=(name, str(log)))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("name", "number"), long_after(len(_PROGRAMS) + 2, [(name, number) for number in _SIGNALS for name in _PROGRAMS])
)
def test_all_save_and_then_the_main_thread_gets_the_signal(name: str, number: signal.Signals, tmp_path: Path) -> None:
    log, count = tmp_path / "log", _COUNTS.get(name, 1)
    with _running_program(name, log) as process:
        assert process.pid is not None
        wait_until(lambda: log.read_text().count("trains") == count, seconds=120, what=log.read_text)
        if name in _READY:
            wait_until(lambda: _READY[name] in log.read_text(), seconds=60, what=log.read_text)
            time.sleep(0.5)
            assert "stop requested" not in log.read_text()
        os.kill(process.pid, number)
        wait_until(lambda: log.read_text().count("saved") == count, seconds=120, what=log.read_text)
        if (name, number) == ("beside_c_code", signal.SIGINT):
            return  # Python sees it after the C code
        process.join(120)
        lines = log.read_text().splitlines()
    if "handlers" in name:
        assert (process.exitcode, lines.count("handled")) == (7, 1)
        assert lines.index("handled") > lines.index("saved"), "as after a search in the main thread"
    elif number == signal.SIGTERM and name != "beside_one_in_the_main_thread":  # Prefect ends that one by SIGTERM
        assert process.exitcode == -signal.SIGTERM
    else:
        assert process.exitcode == 1
        assert "KeyboardInterrupt" in lines or number == signal.SIGTERM


def test_further_sigterms_change_nothing_and_a_second_interrupt_ends_the_wait(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with _running_program("never_stop", log) as process:
        assert process.pid is not None
        wait_until(lambda: "trains" in log.read_text(), seconds=120, what=log.read_text)
        for _ in range(3):
            os.kill(process.pid, signal.SIGTERM)
            wait_until(lambda: "stop requested" in log.read_text(), seconds=60, what=log.read_text)
            time.sleep(0.3)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGINT)
        wait_until(lambda: "every trial is killed" in log.read_text(), seconds=60, what=log.read_text)
        process.join(120)
    assert process.exitcode == -signal.SIGTERM


def test_without_a_signal_the_handlers_are_those_of_before() -> None:
    before = [signal.getsignal(number) for number in _SIGNALS]
    with ThreadPoolExecutor() as threads:
        options = {"grace": timedelta(0), "poll_interval": _PERIOD}
        assert threads.submit(run_interruptible, threading.Event.is_set, **options).result() is False
    assert [signal.getsignal(number) for number in _SIGNALS] == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
