"""SIGTERM and Ctrl-C as a request to save and end, in place of an exception in the middle of a commit."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interruption"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def interruption() -> Iterator[threading.Event]:
    """Yield an event that is set by the first SIGTERM or SIGINT; the signal itself is delivered at the end.

    Whoever handles it then (Prefect, Python) finds everything saved. A second Ctrl-C does not wait.
    Outside the main thread, where no signal arrives, the event stays unset.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    caught: list[int] = []

    def take_down(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and caught:
            raise KeyboardInterrupt
        caught.append(number)
        requested.set()

    before = {number: signal.signal(number, take_down) for number in _SIGNALS}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])
