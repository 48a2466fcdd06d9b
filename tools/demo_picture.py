"""Run the demo, and save its output as docs/demo.svg, the picture in the README."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.text import Text

from prefect_tune.demo import make_demo_plan
from prefect_tune.drills.run_drill import DrillProgress, run_drill_in_terminal

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "demo.svg"
COLUMNS, STEPS = 100, 24


class WrappingConsole(Console):
    """Wraps the lines that a terminal would wrap, and indents what follows."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        super().print(*(map(self._wrap_line, objects) if soft_wrap else objects), **options)

    def _wrap_line(self, line: Text | str) -> Text:
        text = line if isinstance(line, Text) else Text.from_markup(line)
        return Text("\n    ").join(text.wrap(self, COLUMNS - 4)) if len(text) > COLUMNS else text


def remove_fonts(svg: str) -> str:
    """Drop the fonts that a browser would fetch: a picture makes no request."""
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def main() -> int:
    """Return the exit code."""
    console = WrappingConsole(record=True, width=COLUMNS, force_terminal=False, highlight=False)
    with patch.object(DrillProgress, "show_activity"):  # a terminal shows it only while the drill runs
        report = run_drill_in_terminal(make_demo_plan(STEPS), None, console, keep=False)
    if report.is_exact:
        PICTURE.write_text(remove_fonts(console.export_svg(title="prefect-tune demo")))
    return 0 if report.is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
