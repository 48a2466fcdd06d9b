"""On PYTHONPATH, this records each function of the package that receives or returns the traced value.

Every process that a search starts imports it, so the recording follows the value through all of them. It is Python's
own profile hook: nothing of the package is changed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

METRIC = 0.7318294615
CONFIG_VALUE = 0.2946150731
CHECKPOINT_FILE = "traced-weights.bin"

_MAX_DEPTH = 5  # a message holds a report, which holds metrics, which hold the number
_MAX_ITEMS = 50
# A file that receives a whole state need not know of the value in it.
_WHOLE_STATES = {"Experiment", "TrialMap", "SearchView"}
_PICKLED = b"\x80"  # the first byte: a pickle by value holds the constants of the whole script


def _contains_text(value: object, text: str) -> bool:
    if isinstance(value, str):
        return text in value
    return isinstance(value, bytes) and not value.startswith(_PICKLED) and text.encode() in value


def _make_number_check(number: float) -> Callable[[object], bool]:
    return lambda value: value == number if isinstance(value, float) else _contains_text(value, repr(number))


def _make_instance_check(*names: str) -> Callable[[object], bool]:
    return lambda value: type(value).__name__ in names


TRACED: dict[str, Callable[[object], bool]] = {
    "metric": _make_number_check(METRIC),
    "checkpoint": lambda value: _contains_text(value, CHECKPOINT_FILE),
    "decision": _make_instance_check("MilestoneReached", "Stop", "StopTrial", "DecisionMade"),
    "resume": _make_number_check(CONFIG_VALUE),
}


class Recorder:
    """The profile hook of one process."""

    def __init__(self, root: str, journey: str, record_path: str) -> None:
        self._root, self._record_path, self._matches = root, record_path, TRACED[journey]
        self._recorded: set[int] = set()

    def on_event(self, frame: FrameType, event: str, argument: object) -> None:
        """Record the frame's function if the call's arguments, or what it returns, contain the traced value."""
        code = frame.f_code
        if event not in {"call", "return"} or not code.co_filename.startswith(self._root) or id(code) in self._recorded:
            return
        values = [argument] if event == "return" else _get_arguments(frame)
        if any(self._contains(value, _MAX_DEPTH) for value in values):
            self._recorded.add(id(code))  # functions stay as long as their module
            location = f"{code.co_filename.removeprefix(self._root)} {code.co_firstlineno} {code.co_qualname}"
            line = f"{time.monotonic():.6f} {os.getpid()} {location}\n"
            with open(self._record_path, "a") as record:  # noqa: PTH123  pathlib is not imported in each process
                record.write(line)

    def _contains(self, value: Any, depth: int) -> bool:
        if self._matches(value):
            return True
        if depth == 0 or value is None or isinstance(value, (bool, int, float, str, bytes, type)):
            return False
        if type(value).__name__ in _WHOLE_STATES:
            return False
        try:
            items = list(_get_items(value))[:_MAX_ITEMS]
        except Exception:  # noqa: BLE001  another thread may change it meanwhile, or a property may raise
            return False
        return any(self._contains(item, depth - 1) for item in items)


def _get_arguments(frame: FrameType) -> Iterable[object]:
    """Return the arguments of a call; `self` only if it is a record."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    return [frame.f_locals[name] for name in code.co_varnames[:count] if name in frame.f_locals]


def _get_items(value: Any) -> Iterable[object]:
    """Return what a container or a record holds; nothing of any other object."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if hasattr(type(value), "model_fields"):
        return list(vars(value).values())
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def start_recording() -> None:
    """Install the recorder where a run of `tools.journeys` started this process."""
    if "TRACED_JOURNEY" in os.environ:
        environment = (os.environ[name] for name in ("TRACED_ROOT", "TRACED_JOURNEY", "TRACED_RECORD"))
        recorder = Recorder(*environment)
        threading.setprofile(recorder.on_event)
        sys.setprofile(recorder.on_event)


start_recording()
