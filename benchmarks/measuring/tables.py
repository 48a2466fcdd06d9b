"""Markdown tables in `benchmarks/README.md`, written between markers by the script that measured them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

__all__ = ["README", "describe_setup", "extras_in", "format_table", "publish_section", "version_in", "write_section"]

README = Path(__file__).parents[1] / "README.md"


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def describe_setup(*packages: str) -> str:
    """Return when, where and with what was measured, and how busy the machine was."""
    when = datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    extras = ", ".join(extras_in(sys.executable)) or "none"
    machine = f"{os.cpu_count()} cores ({platform.machine()})"
    return f"{when}, {machine}, load average at the end {load}; {versions}; extras installed: {extras}."


def version_in(python: str, package: str) -> str:
    """Return the version of a package of another interpreter."""
    command = [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


_EXTRAS = """
import re
from importlib.metadata import distributions, metadata
package = metadata("prefect-tune")
present = {re.sub("[-_.]+", "-", distribution.name).lower() for distribution in distributions()}
needed = {extra: set() for extra in package.get_all("Provides-Extra")}
for requirement in package.get_all("Requires-Dist"):
    for extra in re.findall("extra == .([a-z]+)", requirement):
        needed[extra].add(re.match("[A-Za-z0-9-]+", requirement)[0])
print(*sorted(extra for extra, names in needed.items() if names <= present))
"""


def extras_in(python: str) -> Sequence[str]:
    """Return the extras of this package whose requirements an interpreter has."""
    return subprocess.run([python, "-c", _EXTRAS], stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def publish_section(section: str, text: str, *, write: bool) -> None:
    """Print the text; with `write`, put it into `benchmarks/README.md` too."""
    print(text)
    if write:
        write_section(section, text)


def write_section(section: str, text: str, readme: Path = README) -> None:
    """Put `text` between the markers of `section` in `readme`."""
    page = readme.read_text()
    begin, end = f"<!-- {section}: written by its script -->\n", f"<!-- end of {section} -->"
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"{readme}: expected the markers of {section!r}")
    readme.write_text(f"{before}{begin}{text}\n{end}{after}")
