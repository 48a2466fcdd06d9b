"""Read the Python files that the checks of the house look at."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its path below the root, its text, and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def line_count(self) -> int:
        """Lines of text, blank ones and comments included."""
        return self.text.count("\n")


def read_sources(root: Path, rooms: Sequence[str]) -> list[Source]:
    """Return every Python file in the rooms, sorted."""
    paths = sorted(path for room in rooms for path in (root / room).rglob("*.py"))
    texts = {path.relative_to(root): path.read_text() for path in paths}
    return [Source(path, text, ast.parse(text, path.name)) for path, text in texts.items()]
