"""Prefect's logging in a trial's process, which has no flow run and does not import Prefect by itself.

What a process prints becomes the log of its run: so the loggers that Prefect would send to its API print there.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_LOGGERS = "prefect.logging.loggers"
_EXTRA = "PREFECT_LOGGING_EXTRA_LOGGERS"


def print_logs_of_run() -> None:
    """Have `get_run_logger()` and the loggers of PREFECT_LOGGING_EXTRA_LOGGERS print, once Prefect is imported or not.

    The level is INFO, unless a logger has one. Calling it again has no effect.
    """
    if not any(isinstance(each, _PatchesRunLogger) for each in sys.meta_path):
        sys.meta_path.insert(0, _PatchesRunLogger())
    for name in filter(None, map(str.strip, os.environ.get(_EXTRA, "").split(","))):
        _print_records(logging.getLogger(name))


def _print_records(logger: logging.Logger) -> logging.Logger:
    if _handler not in logger.handlers:
        logger.addHandler(_handler)
        logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return logger


class _PrintingHandler(logging.Handler):
    """Prints to what `sys.stderr` is at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)  # noqa: T201  its output is the log


_handler = _PrintingHandler()
_handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))


class _PatchesRunLogger(MetaPathFinder):
    """Gives `get_run_logger` a logger where there is no run, as soon as something imports it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _LOGGERS else None
        if spec is None or spec.loader is None:
            return None
        run: Callable[[ModuleType], None] = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            vars(module)["get_run_logger"] = _with_fallback(module)

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def _with_fallback(module: ModuleType) -> Callable[..., Any]:
    """Return the `get_run_logger` of Prefect's module with a logger for code outside of a run."""
    original, missing = vars(module)["get_run_logger"], vars(module)["MissingContextError"]

    @wraps(original)
    def get_run_logger(*args: Any, **options: Any) -> Any:
        try:
            return original(*args, **options)
        except missing:
            return _print_records(logging.getLogger("trial"))

    return get_run_logger
