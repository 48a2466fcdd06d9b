"""Peak memory of saving and restoring 4 GiB, in a process that has loaded what a Prefect task has loaded.

python -m benchmarks.memory [--write] [--gib 4]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from benchmarks.measuring.s3_process import S3SinkProcess
from benchmarks.measuring.tables import describe_setup, format_table, publish_section
from benchmarks.transfer import fill, require_equal, run_client

_LIMIT_MIB = 512


def _rows(folder: Path, gib: int) -> list[list[str]]:
    fill(folder / "source", 1, gib << 30)
    rows: list[list[str]] = []
    with S3SinkProcess() as sink:
        for act, directory in (("save", folder / "source"), ("restore", folder / "restored")):
            measured = run_client("ours", act, sink.endpoint, directory, "--with-prefect")
            before, peak = measured.loaded_rss_bytes >> 20, measured.peak_rss_bytes >> 20
            verdict = "yes" if peak <= _LIMIT_MIB else "**no**"
            rows.append([f"{act} 1 file of {gib} GiB", f"{before}", f"{peak} (≤ {_LIMIT_MIB})", verdict])
    require_equal(folder / "source", folder / "restored")
    return rows


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--gib", type=int, default=4)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prefect-tune-"))
    try:
        rows = _rows(folder, args.gib)
    finally:
        shutil.rmtree(folder)
    head = ["what", "RSS before, MiB", "peak RSS, MiB", "met"]
    text = f"{format_table(head, rows)}\n\n{describe_setup('prefect', 'obstore')}"
    publish_section("memory", text, write=args.write)


if __name__ == "__main__":
    _main()
