"""Processes that import ahead of their trial, and the pools of workers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.attempt.processes import process_pool
from prefect_tune.attempt.processes.process_pool import TrialProcessPool, worker_pool
from prefect_tune.core.reasons import ProcessEnd
from tests.attempt.processes.modules import Module
from tests.fakes.trial_processes import (
    Family,
    LogRecorder,
    log_to,
    messages_of,
    metrics_of,
    nothing_left,
    start_of,
    until,
)

pytestmark = pytest.mark.usefixtures("ours")  # fails if a process outlives its test

# ------------------------------------------------------------------------------------------------ imported ahead


def test_a_single_trials_process_imports_its_module_before_it_is_needed(module: Module, recorder: LogRecorder) -> None:
    module.write(
        "os.environ['SET'] = 'yes'\ndef measured(config): return {'x': config['x'], 'set': os.environ.get('SET')}"
    )
    with TrialProcessPool(slots=0) as pool:
        pool.prepare(f"{module.name}:train", log_to(recorder))
        until(lambda: module.imports, what=lambda: "an import")
        with pool.process(module.start(7), log_to(recorder)) as channel:
            found = metrics_of(channel)
        assert (found["x"], [found["pid"]], found["set"]) == (7, module.imports, "yes")


def test_an_import_ahead_that_ends_its_process_is_repeated_by_the_trial(
    module: Module, ours: Family, recorder: LogRecorder
) -> None:
    module.write("os._exit(3)")
    with TrialProcessPool(slots=0) as pool:
        pool.prepare(f"{module.name}:train", log_to(recorder))
        until(lambda: module.imports, what=lambda: "an import")
        until(
            lambda: ours.names() <= {"tune-forkserver", "tune-subreaper"}, what=lambda: f"its end, not {ours.names()}"
        )
        with pool.process(module.start(), log_to(recorder)) as channel:
            assert messages_of(channel) == []
            assert channel.end() == ProcessEnd(exit_code=3)


def test_a_long_message_to_a_process_that_imports_ahead_does_not_wait_for_the_import(
    module: Module, recorder: LogRecorder
) -> None:
    module.write("import time; time.sleep(600)")
    start, stop = module.start(), threading.Event()
    stop.set()
    with nothing_left(), TrialProcessPool(slots=0) as pool:
        pool.prepare(f"{module.name}:train", log_to(recorder))
        until(lambda: module.imports, what=lambda: "an import")
        long = start.model_copy(update={"config": {"text": "x" * 3_000_000}})
        with pool.process(long, log_to(recorder), stop=stop) as channel:
            until(lambda: len(module.imports) == 2, what=lambda: "the import of the trial's own process")
            assert channel.receive(timedelta(seconds=0.1)) is None


def test_an_import_ahead_that_prints_much_goes_on(module: Module, recorder: LogRecorder) -> None:
    module.write("print('x' * 60_000 + '\\n' + 'x' * 60_000)\ndef measured(config): return {'x': len(config['text'])}")
    with TrialProcessPool(slots=0) as pool:
        pool.prepare(f"{module.name}:train", log_to(recorder))
        until(lambda: module.imports, what=lambda: "an import")
        start = module.start().model_copy(update={"config": {"text": "x" * 3_000_000}})
        with pool.process(start, log_to(recorder)) as channel:
            found = metrics_of(channel)
    assert (found["x"], [found["pid"]]) == (3_000_000, module.imports)
    assert recorder.reasons == ["x" * 60_000] * 2


def test_a_long_pickle_is_not_imported_ahead(ours: Family, recorder: LogRecorder, tmp_path: Path) -> None:
    weights = bytes(3_000_000)
    start = start_of(lambda _config: {"size": len(weights)}, tmp_path)
    with TrialProcessPool(slots=0) as pool:
        pool.prepare(start.trainable, log_to(recorder))
        assert not ours.pids("trial")
        with pool.process(start, log_to(recorder)) as channel:
            assert metrics_of(channel) == {"size": 3_000_000}


# ---------------------------------------------------------------------------------------------------- in a worker


def test_attempts_of_a_search_in_one_worker_share_an_import(
    module: Module, ours: Family, recorder: LogRecorder
) -> None:
    def train(search: str) -> int:
        with worker_pool(search, "auto") as pool, pool.process(module.start(), log_to(recorder)) as channel:
            return int(metrics_of(channel)["pid"])

    with ThreadPoolExecutor(3) as threads:
        assert len(set(threads.map(train, ["first"] * 6))) == 6
    assert len(module.imports) == 1
    train("second")
    assert len(module.imports) == 2
    until(lambda: len(ours.pids("tune-forkserver")) == 1, what=lambda: "the end of the first search's pool")
    with worker_pool("another", "never"):
        until(lambda: not ours.pids(), what=lambda: "the end of the second search's")


def test_the_pool_of_a_search_that_sends_no_more_attempts_is_closed(
    module: Module, ours: Family, recorder: LogRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "_IDLE", timedelta(0))
    with worker_pool("search", "auto") as pool, pool.process(module.start(), log_to(recorder)) as channel:
        metrics_of(channel)
    ours.require_none()
