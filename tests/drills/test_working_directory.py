"""Each attempt of a drill has a working directory of its own, in which it finds what was there before the drill."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefect_tune.drills import probe
from prefect_tune.drills.probe import enter_copied_directory


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "home" / "project"
    (project / "package").mkdir(parents=True)
    (project / ".git").mkdir()
    (tmp_path / "home" / "data").mkdir()
    (tmp_path / "drill").mkdir()
    (project / "weights.json").write_text("old")
    (project / "package" / "part.txt").write_text("part")
    (tmp_path / "home" / "data" / "table.csv").write_text("1,2")
    (project / "link").symlink_to("../data")
    monkeypatch.setenv("PWD", str(project))
    monkeypatch.chdir(project)
    return project


def test_what_an_attempt_leaves_in_its_directory_is_not_there_for_the_next_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in (1, 2):
        monkeypatch.chdir(project)
        enter_copied_directory(tmp_path / "drill" / f"directory-{attempt}")
        assert not Path("made").exists()
        assert Path("weights.json").read_text() == "old"
        assert Path("package/part.txt").read_text() == "part"
        assert Path("../data/table.csv").read_text() == Path("link/table.csv").read_text() == "1,2"
        Path("made").mkdir()
        Path("weights.json").write_text("new")
        Path("package/more.txt").write_text("more")
    assert sorted(path.name for path in project.iterdir()) == [".git", "link", "package", "weights.json"]
    assert (project / "weights.json").read_text() == "old"


def test_the_ranks_of_an_attempt_share_their_directory(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        monkeypatch.chdir(project)
        enter_copied_directory(tmp_path / "drill" / "directory-1")
        assert Path("of-rank-0").exists() == (rank == 1)
        Path("of-rank-0").touch()


def test_what_is_too_much_to_copy_is_a_link(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_MAX_COPIED_BYTES", 3)
    enter_copied_directory(tmp_path / "drill" / "directory-1")
    assert [Path(name).is_symlink() for name in ("weights.json", "package", "package/part.txt", ".git")] == [
        False, False, True, True,
    ]  # fmt: skip
    assert Path("package/part.txt").resolve() == project / "package" / "part.txt"


def test_a_drill_whose_folder_is_in_the_working_directory_does_not_copy_itself(project: Path) -> None:
    (project / "drills").mkdir()
    enter_copied_directory(project / "drills" / "directory-1")
    assert Path("drills").is_symlink()
