"""Every row of the parity page names an existing test, or a reason."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.fakes.pages import ROOT

PAGE = (ROOT / "docs" / "parity.md").read_text()
BEHAVIOURS, BUGS = 144, 48  # numbered by the page itself, not as the inventory of the seeds is
REASONS = ("not carried over: ", "not yet: ")


@dataclass(frozen=True)
class Row:
    """One behaviour or bug."""

    id: str
    was: str
    here: str
    shown_by: str

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`(tests/[^`]+)`", self.shown_by)


ROWS = [
    Row(*(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]))
    for line in PAGE.splitlines()
    if re.match(r"\| [FB]\d", line)
]


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Return the tests of a module, those of classes as `Class::test`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return frozenset(name for name in found if name.split("::")[-1].startswith("test_"))


def test_every_behaviour_and_every_bug_of_the_seeds_has_one_row() -> None:
    assert [row.id for row in ROWS] == [
        *(f"F{number}" for number in range(1, BEHAVIOURS + 1)),
        *(f"B{number}" for number in range(1, BUGS + 1)),
    ]
    assert f"**{BEHAVIOURS}** of them" in PAGE.replace("\n", " ")
    assert f"code, **{BUGS}**, B1 to B{BUGS}" in PAGE.replace("\n", " ")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_names_tests_that_exist_or_says_why_there_are_none(row: Row) -> None:
    assert row.was
    assert row.here
    assert row.tests or row.shown_by.startswith(REASONS)
    missing = [each for each in row.tests if not _exists(*each.partition("::")[::2])]
    assert missing == []


def _exists(path: str, test: str) -> bool:
    file = ROOT / path
    return file.is_file() and re.sub(r"\[.*\]$", "", test) in defined_in(file)


def test_what_is_not_carried_over_has_more_than_the_words() -> None:
    for row in ROWS:
        said = next((reason for reason in REASONS if row.shown_by.startswith(reason)), None)
        assert said is None or len(row.shown_by.removeprefix(said).split()) >= 3, row.id
