from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefect_tune.blocks import LocalTarget
from prefect_tune.stores.subprocess_store import SubprocessStore
from tests.blocks.conftest import SHORT


def test_a_folder_is_made_when_it_is_first_used_and_not_before(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path / "not" / "yet"))
    assert not (tmp_path / "not").exists()
    with target.open(timeout=SHORT) as store:
        store.create("a/b", b"bytes")
    assert (tmp_path / "not" / "yet" / "a" / "b").read_bytes() == b"bytes"


def test_a_check_leaves_nothing_that_is_listed_behind(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path))
    result = target.check()
    assert (result.ok, result.conditional_create) == (True, True)
    assert result.message.startswith(f"file://{tmp_path}: a probe was written, read back, listed and deleted")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_mount_that_may_hang_is_worked_on_in_a_process_that_can_be_killed(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path / "mount"), may_hang=True)
    with target.open(timeout=SHORT * 6) as store:
        assert isinstance(store, SubprocessStore)
        assert store.has_conditional_create
        store.create("a/b", b"bytes")
    assert (tmp_path / "mount" / "a" / "b").read_bytes() == b"bytes"
    assert LocalTarget(path=str(tmp_path / "mount")).check().ok


def test_a_missing_mount_that_may_hang_is_not_made_either(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path / "mount"), may_hang=True, must_exist=True)
    assert "does not exist" in target.check(timeout=SHORT * 6).message


def test_a_tilde_is_the_home_of_who_runs_it(tmp_path: Path) -> None:
    assert os.environ["HOME"] == str(tmp_path)
    assert LocalTarget(path="~/runs").path == str(tmp_path / "runs")


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    result = LocalTarget(path=str(tmp_path / "runs")).check()
    assert not result.ok
    assert "expected a folder, found" in result.message


def test_a_mount_that_is_missing_is_not_made(tmp_path: Path) -> None:
    result = LocalTarget(path=str(tmp_path / "mount"), must_exist=True).check()
    assert not result.ok
    assert "does not exist" in result.message
    assert not (tmp_path / "mount").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_to_write_is_said(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir(mode=0o555)
    result = LocalTarget(path=str(tmp_path / "runs")).check()
    assert not result.ok
    assert "read-only: listing is permitted, writing is not" in result.message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_file_system_mounted_read_only_is_said(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o ro,size=64k tmpfs {mount} 2>/dev/null") != 0:
        pytest.skip("this sandbox does not mount")
    try:
        result = LocalTarget(path=str(mount)).check()
    finally:
        os.system(f"umount {mount}")
    assert not result.ok
    assert "read-only: listing is permitted, writing is not" in result.message
