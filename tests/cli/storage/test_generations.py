"""Names whose experiment was deleted, or is of a development version, as the command line shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.command_line import Run
from tests.fakes.searches.experiments import write_experiment

DEVELOPMENT = Path(__file__).parents[2] / "data" / "development_layout"
REFUSED = (
    "experiment '{}' was written by a development version of prefect-tune, before its first release, and is not read: "
    "finish it with that version, or delete its folder {}/, or choose another name"
)
NAMES = sorted(path.name for path in DEVELOPMENT.iterdir())
VERBS: Sequence[Sequence[str]] = (
    ["show"],
    ["audit"],
    ["checkpoints"],
    ["verify"],
    ["gc"],
    ["report"],
    ["export", "DIRECTORY"],
    ["stop"],
    ["delete", "--yes"],
    ["resume"],
)


def test_there_are_five_kinds_of_experiments_of_a_development_version() -> None:
    assert NAMES == ["asha", "fork", "own", "pbt", "training"]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_that_names_one_refuses_it_in_one_sentence(run: Run, tmp_path: Path, name: str) -> None:
    for verb, *more in VERBS:
        found = run(verb, DEVELOPMENT, name, *(str(tmp_path) if each == "DIRECTORY" else each for each in more))
        assert REFUSED.format(name, name) in " ".join(found.err.split()), (verb, found.err)
        assert found.code != 0


def test_ls_lists_them_with_that_sentence(run: Run) -> None:
    listed = json.loads(run("ls", DEVELOPMENT, "--json").out)
    assert [(each["experiment"], each["kind"], each["damage"]) for each in listed] == [
        (name, "not read", REFUSED.format(name, name)) for name in NAMES
    ]


def test_a_deleted_name_is_used_again_and_what_its_deletion_left_is_collected(run: Run, tmp_path: Path) -> None:
    write_experiment(tmp_path, "first", [1])
    assert run("delete", tmp_path, "first", "--yes").code == 0
    (marker,) = [path for path in tmp_path.rglob("*.json") if "first" in path.parts]
    assert marker.relative_to(tmp_path).as_posix() == "first/generations/0000000002.json"
    assert "no experiments" in run("ls", tmp_path).out
    again = run("delete", tmp_path, "first", "--yes")
    assert "there is no experiment 'first'" in again.err
    late = tmp_path / "first" / "1" / "trials" / "trial" / "blobs" / "late"
    late.parent.mkdir(parents=True)
    late.write_bytes(b"late")
    write_experiment(tmp_path, "first", [1])
    assert (tmp_path / "first" / "2" / "journal").is_dir()
    assert json.loads(run("gc", tmp_path, "first", "--json").out)["deleted_experiments"]["object_count"] == 1
    assert late.exists()
    assert "1 object of deleted experiments of this name" in run("gc", tmp_path, "first", "--delete").out
    assert not late.exists()
    assert run("show", tmp_path, "first").code == 0
    late.parent.mkdir(parents=True, exist_ok=True)
    late.write_bytes(b"late")
    assert run("delete", tmp_path, "first", "--yes").code == 0
    assert not late.exists()
    late.parent.mkdir(parents=True, exist_ok=True)
    late.write_bytes(b"late")
    assert run("delete", tmp_path, "first", "--yes").code == 0  # what is left of it, after an interruption
    assert not late.exists()
