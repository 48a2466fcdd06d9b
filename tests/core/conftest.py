from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.histories import cut_small, decoding_once, snapshots_every


@pytest.fixture
def tiny_blobs() -> Iterator[None]:
    with cut_small():
        yield


@pytest.fixture
def decoded_once() -> Iterator[None]:
    with decoding_once():
        yield


@pytest.fixture
def frequent_snapshots() -> Iterator[None]:
    with snapshots_every(3):
        yield
