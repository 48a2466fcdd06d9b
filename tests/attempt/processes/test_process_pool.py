"""Attempts in forked processes: their environment and their ends; none leaves a process behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes import fork_servers
from prefect_tune.attempt.processes.fork_servers import ForkedProcess, ForkServer
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.journal_events import Cause
from prefect_tune.core.messages.process_messages import CheckpointAndStop, Start, StepDone, TrainingEnded
from prefect_tune.core.reasons import ProcessEnd
from tests.fakes.outcomes import require_failure, require_reason
from tests.fakes.trial_processes import (
    Family,
    LogRecorder,
    children_of,
    family,
    make_log,
    make_start,
    no_leaks,
    receive_messages,
    receive_metrics,
    started_process,
    wait_until,
)
from tests.long_cases import long_after
from tests.trainables.processes.forked import block, die, exit_at_sigterm, inspect_process, leave_children, print_lines
from tests.trainables.processes.lingering import ForksInAStep, LateThread, NeverCleansUp
from tests.trainables.witness import Act, acts_of

LOG = make_log(LogRecorder())
SLOTS = 4


@pytest.fixture
def processes(module_processes: Family) -> Family:
    return module_processes


def train_and_inspect(
    pool: TrialProcessPool, folder: Path, environment: dict[str, str] | None = None, **config: object
) -> dict[str, Any]:
    with pool.open_process(make_start(inspect_process, folder, config), LOG, environment or {}) as channel:
        return dict(receive_metrics(channel))


def start_gated(trainable: object, folder: Path) -> Start:
    """Describe an attempt that records its acts in `witness` and waits for the file `gate`."""
    return make_start(trainable, folder, {"witness": str(folder / "witness"), "gate": str(folder / "gate")})


def find_acts(folder: Path, *names: str) -> list[Act]:
    return [act for act in acts_of(folder / "witness") if act.act in names]


def wait_for_fork_server_only(processes: Family) -> int:
    """Wait until only the fork server lives; return its pid."""
    pid = processes.wait_for_one("tune-forkserver")
    wait_until(lambda: processes.pids() == [pid], what=lambda: f"the end of all of {processes.pids()} but {pid}")
    return pid


def wait_for_trial(folder: Path) -> None:
    wait_until(lambda: find_acts(folder, "begin"), what=lambda: "the trial")


def test_a_trial_has_the_environment_of_this_moment_and_the_variables_of_its_own(
    pool: TrialProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GONE", "before")
    monkeypatch.setenv("TZ", "UTC")
    names = ("GONE", "CHANGED", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED")
    assert train_and_inspect(pool, tmp_path, variables=names)["environment"]["GONE"] == "'before'"
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("CHANGED", "now")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("TZ", "UTC-5")
    monkeypatch.setitem(os.environb, b"ODD", b"\xff\xe9")
    metrics = train_and_inspect(pool, tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}, variables=(*names, "ODD"))
    assert metrics["environment"] == {
        "GONE": "None",
        "CHANGED": "'now'",
        "CUDA_VISIBLE_DEVICES": "'1'",
        "PYTHONUNBUFFERED": "'1'",
        "ODD": r"'\udcff\udce9'",
    }
    assert "CUDA_VISIBLE_DEVICES=1" in metrics["in_a_child"]
    assert metrics["hour"] == 5


def test_a_trial_is_where_its_supervisor_is_and_has_a_temporary_directory_of_its_own(
    pool: TrialProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train_and_inspect(pool, tmp_path)
    monkeypatch.chdir(tmp_path)
    second = train_and_inspect(pool, tmp_path)
    assert (first["directory"], second["directory"]) == (str(Path(__file__).parents[3]), str(tmp_path))
    assert first["temporary"] != second["temporary"]
    assert not Path(first["temporary"]).exists()


def test_the_temporary_files_of_a_killed_process_stay_until_its_save_is_over_and_its_channel_closes(
    pool: TrialProcessPool, tmp_path: Path
) -> None:
    with pool.open_process(make_start(inspect_process, tmp_path, {}), LOG) as channel:
        folder = Path(receive_metrics(channel)["temporary"])
        channel.end()
        assert folder.is_dir()
    assert not folder.exists()


def test_a_supervisor_whose_directory_was_removed_still_has_its_trials(
    pool: TrialProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = tmp_path / "gone"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    with pool.open_process(make_start(print_lines, tmp_path, {"lines": 1}), LOG) as channel:
        assert isinstance(receive_messages(channel)[-1], TrainingEnded)


def read_ignored_signals() -> list[str]:
    """Return the ignored signals of a new Python process, in the format of `inspect_process`."""
    script = "import re; print(re.findall(r'SigIgn:\\s*(\\w+)', open('/proc/self/status').read())[0])"
    return subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def clear_uncompared_signals(ignored: list[str]) -> list[int]:
    """Clear SIGINT, which a background shell ignores, and 32 and 33, which glibc ignores after `posix_spawn`."""
    return [int(mask, 16) & ~(1 << (signal.SIGINT - 1)) & ~(0b11 << 31) for mask in ignored]


def test_a_trial_leads_its_own_session_and_finds_a_process_as_good_as_new(
    pool: TrialProcessPool, tmp_path: Path
) -> None:
    metrics, other = train_and_inspect(pool, tmp_path), train_and_inspect(pool, tmp_path)
    assert metrics["pid"] == metrics["session"] == metrics["group"] != other["pid"]
    assert metrics["drawn"] != other["drawn"]
    assert metrics["threads"] == 1
    assert metrics["descriptors"] == 4  # the streams, and the channel
    assert clear_uncompared_signals(metrics["ignored"]) == clear_uncompared_signals(read_ignored_signals())
    assert not {"prefect", "numpy", "pyarrow", "obstore", "rich", "typer"} & set(metrics["modules"])


def test_what_is_forked_has_one_thread_and_is_forked_again_and_again(
    pool: TrialProcessPool, processes: Family, tmp_path: Path
) -> None:
    train_and_inspect(pool, tmp_path)
    pid = processes.wait_for_one("tune-forkserver")
    train_and_inspect(pool, tmp_path)
    assert processes.wait_for_one("tune-forkserver") == pid
    assert "Threads:\t1\n" in Path(f"/proc/{pid}/status").read_text()


def test_nothing_is_started_before_it_is_needed(tmp_path: Path) -> None:
    with family() as processes, TrialProcessPool(slots=1) as pool:
        assert not processes.pids()
        pool.start_import("tests.trainables.processes.forked:inspect_process", LOG)
        wait_until(lambda: len(processes.pids()) == 1, what=lambda: f"one of {processes.names()}")  # /proc lags
        train_and_inspect(pool, tmp_path)


def test_a_group_wide_sigterm_ends_neither_a_trial_nor_what_stands_around_it(
    pool: TrialProcessPool, processes: Family, tmp_path: Path
) -> None:
    with pool.open_process(start_gated(block, tmp_path), LOG) as channel:
        wait_for_trial(tmp_path)
        for pid in processes.pids():
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(pid, number)
        os.kill(processes.wait_for_one("tune-subreaper"), signal.SIGUSR1)
        (tmp_path / "gate").touch()
        assert isinstance(receive_messages(channel)[-1], TrainingEnded)


@pytest.mark.parametrize("forks", [True, False], ids=["forked", "by itself"])
@pytest.mark.parametrize(("code", "as_method"), long_after(1, [(0, False), (None, True), (143, False)]))
def test_a_trial_whose_own_handler_of_a_signal_exits_is_not_complete(
    pool: TrialProcessPool, tmp_path: Path, forks: bool, as_method: bool, code: int | None
) -> None:
    config = {"code": code, "as_method": as_method}
    process = pool.open_process if forks else started_process
    with process(make_start(exit_at_sigterm, tmp_path, config), LOG) as channel:
        failure = require_failure(receive_messages(channel)[-1])
    assert failure.cause is Cause.MACHINE
    assert require_reason(failure).arguments["advice"]["code"] == "advice-signal-handler"


@pytest.mark.parametrize("forks", [True, False], ids=["forked", "by itself"])
@pytest.mark.parametrize(
    ("how", "expected"),
    long_after(
        2,
        [
            (3, "exited with code 3"),
            (-signal.SIGKILL, "ended by SIGKILL"),
            (0, "exited with code 0"),
            (-signal.SIGABRT, "ended by SIGABRT"),
            (-(signal.SIGRTMIN + 1), "ended by signal 35"),
            ("segfault", "ended by SIGSEGV"),
        ],
    ),
)
def test_the_exit_code_or_signal_of_a_process_is_reported_with_its_last_output(
    pool: TrialProcessPool, tmp_path: Path, forks: bool, how: object, expected: str
) -> None:
    process = pool.open_process if forks else started_process
    with process(make_start(die, tmp_path, {"how": how}), LOG) as channel:
        receive_messages(channel)
        end = channel.end()
        assert channel.end() == end
    assert str(end) == expected
    assert end.output.startswith("last words")
    assert ("Segmentation fault" in end.output) == (how == "segfault")


CALLER: ContextVar[str] = ContextVar("caller", default="unset")


def test_what_trials_print_is_logged_in_order_each_in_the_context_of_its_task(
    pool: TrialProcessPool, tmp_path: Path
) -> None:
    def train(name: str) -> LogRecorder:
        CALLER.set(name)
        recorder = LogRecorder(CALLER.get)
        with pool.open_process(make_start(print_lines, tmp_path, {"lines": 200}), make_log(recorder)) as channel:
            receive_messages(channel)
        return recorder

    names = ["one", "two", "three"]
    with ThreadPoolExecutor(len(names)) as threads:
        for name, recorder in zip(names, threads.map(train, names), strict=True):
            assert recorder.reasons == [f"line {number}" for number in range(200)]
            assert set(recorder.answers) == {name}


def test_a_trial_that_is_asked_to_stop_and_raises_reports_the_error(pool: TrialProcessPool, tmp_path: Path) -> None:
    def fail(_config: object) -> None:
        raise ValueError("shapes differ")

    with pool.open_process(make_start(fail, tmp_path), LOG) as channel:
        channel.send(CheckpointAndStop())
        failure = require_failure(receive_messages(channel)[-1])
    assert require_reason(failure).arguments["text"] == "shapes differ"


@pytest.mark.long
def test_of_200_trials_at_once_and_one_after_the_other_nothing_is_left(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    def train(number: int) -> int:
        with pool.open_process(make_start(print_lines, tmp_path, {"lines": 1}), LOG) as channel:
            assert isinstance(receive_messages(channel)[-1], TrainingEnded)
        return number

    with family() as processes, TrialProcessPool(slots=16) as pool:
        train(0)
        with no_leaks(), ThreadPoolExecutor(16) as threads:
            assert list(threads.map(train, range(200))) == list(range(200))
            pool.end_idle_processes()
        zombies = partial(children_of, wait_for_fork_server_only(processes))
        wait_until(lambda: not zombies(), what=lambda: f"the end of {zombies()}")
    record_property("figure: trials in forked processes, none of them left", 200)


def test_64_trials_run_at_once(pool: TrialProcessPool, tmp_path: Path) -> None:
    begun = partial(find_acts, tmp_path, "begin")

    def train(_number: int) -> int:
        with pool.open_process(start_gated(block, tmp_path), LOG) as channel:
            return int(receive_metrics(channel)["pid"])

    with ThreadPoolExecutor(64) as threads:
        pids = threads.map(train, range(64))
        wait_until(lambda: len(begun()) == 64, seconds=60, what=lambda: f"64 of {len(begun())}")
        (tmp_path / "gate").touch()
        assert len(set(pids)) == 64


def test_whatever_a_trial_has_started_ends_with_it_when_it_is_given_up(
    pool: TrialProcessPool, processes: Family, tmp_path: Path
) -> None:
    with pool.open_process(start_gated(leave_children, tmp_path), LOG) as channel:
        wait_for_trial(tmp_path)
        started = {act.step for act in find_acts(tmp_path, "child", "orphan")}
        assert len(started & set(processes.pids())) == 3
        channel.end()
        assert not started & set(processes.pids())  # only the subreaper, which has reported its end, may still run


def test_orphans_that_end_before_their_trial_are_reaped(
    pool: TrialProcessPool, processes: Family, tmp_path: Path
) -> None:
    with pool.open_process(start_gated(leave_children, tmp_path), LOG) as channel:
        wait_for_trial(tmp_path)
        children = partial(children_of, processes.wait_for_one("tune-subreaper"))
        wait_until(lambda: len(children()) == 2, what=lambda: f"the trial and an orphan, not {children()}")
        (tmp_path / "gate").touch()
        receive_messages(channel)


def test_a_fork_server_that_is_killed_costs_nothing(pool: TrialProcessPool, processes: Family, tmp_path: Path) -> None:
    with pool.open_process(start_gated(block, tmp_path), LOG) as channel:
        wait_for_trial(tmp_path)
        pid = processes.wait_for_one("tune-forkserver")
        os.kill(pid, signal.SIGKILL)
        metrics = train_and_inspect(pool, tmp_path)
        assert processes.wait_for_one("tune-forkserver") != pid
        (tmp_path / "gate").touch()
        assert receive_metrics(channel)["pid"] == find_acts(tmp_path, "begin")[0].pid != metrics["pid"]
        assert channel.end() == ProcessEnd(exit_code=0)


@pytest.mark.long
def test_a_fork_server_that_is_stopped_is_replaced(
    pool: TrialProcessPool, processes: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_and_inspect(pool, tmp_path)
    pid = processes.wait_for_one("tune-forkserver")
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(fork_servers, "_FORK_TIMEOUT", timedelta(seconds=15))
    train_and_inspect(pool, tmp_path)
    assert processes.wait_for_one("tune-forkserver") != pid


@pytest.mark.parametrize("stopped", ["trial", "tune-subreaper"])
def test_a_trial_that_is_stopped_or_whose_subreaper_is_can_be_ended(
    pool: TrialProcessPool, processes: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    monkeypatch.setattr(fork_servers, "_EXIT_TIMEOUT", timedelta(seconds=0.5))
    with pool.open_process(start_gated(block, tmp_path), LOG) as channel:
        wait_for_trial(tmp_path)
        os.kill(processes.wait_for_one(stopped), signal.SIGSTOP)
        assert channel.end() == ProcessEnd(signal="SIGKILL")
    pool.end_idle_processes()
    wait_for_fork_server_only(processes)


@pytest.mark.long
def test_a_machine_without_room_for_another_process_is_named_in_the_error(
    pool: TrialProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_servers, "read_fork_message", lambda *_: "failed 11")
    with pytest.raises(BlockingIOError, match="cannot be forked"), pool.open_process(make_start(block, tmp_path), LOG):
        pass


def test_an_attempt_that_still_runs_when_its_pool_is_closed_goes_on(tmp_path: Path) -> None:
    with TrialProcessPool(slots=1) as pool:
        attempt = pool.open_process(start_gated(block, tmp_path), LOG)
        channel = attempt.__enter__()
        wait_for_trial(tmp_path)
    (tmp_path / "gate").touch()
    assert isinstance(receive_messages(channel)[-1], TrainingEnded)
    attempt.__exit__(None, None, None)


_NOT_TEXT = b"\xff\xfe odd) S"


@contextmanager
def running_process_with_undecodable_name() -> Iterator[None]:
    """Run a process whose name is no UTF-8: Linux cuts names to 15 bytes, even within a character."""
    context = multiprocessing.get_context("fork")
    is_named = context.Event()

    def idle() -> None:
        ctypes.CDLL(None).prctl(15, _NOT_TEXT)
        is_named.set()
        time.sleep(600)

    process = context.Process(target=idle)
    process.start()
    try:
        assert is_named.wait(60)
        assert Path(f"/proc/{process.pid}/comm").read_bytes() == _NOT_TEXT + b"\n"
        yield
    finally:
        process.kill()
        process.join()


def test_strays_end_where_some_process_of_the_machine_has_a_name_that_is_no_text(tmp_path: Path) -> None:
    with family() as processes, running_process_with_undecodable_name(), TrialProcessPool(slots=1) as pool:
        config = {"witness": str(tmp_path / "witness"), "gate": ""}
        with pool.open_process(make_start(leave_children, tmp_path, config), LOG) as channel:
            assert isinstance(receive_messages(channel)[-1], TrainingEnded)
            assert channel.end() == ProcessEnd(exit_code=0)
        started = [act.step for act in find_acts(tmp_path, "child", "orphan")]
        assert len(started) == 3
        assert not set(started) & set(processes.pids())


def test_a_fork_that_exits_in_a_step_does_not_clean_up_what_the_trial_still_uses(tmp_path: Path) -> None:
    with family(), TrialProcessPool(slots=1) as pool:
        start = make_start(ForksInAStep, tmp_path, {"witness": str(tmp_path / "witness")}, steps=3)
        with pool.open_process(start, LOG) as channel:
            metrics = receive_metrics(channel)
            channel.end()
    assert metrics["code"] == 7
    assert [act.step for act in find_acts(tmp_path, "cleanup")] == [metrics["pid"]]


def test_a_thread_of_an_earlier_trial_cannot_report_to_the_next_one(tmp_path: Path) -> None:
    with family(), TrialProcessPool(slots=1) as pool:
        for _ in range(2):
            with pool.open_process(make_start(LateThread, tmp_path, steps=2), LOG) as channel:
                *messages, ended = receive_messages(channel)
                assert isinstance(ended, TrainingEnded), ended
                channel.end()
    results = [message.report.metrics for message in messages if isinstance(message, StepDone)]
    assert [metrics["loss"] for metrics in results] == [1.0, 1.0]
    assert "an earlier trial of this process" in str(results[-1]["became"])


def test_processes_whose_cleanup_hangs_are_waited_for_all_at_once(tmp_path: Path) -> None:
    with family(), ExitStack() as stack:
        pool = stack.enter_context(TrialProcessPool(slots=4))
        with ExitStack() as trials:
            start = make_start(NeverCleansUp, tmp_path, {"gate": str(tmp_path / "never")}, steps=1)
            for channel in [trials.enter_context(pool.open_process(start, LOG)) for _ in range(4)]:
                assert isinstance(receive_messages(channel)[-1], TrainingEnded)
        start_time = time.monotonic()
        stack.close()
        assert time.monotonic() - start_time < 15  # one by one it takes 20


_LOUD_ENVIRONMENT = {"PYTHONWARNINGS": "always::ResourceWarning", "PYTHONUNBUFFERED": "1"}


def _end_new_fork(forks: ForkServer) -> None:
    child = forks.fork()
    assert isinstance(child, ForkedProcess)
    child.connection.close()
    assert child.end(timedelta(seconds=60)) == 0


def test_a_fork_server_its_subreapers_and_their_trials_leave_no_socket_open(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in _LOUD_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    forks = ForkServer()
    _end_new_fork(forks)
    _end_new_fork(forks)
    last = forks.fork()
    assert last is not None
    forks.end()
    last.connection.close()
    assert last.end(timedelta(seconds=60)) == 0
    assert capfd.readouterr().err == ""
