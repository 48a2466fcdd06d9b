"""No process of a trial outlives it, however the processes started, in any session, whichever process is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.supervisors import PATIENCE_SECONDS, WAYS, Watched, watched
from tests.fakes.trial_processes import children_of, until


def require_nothing_living(seen: Watched) -> None:
    """Wait until no process lives, without killing any."""
    until(lambda: not seen.living(), seconds=PATIENCE_SECONDS, what=lambda: f"the end of {seen.living()}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("killed", ["supervisor", "trial"])
def test_all_that_a_trial_has_started_ends_when_it_or_its_supervisor_is_killed(
    tmp_path: Path, way: str, killed: str, record_property: Callable[[str, object], None]
) -> None:
    with watched(tmp_path, way) as seen:
        seen.kill(killed)
        began = time.monotonic()
        require_nothing_living(seen)
        record_property(f"seconds until nothing lived: {way}, {killed}", round(time.monotonic() - began, 3))
        if killed == "trial":
            ended = (tmp_path / "ended").exists
            until(ended, seconds=PATIENCE_SECONDS, what=lambda: "word of it to the supervisor")


@pytest.mark.parametrize("killed", ["supervisor", "trial"])
def test_what_does_not_end_by_sigterm_is_killed(
    tmp_path: Path, killed: str, record_property: Callable[[str, object], None]
) -> None:
    with watched(tmp_path, "training", stubborn=True) as seen:
        seen.kill(killed)
        began = time.monotonic()
        require_nothing_living(seen)
        record_property(f"seconds until nothing lived: stubborn, {killed}", round(time.monotonic() - began, 3))


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
    with watched(tmp_path, way) as seen:
        seen.kill(*killed)
        require_nothing_living(seen)


def test_the_fork_server_stays_for_a_subreaper_that_is_killed_after_their_supervisor(tmp_path: Path) -> None:
    with watched(tmp_path, "search") as seen:
        subreaper = seen.ours.one("tune-subreaper")
        os.kill(subreaper, signal.SIGSTOP)  # it has not started its work
        seen.kill("supervisor")
        time.sleep(0.3)
        os.kill(subreaper, signal.SIGKILL)
        require_nothing_living(seen)


def test_a_fork_server_that_is_killed_takes_nothing_along(tmp_path: Path) -> None:
    with watched(tmp_path, "search") as seen:
        seen.kill("tune-forkserver")
        until(lambda: not seen.ours.pids("tune-forkserver"), what=lambda: "its end")
        assert seen.living() == {seen.trial, *seen.started}


def test_a_kill_of_the_fork_servers_group_leaves_the_subreaper(tmp_path: Path) -> None:
    with watched(tmp_path, "search") as seen:
        os.killpg(seen.ours.one("tune-forkserver"), signal.SIGKILL)
        seen.kill("trial")
        require_nothing_living(seen)


def test_with_both_killed_at_once_the_trial_dies_and_what_it_has_started_lives_on(tmp_path: Path) -> None:
    """Documents the limit of the guarantee."""
    with watched(tmp_path, "search") as seen:
        seen.kill("tune-forkserver", "tune-subreaper")
        until(lambda: seen.living() == seen.started, seconds=PATIENCE_SECONDS, what=lambda: "the end of the trial")
        time.sleep(0.3)
        assert seen.living() == seen.started
        for pid in seen.started:
            os.kill(pid, signal.SIGKILL)


def test_what_a_trial_has_started_has_the_subreaper_for_its_parent_once_its_own_is_gone(tmp_path: Path) -> None:
    with watched(tmp_path, "elsewhere") as seen:
        children = children_of(seen.ours.one("tune-subreaper"))
        assert {seen.orphan, seen.trial} <= set(children)
