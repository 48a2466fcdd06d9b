"""Peak memory of saving and restoring 4 GiB, in a process that has loaded what a Prefect task has loaded.

python -m benchmarks.memory [--write] [--gib 4]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from benchmarks.measuring.s3_process import S3SinkProcess
from benchmarks.measuring.tables import circumstances, table, write
from benchmarks.transfer import fill, require_equal, run_client

_LIMIT_MIB = 512


def _rows(room: Path, gib: int) -> list[list[str]]:
    fill(room / "source", 1, gib << 30)
    rows: list[list[str]] = []
    with S3SinkProcess() as sink:
        for act, directory in (("save", room / "source"), ("restore", room / "restored")):
            measured = run_client("ours", act, sink.endpoint, directory, "--with-prefect")
            before, peak = (size >> 20 for size in (measured.loaded_rss_bytes, measured.peak_rss_bytes))
            met = "yes" if peak <= _LIMIT_MIB else "**no**"
            rows.append([f"{act} 1 file of {gib} GiB", f"{before}", f"{peak} (≤ {_LIMIT_MIB})", met])
    require_equal(room / "source", room / "restored")
    return rows


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--gib", type=int, default=4)
    asked = parser.parse_args()
    room = Path(tempfile.mkdtemp(prefix="prefect-tune-"))
    try:
        rows = _rows(room, asked.gib)
    finally:
        shutil.rmtree(room)
    head = ["what", "RSS before, MiB", "peak RSS, MiB", "met"]
    text = f"{table(head, rows)}\n\n{circumstances('prefect', 'obstore')}"
    print(text)
    if asked.write:
        write("memory", text)


if __name__ == "__main__":
    _main()
