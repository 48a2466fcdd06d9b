"""No process of a trial outlives it, however it was started; child processes behave as outside a trial."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_channel import TrialChannel, open_trial_thread
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.messages.process_messages import (
    CheckpointAndStop,
    CheckpointSaved,
    FromTrial,
    Start,
    StepDone,
    TrainingEnded,
)
from prefect_tune.core.reasons import get_reason_code
from tests.fakes.supervisors import TIMEOUT_SECONDS, SupervisedTrial, supervise_trial
from tests.fakes.trial_processes import (
    Family,
    LogRecorder,
    children_of,
    family,
    make_log,
    make_start,
    read_proc,
    receive_metrics,
    started_process,
    supervised_process,
    wait_until,
)
from tests.trainables.processes import parallel
from tests.trainables.witness import acts_of


def wait_for_all_ends(run: SupervisedTrial) -> None:
    """Wait for the end of all processes, without killing any."""
    wait_until(lambda: not run.living_pids(), seconds=TIMEOUT_SECONDS, what=lambda: f"the end of {run.living_pids()}")


@pytest.mark.parametrize(("way", "stubborn"), [("search", False), ("training", True), ("elsewhere", False)])
@pytest.mark.parametrize("killed", ["supervisor", "trial"])
def test_all_that_a_trial_has_started_ends_when_it_or_its_supervisor_is_killed_even_if_it_ignores_sigterm(
    tmp_path: Path, way: str, stubborn: bool, killed: str, record_property: Callable[[str, object], None]
) -> None:
    with supervise_trial(tmp_path, way, stubborn=stubborn) as run:
        run.kill(killed)
        start_time = time.monotonic()
        wait_for_all_ends(run)
        record_property(f"seconds until nothing lived: {way}, {killed}", round(time.monotonic() - start_time, 3))
        if killed == "trial":
            wait_until((tmp_path / "ended").exists, seconds=TIMEOUT_SECONDS, what=lambda: "the supervisor's notice")


@pytest.mark.parametrize("killed", ["supervisor", "trial"])
def test_of_a_started_process_what_is_in_its_process_group_ends_and_the_rest_lives_on(
    tmp_path: Path, killed: str
) -> None:
    """A limit of systems other than Linux."""
    with supervise_trial(tmp_path, "started", stubborn=True) as run:
        elsewhere = run.started_pids - {run.child_pid}
        run.kill(killed)
        living = run.living_pids
        wait_until(lambda: living() == elsewhere, seconds=TIMEOUT_SECONDS, what=lambda: f"the end of {living()}")
        for pid in elsewhere:
            os.kill(pid, signal.SIGKILL)


_SUBREAPER, _FORK_SERVER = "tune-subreaper", "tune-forkserver"
_KILLED = [
    (_SUBREAPER,),
    (_SUBREAPER, "trial"),
    (_FORK_SERVER, "trial"),
    pytest.param((_SUBREAPER, "supervisor"), marks=pytest.mark.deep),
    pytest.param((_SUBREAPER, "trial", "supervisor"), marks=pytest.mark.deep),
    pytest.param((_FORK_SERVER, "supervisor"), marks=pytest.mark.deep),
    pytest.param((_FORK_SERVER, "trial", "supervisor"), marks=pytest.mark.deep),
]


@pytest.mark.long
@pytest.mark.parametrize("killed", _KILLED, ids=" and ".join)
@pytest.mark.parametrize("way", ["search", pytest.param("elsewhere", marks=pytest.mark.deep)])
def test_of_the_subreaper_and_the_fork_server_one_is_enough(tmp_path: Path, way: str, killed: tuple[str, ...]) -> None:
    with supervise_trial(tmp_path, way) as run:
        run.kill(*killed)
        wait_for_all_ends(run)


def test_the_fork_server_stays_for_a_subreaper_that_is_killed_after_their_supervisor(tmp_path: Path) -> None:
    with supervise_trial(tmp_path, "search") as run:
        subreaper = run.family.wait_for_one("tune-subreaper")
        os.kill(subreaper, signal.SIGSTOP)  # it has not started its work
        run.kill("supervisor")
        time.sleep(0.3)
        os.kill(subreaper, signal.SIGKILL)
        wait_for_all_ends(run)


def test_a_fork_server_that_is_killed_takes_nothing_along(tmp_path: Path) -> None:
    with supervise_trial(tmp_path, "search") as run:
        run.kill("tune-forkserver")
        wait_until(lambda: not run.family.pids("tune-forkserver"), what=lambda: "its end")
        assert run.living_pids() == {run.trial_pid, *run.started_pids}


def test_a_kill_of_the_fork_servers_group_leaves_the_subreaper(tmp_path: Path) -> None:
    with supervise_trial(tmp_path, "search") as run:
        os.killpg(run.family.wait_for_one("tune-forkserver"), signal.SIGKILL)
        run.kill("trial")
        wait_for_all_ends(run)


def test_with_both_killed_at_once_the_trial_dies_and_what_it_has_started_lives_on(tmp_path: Path) -> None:
    """A limit of the guarantee."""
    with supervise_trial(tmp_path, "search") as run:
        run.kill("tune-forkserver", "tune-subreaper")
        wait_until(lambda: run.living_pids() == run.started_pids, seconds=TIMEOUT_SECONDS, what=lambda: "its end")
        time.sleep(0.3)
        assert run.living_pids() == run.started_pids
        for pid in run.started_pids:
            os.kill(pid, signal.SIGKILL)


def test_what_a_trial_has_started_has_the_subreaper_for_its_parent_once_its_own_is_gone(tmp_path: Path) -> None:
    with supervise_trial(tmp_path, "elsewhere") as run:
        children = children_of(run.family.wait_for_one("tune-subreaper"))
        assert {run.orphan_pid, run.trial_pid} <= set(children)


LOG = make_log(LogRecorder())
_TIMEOUT_SECONDS = 100.0  # the machine may be busy with other tests; some start many Python processes
_WAYS = [name for name in parallel.WORKERS if name != "DataLoader"]

Opener = Callable[[Start, Log], AbstractContextManager[TrialChannel]]


@contextmanager
def search_pool() -> Iterator[Opener]:
    """Start trial processes like `pt.tune`."""
    with TrialProcessPool(slots=len(_WAYS)) as pool:
        yield pool.open_process


@contextmanager
def single_trial_pool() -> Iterator[Opener]:
    """Start trial processes like `pt.durable_trainable`, workers of Dask and Ray, and runs of deployments."""
    with TrialProcessPool(slots=0) as pool:
        yield pool.open_process


# --------------------------------------------------------------------------------------- as outside a trial

_POOLS: Mapping[str, Callable[[], AbstractContextManager[Opener]]] = {
    "a search's": search_pool,
    "by itself": single_trial_pool,
    "without Linux": lambda: nullcontext(started_process),
}


@pytest.fixture(params=list(_POOLS))
def open_process(request: pytest.FixtureRequest) -> Iterator[Opener]:
    with _POOLS[request.param]() as open_process:
        yield open_process


def train_and_measure(open_process: Opener, trainable: object, folder: Path, **config: object) -> Mapping[str, Any]:
    with open_process(make_start(trainable, folder, {"witness": str(folder / "witness"), **config}), LOG) as channel:
        return receive_metrics(channel)


def test_a_forked_worker_ends_by_the_signals_that_end_it_outside_a_trial(open_process: Opener, tmp_path: Path) -> None:
    by_sigterm, by_ctrl_c = train_and_measure(open_process, parallel.terminate_workers, tmp_path)["codes"]
    assert (by_sigterm, by_ctrl_c) == (-signal.SIGTERM, 1)


def test_a_worker_that_is_terminated_as_it_is_forked_ends_too(tmp_path: Path) -> None:
    metrics = train_and_measure(supervised_process, parallel.terminate_early, tmp_path, rounds=100)
    assert metrics["codes"] == [-signal.SIGTERM]


def test_threads_of_a_trial_fork_side_by_side_and_no_signal_stays_blocked(tmp_path: Path) -> None:
    metrics = train_and_measure(supervised_process, parallel.fork_from_threads, tmp_path)
    assert (metrics["codes"], metrics["blocked"]) == ([-signal.SIGTERM], 0)


def test_a_worker_of_a_trial_in_a_thread_of_the_flow_ends_as_well(tmp_path: Path) -> None:
    assert train_and_measure(open_trial_thread, parallel.terminate_workers, tmp_path)["codes"] == [-signal.SIGTERM, 1]


# ------------------------------------------------------------------------------------- each end of the trial


def train_and_end(open_process: Opener, folder: Path, ending: str, way: str) -> list[int]:
    """Train with workers, and end the trial; return the processes that reported."""
    folder.mkdir()
    witness = folder / "witness"
    config = {"witness": str(witness), "way": way, "steps": 3 if ending == "by itself" else 10_000}
    with open_process(make_start(parallel.train_with_workers, folder, config), LOG) as channel:
        last = _receive_last_message(channel, lambda: _end_trial(ending, channel, witness))
        assert isinstance(last, TrainingEnded | None), (way, last)
        code = None if last is None else get_reason_code(last.outcome.reason)
        assert code == {"killed": None, "asked to stop": "saved-as-requested"}.get(ending, "returned"), (way, last)
        channel.end()
    return sorted(read_trial_pids(witness))


def _receive_last_message(channel: TrialChannel, on_second_step: Callable[[], None]) -> FromTrial | None:
    """Acknowledge checkpoints until the trial ends; return its last message, or None if it died."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            message = channel.receive(timedelta(seconds=0.1))
        except EOFError:
            return None
        if isinstance(message, TrainingEnded):
            return message
        if isinstance(message, StepDone):
            if message.report.step == 2:
                on_second_step()
            channel.send(CheckpointSaved(step=message.report.step))
    raise AssertionError(f"not over within {_TIMEOUT_SECONDS:g} s: a trial")


def read_trial_pids(witness: Path) -> set[int]:
    return {act.pid for act in acts_of(witness) if act.act == "trained"}


def _end_trial(ending: str, channel: TrialChannel, witness: Path) -> None:
    if ending == "killed":
        (pid,) = read_trial_pids(witness)
        os.kill(pid, signal.SIGKILL)
    elif ending == "asked to stop":
        channel.send(CheckpointAndStop())


def find_shared_memory(pids: list[int], folder: Path) -> list[str]:
    """Return the files in shared memory that these processes named, or whose names have their pids."""
    names = [path.read_text() for path in folder.rglob("*.shared")]
    pattern = re.compile("|".join([rf"\b({'|'.join(map(str, pids))})\b", *map(re.escape, names)]).replace("_", "[_-]"))
    return [entry.name for entry in Path("/dev/shm").iterdir() if pattern.search(entry.name.replace("_", "-"))]


def require_no_process_left(
    processes: Family, ending: str, open_process: Opener, folder: Path, ways: list[str]
) -> None:
    """Train in all ways in parallel; require that no process outlives its trial."""
    with ThreadPoolExecutor(4) as threads:
        trials = threads.map(lambda way: train_and_end(open_process, folder / way, ending, way), ways)
        pids = [pid for trial in trials for pid in trial]
    assert len(pids) == len(ways)
    assert processes.names() <= {"tune-forkserver", "tune-subreaper", "trial"}
    assert not set(pids) & set(processes.pids())
    wait_until(lambda: not find_shared_memory(pids, folder), what=lambda: str(find_shared_memory(pids, folder)))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ending", ["by itself", "killed", "asked to stop"])
@pytest.mark.parametrize("pool_context", [search_pool, pytest.param(single_trial_pool, marks=pytest.mark.deep)])
def test_processes_of_a_trainable_end_with_the_trial_by_whatever_way_they_were_started(
    pool_context: Callable[[], AbstractContextManager[Opener]], ending: str, tmp_path: Path
) -> None:
    with family() as processes, pool_context() as open_process:
        require_no_process_left(processes, ending, open_process, tmp_path, _WAYS)


def _list_resource_trackers(processes: Family) -> list[int]:
    return [pid for pid in processes.pids() if b"resource_tracker" in read_proc(pid, "cmdline")]


def test_a_resource_tracker_that_is_slow_still_removes_what_its_trial_left_in_shared_memory(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    with family() as processes, single_trial_pool() as open_process:
        start = make_start(parallel.leave_shared_memory, tmp_path, {"witness": str(witness)})
        with open_process(start, LOG) as channel:
            wait_until(lambda: acts_of(witness), seconds=_TIMEOUT_SECONDS, what=lambda: "a trial")
            trial = acts_of(witness)[0].pid
            wait_until(lambda: _list_resource_trackers(processes), seconds=_TIMEOUT_SECONDS, what=lambda: "its tracker")
            (tracker,) = _list_resource_trackers(processes)
            os.kill(tracker, signal.SIGSTOP)
            os.kill(trial, signal.SIGKILL)
            wait_until(lambda: not processes.pids("sleep"), what=lambda: "the end of what ignores SIGTERM")
            os.kill(tracker, signal.SIGCONT)
            channel.end()
    assert not find_shared_memory([trial], tmp_path)


@pytest.mark.integrations
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ending", ["by itself", "killed", "asked to stop"])
@pytest.mark.parametrize("pool_context", [search_pool, single_trial_pool])
def test_workers_of_a_data_loader_end_with_the_trial(
    pool_context: Callable[[], AbstractContextManager[Opener]], ending: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    with family() as processes, pool_context() as open_process:
        require_no_process_left(processes, ending, open_process, tmp_path, ["DataLoader"])
