"""The calls of one map run at once, in order and bounded in number; nested maps do not multiply the threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Generator
from typing import cast

import pytest

from prefect_tune.stores.parallel_map import parallel_map


def test_calls_run_side_by_side_in_order_and_no_more_than_a_few_at_once() -> None:
    barrier = threading.Barrier(4)
    started = 0

    def transfer(number: int) -> int:
        nonlocal started
        started += 1
        if number < 4:
            barrier.wait(20)  # passes only if four run at once
        return number

    results = cast(Generator[int], parallel_map(transfer, iter(range(10**9)), workers=4))
    assert [next(results) for _ in range(20)] == list(range(20))
    results.close()
    assert started <= 20 + 2 * 4


def test_the_first_error_ends_the_rest() -> None:
    started: list[int] = []

    def fail(number: int) -> None:
        started.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        list(parallel_map(fail, range(1000), workers=2))
    assert len(started) <= 4


def test_once_the_consumer_has_failed_calls_that_run_are_awaited_and_no_other_begins() -> None:
    second_runs, may_end = threading.Event(), threading.Event()
    ended: list[int] = []

    def transfer(number: int) -> None:
        if number == 1:
            second_runs.set()
        if number:  # the second and the third occupy both threads
            may_end.wait(20)
        ended.append(number)

    def consume() -> None:
        for _ in parallel_map(transfer, range(1000), workers=2):
            assert second_runs.wait(20)
            threading.Timer(0.2, may_end.set).start()
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  it has no message
        consume()
    assert 1 in ended, "the call that had begun was not awaited"
    assert 3 not in ended, "the fourth, which was submitted, was not canceled"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("transfer")]


def test_a_map_within_a_call_of_a_map_runs_in_the_thread_of_that_call() -> None:
    barrier = threading.Barrier(2)

    def outer(number: int) -> tuple[int, set[int]]:
        barrier.wait(20)  # both calls run, each in its thread
        return threading.get_ident(), set(parallel_map(lambda _: threading.get_ident(), range(20 + number)))

    threads = list(parallel_map(outer, range(2)))
    assert all(inner == {own} for own, inner in threads)
    assert threads[0] != threads[1]


def test_a_map_within_the_only_call_of_a_map_runs_side_by_side() -> None:
    barrier = threading.Barrier(2)

    def outer(_: int) -> list[int]:
        return list(parallel_map(lambda _: barrier.wait(20), range(2)))

    assert [sorted(numbers) for numbers in parallel_map(outer, range(1))] == [[0, 1]]


AT_EXIT = """
import threading
from prefect_tune.stores.parallel_map import parallel_map

def transfer():
    threading.main_thread().join()
    print(list(parallel_map(abs, [-1, -2, -3])))

threading.Thread(target=transfer).start()
"""


def test_a_thread_that_outlives_the_main_thread_still_transfers() -> None:
    process = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True)
    assert (process.stdout, process.stderr) == ("[1, 2, 3]\n", "")
