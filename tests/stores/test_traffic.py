"""Requests and bytes, counted at the store."""

from __future__ import annotations

import pytest

from benchmarks import traffic
from benchmarks.traffic import MIB


@pytest.mark.long
def test_two_thousand_files_take_at_most_forty_requests() -> None:
    sent = traffic.save_many_files()
    assert sent.requests <= 40
    assert sent.blob_bytes == 2000 * (256 * MIB // 2000)


def test_an_unchanged_checkpoint_sends_no_blob_bytes() -> None:
    (sent,) = traffic.save_unchanged(times=1)
    assert sent.blob_bytes == 0
    assert sent.requests <= 6 + sent.read_bytes // (8 * MIB)
