"""Read the Python files that `tools/house.py` checks."""

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


def read_sources(root: Path, folders: Sequence[str]) -> list[Source]:
    """Return every Python file in the folders, sorted."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    texts = {path.relative_to(root): path.read_text() for path in paths}
    return [Source(path, text, ast.parse(text, path.name)) for path, text in texts.items()]
