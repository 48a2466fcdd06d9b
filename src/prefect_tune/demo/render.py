"""Render the demo: three tracks, one below the other, and the claims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

__all__ = ["Assertion", "Track", "cells", "tracks", "verdict"]

_NARROW = 100  # terminal columns below which a track has 24 cells, and not 48


@dataclass(frozen=True)
class Track:
    """One run: from which step to which, and what happened on the way."""

    name: str
    steps: int
    begun: bool = False
    came_back_at: int = 0
    step: int = 0
    committed: frozenset[int] = frozenset()
    killed_at: int | None = None
    seconds: float = 0.0
    outcome: str = ""


@dataclass(frozen=True)
class Assertion:
    """A claim of the demo, whether it held, and lines of evidence."""

    held: bool
    text: str
    shown_by: tuple[str, ...] = ()


def cells(track: Track, width: int) -> Text:
    """Return the track as `width` cells: steps trained, checkpoints committed, the kill, the way back."""
    marks = dict.fromkeys(range(width), ("·", "dim"))
    start, end = _cell(track.came_back_at, track, width), _cell(track.step, track, width)
    marks |= dict.fromkeys(range(max(start, 0), end + 1), ("━", "cyan"))
    marks |= {_cell(step, track, width): ("●", "green") for step in track.committed if step > track.came_back_at}
    if track.came_back_at:
        marks |= dict.fromkeys(range(start), (" ", ""))
        marks[start] = ("↻", "bold yellow")
    if track.killed_at is not None:
        marks |= dict.fromkeys(range(_cell(track.killed_at, track, width) + 1, width), (" ", ""))
        marks[_cell(track.killed_at, track, width)] = ("✗", "bold red")
    return Text.assemble(*(marks[index] for index in range(width)))


def _cell(step: int, track: Track, width: int) -> int:
    """The cell in which `step` ends; -1 for step 0."""
    return -(-step * width // track.steps) - 1


def tracks(shown: Iterable[Track], columns: int, status: str) -> Group:
    """Return the tracks, and the status below them."""
    table = Table.grid(padding=(0, 2))
    for _ in range(5):
        table.add_column(no_wrap=True)
    for number, track in enumerate(shown, 1):
        style = "" if track.begun else "dim"
        seconds = f"{track.seconds:.1f} s" if track.seconds else ""
        table.add_row(
            Text(f"{number} {track.name}", style),
            cells(track, 24 if columns < _NARROW else 48),
            Text(f"step {track.step}" if track.begun else "", style),
            Text(track.outcome),
            Text(seconds, "dim"),
        )
    below: RenderableType = Spinner("dots", Text(status, "dim")) if status else _legend()
    return Group(Padding(table, (1, 0, 1, 2)), Padding(below, (0, 0, 0, 2)))


def _legend() -> Text:
    parts = (("●", "green", "committed"), ("✗", "bold red", "SIGKILL"), ("↻", "bold yellow", "came back here"))
    return Text("   ").join(Text.assemble((mark, style), (f" {said}", "dim")) for mark, style, said in parts)


def verdict(claims: Iterable[Assertion]) -> Table:
    """Return the claims, each with its mark."""
    table = Table.grid(padding=(0, 1))
    for claim in claims:
        mark = Text("✓", "bold green") if claim.held else Text("✗", "bold red")
        table.add_row(" ", mark, Text(claim.text, "bold"))
        for line in claim.shown_by:
            table.add_row("", "", Text(line, "dim", overflow="fold"))
    return table
