"""Scratch directories, which end with their process, in the user's folder of a directory that all users share."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local import scratch
from prefect_tune.stores.local.scratch import ScratchDirectory, _machine_digest, locked_folder, make_user_folder
from tests.trainables.unreadable import make_deep

FOLDERS = ("staging", "artifacts")


def test_each_is_new_and_has_its_empty_folders() -> None:
    with ScratchDirectory(*FOLDERS) as first, ScratchDirectory(*FOLDERS) as second:
        assert first != second
        (first / "staging" / "file").write_text("left")
        for path, content in ((first, {"staging", "artifacts", "file"}), (second, {"staging", "artifacts"})):
            assert {entry.name for entry in path.rglob("*")} == content


def test_one_is_removed_with_its_content() -> None:
    with ScratchDirectory() as other:
        with ScratchDirectory(*FOLDERS) as path:
            (path / "staging" / "file").write_text("left")
        assert not path.exists()
        assert other.is_dir()


MAKE_SCRATCH = """
import os, signal, sys
from prefect_tune.stores.local.scratch import ScratchDirectory
path = ScratchDirectory("staging").path
if child := os.fork():
    print(child, path, flush=True)
    sys.stdin.read()
else:
    print(end="", flush=True)
    signal.pause()
"""


def test_that_of_a_process_stays_while_it_lives_and_goes_when_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command, environment = [sys.executable, "-c", MAKE_SCRATCH], {**os.environ, "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout
        child, path = process.stdout.readline().split()
        try:
            for file in tmp_path.rglob("*"):
                os.utime(file, (0, 0))  # as if it trained for weeks
            with ScratchDirectory():
                assert Path(path, "staging").is_dir()
            process.kill()
            process.wait()
            scratch._make_process_folder.cache_clear()  # as in another process
            with ScratchDirectory():
                assert not Path(path).parent.exists()
                assert len([*tmp_path.glob("*/*.lock")]) == 2  # this process has two
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_process_leaves_nothing_when_it_ends() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        for characters in (30, 70):
            folder = _make_long_folder(Path(base), characters)
            code = "from prefect_tune.stores.local.scratch import ScratchDirectory; print(ScratchDirectory().path)"
            command, environment = [sys.executable, "-c", code], {**os.environ, "TMPDIR": str(folder)}
            process = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            assert [*folder.glob("*/*")] == []
            assert not Path(process.stdout.strip()).parent.is_symlink()


def test_one_is_removed_however_deep_its_content_is() -> None:
    with ScratchDirectory() as path:
        make_deep(path, ["n"] * 1200)
    assert not path.exists()


def test_a_parent_that_was_tidied_away_is_made_again() -> None:
    with ScratchDirectory() as first:
        shutil.rmtree(first.parent)
        with ScratchDirectory(*FOLDERS) as second:
            assert (second / "staging").is_dir()


def test_its_path_leaves_room_for_sockets_whatever_the_machine_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has at most 107 bytes, and multiprocessing uses 32 of them."""
    monkeypatch.setattr(socket, "gethostname", lambda: "m" * 64)
    scratch._make_process_folder.cache_clear()
    with ScratchDirectory("1") as path:
        assert len(str(path / "1")) - len(tempfile.gettempdir()) <= 48


def _make_long_folder(folder: Path, characters: int) -> Path:
    """Make a folder whose path has this number of characters."""
    rest = characters - len(str(folder)) - 1
    path = folder.joinpath(*("d" * len(part) for part in textwrap.wrap("d" * rest, 200)))
    path.mkdir(parents=True)
    return path


@pytest.mark.parametrize("characters", [54, 80, 140])
def test_sockets_fit_below_it_whatever_the_length_of_tmpdir(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, characters: int
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = _make_long_folder(Path(base), characters)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        for _ in range(2):
            with ScratchDirectory("1") as path, ScratchDirectory():
                socket_path = path / "1" / "torch-shm-dir-XXXXXX" / "manager.sock"
                socket_path.parent.mkdir()
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(str(socket_path))
                assert socket_path.resolve().is_relative_to(folder)  # not in the folder of the short links
                assert path.parent.is_symlink()
        assert len(caplog.messages) == (characters > 80)
        assert all(f"has {characters} characters" in message for message in caplog.messages)


def test_a_link_that_leads_nowhere_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = _make_long_folder(Path(base), 70)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        leftover = scratch._make_short_link(folder / f"{scratch._machine_digest()}-left")
        assert leftover is not None
        with ScratchDirectory() as path:
            assert not leftover.is_symlink()
            assert path.is_dir()


def test_without_a_place_for_links_one_line_says_what_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", str(_make_long_folder(Path(base), 75)))
        monkeypatch.setattr(scratch, "_SHORT_FOLDERS", ("/nowhere",))
        for _ in range(2):
            with ScratchDirectory() as path:
                assert path.is_dir()
    (message,) = caplog.messages
    assert "has 75 characters" in message


NAME = f"prefect-tune-{os.geteuid()}"
NOBODY = 65534
# A child that only changes its user and makes a folder takes no lock that another thread might hold.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which takes root")


@pytest.fixture
def shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory like /tmp: all users write to it, only owners delete."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def call_as_nobody(shared_folder: Path, operation: Callable[[], object]) -> None:
    """Call the function in a process of the Unix user `nobody`, whose working directory is `shared_folder`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(shared_folder)  # the folders above may be unreadable
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.umask(0)
            operation()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def link_to_folder() -> None:
    Path("lair").mkdir(mode=0o777)
    Path(NAME).symlink_to("lair")


PRE_CREATED: Mapping[str, Callable[[], object]] = {
    "made open": lambda: Path(NAME).mkdir(mode=0o777),
    "made private": lambda: Path(NAME).mkdir(mode=0o700),
    "linked to a folder": link_to_folder,
    "linked to nothing": lambda: Path(NAME).symlink_to("not-there"),
    "made a file": lambda: Path(NAME).touch(),
    "made a pipe": lambda: os.mkfifo(NAME),
}


def describe_mode(path: Path) -> str:
    status = path.lstat()
    return f"{stat.S_IMODE(status.st_mode):o} of {status.st_uid}"


def test_it_is_made_for_this_user_alone_and_found_again(shared_folder: Path) -> None:
    folder = make_user_folder()
    assert folder == shared_folder / NAME
    assert describe_mode(folder) == f"700 of {os.geteuid()}"
    assert make_user_folder() == folder


@needs_root
@pytest.mark.parametrize("pre_create", PRE_CREATED.values(), ids=PRE_CREATED)
@pytest.mark.parametrize(
    "use",
    [ScratchDirectory, lambda: locked_folder("name", Deadline.never()).__enter__()],
    ids=["scratch directory", "locked folder"],
)
def test_what_another_user_made_under_the_name_is_refused_and_left_alone(
    shared_folder: Path, pre_create: Callable[[], object], use: Callable[[], object]
) -> None:
    call_as_nobody(shared_folder, pre_create)
    theirs = sorted(shared_folder.rglob("*"))
    with pytest.raises(pt.StoreRefused, match=rf"{NAME}: expected a folder of user 0 .* of user {NOBODY}: .* TMPDIR"):
        use()
    assert sorted(shared_folder.rglob("*")) == theirs


@needs_root
def test_a_folder_of_the_superuser_is_no_folder_of_another_user(shared_folder: Path) -> None:
    theirs = shared_folder / f"prefect-tune-{NOBODY}"
    theirs.mkdir()
    theirs.chmod(0o777)

    def use() -> None:
        tempfile.tempdir = "."
        with pytest.raises(pt.StoreRefused, match="of user 0: remove it"):
            ScratchDirectory("staging")

    call_as_nobody(shared_folder, use)
    assert not any(theirs.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702], ids=oct)
def test_an_own_folder_that_others_can_write_to_is_refused(shared_folder: Path, mode: int) -> None:
    (shared_folder / NAME).mkdir()
    (shared_folder / NAME).chmod(mode)
    with pytest.raises(pt.StoreRefused, match="set TMPDIR to another folder"):
        make_user_folder()


def test_a_link_to_an_own_folder_is_refused(shared_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (shared_folder / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(pt.StoreRefused, match="found lrwx"):
        ScratchDirectory()
    assert not any((tmp_path / "elsewhere").iterdir())


@needs_root
@pytest.mark.usefixtures("shared_folder")
def test_a_file_system_that_keeps_no_owners_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def make_folder_of_nobody(self: Path, mode: int = 0o777) -> None:
        mkdir(self, mode)
        os.chown(self, NOBODY, NOBODY)

    monkeypatch.setattr(Path, "mkdir", make_folder_of_nobody)
    with pytest.raises(pt.StoreRefused, match=r"of user 65534: .* set TMPDIR"):
        make_user_folder()


@pytest.mark.usefixtures("shared_folder")
def test_what_a_killed_process_left_is_removed_and_what_its_links_lead_to_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("precious")
    leftover = make_user_folder() / f"{_machine_digest()}-left"
    (leftover / "temporary").mkdir(parents=True)
    leftover.with_name(f"{leftover.name}.lock").touch()
    (leftover / "temporary" / "folder").symlink_to(outside / "folder")
    (leftover / "temporary" / "file").symlink_to(outside / "file")
    link = make_user_folder() / f"{_machine_digest()}-link"
    link.symlink_to(outside / "folder")
    link.with_name(f"{link.name}.lock").touch()
    with ScratchDirectory():
        assert not leftover.exists()
    assert (outside / "file").read_text() == "precious"
    assert (outside / "folder").is_dir()


def test_a_temporary_copy_of_a_checkpoint_is_out_of_other_users_reach(tmp_path: Path, shared_folder: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_bytes(b"w")
    copy = Path(pt.Checkpoint(source).to_directory())
    assert copy.is_relative_to(shared_folder / NAME)
    assert describe_mode(shared_folder / NAME) == f"700 of {os.geteuid()}"
