"""Whether a folder is this user's own, on real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefect_tune.stores.own_folder import why_not_own

OTHER = 4242
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the administrator can give files away")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "above" / "root"
    (made / "e" / "journal").mkdir(parents=True)
    (made / "e" / "journal" / "1.json").write_text("{}")
    return made


def looked_at(root: Path) -> str:
    return why_not_own(root, ["e/journal", "e/segments"])


def test_a_folder_that_only_its_user_can_write_to_is_their_own(root: Path) -> None:
    assert not looked_at(root)
    assert not looked_at(root / ".." / "root")


@pytest.mark.parametrize("below", ["..", ".", "e", "e/journal", "e/journal/1.json"])
@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_what_others_can_write_is_not(root: Path, below: str, bits: int) -> None:
    place = root / below
    place.chmod(place.stat().st_mode | bits)
    assert looked_at(root).startswith(f"{place.resolve()} can be written by others (")


def test_above_it_a_sticky_folder_will_do_and_it_itself_must_not_be_one(root: Path) -> None:
    root.parent.chmod(0o1777)
    assert not looked_at(root)
    root.chmod(0o1777)
    assert f"{root} can be written by others (drwxrwxrwt;" in looked_at(root)


@needs_root
@pytest.mark.parametrize("below", ["..", ".", "e", "e/journal", "e/journal/1.json"])
def test_what_belongs_to_another_user_is_not(root: Path, below: str) -> None:
    os.chown(root / below, OTHER, -1)
    assert f"{(root / below).resolve()} belongs to user {OTHER}" in looked_at(root)


def test_links_above_it_are_followed_as_far_as_they_are_ones_own(root: Path) -> None:
    link = root.parents[1] / "link"
    link.symlink_to(Path("above", "..", "above"))
    assert not looked_at(link / "root")
    root.parent.chmod(0o777)
    assert f"{root.parent} can be written by others" in looked_at(link / "root")


@needs_root
def test_a_link_of_another_user_is_not_followed(root: Path) -> None:
    link = root.parents[1] / "link"
    link.symlink_to(root.parent)
    os.chown(link, OTHER, -1, follow_symlinks=False)
    assert f"{link} is a link that belongs to user {OTHER}" in looked_at(link / "root")


@pytest.mark.parametrize("linked", ["e", "e/journal", "e/journal/1.json"])
def test_a_link_below_it_is_not_followed(root: Path, linked: str) -> None:
    place = root / linked
    place.rename(elsewhere := root.parent / "elsewhere")
    place.symlink_to(elsewhere)
    assert looked_at(root)


def test_links_in_a_circle_and_what_is_not_there_are_not_ones_own(root: Path) -> None:
    (root.parent / "a").symlink_to("b")
    (root.parent / "b").symlink_to("a")
    assert "too many links" in looked_at(root.parent / "a")
    assert "No such file" in looked_at(root.parent / "gone")
    assert looked_at(root / "e" / "journal" / "1.json")
