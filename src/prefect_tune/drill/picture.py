"""The runs of a drill as a picture: a line per run, with its commits, kills and resumes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

CELLS = 24
LEGEND = "[green]●[/] committed   [bold red]✗[/] SIGKILL   [bold yellow]↻[/] resumed after this step"


@dataclass
class Track:
    """What one run has done, as the picture shows it."""

    name: str
    steps: int
    step: int = 0
    committed: Collection[int] = ()
    kills: list[int] = field(default_factory=list)
    """After which steps it was killed."""
    resumes: list[int] = field(default_factory=list)
    """After which steps it resumed."""
    seconds: float = 0.0
    outcome: str = ""

    def cells(self, width: int) -> Text:
        """Return the run as `width` cells: steps trained, checkpoints committed, kills, resumes."""
        last = [max(0, -(-step * width // self.steps) - 1) for step in range(self.steps + 1)]
        marks = [("━", "cyan") if self.step and cell <= last[self.step] else ("·", "dim") for cell in range(width)]
        for steps, mark in (
            (self.committed, ("●", "green")),
            (self.resumes, ("↻", "bold yellow")),
            (self.kills, ("✗", "bold red")),
        ):
            for step in steps:
                marks[last[min(step, self.steps)]] = mark
        return Text.assemble(*marks)


def picture_of(tracks: Sequence[Track]) -> Table:
    """Return the tracks, one below the other."""
    table = Table.grid(padding=(0, 2))
    for number, each in enumerate(tracks, 1):
        words = (f"step {each.step}" if each.step else "", each.outcome, f"{each.seconds:.1f} s")
        table.add_row(f"  {number} {each.name}", each.cells(CELLS), *words)
    return table
