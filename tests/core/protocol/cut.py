"""Small chunk and blob sizes: a few bytes fill as many chunks and blobs as gigabytes usually do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from prefect_tune.core.checkpoints import commit, manifest, verified_reads

_CHUNK_BYTES = 8
_BLOB_BYTES = 24


@contextmanager
def cut_small() -> Iterator[None]:
    """Set the chunk size to 8 bytes and the blob size to 24 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "pieces", lambda files: manifest.pieces(files, _CHUNK_BYTES))
        patch.setattr(commit, "groups", lambda cut: manifest.groups(cut, _BLOB_BYTES))
        patch.setattr(verified_reads, "BLOB_BYTES", _BLOB_BYTES)
        yield
