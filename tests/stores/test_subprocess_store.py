from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from prefect_tune.core.errors import CommitUnknown, DeadlineExceeded, InvalidInput, StoreRefused, StoreUnavailable
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.open_location import open_fsspec_store
from prefect_tune.stores.posix_store import PosixStore
from prefect_tune.stores.subprocess_store import SubprocessStore
from tests.fakes.stores.racers import race_to_create
from tests.fakes.stores.slow_stores import HangsInConstructor, MoodyStore
from tests.stores.contract import StoreContract

TIMEOUT = timedelta(seconds=1.5)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SubprocessStore]:
    """One pool of children for the whole contract: starting them is slow."""
    with _make_store(tmp_path_factory.mktemp("isolated")) as store:
        yield store


class TestSubprocessStore(StoreContract):
    @pytest.fixture
    def store(self, shared_store: SubprocessStore) -> Iterator[SubprocessStore]:
        yield shared_store
        shared_store.delete([listed.path for listed in shared_store.list("")])


def _make_store(root: Path, timeout: timedelta = timedelta(seconds=60), max_children: int = 4) -> SubprocessStore:
    return SubprocessStore(partial(MoodyStore, str(root)), deadline=Deadline.after(timeout), max_children=max_children)


def _is_running(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def _wait_for_exit(seconds: float, pid: int) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and _is_running(pid):
        time.sleep(0.02)
    return not _is_running(pid)


def test_a_hung_write_ends_at_the_deadline_and_its_process_with_it(tmp_path: Path) -> None:
    with _make_store(tmp_path, TIMEOUT, max_children=1) as store:
        child = int(store.read("pid"))
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"put of 'hang'.*1\.5 s"):
            store.put("hang", b"")
        assert time.monotonic() - start < TIMEOUT.total_seconds() + 1
        assert not _is_running(child)


def test_a_hung_create_is_not_known(tmp_path: Path) -> None:
    with _make_store(tmp_path, TIMEOUT) as store, pytest.raises(CommitUnknown, match="read it back"):
        store.create("hang", b"")


def test_a_constructor_that_hangs_ends_at_the_deadline_and_nothing_is_written() -> None:
    deadline = Deadline.after(TIMEOUT)
    with SubprocessStore(HangsInConstructor, deadline=deadline) as store, pytest.raises(DeadlineExceeded):
        store.create("a", b"")


def test_callers_that_wait_for_a_child_end_at_the_deadline_too(tmp_path: Path) -> None:
    start = time.monotonic()
    with _make_store(tmp_path, TIMEOUT, max_children=2) as store, ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(store.put, f"hang/{number}", b"") for number in range(8)]
        assert [type(call.exception()) for call in calls] == [DeadlineExceeded] * 8
    assert time.monotonic() - start < TIMEOUT.total_seconds() + 1.5


def test_a_child_that_dies_is_unavailable_and_the_next_call_has_a_new_one(tmp_path: Path) -> None:
    with _make_store(tmp_path, max_children=1) as store:
        first = store.read("pid")
        with pytest.raises(StoreUnavailable, match="exit code -9"):
            store.put("die", b"")
        assert store.read("pid") != first


def test_a_machine_without_another_process_is_unavailable_and_the_next_call_has_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with _make_store(tmp_path, max_children=1) as store:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            with pytest.raises(StoreUnavailable, match="create of 'a': its child process cannot be started"):
                store.create("a", b"1")
        store.create("a", b"1")


@pytest.mark.parametrize(("name", "survives"), [("die", False), ("then-die", True)])
def test_a_child_that_dies_in_a_create_leaves_it_unknown(tmp_path: Path, name: str, *, survives: bool) -> None:
    with _make_store(tmp_path) as store:
        with pytest.raises(CommitUnknown, match="read it back"):
            store.create(name, b"1")
        assert (store.size(name) == 1) == survives


def test_a_child_killed_between_two_calls_costs_one_call(tmp_path: Path) -> None:
    with _make_store(tmp_path, max_children=1) as store:
        os.kill(int(store.read("pid")), signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            store.put("a", b"1")
        store.put("a", b"1")
        assert store.size("a") == 1


def test_the_answer_of_an_interrupted_call_is_not_given_to_the_next_caller(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with _make_store(tmp_path, max_children=1) as store:
            child = store.read("pid")
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                store.read("sleep")
            assert store.read("pid") not in {child, b"slept"}
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_bug_of_the_store_is_raised_with_its_traceback(tmp_path: Path) -> None:
    with _make_store(tmp_path) as store, pytest.raises(RuntimeError, match="a bug of the store's"):
        store.put("bug", b"")


def test_what_the_store_raises_is_raised_here(tmp_path: Path) -> None:
    with _make_store(tmp_path / "missing") as store, pytest.raises(StoreUnavailable, match="the root does not exist"):
        store.create("a", b"")


def test_pieces_that_the_store_did_not_take_are_no_later_request(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    with _make_store(root, max_children=1) as store:
        store.put("object", b"1")
        child = store.read("pid")
        root.rename(elsewhere)
        with pytest.raises(StoreUnavailable, match="the root does not exist"):
            store.replace("object", [b"1", b"2", b"3"])
        elsewhere.rename(root)
        assert store.size("object") == 1
        assert store.read("pid") == child


def test_pieces_that_cannot_be_read_to_the_end_replace_nothing(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise InvalidInput("a bad disk")

    with _make_store(tmp_path, max_children=1) as store:
        store.put("object", b"1")
        with pytest.raises(InvalidInput, match="a bad disk"):
            store.replace("object", pieces())
        assert store.read("object") == b"1"


def test_a_path_is_refused_before_a_child_is_asked() -> None:
    with SubprocessStore(HangsInConstructor) as store, pytest.raises(InvalidInput):
        store.put("../x", b"")


def test_a_store_that_cannot_be_made_says_why() -> None:
    missing = partial(import_module, "no_such_module")
    with SubprocessStore(missing) as store, pytest.raises(StoreRefused, match="no_such_module"):  # type: ignore[arg-type]  # it makes none
        store.size("a")


def test_threads_share_the_children_and_work_side_by_side(tmp_path: Path) -> None:
    with _make_store(tmp_path, max_children=4) as store, ThreadPoolExecutor(8) as pool:
        pids = {bytes(pid) for pid in pool.map(lambda _: store.read("pid"), range(40))}
        assert 1 <= len(pids) <= 4
        start = time.monotonic()
        list(pool.map(lambda _: store.read("sleep"), range(4)))
        assert time.monotonic() - start < 4 * 0.3


def test_closing_leaves_no_process_behind_and_refuses_further_calls(tmp_path: Path) -> None:
    store = _make_store(tmp_path)
    child = int(store.read("pid"))
    store.close()
    assert not _is_running(child)
    with pytest.raises(StoreUnavailable, match="closed"):
        store.size("a")


def test_closing_ends_an_operation_under_way(tmp_path: Path) -> None:
    store = _make_store(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(store.put, "hang", b"")
        time.sleep(0.5)
        store.close()
        assert isinstance(call.exception(timeout=10), StoreUnavailable)


def test_a_child_does_not_import_prefect(tmp_path: Path) -> None:
    with _make_store(tmp_path) as store:
        modules = store.read("modules").decode().splitlines()
    assert "prefect_tune.stores.posix_store" in modules
    assert not {"prefect", "pyarrow", "pydantic"} & set(modules)


ORPHAN = """
import sys
from functools import partial
from prefect_tune.stores.subprocess_store import SubprocessStore
from tests.fakes.stores.slow_stores import MoodyStore
store = SubprocessStore(partial(MoodyStore, sys.argv[1]), max_children=1)
print(store.read("pid").decode(), flush=True)
store.put("drip", b"")
"""


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    command, environment = [sys.executable, "-c", ORPHAN, str(tmp_path)], {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    while not (tmp_path / "dripped").exists():
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    assert _wait_for_exit(3, child)


def test_an_isolated_file_store_is_a_conditional_one(tmp_path: Path) -> None:
    with SubprocessStore(partial(PosixStore, tmp_path)) as store:
        assert store.has_conditional_create


@pytest.mark.long
def test_of_two_whose_children_know_nothing_of_each_other_one_creates_an_object(tmp_path: Path) -> None:
    factory = partial(open_fsspec_store, "local", str(tmp_path), {})
    with SubprocessStore(factory) as one, SubprocessStore(factory) as other:
        assert not one.has_conditional_create
        assert race_to_create([one, other], 50) == [1] * 50
