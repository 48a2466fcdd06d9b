"""Directories of some bytes, cut into as many chunks and blobs as one of gigabytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from prefect_tune.core.checkpoints import chunking, commit, verified_reads

_CHUNK_BYTES = 8
_BLOB_BYTES = 24


@contextmanager
def cut_small() -> Iterator[None]:
    """Chunks of 8 bytes and blobs of 24."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "pieces", lambda files: chunking.pieces(files, _CHUNK_BYTES))
        patch.setattr(commit, "groups", lambda cut: chunking.groups(cut, _BLOB_BYTES))
        patch.setattr(verified_reads, "BLOB_BYTES", _BLOB_BYTES)
        yield
