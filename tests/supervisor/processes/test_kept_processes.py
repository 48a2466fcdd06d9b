"""Processes that serve trial after trial and import ahead, and the pools of workers."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.core.messages.process_messages import Broke, TrialEnded
from prefect_tune.runtime.processes.process_reset import READ_ONCE, ProcessState
from prefect_tune.supervisor.processes import worker_pools
from prefect_tune.supervisor.processes.process_channel import trial_in_place
from prefect_tune.supervisor.processes.process_pool import TrialProcessPool
from prefect_tune.supervisor.processes.worker_pools import worker_pool
from prefect_tune.supervisor.trial_spec import Reuse
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
from tests.supervisor.processes.modules import Module, Trains, different

pytestmark = pytest.mark.usefixtures("ours")  # fails if a process outlives its test

# -------------------------------------------------------------------------------------------------------- kept


def test_a_process_that_is_kept_serves_functions_and_begins_each_as_if_it_were_new(
    trains: Trains, module: Module
) -> None:
    module.write("""
        import random, tempfile
        def measured(config):
            found = {'drawn': random.random(), 'mark': os.environ.get('MARK', ''), 'here': os.getcwd(),
                     'temporary': tempfile.gettempdir()}
            os.environ['MARK'] = 'left'
            os.chdir('/')
            random.seed(1)
            return found
    """)
    found = trains(3, "keep")
    assert (different(found), len(module.imports), different(found, "drawn"), different(found, "temporary")) == (
        1,
        1,
        3,
        3,
    )
    assert [(each["mark"], each["here"]) for each in found] == [("", str(Path.cwd()))] * 3


@pytest.mark.parametrize("reuse", ["keep", "never"])
def test_threads_that_the_import_has_started_report_for_each_trial(
    trains: Trains, module: Module, reuse: Reuse
) -> None:
    module.write("""
        import concurrent.futures
        import prefect_tune as pt
        threads = concurrent.futures.ThreadPoolExecutor(1)
        threads.submit(int).result()
        def measured(config):
            threads.submit(pt.report, {'from': 'a thread'}).result()
            return {'x': config['x']}
    """)
    assert [each["from"] for each in trains(2, reuse)] == ["a thread"] * 2


def test_a_function_that_imports_much_by_itself_is_not_forked_for_each_trial(trains: Trains, module: Module) -> None:
    module.write("""
        import sys, types
        def measured(config):
            sys.modules.update({f'imported_{n}': types.ModuleType(f'imported_{n}') for n in range(100)})
            return {'x': config['x']}
    """)
    found = trains(3)
    assert (different(found), len(module.imports), [each["x"] for each in found]) == (1, 1, [0, 1, 2])
    assert different(trains(3, "fork")) == 3


LEFT = {
    "a thread": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "a process": "subprocess.Popen(['sleep', '600'])",
    "an orphan": "subprocess.run(['sh', '-c', 'setsid sleep 600 &'], check=True)",
    "a file": "globals().update(left=open('/etc/hostname'))",
    "a log file": "logging.basicConfig(filename=tempfile.mktemp())",
    "a stream": "sys.stdout = tempfile.TemporaryFile('w')",
    "a mask": "os.umask(0o27)",
    "a limit": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "a priority": "os.nice(1)",
    "a start method": "multiprocessing.set_start_method('spawn')",
    "devices": "os.environ.update(HIP_VISIBLE_DEVICES='3')",
    "a handler": "signal.signal(signal.SIGUSR2, lambda *_: None)",
}


@pytest.mark.parametrize("what", LEFT)
def test_a_process_in_which_a_trial_left_something_serves_no_other(trains: Trains, module: Module, what: str) -> None:
    module.write(f"""
        import logging, multiprocessing, resource, signal, subprocess, sys, tempfile, threading
        def measured(config):
            {LEFT[what]}
            return {{}}
    """)
    assert different(trains(3, "keep")) == 3


def test_a_trial_that_fails_only_after_an_earlier_one_begins_again_in_a_new_process(
    trains: Trains, module: Module, recorder: LogRecorder
) -> None:
    module.write("""
        calls = []
        def measured(config):
            calls.append(config)
            if len(calls) > 1:
                raise RuntimeError('only once in a process')
            return {'x': config['x']}
    """)
    found = trains(3, "keep")
    assert ([each["x"] for each in found], different(found)) == ([0, 1, 2], 3)
    (line,) = set(recorder.lines)
    assert line.endswith("failed before its first report (RuntimeError: only once in a process); a new one is started")


def test_a_trial_that_fails_in_a_new_process_too_has_failed_and_takes_that_process_with_it(
    module: Module, recorder: LogRecorder
) -> None:
    module.write("def measured(config): 1 / config['x']; return {}")
    with TrialProcessPool(slots=1, reuse="keep") as pool:
        for x, end in ((0, Broke), (1, TrialEnded), (0, Broke)):
            with pool.process(module.start(x), log_to(recorder)) as channel:
                assert isinstance(messages_of(channel)[-1], end)
    assert len(set(module.imports)) == 3


@pytest.mark.timeout(120)
def test_a_trial_that_is_stopped_does_not_wait_for_an_import_of_the_process_that_replaces_its_own(
    module: Module, ours: Family, recorder: LogRecorder, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    module.write(f"""
        import time
        import prefect_tune as pt
        if os.path.exists({str(flag)!r}):
            time.sleep(600)
        class Trains(pt.Trainable):
            def step(self): return {{"x": 1}}
            def save_checkpoint(self, checkpoint_dir): pass
            def reset_config(self, config): return config["x"] == 0
    """)
    first, second = (module.start(x).model_copy(update={"trainable": f"{module.name}:Trains"}) for x in (0, 1))
    stop = threading.Event()
    with TrialProcessPool(slots=1, reuse="fork") as pool:
        with pool.process(first, log_to(recorder)) as channel:
            metrics_of(channel)
        flag.touch()
        os.kill(ours.one("tune-template"), signal.SIGKILL)
        stop.set()
        with pool.process(second, log_to(recorder), stop=stop) as channel:
            until(lambda: channel.receive(timedelta(0)) or len(module.imports) > 2, what=lambda: "its import")


@pytest.mark.parametrize("name", READ_ONCE)
def test_a_worker_whose_devices_change_trains_in_another_process(
    module: Module, recorder: LogRecorder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pids = []
    with TrialProcessPool(slots=1, reuse="keep") as pool:
        for value in ("1", "1", "2"):
            monkeypatch.setenv(name, value)
            with pool.process(module.start(), log_to(recorder)) as channel:
                pids.append(metrics_of(channel)["pid"])
    assert (pids[0] == pids[1], pids[1] == pids[2]) == (True, False)


def test_a_trial_whose_process_serves_no_other_is_not_inspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: LogRecorder
) -> None:
    monkeypatch.setattr(ProcessState, "now", None)  # it reads /proc, which other systems lack
    start = start_of(lambda _config: {"x": 1}, tmp_path)
    with trial_in_place(start, log_to(recorder)) as channel:
        assert metrics_of(channel) == {"x": 1}


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
            assert channel.end() == "exited with code 3"


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
    assert recorder.lines == ["x" * 60_000] * 2


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
    monkeypatch.setattr(worker_pools, "_IDLE", timedelta(0))
    with worker_pool("search", "auto") as pool, pool.process(module.start(), log_to(recorder)) as channel:
        metrics_of(channel)
    ours.require_none()
