from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from prefect_tune.blocks import FsspecTarget, resolve_target
from prefect_tune.core.errors import InvalidInput
from prefect_tune.stores.subprocess_store import SubprocessStore
from tests.blocks.conftest import SHORT
from tests.fakes.servers.processes import free_port, running_server

PASSWORD = "password-of-mine"


def test_memory_is_shared_within_the_process() -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    with resolve_target(uri).open(timeout=SHORT) as store:
        store.create("a", b"bytes")
    with resolve_target(uri).open(timeout=SHORT) as store:
        assert bytes(store.read("a")) == b"bytes"


def test_memory_serves_one_runner_and_says_so() -> None:
    result = resolve_target(f"memory://{uuid.uuid4().hex}").check()
    assert (result.ok, result.conditional_create) == (True, False)
    assert "ONE RUNNER ONLY" in result.message


def test_reading_a_folder_that_is_missing_does_not_make_it_and_the_first_write_does(tmp_path: Path) -> None:
    with FsspecTarget(location=f"local://{tmp_path}/new/runs").open(timeout=SHORT) as store:
        assert store.list("") == []
        assert store.size("a") is None
        assert list(tmp_path.iterdir()) == []
        store.create("a", b"bytes")
        assert [listed.path for listed in store.list("")] == ["a"]


def test_an_option_is_plain_or_secret_and_not_both() -> None:
    target = FsspecTarget(location="sftp://host/x", storage_options={"port": 1}, secret_options={"port": 2})
    with pytest.raises(InvalidInput, match="'port' is both a plain and a secret option"):
        target.merge_options()


def test_a_package_that_is_missing_is_named_by_the_check() -> None:
    result = FsspecTarget(location="smb://host/runs").check()
    assert not result.ok
    assert "needs a package that is not installed" in result.message
    assert "smbprotocol" in result.message


@contextmanager
def _serve_folder(rclone: str, protocol: str, folder: Path) -> Iterator[int]:
    port, root = free_port(), folder / "served"
    root.mkdir()
    address = ["--addr", f"127.0.0.1:{port}", "--user", "me", "--pass", PASSWORD]
    command = [rclone, "serve", protocol, *address, "--vfs-cache-mode", "writes", "--vfs-write-back", "0s", str(root)]
    command += ["--cache-dir", str(folder / "cache")]
    with running_server(command, port, folder / "rclone.log"):
        yield port


@pytest.mark.deep
@pytest.mark.parametrize("protocol", ["sftp", "ftp"])
class TestServers:
    @pytest.fixture
    def port(self, rclone: str, protocol: str, tmp_path: Path) -> Iterator[int]:
        if protocol == "sftp":
            pytest.importorskip("paramiko", reason="fsspec speaks SFTP through it")
        with _serve_folder(rclone, protocol, tmp_path) as port:
            yield port

    def test_a_folder_passes_for_one_runner(self, protocol: str, port: int, tmp_path: Path) -> None:
        target = FsspecTarget(location=f"{protocol}://me@127.0.0.1:{port}/runs", secret_options={"password": PASSWORD})
        result = target.check(timeout=timedelta(seconds=60))
        assert (result.ok, result.conditional_create) == (True, False), result.message
        with target.open(timeout=timedelta(seconds=60)) as store:
            store.create("a/b", b"bytes")
            assert [listed.path for listed in store.list("")] == ["a/b"]
        assert (tmp_path / "served/runs").is_dir()

    def test_a_wrong_password_is_said_and_not_repeated(self, protocol: str, port: int) -> None:
        location = f"{protocol}://me@127.0.0.1:{port}/runs"
        target = FsspecTarget(location=location, secret_options={"password": "another-one"})
        result = target.check(timeout=timedelta(seconds=60))
        assert not result.ok
        assert result.message.startswith(f"{location}: could not ")
        assert "another-one" not in result.message


def test_a_server_that_is_not_there_is_said() -> None:
    result = FsspecTarget(location=f"ftp://me@127.0.0.1:{free_port()}/runs").check(timeout=timedelta(seconds=60))
    assert not result.ok
    assert "refused" in result.message


def test_a_server_that_never_answers_is_given_up_and_its_client_killed() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        start = time.monotonic()
        result = FsspecTarget(location=f"ftp://127.0.0.1:{listener.getsockname()[1]}/runs").check(timeout=SHORT / 5)
    assert not result.ok
    assert "not done within 2 s" in result.message
    assert time.monotonic() - start < 6
    assert _list_children() == []


def _list_children() -> list[str]:
    """Return the commands of living child processes that isolate stores."""
    children = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text, command = status.read_text(), (status.parent / "cmdline").read_text()
        except OSError:
            continue  # it has just exited
        if f"PPid:\t{os.getpid()}\n" in text and SubprocessStore.__module__ in command and "State:\tZ" not in text:
            children.append(command)
    return children
