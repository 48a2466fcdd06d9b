"""Run the tests that prove that nothing is lost, and write their figures into docs/reliability.md.

    python tools/reliability.py          what CI runs: minutes
    python tools/reliability.py --deep   hundreds of real kills too: an hour
    python tools/reliability.py --reports build/*.xml   what such runs left, made in parts with pytest's --junitxml

No figure on that page is typed: each is a property that a test recorded, summed over the tests that passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

_REPOSITORY = Path(__file__).resolve().parent.parent
_PAGE = _REPOSITORY / "docs" / "reliability.md"
_SUITES = ("tests/core", "tests/stores", "tests/flows")
_ON_QUALITY = ("tests.core.schedulers.", "tests.core.search.", "tests.integrations.")
"""Tests whose figures say how well a search does, and not that nothing is lost."""
_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"


def main(arguments: Sequence[str]) -> int:
    """Return pytest's exit code; the page is written only if everything passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deep", action="store_true", help="run the long tests too")
    parser.add_argument("--reports", nargs="+", type=Path, help="run nothing: the reports of runs in which all passed")
    options = parser.parse_args(arguments)
    if options.reports:
        _write_page(_sum_figures(options.reports), "tools/reliability.py --reports")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        code = _run_tests(report, deep=options.deep)
        if code == 0:
            _write_page(_sum_figures([report]), f"tools/reliability.py{' --deep' if options.deep else ''}")
    return code


def _run_tests(report: Path, *, deep: bool) -> int:
    marker = "deep or not deep" if deep else "not deep"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", marker, f"--junitxml={report}", *_SUITES]
    return subprocess.run(command, cwd=_REPOSITORY, check=False).returncode


def _sum_figures(reports: Sequence[Path]) -> dict[str, float]:
    """Sum what the tests of all reports recorded; a test that is in two of them counts once.

    Raises:
        SystemExit: a test failed in one of them.
    """
    cases: dict[tuple[str | None, str | None], ET.Element] = {}
    for report in reports:
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
            if case.find("failure") is not None or case.find("error") is not None:
                raise SystemExit(f"{report}: {case.get('classname')}::{case.get('name')} failed; run it again")
            if case.find("skipped") is None:
                cases[case.get("classname"), case.get("name")] = case
    return {"tests passed": len(cases), **_sum_properties(cases.values())}


def _sum_properties(cases: Iterable[ET.Element]) -> dict[str, float]:
    sums: Counter[str] = Counter()
    largest: dict[str, float] = {}
    on_loss = [case for case in cases if not (case.get("classname") or "").startswith(_ON_QUALITY)]
    for entry in (entry for case in on_loss for entry in case.iter("property")):
        kind, _, name = entry.get("name", "").partition(": ")
        if kind == "figure":
            sums[name] += float(entry.get("value", "0"))  # type: ignore[assignment]  # a counter counts floats too
        elif kind == "largest":
            largest[name] = max(largest.get(name, 0.0), float(entry.get("value", "0")))
    return {**dict(sorted(sums.items())), **dict(sorted(largest.items()))}


def _write_page(figures: dict[str, float], command: str) -> None:
    before, _, rest = _PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    rows = [f"| {name} | {value:,.10g} |" for name, value in figures.items()]
    when = datetime.now(UTC).date().isoformat()
    run = f"`python {command}`, {when}:"
    table = "\n".join(["", run, "", "| what | figure |", "|---|---:|", *rows, ""])
    _PAGE.write_text(f"{before}{_BEGIN}{table}{_END}{after}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
