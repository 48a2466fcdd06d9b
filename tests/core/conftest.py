from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.cut import cut_small


@pytest.fixture
def tiny_blobs() -> Iterator[None]:
    with cut_small():
        yield
