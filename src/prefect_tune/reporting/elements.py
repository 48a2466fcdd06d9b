"""The elements of a report page, before they are rendered as Markdown or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Link:
    """Text with a hyperlink."""

    text: str
    address: str


@dataclass(frozen=True)
class Verbatim:
    """Text to copy: a path, a command."""

    text: str


Cell: TypeAlias = str | Link | Verbatim


@dataclass(frozen=True)
class Heading:
    """A title; level 1 is the page's."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    parts: Sequence[Cell]
    strong: bool = False


@dataclass(frozen=True)
class Figure:
    """A picture, its description, and its legend."""

    svg: str
    shows: str
    legend: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells; without names of columns, the first cell of each row names it."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Code:
    """Preformatted lines."""

    text: str
    language: str = "json"


Block: TypeAlias = Heading | Text | Figure | Table | Code
