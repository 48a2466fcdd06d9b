"""Run the tests that prove that nothing is lost, and write their figures into docs/reliability.md.

    python tools/reliability.py          what CI runs: minutes
    python tools/reliability.py --deep   hundreds of real kills too: an hour

No figure on that page is typed: each is a property that a test recorded, summed over the tests that passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

_REPOSITORY = Path(__file__).resolve().parent.parent
_PAGE = _REPOSITORY / "docs" / "reliability.md"
_SUITES = ("tests/core", "tests/stores", "tests/flows")
_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"


def main(arguments: Sequence[str]) -> int:
    """Return pytest's exit code; the page is written only if everything passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deep", action="store_true", help="run the long tests too")
    deep = parser.parse_args(arguments).deep
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        code = _run(report, deep=deep)
        if code == 0:
            _write(_figures(report), deep=deep)
    return code


def _run(report: Path, *, deep: bool) -> int:
    marker = "deep or not deep" if deep else "not deep"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", marker, f"--junitxml={report}", *_SUITES]
    return subprocess.run(command, cwd=_REPOSITORY, check=False).returncode


def _figures(report: Path) -> dict[str, float]:
    tree = ET.parse(report)  # noqa: S314 - pytest wrote it a moment ago
    told: Counter[str] = Counter()
    largest: dict[str, float] = {}
    for entry in tree.iter("property"):
        kind, _, name = entry.get("name", "").partition(": ")
        if kind == "figure":
            told[name] += float(entry.get("value", "0"))  # type: ignore[assignment]  # a counter counts floats too
        elif kind == "largest":
            largest[name] = max(largest.get(name, 0.0), float(entry.get("value", "0")))
    cases = [case for case in tree.iter("testcase") if case.find("skipped") is None]
    return {"tests passed": len(cases), **dict(sorted(told.items())), **dict(sorted(largest.items()))}


def _write(figures: dict[str, float], *, deep: bool) -> None:
    before, _, rest = _PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    rows = [f"| {name} | {value:,.10g} |" for name, value in figures.items()]
    when = datetime.now(UTC).date().isoformat()
    run = f"`python tools/reliability.py{' --deep' if deep else ''}`, {when}:"
    table = "\n".join(["", run, "", "| what | figure |", "|---|---:|", *rows, ""])
    _PAGE.write_text(f"{before}{_BEGIN}{table}{_END}{after}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
