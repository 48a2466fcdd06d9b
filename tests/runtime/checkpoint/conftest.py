from __future__ import annotations

from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.stores.open_location import open_location, parse_uri
from tests.fakes.checkpoints import FILES, KEY, MINUTE, commit_files, write_files


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own temporary folder, as if it ran on its own machine."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_files(tmp_path / "staged", FILES)


@pytest.fixture
def target(tmp_path: Path, source: Path) -> Path:
    root = tmp_path / "target"
    root.mkdir()
    with open_location(parse_uri(root), timeout=MINUTE) as store:
        commit_files(store, source)
    return root


@pytest.fixture
def checkpoint(target: Path) -> pt.Checkpoint:
    return pt.Checkpoint(target / KEY.folder)
