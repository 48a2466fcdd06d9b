"""A drill in a terminal: a line per run, with its commits, kills and resumes, and then what was found."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from prefect_tune.blocks import resolve_target
from prefect_tune.core.shown_text import visible
from prefect_tune.drills.findings import DrillReport
from prefect_tune.drills.plan import DrillPlan
from prefect_tune.drills.run_drill import Track, api_of_drill, run_drill, temporary_folder

_CELLS = 24
_LEGEND = {
    "●": "[green]●[/] committed",
    "✗": "[bold red]✗[/] SIGKILL",
    "↻": "[bold yellow]↻[/] resumed after this step",
}


def drill_in_terminal(plan: DrillPlan, place: str | None, console: Console, *, keep: bool) -> DrillReport:
    """Run a drill, show its runs as they go, and print what it found.

    Args:
        plan: what is trained, and where it is killed.
        place: of the target; None for a temporary folder.
        console: gets the picture and the lines.
        keep: whether what the runs have written stays.

    Raises as `run_drill`.
    """
    tracks: list[Track] = []
    with ExitStack() as at_end:
        if place is None and keep:
            place = tempfile.mkdtemp(prefix="prefect-tune-drill-")
        elif place is None:
            place = at_end.enter_context(temporary_folder())
        environment = at_end.enter_context(api_of_drill())
        console.print(f"\n  [bold]prefect-tune drill[/] of {plan.trainable}, {plan.steps} steps\n")
        with Live(get_renderable=lambda: picture_of(tracks), console=console):
            report = run_drill(plan, resolve_target(place), environment, keep=keep, tracks=tracks)
    console.print("" if console.is_terminal else "\n", f"  {legend_of(tracks)}\n", sep="\n")
    first, *others = map(visible, report.lines())
    found = Table.grid(padding=(0, 1, 0, 0))
    found.add_row(Text("  ✓", "bold green") if report.is_exact else Text("  ✗", "bold red"), Text(first))
    console.print(found)
    for line in others:
        console.print(Padding(Text(line.strip()), (0, 0, 0, 4), expand=False))
    if keep:
        console.print(Text(f"  kept on {place}: experiments {report.name}-undisturbed and {report.name}-killed", "dim"))
    return report


def picture_of(tracks: Sequence[Track]) -> Table:
    """Return the tracks, one below the other."""
    table = Table.grid(padding=(0, 2))
    for number, each in enumerate(tracks, 1):
        step, seconds = f"step {each.step}" if each.step else "", f"{each.seconds:.1f} s"
        table.add_row(f"  {number} {each.name}", cells_of(each, _CELLS), step, seconds)
    return table


def legend_of(tracks: Sequence[Track]) -> str:
    """Return what the marks in the picture mean; of a mark that it does not have, nothing."""
    drawn = "".join(cells_of(each, _CELLS).plain for each in tracks)
    return "   ".join(words for mark, words in _LEGEND.items() if mark in drawn)


def cells_of(track: Track, width: int) -> Text:
    """Return the run as `width` cells: steps trained, checkpoints committed, kills, resumes."""
    last = [max(0, -(-step * width // track.steps) - 1) for step in range(track.steps + 1)]
    marks = [("━", "cyan") if track.step and cell <= last[track.step] else ("·", "dim") for cell in range(width)]
    after = 1 if width >= 2 * track.steps else 0  # a kill is after its step, and hides no commit where there is room
    for steps, mark, offset in (
        (track.committed, ("●", "green"), 0),
        (track.resumes, ("↻", "bold yellow"), 0),
        (track.kills, ("✗", "bold red"), after),
    ):
        for step in steps:
            marks[min(last[min(step, track.steps)] + offset, width - 1)] = mark
    return Text.assemble(*marks)
