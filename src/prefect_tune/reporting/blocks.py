"""The parts of a page, before it is Markdown or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Block", "Cell", "Code", "Details", "Figure", "Heading", "Link", "Table", "Text", "Verbatim"]


@dataclass(frozen=True)
class Link:
    """Text that leads somewhere."""

    text: str
    address: str


@dataclass(frozen=True)
class Verbatim:
    """Text to be copied: a path, a command."""

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
    """A picture, what it shows in words, and how it is read."""

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
    """Lines as they are."""

    text: str
    language: str = "json"


@dataclass(frozen=True)
class Details:
    """What is shown when somebody wants to see it."""

    summary: str
    blocks: Sequence[Block]


Block: TypeAlias = "Heading | Text | Figure | Table | Code | Details"
