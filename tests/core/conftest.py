from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.histories import snapshots_every
from tests.core.protocol.cut import cut_small


@pytest.fixture
def tiny_blobs() -> Iterator[None]:
    with cut_small():
        yield


@pytest.fixture
def frequent_snapshots() -> Iterator[None]:
    with snapshots_every(3):
        yield
