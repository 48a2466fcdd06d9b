"""The acts of a trainable, recorded in a local file, independently of the package."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Act:
    """One line: the process, its act, and the step."""

    pid: int
    act: str
    step: int


def record_act(path: object, act: str, step: int) -> None:
    """Append a line in one write, which a later kill cannot undo."""
    if not path:
        return
    descriptor = os.open(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    try:
        os.write(descriptor, f"{os.getpid()} {act} {step}\n".encode())
    finally:
        os.close(descriptor)


def hold(gate: object, *, seconds: float = 60) -> None:
    """Wait until the test makes the file `gate`."""
    end = time.monotonic() + seconds
    while gate and not Path(str(gate)).exists() and time.monotonic() < end:
        time.sleep(0.005)


def acts_of(path: Path) -> Sequence[Act]:
    """Return the acts of all whole lines so far."""
    if not path.exists():
        return ()
    lines = path.read_text().split("\n")[:-1]
    return tuple(Act(int(pid), act, int(step)) for pid, act, step in (line.split() for line in lines))
