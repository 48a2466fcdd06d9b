"""Requests and bytes, counted at the store."""

from __future__ import annotations

import pytest

from benchmarks import traffic
from benchmarks.traffic import MIB


@pytest.mark.long
def test_two_thousand_files_take_at_most_forty_requests() -> None:
    sent = traffic.many_files()
    assert sent.requests <= 40
    assert sent.blob_bytes == 2000 * (256 * MIB // 2000)


def test_an_unchanged_checkpoint_sends_no_blob_bytes() -> None:
    (sent,) = traffic.unchanged(times=1)
    assert sent.blob_bytes == 0
    assert sent.requests <= 6 + sent.read_bytes // (8 * MIB)


@pytest.mark.long
def test_unchanged_checkpoints_read_each_blob_back_once_in_the_turns_of_all() -> None:
    saves = traffic.unchanged(file_count=400)
    assert sum(each.read_bytes for each in saves) == 400 * (256 * MIB // 2000)
    assert sum(each.requests for each in saves) <= 3 * len(saves) + 4


@pytest.mark.long
def test_one_changed_file_of_ten_sends_its_own_bytes_and_at_most_a_chunk_more() -> None:
    sent = traffic.one_of_ten()
    assert 256 * MIB // 10 <= sent.blob_bytes <= 256 * MIB // 10 + 4 * MIB


@pytest.mark.long
def test_an_upload_that_broke_off_does_not_send_finished_blobs_again() -> None:
    again, sent_twice = traffic.interrupted(10)
    assert sent_twice == set()
    assert again.blobs == 16 - 10
