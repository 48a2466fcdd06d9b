"""Run the demo, and save its output as docs/demo.svg, the picture in the README."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.console import Console

from prefect_tune.demo import make_demo_plan
from prefect_tune.drills.run_drill import run_drill_in_terminal

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "demo.svg"
COLUMNS, STEPS = 100, 24


def remove_fonts(svg: str) -> str:
    """Drop the fonts that a browser would fetch: a picture makes no request."""
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def main() -> int:
    """Return the exit code."""
    console = Console(record=True, width=COLUMNS, force_terminal=False, highlight=False)
    report = run_drill_in_terminal(make_demo_plan(STEPS), None, console, keep=False)
    if report.is_exact:
        PICTURE.write_text(remove_fonts(console.export_svg(title="prefect-tune demo")))
    return 0 if report.is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
