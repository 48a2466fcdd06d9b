"""Scratch directories: new and empty, in a folder that ends with its process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from prefect_tune.stores.local import scratch
from prefect_tune.stores.local.scratch import ScratchDirectory
from tests.trainables.unreadable import make_deep

FOLDERS = ("staging", "artifacts")


def test_each_is_new_and_has_its_empty_folders() -> None:
    with ScratchDirectory(*FOLDERS) as first, ScratchDirectory(*FOLDERS) as second:
        assert first != second
        (first / "staging" / "file").write_text("left")
        for path, content in ((first, {"staging", "artifacts", "file"}), (second, {"staging", "artifacts"})):
            assert {each.name for each in path.rglob("*")} == content


def test_one_is_removed_with_its_content() -> None:
    with ScratchDirectory() as kept:
        with ScratchDirectory(*FOLDERS) as path:
            (path / "staging" / "file").write_text("left")
        assert not path.exists()
        assert kept.is_dir()


MAKE_ONE = """
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
    with subprocess.Popen(
        [sys.executable, "-c", MAKE_ONE],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        child, path = process.stdout.readline().split()
        try:
            for file in tmp_path.rglob("*"):
                os.utime(file, (0, 0))  # it trains for weeks
            with ScratchDirectory():
                assert Path(path, "staging").is_dir()
            process.kill()
            process.wait()
            scratch._process_folder.cache_clear()  # as in another process
            with ScratchDirectory():
                assert not Path(path).parent.exists()
                assert len([*tmp_path.glob("*/*.lock")]) == 2  # of this process, twice
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_process_leaves_nothing_when_it_ends() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        for characters in (30, 70):
            folder = _below(Path(base), characters)
            code = "from prefect_tune.stores.local.scratch import ScratchDirectory; print(ScratchDirectory().path)"
            environment = {**os.environ, "TMPDIR": str(folder)}
            run = subprocess.run(
                [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
            )
            assert [*folder.glob("*/*")] == []
            assert not Path(run.stdout.strip()).parent.is_symlink()


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
    scratch._process_folder.cache_clear()
    with ScratchDirectory("1") as path:
        assert len(str(path / "1")) - len(tempfile.gettempdir()) <= 48


def _below(folder: Path, characters: int) -> Path:
    """Make and return a folder whose path has so many characters."""
    rest = characters - len(str(folder)) - 1
    path = folder.joinpath(*("d" * len(part) for part in textwrap.wrap("d" * rest, 200)))
    path.mkdir(parents=True)
    return path


@pytest.mark.parametrize("characters", [54, 80, 140])
def test_sockets_fit_below_it_whatever_the_length_of_tmpdir(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, characters: int
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = _below(Path(base), characters)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        for _ in range(2):
            with ScratchDirectory("1") as path, ScratchDirectory():
                socket_path = path / "1" / "torch-shm-dir-XXXXXX" / "manager.sock"
                socket_path.parent.mkdir()
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(str(socket_path))
                assert socket_path.resolve().is_relative_to(folder)  # where there is room for large files
                assert path.parent.is_symlink()
        assert len(caplog.messages) == (characters > 80)
        assert all(f"has {characters} characters" in message for message in caplog.messages)


def test_a_link_that_leads_nowhere_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = _below(Path(base), 70)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        left = scratch._make_link(folder / f"{scratch._this_machine()}-left")
        assert left is not None
        with ScratchDirectory() as path:
            assert not left.is_symlink()
            assert path.is_dir()


def test_without_a_place_for_links_one_line_says_what_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", str(_below(Path(base), 75)))
        monkeypatch.setattr(scratch, "_SHORT_FOLDERS", ("/nowhere",))
        for _ in range(2):
            with ScratchDirectory() as path:
                assert path.is_dir()
    (message,) = caplog.messages
    assert "has 75 characters" in message
