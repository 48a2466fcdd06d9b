"""Processes that serve trial after trial, that import ahead, and the pools of workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.core.messages.process_messages import Broke, TrialEnded
from prefect_tune.supervisor import worker_pools
from prefect_tune.supervisor.process_pool import TrialProcessPool
from prefect_tune.supervisor.worker_pools import worker_pool
from tests.fakes.trial_processes import (
    Family,
    Hearing,
    heard,
    log_to,
    metrics_of,
    until,
)
from tests.supervisor.modules import Module, Trains, different

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
    "a log file": "logging.basicConfig(filename='log')",
    "a stream": "sys.stdout = open('printed', 'w')",
    "a handler": "signal.signal(signal.SIGUSR2, lambda *_: None)",
}


@pytest.mark.parametrize("what", LEFT)
def test_a_process_in_which_a_trial_left_something_serves_no_other(trains: Trains, module: Module, what: str) -> None:
    module.write(f"""
        import logging, signal, subprocess, sys, threading
        def measured(config):
            {LEFT[what]}
            return {{}}
    """)
    assert different(trains(3, "keep")) == 3


def test_a_trial_that_failed_takes_its_process_with_it(module: Module, ours: Family, hearing: Hearing) -> None:
    del ours
    module.write("def measured(config): 1 / config['x']; return {}")
    with TrialProcessPool(slots=1, reuse="keep") as pool:
        with pool.process(module.start(0), log_to(hearing)) as channel:
            assert isinstance(heard(channel)[-1], Broke)
        with pool.process(module.start(1), log_to(hearing)) as channel:
            assert isinstance(heard(channel)[-1], TrialEnded)
    assert len(set(module.imports)) == 2


# ------------------------------------------------------------------------------------------------ imported ahead


def test_a_single_trials_process_imports_its_module_before_it_is_needed(
    module: Module, ours: Family, hearing: Hearing
) -> None:
    module.write(
        "os.environ['SET'] = 'yes'\ndef measured(config): return {'x': config['x'], 'set': os.environ.get('SET')}"
    )
    with TrialProcessPool(slots=0) as pool:
        pool.prepare(f"{module.name}:train", log_to(hearing))
        until(lambda: module.imports, what=lambda: "an import")
        with pool.process(module.start(7), log_to(hearing)) as channel:
            found = metrics_of(channel)
        assert (found["x"], [found["pid"]], found["set"]) == (7, module.imports, "yes")
    ours.require_none()


def test_an_import_ahead_that_ends_its_process_is_repeated_by_the_trial(
    module: Module, ours: Family, hearing: Hearing
) -> None:
    module.write("os._exit(3)")
    with TrialProcessPool(slots=0) as pool:
        pool.prepare(f"{module.name}:train", log_to(hearing))
        until(lambda: module.imports, what=lambda: "an import")
        until(
            lambda: ours.names() <= {"tune-forkserver", "tune-subreaper"}, what=lambda: f"its end, not {ours.names()}"
        )
        with pool.process(module.start(), log_to(hearing)) as channel:
            assert heard(channel) == []
            assert channel.end() == "exited with code 3"


# ---------------------------------------------------------------------------------------------------- in a worker


def test_attempts_of_a_search_in_one_worker_share_an_import(module: Module, ours: Family, hearing: Hearing) -> None:
    def train(search: str) -> int:
        with worker_pool(search, "auto") as pool, pool.process(module.start(), log_to(hearing)) as channel:
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
    module: Module, ours: Family, hearing: Hearing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pools, "_IDLE", timedelta(0))
    with worker_pool("search", "auto") as pool, pool.process(module.start(), log_to(hearing)) as channel:
        metrics_of(channel)
    ours.require_none()
