"""Fork servers, the processes that import a trainable and fork its trials: kills, and their recovery."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes import fork_servers, process_pool
from prefect_tune.attempt.processes.process_pool import TrialProcessPool, worker_pool
from prefect_tune.core.reasons import ProcessEnd
from tests.attempt.processes.modules import Module
from tests.fakes.trial_processes import Family, LogRecorder, log_to, messages_of, metrics_of, nothing_left, until
from tests.long_cases import long_after

pytestmark = pytest.mark.usefixtures("ours")  # fails if a process outlives its test

WAITS_FOR = """
import subprocess, time
def measured(config):
    if config["x"] == 0:
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    return {"x": config["x"]}
"""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill(ours: Family, whom: str) -> None:
    template = ours.one("tune-template")
    subreaper = parent_of(template)
    victims = {
        "the template": [template],
        "its subreaper": [subreaper],
        "the fork server": [parent_of(subreaper)],
    }
    for victim in victims[whom]:
        os.kill(victim, signal.SIGKILL)


@pytest.mark.parametrize("whom", ["the template", "its subreaper"])
def test_a_kill_during_the_import_ends_what_it_has_started_and_no_trial(
    module: Module, ours: Family, recorder: LogRecorder, tmp_path: Path, whom: str
) -> None:
    flag = tmp_path / "flag"
    module.write(f"""
        import subprocess, time
        if not os.path.exists({str(flag)!r}):
            subprocess.Popen(["sleep", "600"])
            open({str(flag)!r}, "w").close()
            time.sleep(600)
        def measured(config): return {{"x": config["x"]}}
    """)
    with nothing_left(), TrialProcessPool(slots=2, reuse="auto") as pool:
        pool.prepare(f"{module.name}:train", log_to(recorder))
        until(flag.exists, what=lambda: "an import")
        (template,) = pool._servers._templates.values()
        until(
            lambda: template.process is not None, what=lambda: "the answer of the fork server"
        )  # else it is replaced unsaid
        kill(ours, whom)
        until(lambda: not ours.pids("sleep"), what=lambda: f"the end of what it started, not {ours.names()}")
        with pool.process(module.start(1), log_to(recorder)) as channel:
            assert metrics_of(channel)["x"] == 1
    assert "its import ended the process" in recorder.reasons[0]


@pytest.mark.parametrize("whom", long_after(1, ["the template", "its subreaper"]))
def test_a_kill_while_trials_run_costs_an_attempt_of_each_and_the_next_are_forked_again(
    module: Module, ours: Family, recorder: LogRecorder, whom: str
) -> None:
    module.write(WAITS_FOR)

    def two_attempts(pool: TrialProcessPool) -> dict[str, Any]:
        with pool.process(module.start(0), log_to(recorder)) as channel:
            messages_of(channel)
            assert channel.end() == ProcessEnd(signal="SIGKILL")
        with pool.process(module.start(1), log_to(recorder)) as channel:
            return dict(metrics_of(channel))

    with nothing_left(), TrialProcessPool(slots=3, reuse="auto") as pool, ThreadPoolExecutor(3) as threads:
        found = [threads.submit(two_attempts, pool) for _ in range(3)]
        until(lambda: len(ours.pids("sleep")) == 3, what=lambda: f"three trials, not {ours.names()}")
        kill(ours, whom)
        pids = {each.result()["pid"] for each in found}
        last = forked_again(module, pool, recorder)
    assert len({*pids, last}) == 4
    assert recorder.reasons == []


def forked_again(module: Module, pool: TrialProcessPool, recorder: LogRecorder) -> int:
    """Train once more; return the process, which imports nothing."""
    with pool.process(module.start(1), log_to(recorder)) as channel:
        pid = int(metrics_of(channel)["pid"])
    assert pid not in module.imports
    return pid


def test_a_killed_fork_server_leaves_the_template_and_its_trials(
    module: Module, ours: Family, recorder: LogRecorder
) -> None:
    module.write(WAITS_FOR)
    with TrialProcessPool(slots=2, reuse="auto") as pool, pool.process(module.start(0), log_to(recorder)) as channel:
        until(lambda: ours.pids("sleep"), what=lambda: "a trial")
        kill(ours, "the fork server")
        forked_again(module, pool, recorder)
        assert channel.end() == ProcessEnd(signal="SIGKILL")  # by this call
    assert len(module.imports) == 1


def test_a_request_that_cannot_be_written_leaves_no_process_that_waits_for_it(
    module: Module, ours: Family, recorder: LogRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with nothing_left(), TrialProcessPool(slots=1, reuse="auto") as pool:
        monkeypatch.setattr("os.memfd_create", full)
        with pool.process(module.start(7), log_to(recorder)) as channel:
            assert metrics_of(channel)["x"] == 7
        until(lambda: not ours.pids("tune-template"), what=lambda: f"no template, not {ours.names()}")
    assert "No space left on device" in recorder.reasons[0]


@pytest.mark.long
@pytest.mark.parametrize(("process", "said"), [(1, "was forked within 3 s"), (2, "did not begin its trial within 3 s")])
def test_a_fork_that_hangs_before_its_trial_begins_is_replaced_by_a_process_of_its_own(
    module: Module,
    ours: Family,
    recorder: LogRecorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: int,
    said: str,
) -> None:
    module.write(f"""
        import time
        def hang_later():
            global depth
            depth += 1
            if depth == {process} and os.path.exists({str(tmp_path / "hang")!r}):
                time.sleep(600)
        depth = 0
        os.register_at_fork(after_in_child=hang_later)
        def measured(config):
            open({str(tmp_path / "hang")!r}, "w").close()
            return {{"x": config["x"]}}
    """)
    pids = []
    with nothing_left(), TrialProcessPool(slots=1, reuse="auto") as pool:
        for x in range(3):
            with pool.process(module.start(x), log_to(recorder)) as channel:
                pids.append(metrics_of(channel)["pid"])
            pool.dismiss()
            until(lambda: len(ours.pids("tune-subreaper")) <= 1, what=lambda: f"the template's, not {ours.names()}")
            monkeypatch.setattr(fork_servers, "_FORK_TIMEOUT", timedelta(seconds=3))
            monkeypatch.setattr(process_pool, "_BEGIN_TIMEOUT", timedelta(seconds=3))
    assert pids[0] not in module.imports
    assert pids[1:] == module.imports[1:]
    assert [said in each for each in recorder.lines if "cannot be forked after its import" in each] == [True]


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
    monkeypatch.setattr(process_pool, "_IDLE_TIMEOUT", timedelta(0))
    with worker_pool("search", "auto") as pool, pool.process(module.start(), log_to(recorder)) as channel:
        metrics_of(channel)
    ours.require_none()
