"""No process of a trial outlives it, however the processes started; its child processes behave as outside a trial."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.attempt.processes.process_channel import TrialChannel, trial_in_thread
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.processes.process_pool import TrialProcessPool
from prefect_tune.core.messages.process_messages import (
    CheckpointAndStop,
    CheckpointSaved,
    FromTrial,
    Start,
    StepDone,
    TrialEnded,
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


def require_nothing_living(seen: SupervisedTrial) -> None:
    """Wait until no process lives, without killing any."""
    wait_until(lambda: not seen.living_pids(), seconds=TIMEOUT_SECONDS, what=lambda: f"the end of {seen.living_pids()}")


@pytest.mark.parametrize(("way", "stubborn"), [("search", False), ("training", True), ("elsewhere", False)])
@pytest.mark.parametrize("killed", ["supervisor", "trial"])
def test_all_that_a_trial_has_started_ends_when_it_or_its_supervisor_is_killed_even_if_it_ignores_sigterm(
    tmp_path: Path, way: str, stubborn: bool, killed: str, record_property: Callable[[str, object], None]
) -> None:
    with supervise_trial(tmp_path, way, stubborn=stubborn) as seen:
        seen.kill(killed)
        began = time.monotonic()
        require_nothing_living(seen)
        record_property(f"seconds until nothing lived: {way}, {killed}", round(time.monotonic() - began, 3))
        if killed == "trial":
            ended = (tmp_path / "ended").exists
            wait_until(ended, seconds=TIMEOUT_SECONDS, what=lambda: "word of it to the supervisor")


@pytest.mark.parametrize("killed", ["supervisor", "trial"])
def test_of_a_started_process_what_is_in_its_process_group_ends_and_the_rest_lives_on(
    tmp_path: Path, killed: str
) -> None:
    """Documents the limit of systems other than Linux."""
    with supervise_trial(tmp_path, "started", stubborn=True) as seen:
        elsewhere = seen.started_pids - {seen.child_pid}
        seen.kill(killed)
        wait_until(
            lambda: seen.living_pids() == elsewhere,
            seconds=TIMEOUT_SECONDS,
            what=lambda: f"the end of {seen.living_pids()}",
        )
        for pid in elsewhere:
            os.kill(pid, signal.SIGKILL)


_SUBREAPER, _FORK_SERVER = "tune-subreaper", "tune-forkserver"
_GUARDS = [
    (_SUBREAPER,),
    (_SUBREAPER, "trial"),
    (_FORK_SERVER, "trial"),
    *(
        pytest.param(each, marks=pytest.mark.deep)
        for each in [
            (_SUBREAPER, "supervisor"),
            (_SUBREAPER, "trial", "supervisor"),
            (_FORK_SERVER, "supervisor"),
            (_FORK_SERVER, "trial", "supervisor"),
        ]
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("killed", _GUARDS, ids=" and ".join)
@pytest.mark.parametrize("way", ["search", pytest.param("elsewhere", marks=pytest.mark.deep)])
def test_of_the_subreaper_and_the_fork_server_one_is_enough(tmp_path: Path, way: str, killed: tuple[str, ...]) -> None:
    with supervise_trial(tmp_path, way) as seen:
        seen.kill(*killed)
        require_nothing_living(seen)


def test_the_fork_server_stays_for_a_subreaper_that_is_killed_after_their_supervisor(tmp_path: Path) -> None:
    with supervise_trial(tmp_path, "search") as seen:
        subreaper = seen.family.wait_for_one("tune-subreaper")
        os.kill(subreaper, signal.SIGSTOP)  # it has not started its work
        seen.kill("supervisor")
        time.sleep(0.3)
        os.kill(subreaper, signal.SIGKILL)
        require_nothing_living(seen)


def test_a_fork_server_that_is_killed_takes_nothing_along(tmp_path: Path) -> None:
    with supervise_trial(tmp_path, "search") as seen:
        seen.kill("tune-forkserver")
        wait_until(lambda: not seen.family.pids("tune-forkserver"), what=lambda: "its end")
        assert seen.living_pids() == {seen.trial_pid, *seen.started_pids}


def test_a_kill_of_the_fork_servers_group_leaves_the_subreaper(tmp_path: Path) -> None:
    with supervise_trial(tmp_path, "search") as seen:
        os.killpg(seen.family.wait_for_one("tune-forkserver"), signal.SIGKILL)
        seen.kill("trial")
        require_nothing_living(seen)


def test_with_both_killed_at_once_the_trial_dies_and_what_it_has_started_lives_on(tmp_path: Path) -> None:
    """Documents the limit of the guarantee."""
    with supervise_trial(tmp_path, "search") as seen:
        seen.kill("tune-forkserver", "tune-subreaper")
        wait_until(
            lambda: seen.living_pids() == seen.started_pids,
            seconds=TIMEOUT_SECONDS,
            what=lambda: "the end of the trial",
        )
        time.sleep(0.3)
        assert seen.living_pids() == seen.started_pids
        for pid in seen.started_pids:
            os.kill(pid, signal.SIGKILL)


def test_what_a_trial_has_started_has_the_subreaper_for_its_parent_once_its_own_is_gone(tmp_path: Path) -> None:
    with supervise_trial(tmp_path, "elsewhere") as seen:
        children = children_of(seen.family.wait_for_one("tune-subreaper"))
        assert {seen.orphan_pid, seen.trial_pid} <= set(children)


# Trainables with child processes: these behave as outside a trial, and none outlives the trial.

LOG = make_log(LogRecorder())
_SLOW_SECONDS = 100.0  # the machine may be busy with other tests; some start many Python processes
_WAYS = [name for name in parallel.WORKERS if name != "DataLoader"]

Opened = Callable[[Start, Log], AbstractContextManager[TrialChannel]]


@contextmanager
def searches() -> Iterator[Opened]:
    """Start trial processes as `pt.tune` does."""
    with TrialProcessPool(slots=len(_WAYS)) as pool:
        yield pool.open_process


@contextmanager
def trains_alone() -> Iterator[Opened]:
    """Start trial processes as `pt.durable_trainable` does, workers of Dask and Ray, and runs of deployments."""
    with TrialProcessPool(slots=0) as pool:
        yield pool.open_process


# --------------------------------------------------------------------------------------- as outside a trial

_ALL: Mapping[str, Callable[[], AbstractContextManager[Opened]]] = {
    "a search's": searches,
    "by itself": trains_alone,
    "without Linux": lambda: nullcontext(started_process),
}


@pytest.fixture(params=list(_ALL))
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    with _ALL[request.param]() as made:
        yield made


def found_by(opened: Opened, trainable: object, folder: Path, **config: object) -> Mapping[str, Any]:
    with opened(make_start(trainable, folder, {"witness": str(folder / "witness"), **config}), LOG) as channel:
        return receive_metrics(channel)


def test_a_forked_worker_ends_by_the_signals_that_end_it_outside_a_trial(opened: Opened, tmp_path: Path) -> None:
    by_sigterm, by_ctrl_c = found_by(opened, parallel.terminate_workers, tmp_path)["codes"]
    assert (by_sigterm, by_ctrl_c) == (-signal.SIGTERM, 1)


def test_a_worker_that_is_terminated_as_it_is_forked_ends_too(tmp_path: Path) -> None:
    assert found_by(supervised_process, parallel.terminate_early, tmp_path, rounds=100)["codes"] == [-signal.SIGTERM]


def test_threads_of_a_trial_fork_side_by_side_and_no_signal_stays_blocked(tmp_path: Path) -> None:
    found = found_by(supervised_process, parallel.fork_from_threads, tmp_path)
    assert (found["codes"], found["blocked"]) == ([-signal.SIGTERM], 0)


def test_a_worker_of_a_trial_in_a_thread_of_the_flow_ends_as_well(tmp_path: Path) -> None:
    assert found_by(trial_in_thread, parallel.terminate_workers, tmp_path)["codes"] == [-signal.SIGTERM, 1]


# ------------------------------------------------------------------------------------- each end of the trial


def trained(opened: Opened, folder: Path, ends: str, way: str) -> list[int]:
    """Train with workers, end the trial; return the processes that reported: there must be one."""
    folder.mkdir()
    witness = folder / "witness"
    config = {"witness": str(witness), "way": way, "steps": 3 if ends == "by itself" else 10_000}
    with opened(make_start(parallel.train_with_workers, folder, config), LOG) as channel:
        last = _last_word(channel, lambda: _end(ends, channel, witness))
        assert isinstance(last, TrialEnded | None), (way, last)
        code = None if last is None else get_reason_code(last.outcome.reason)
        assert code == {"killed": None, "asked to stop": "saved-as-requested"}.get(ends, "returned"), (way, last)
        channel.end()
    return sorted(pids_of_trials(witness))


def _last_word(channel: TrialChannel, at_second_step: Callable[[], None]) -> FromTrial | None:
    """Acknowledge checkpoints until the trial ends; return its last message, None if it died without one."""
    deadline = time.monotonic() + _SLOW_SECONDS
    while time.monotonic() < deadline:
        try:
            message = channel.receive(timedelta(seconds=0.1))
        except EOFError:
            return None
        if isinstance(message, TrialEnded):
            return message
        if isinstance(message, StepDone):
            if message.report.step == 2:
                at_second_step()
            channel.send(CheckpointSaved(step=message.report.step))
    raise AssertionError(f"not over within {_SLOW_SECONDS:g} s: a trial")


def pids_of_trials(witness: Path) -> set[int]:
    return {each.pid for each in acts_of(witness) if each.act == "trained"}


def _end(ends: str, channel: TrialChannel, witness: Path) -> None:
    if ends == "killed":
        (pid,) = pids_of_trials(witness)
        os.kill(pid, signal.SIGKILL)
    elif ends == "asked to stop":
        channel.send(CheckpointAndStop())


def left_in_shared_memory(pids: list[int], folder: Path) -> list[str]:
    """Return the files in shared memory that are named after these processes, or that they named."""
    names = [path.read_text() for path in folder.rglob("*.shared")]
    mine = re.compile("|".join([rf"\b({'|'.join(map(str, pids))})\b", *map(re.escape, names)]).replace("_", "[_-]"))
    return [entry.name for entry in Path("/dev/shm").iterdir() if mine.search(entry.name.replace("_", "-"))]


def require_nothing_of(ours: Family, ends: str, opened: Opened, folder: Path, ways: list[str]) -> None:
    """Train each way, side by side; require that no process is left once the trials have ended."""
    with ThreadPoolExecutor(4) as threads:
        work = partial(trained, opened)
        pids = [pid for each in threads.map(lambda way: work(folder / way, ends, way), ways) for pid in each]
    assert len(pids) == len(ways)
    assert ours.names() <= {"tune-forkserver", "tune-subreaper", "trial"}
    assert not set(pids) & set(ours.pids())
    wait_until(lambda: not left_in_shared_memory(pids, folder), what=lambda: str(left_in_shared_memory(pids, folder)))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ends", ["by itself", "killed", "asked to stop"])
@pytest.mark.parametrize("opens", [searches, pytest.param(trains_alone, marks=pytest.mark.deep)])
def test_processes_of_a_trainable_end_with_the_trial_by_whatever_way_they_were_started(
    opens: Callable[[], AbstractContextManager[Opened]], ends: str, tmp_path: Path
) -> None:
    with family() as ours, opens() as opened:
        require_nothing_of(ours, ends, opened, tmp_path, _WAYS)


def _resource_tracker(ours: Family) -> list[int]:
    return [each for each in ours.pids() if b"resource_tracker" in read_proc(each, "cmdline")]


def test_a_resource_tracker_that_is_slow_still_removes_what_its_trial_left_in_shared_memory(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    with family() as ours, trains_alone() as opened:
        start = make_start(parallel.leave_shared_memory, tmp_path, {"witness": str(witness)})
        with opened(start, LOG) as channel:
            wait_until(lambda: acts_of(witness), seconds=_SLOW_SECONDS, what=lambda: "a trial")
            trial = acts_of(witness)[0].pid
            wait_until(lambda: _resource_tracker(ours), seconds=_SLOW_SECONDS, what=lambda: "its tracker")
            (tracker,) = _resource_tracker(ours)
            os.kill(tracker, signal.SIGSTOP)
            os.kill(trial, signal.SIGKILL)
            wait_until(lambda: not ours.pids("sleep"), what=lambda: "the end of what ignores SIGTERM")
            os.kill(tracker, signal.SIGCONT)
            channel.end()
    assert not left_in_shared_memory([trial], tmp_path)


@pytest.mark.integrations
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ends", ["by itself", "killed", "asked to stop"])
@pytest.mark.parametrize("opens", [searches, trains_alone])
def test_workers_of_a_data_loader_end_with_the_trial(
    opens: Callable[[], AbstractContextManager[Opened]], ends: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    with family() as ours, opens() as opened:
        require_nothing_of(ours, ends, opened, tmp_path, ["DataLoader"])
