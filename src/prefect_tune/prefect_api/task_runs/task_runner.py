"""How many tasks a task runner of threads runs at once.

To ask upstream: a public `max_workers` of `ThreadPoolTaskRunner`.
"""

from __future__ import annotations

import sys
from typing import Any

from prefect.context import FlowRunContext
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner


def max_workers_here() -> int | None:
    """Return `max_workers` of this flow's task runner, as given or set; None if it is unlimited, or no thread pool."""
    context = FlowRunContext.get()
    return None if context is None else max_workers_of(context.task_runner)


def max_workers_of(runner: TaskRunner[Any]) -> int | None:
    """Return `max_workers` of a task runner, as given or set; None if it is unlimited, or no thread pool."""
    found = getattr(runner, "_max_workers", None) if isinstance(runner, ThreadPoolTaskRunner) else None
    return found if isinstance(found, int) and found < sys.maxsize else None
