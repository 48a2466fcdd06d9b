from __future__ import annotations

import pytest

from prefect_tune.core import chunks, commit, restore

_CHUNK_BYTES = 8
_BLOB_BYTES = 24


@pytest.fixture
def tiny_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut directories of some bytes into as many chunks and blobs as one of gigabytes has."""
    monkeypatch.setattr(commit, "pieces", lambda files: chunks.pieces(files, _CHUNK_BYTES))
    monkeypatch.setattr(commit, "groups", lambda cut: chunks.groups(cut, _BLOB_BYTES))
    monkeypatch.setattr(restore, "BLOB_BYTES", _BLOB_BYTES)
