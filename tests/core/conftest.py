from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.histories import caching_decoded_documents, small_blobs, snapshots_every


@pytest.fixture
def tiny_blobs() -> Iterator[None]:
    with small_blobs():
        yield


@pytest.fixture
def decode_cache() -> Iterator[None]:
    with caching_decoded_documents():
        yield


@pytest.fixture
def frequent_snapshots() -> Iterator[None]:
    with snapshots_every(3):
        yield
