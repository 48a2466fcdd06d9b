"""What the demo shows on a terminal: three tracks, one below the other, the current status, and the claims."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_NARROW = 100  # terminal columns below which a track has 24 cells, and not 48


@dataclass
class Track:
    """One run: from which step to which, and what happened on the way. Changed while the screen shows it."""

    name: str
    steps: int
    has_begun: bool = False
    resumed_at: int = 0
    step: int = 0
    committed: frozenset[int] = frozenset()
    killed_at: int | None = None
    seconds: float = 0.0
    outcome: str = ""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Begin the run, and take its time."""
        began = time.monotonic()
        self.has_begun = True
        yield
        self.seconds = time.monotonic() - began

    def trained(self, step: int, newest_step: int) -> None:
        """Show how far the run has come, and the newest checkpoint that it has committed."""
        self.committed |= {newest_step} - {0}
        self.step = max(step, newest_step)

    def forget(self, outcome: str) -> None:
        """Show a run that has to be repeated."""
        self.step, self.committed, self.killed_at, self.outcome = 0, frozenset(), None, outcome


@dataclass(frozen=True)
class DemoClaim:
    """A claim of the demo, whether it held, and lines of evidence."""

    held: bool
    text: str
    shown_by: tuple[str, ...] = ()


class DemoScreen:
    """Shows the tracks of the three runs until the `with` block is left."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self.tracks = [Track(name, steps) for name in ("undisturbed", "killed", "resumed")]
        self.status = ""
        self._live = Live(console=console, refresh_per_second=10, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.status = ""
        self._live.stop()
        if not self._console.is_terminal:
            self._console.print()  # there, Rich's live display ends without a line break

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for _ in range(5):
            table.add_column(no_wrap=True)
        for number, track in enumerate(self.tracks, 1):
            style = "" if track.has_begun else "dim"
            table.add_row(
                Text(f"{number} {track.name}", style),
                cells(track, 24 if self._console.width < _NARROW else 48),
                Text(f"step {track.step}" if track.has_begun else "", style),
                Text(track.outcome),
                Text(f"{track.seconds:.1f} s" if track.seconds else "", "dim"),
            )
        below: RenderableType = Spinner("dots", Text(self.status, "dim")) if self.status else _legend()
        return Group(Padding(table, (1, 0, 1, 2)), Padding(below, (0, 0, 0, 2)))


def cells(track: Track, width: int) -> Text:
    """Return the track as `width` cells: steps trained, checkpoints committed, the kill, the way back."""
    marks = dict.fromkeys(range(width), ("·", "dim"))
    start, end = _cell(track.resumed_at, track, width), _cell(track.step, track, width)
    marks |= dict.fromkeys(range(max(start, 0), end + 1), ("━", "cyan"))
    marks |= {_cell(step, track, width): ("●", "green") for step in track.committed if step > track.resumed_at}
    if track.resumed_at:
        marks |= dict.fromkeys(range(start), (" ", ""))
        marks[start] = ("↻", "bold yellow")
    if track.killed_at is not None:
        marks |= dict.fromkeys(range(_cell(track.killed_at, track, width) + 1, width), (" ", ""))
        marks[_cell(track.killed_at, track, width)] = ("✗", "bold red")
    return Text.assemble(*(marks[index] for index in range(width)))


def _cell(step: int, track: Track, width: int) -> int:
    """The cell in which `step` ends; -1 for step 0."""
    return -(-step * width // track.steps) - 1


def _legend() -> Text:
    parts = (("●", "green", "committed"), ("✗", "bold red", "SIGKILL"), ("↻", "bold yellow", "resumed here"))
    return Text("   ").join(Text.assemble((mark, style), (f" {said}", "dim")) for mark, style, said in parts)


def verdict(claims: Iterable[DemoClaim]) -> Table:
    """Return the claims, each with its mark."""
    table = Table.grid(padding=(0, 1))
    for claim in claims:
        mark = Text("✓", "bold green") if claim.held else Text("✗", "bold red")
        table.add_row(" ", mark, Text(claim.text, "bold"))
        for line in claim.shown_by:
            table.add_row("", "", Text(line, "dim", overflow="fold"))
    return table
