"""Perform the demo, and keep what it showed as docs/demo.svg, the picture in the README."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.console import Console

from prefect_tune.demo.run_demo import Demo

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "demo.svg"
COLUMNS = 84


def without_fonts(svg: str) -> str:
    """Drop the fonts that a browser would fetch: a picture makes no request."""
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def main() -> int:
    """Return the exit code."""
    console = Console(record=True, width=COLUMNS, force_terminal=False, highlight=False)
    held = Demo().run(console)
    if held:
        PICTURE.write_text(without_fonts(console.export_svg(title="make demo")))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
