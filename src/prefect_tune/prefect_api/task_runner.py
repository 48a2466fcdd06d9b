"""How many tasks a task runner of threads runs at once.

To ask upstream: a public `max_workers` of `ThreadPoolTaskRunner`.
"""

from __future__ import annotations

import sys

from prefect.task_runners import ThreadPoolTaskRunner

__all__ = ["max_workers_of"]


def max_workers_of(runner: ThreadPoolTaskRunner[object]) -> int | None:
    """Return the runner's `max_workers`, as given or set for all of them; None if it is unlimited."""
    found = getattr(runner, "_max_workers", None)
    return found if isinstance(found, int) and found < sys.maxsize else None
