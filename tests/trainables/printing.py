"""A trainable that prints, and ends as its configuration says."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import prefect_tune as pt


def print_and_end(config: dict[str, Any]) -> None:
    how = config["how"]
    if how == "silent":
        raise ValueError("no word")
    for number in range(30):
        print(f"line {number} of {how}")
    sys.stderr.write(f"\rbar 0%\rbar 50% of {how}")
    pt.report({"loss": 1.0})
    match how:
        case "raise":
            raise ValueError("no data")
        case "exit":
            os._exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hostile":
            os.write(1, b"\n\x1b]0;title\x07 \xff\xfe " + "\u202e".encode() + b"y" * 2**20)
            raise ValueError("hostile")
