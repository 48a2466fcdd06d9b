"""A Prefect database with all migrations applied: they take most of a server's start."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from uuid import uuid4

import pytest

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""The folder of a server's database: on a disk that is busy with other tests, SQLite locks time out."""

_MIGRATE = """
import asyncio
from prefect.server.database import provide_database_interface
asyncio.run(provide_database_interface().create_db())
"""


def migrated_database(config: pytest.Config) -> Path:
    """Return a migrated database to copy; one process makes it, and the others wait for it."""
    folder = config.rootpath / ".pytest_cache" / "prefect-database"
    folder.mkdir(parents=True, exist_ok=True)
    database = folder / f"{version('prefect')}.db"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            _migrate(partial := folder / uuid4().hex)
            partial.replace(database)
    return database


def _migrate(database: Path) -> None:
    url = f"sqlite+aiosqlite:///{database}"
    environment = {**os.environ, "PREFECT_SERVER_DATABASE_CONNECTION_URL": url}
    process = subprocess.run(
        [sys.executable, "-c", _MIGRATE], env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
