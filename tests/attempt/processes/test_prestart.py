"""A pool that starts before its flow: it serves the first search that it fits, and no other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from prefect_tune.executors.prestart import _LateLog, prestarting, process_pool
from prefect_tune.runtime.trainable import Reuse
from prefect_tune.terminal.live_display import NOTICE
from tests.attempt.processes.modules import Module
from tests.fakes.trial_processes import Family, LogRecorder, log_to, metrics_of, nothing_left

PRINTS = """
print("imported", flush=True)
def measured(config): return {"x": config["x"]}
"""
pytestmark = pytest.mark.usefixtures("ours")


def trained(module: Module, recorder: LogRecorder, slots: int, reuse: Reuse) -> Mapping[str, Any]:
    """Train two trials, one after the other, as a search does; return the metrics of the last one."""
    log = log_to(recorder)
    with process_pool(log, slots=slots, reuse=reuse) as pool:
        pool.prepare(f"{module.name}:train", log)
        for x in (1, 2):
            with pool.process(module.start(x), log) as channel:
                metrics = metrics_of(channel)
    return metrics


@pytest.mark.parametrize(("slots", "reuse", "imports"), [(2, "auto", 1), (0, "never", 2)])
def test_the_prestarted_pool_has_imported_the_module_and_its_flow_logs_what_that_printed(
    module: Module, recorder: LogRecorder, slots: int, reuse: Reuse, imports: int
) -> None:
    module.write(PRINTS)
    with nothing_left(), prestarting(f"{module.name}:train", slots=slots, reuse=reuse):
        assert trained(module, recorder, slots, reuse)["x"] == 2
        assert len(module.imports) == imports
    assert recorder.lines.count("imported") == imports


def test_a_notice_that_is_logged_before_the_flow_has_a_log_is_one_in_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    late = _LateLog()
    late.info("cannot be %s", "forked", extra=NOTICE)
    late.forward_to(logging.getLogger("of the run"))
    late.info("later", extra=NOTICE)
    assert [record.message for record in caplog.records if hasattr(record, "is_notice")] == [
        "cannot be forked",
        "later",
    ]


def test_it_serves_one_search(module: Module, recorder: LogRecorder) -> None:
    with nothing_left(), prestarting(f"{module.name}:train", slots=2, reuse="auto"):
        for imports in (1, 2):
            assert trained(module, recorder, 2, "auto")["x"] == 2
            assert len(module.imports) == imports


@pytest.mark.long
@pytest.mark.parametrize(("slots", "reuse"), [(3, "auto"), (2, "never")])
def test_one_that_does_not_fit_has_ended_before_the_search_trains(
    module: Module, recorder: LogRecorder, ours: Family, slots: int, reuse: Reuse
) -> None:
    with nothing_left(), prestarting(f"{module.name}:train", slots=2, reuse="auto"):
        log = log_to(recorder)
        with process_pool(log, slots=slots, reuse=reuse):
            assert not ours.pids()
        assert trained(module, recorder, slots, reuse)["x"] == 2


def test_one_without_a_search_ends_with_its_block(module: Module, ours: Family) -> None:
    with nothing_left(), prestarting(f"{module.name}:train", slots=2, reuse="auto"):
        ours.one("tune-forkserver")


def test_one_of_another_trainable_ends_when_its_flow_imports_its_own(
    module: Module, recorder: LogRecorder, ours: Family
) -> None:
    with nothing_left(), prestarting(f"{module.name}:another", slots=0):
        log = log_to(recorder)
        with process_pool(log, slots=0) as pool:
            pool.prepare(f"{module.name}:train", log)
            with pool.process(module.start(1), log) as channel:
                metrics_of(channel)
                assert len(ours.pids("trial")) <= 1
