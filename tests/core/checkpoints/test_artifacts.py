from __future__ import annotations

import pytest

from prefect_tune.core.storage.layout import NEVER_ARTIFACTS, is_excluded


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("a.tmp", "*.tmp"),
        ("deep/er/a.tmp", "*.tmp"),
        ("logs/a.txt", "logs"),
        ("logs/a/b.txt", "logs/"),
        ("deep/logs/a.txt", "logs"),
        ("trial/checkpoint_3/model.pt", "*/checkpoint_*"),
        ("logs/a.txt", "logs/*.txt"),
        ("rank_0", "./rank_*"),
        ("rank_0/a/b", "./rank_*"),
        ("a[1].txt", "a[[]1].txt"),
    ],
)
def test_excluded(path: str, pattern: str) -> None:
    assert is_excluded(path, ["other", pattern])


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("checkpoint_3/model.pt", "*/checkpoint_*"),
        ("a.TMP", "*.tmp"),
        ("deep/logs/a.txt", "logs/*"),
        ("deep/rank_0", "./rank_*"),
        ("catalogs/a.txt", "logs"),
        ("a.txt", ""),
    ],
)
def test_kept(path: str, pattern: str) -> None:
    assert not is_excluded(path, [pattern])


def test_what_old_trainables_leave_at_the_top_is_no_artifact() -> None:
    left = ("checkpoint_-00001", "checkpoint_tmp12", "save_to_object9", "rank_0", ".lazy_checkpoint_marker")
    assert all(is_excluded(path, NEVER_ARTIFACTS) for path in left)
    assert not any(is_excluded(f"mine/{path}", NEVER_ARTIFACTS) for path in left)
