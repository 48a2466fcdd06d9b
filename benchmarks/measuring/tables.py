"""Markdown tables in `benchmarks/README.md`, written between markers by the script that measured them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

__all__ = ["README", "circumstances", "table", "version_in", "write"]

README = Path(__file__).parents[1] / "README.md"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def circumstances(*packages: str) -> str:
    """Return when, where and with what was measured, and how busy the machine was."""
    when = datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{when}, {os.cpu_count()} cores ({platform.machine()}), load average at the end {load}; {versions}."


def version_in(python: str, package: str) -> str:
    """Return the version of a package of another interpreter."""
    command = [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def write(section: str, text: str, readme: Path = README) -> None:
    """Put `text` between the markers of `section` in `readme`."""
    page = readme.read_text()
    begin, end = f"<!-- {section}: written by its script -->\n", f"<!-- end of {section} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{readme}: expected the markers of {section!r}")
    readme.write_text(f"{before}{begin}{text}\n{end}{after}")
