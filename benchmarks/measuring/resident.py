"""How much memory this process has, as Linux counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

__all__ = ["resident_bytes"]


def resident_bytes(field: Literal["VmRSS", "VmHWM"]) -> int:
    """Return what is resident now (VmRSS), or was at most (VmHWM).

    `ru_maxrss` would count the parent's memory, which a child has until its exec.
    """
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) << 10
