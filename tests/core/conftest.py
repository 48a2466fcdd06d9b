from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.histories import base
from tests.core.protocol.cut import cut_small


@pytest.fixture
def tiny_blobs() -> Iterator[None]:
    with cut_small():
        yield


@pytest.fixture
def short_segments() -> Iterator[None]:
    """Write segments after few entries, which usually takes hundreds."""
    with base(3):
        yield
