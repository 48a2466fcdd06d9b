"""Run one small search for each journey, trace its value, and write the files that it passes into CONTRIBUTING.md.

A file is on a journey if one of its functions receives the value as an argument, or returns it. It decides something if
such a function has a branch or a loop; else it only passes the value on. Files are listed by the part of the package
that they belong to, the parts in the order in which one reads them, the files of a part in the order in which the value
first reaches them.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.journeys.sitecustomize import TRACED

ROOT = Path(__file__).resolve().parents[2]
_PAGE = ROOT / "CONTRIBUTING.md"
_BEGIN, _END = "<!-- journeys: written by make journeys -->\n", "<!-- end of journeys -->\n"
_PACKAGE = "src/prefect_tune/"
_FOLDERS = (_PACKAGE, "flows/", "tasks/", "blocks/")
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.Match, ast.Try, ast.comprehension)
_WIDTH = 118

TITLES: Mapping[str, str] = {
    "metric": "A metric, from the report of a step to the journal and what is seen",
    "checkpoint": "A checkpoint's bytes, from the directory that a trial has written to its manifest, the commit",
    "decision": "A decision of a scheduler, from the report that asks for it to the trial that obeys it",
    "resume": "*Resume*, from the flow to the first step of a trial: a value of its configuration",
}
_PARTS: Mapping[str, str] = {
    "runtime/": "trial's process",
    "attempt/": "attempt",
    "executors/": "search",
    "tuner/": "search",
    "core/schedulers/": "search",
    "core/search/": "search",
    "core/journal": "journal",
    "core/experiment/": "journal",
    "core/messages/": "journal",
    "core/storage/": "journal",
    "core/restore.py": "journal",
    "journal_access.py": "journal",
    "core/checkpoints/": "checkpoint",
    "core/operations/": "checkpoint",
    "stores/": "target",
    "blocks/": "target",
    "tasks/": "tasks",
    "storage_retries.py": "tasks",
    "flows/": "flow",
    "parameters/": "flow",
    "prefect_api/": "flow",
    "ownership.py": "flow",
    "suspension.py": "flow",
    "trust.py": "flow",
    "monitoring/": "what is seen",
    "results.py": "what is seen",
    "arrow_tables.py": "what is seen",
    "notebook.py": "what is seen",
    "reporting/": "what is seen",
    "terminal/": "what is seen",
    "core/prefect_events.py": "what is seen",
    "core/search_view.py": "what is seen",
    "core/": "values",
}
"""The part of the package by the beginning of a path: the longest that fits counts."""
_PASSES_ON = "only passed on by"
_FROM_TRIAL = ("trial's process", "attempt", "tasks", "flow", "checkpoint", "target", "search", "journal", "values")
_TO_TRIAL = ("flow", "tasks", "search", "journal", "checkpoint", "attempt", "trial's process", "target", "values")


@dataclass
class TracedFile:
    """A file on a journey."""

    path: str
    in_search: bool
    """Whether the value first reached it in the search's process."""
    functions: dict[int, str] = field(default_factory=dict)
    """The functions that received or returned the value, by their first lines."""

    @property
    def name(self) -> str:
        """The path as CONTRIBUTING.md writes it."""
        return self.path.removeprefix(_PACKAGE)

    def decides(self) -> bool:
        """Return whether one of its functions has a branch or a loop."""
        tree = ast.parse((ROOT / self.path).read_text())
        return any(
            isinstance(inner, _BRANCHES)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.Lambda)
            and min(line.lineno for line in (node, *getattr(node, "decorator_list", ()))) in self.functions
            for inner in ast.walk(node)
        )


def trace_journey(journey: str) -> list[TracedFile]:
    """Run a scenario under the recorder; return the files in the order of their first record."""
    with tempfile.TemporaryDirectory() as folder:
        record, target = Path(folder, "record"), Path(folder, "target")
        command = [sys.executable, "-m", "tools.journeys.scenarios"]
        if journey == "resume":
            subprocess.run([*command, "before", str(target)], cwd=ROOT, check=True)
        traced = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "TRACED_JOURNEY": journey,
            "TRACED_ROOT": f"{ROOT}/",
            "TRACED_RECORD": str(record),
        }
        with subprocess.Popen([*command, journey, str(target)], cwd=ROOT, env=traced) as search:
            if search.wait():
                raise RuntimeError(f"the scenario {journey} failed")
        lines = sorted((line.split() for line in record.read_text().splitlines()), key=lambda line: float(line[0]))
    files: dict[str, TracedFile] = {}
    for _, pid, path, first_line, function in lines:
        if path.startswith(_FOLDERS):
            file = files.setdefault(path, TracedFile(path, int(pid) == search.pid))
            file.functions[int(first_line)] = function
    files_in_order = list(files.values())
    if journey == "resume":  # it ends where the trial trains
        while files_in_order[-1].in_search:
            files_in_order.pop()
    return files_in_order


def get_part(name: str) -> str:
    """Return the part of the package to which a file belongs."""
    prefix = max((prefix for prefix in _PARTS if name.startswith(prefix)), key=len, default="")
    return _PARTS.get(prefix, "others")


def draw_journey(journey: str, files: Sequence[TracedFile]) -> str:
    """Return the section of a journey: the files that decide something by part, then those that only pass it on."""
    parts = _TO_TRIAL if journey == "resume" else _FROM_TRIAL
    groups: dict[str, list[str]] = {part: [] for part in (*parts, "what is seen")}
    for file in files:
        if file.decides():
            groups.setdefault(get_part(file.name), []).append(file.name)
    if passing := [file.name for file in files if not file.decides()]:
        groups[_PASSES_ON] = passing
    groups = {label: names for label, names in groups.items() if names}
    label_width = max(map(len, groups)) + 3
    rows = [row for label, names in groups.items() for row in _make_rows(label.ljust(label_width), names)]
    return "\n".join([f"{TITLES[journey]} ({len(files)} files):", "", "```journey", *rows, "```", ""])


def _make_rows(label: str, names: Iterable[str]) -> Iterable[str]:
    row = label
    for name in names:
        if len(row) + len(name) > _WIDTH:
            yield row.rstrip()
            row = " " * len(label)
        row += f"{name}  "
    yield row.rstrip()


def main(arguments: Sequence[str]) -> None:
    """Write all journeys into CONTRIBUTING.md; with names of journeys, print these with their functions instead."""
    if arguments:
        for journey in arguments:
            files = trace_journey(journey)
            print(draw_journey(journey, files))
            for file in files:
                print(" " if file.decides() else "-", file.name, ", ".join(file.functions.values()))
        return
    sections = [draw_journey(journey, trace_journey(journey)) for journey in TRACED]
    print(*sections, sep="\n")
    before, _, rest = _PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    written = "\n".join(sections)
    _PAGE.write_text(f"{before}{_BEGIN}\n{written}\n{_END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
