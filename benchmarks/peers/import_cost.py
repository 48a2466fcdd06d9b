"""What an import costs: CPU seconds and memory of `prefect_tune` and of its flows, whatever extras are installed.

    python -m benchmarks.peers.import_cost [--others PYTHON ...] [--ray PYTHON] [--write]

The others are interpreters that have this package with other extras, such as the clouds' packages of credentials, which
must cost nothing until a block of theirs is used. Ray's has `ray[tune]`. Modules are compiled already.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks.measuring.tables import describe_setup, extras_in, format_table, publish_section, version_in

_ROUNDS = 5


def _costs(python: str, label: str, codes: Sequence[str]) -> Iterator[list[str]]:
    """Yield CPU seconds and peak memory of each code beyond those of an empty interpreter: the least of the rounds."""
    empty = _measure_least(python, "pass")
    for code in codes:
        cpu, memory = (whole - least for whole, least in zip(_measure_least(python, code), empty, strict=True))
        yield [f"`{code}`", label, f"{max(cpu, 0):.2f}", f"{memory:.0f}"]


def _measure_least(python: str, code: str) -> Sequence[float]:
    return [min(values) for values in zip(*(_run(python, code) for _ in range(_ROUNDS)), strict=True)]


def _run(python: str, code: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen([python, "-c", code], env={**os.environ, "PREFECT_HOME": home}, cwd=home)
        _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", nargs="+", default=[], metavar="PYTHON", help="interpreters with other extras")
    parser.add_argument("--ray", metavar="PYTHON", help="an interpreter that has ray[tune]")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    ours = ("import prefect_tune", "import prefect_tune; prefect_tune.tune", "import prefect")
    rows: list[list[str]] = []
    for python in (sys.executable, *args.others):
        rows += _costs(python, ", ".join(extras_in(python)), ours)
    if args.ray:
        rows += _costs(args.ray, version_in(args.ray, "ray"), ["from ray import tune"])
    note = f"The least of {_ROUNDS}. {describe_setup('prefect', 'pydantic')}"
    text = f"{format_table(['import', 'extras, or version', 'CPU s', 'MiB'], rows)}\n\n{note}"
    publish_section("import_cost", text, write=args.write)


if __name__ == "__main__":
    _main()
