"""Empty Prefect tasks, two at a time, for `benchmarks.trial_cost`: what Prefect alone costs for each task run.

python benchmarks/peers/tasks.py submitted|short COUNT ROOM
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from pathlib import Path

from prefect import flow, task
from prefect.futures import PrefectFuture

from prefect_tune.prefect_api.task_runs import run_task_inline
from prefect_tune.storage_retries import TASK_RETRY_OPTIONS


@task(task_run_name="empty {number}", **TASK_RETRY_OPTIONS)
def empty(number: int) -> int:
    """Return the number."""
    return number


@flow
def run_submitted(count: int) -> None:
    """Run the tasks as Prefect's users do."""
    running: deque[PrefectFuture[int]] = deque()
    for number in range(count):
        running.append(empty.submit(number))
        if len(running) > 1:
            running.popleft().wait()
    for last in running:
        last.wait()


@flow
def run_inline(count: int) -> None:
    """Run the tasks as a search runs its attempts."""
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(_run_in, copy_context(), number) for number in range(count)]:
            future.result()


def _run_in(context: Context, number: int) -> int:
    return context.run(lambda: run_task_inline(empty, number))


if __name__ == "__main__":
    {"submitted": run_submitted, "short": run_inline}[sys.argv[1]](int(sys.argv[2]))
    Path(sys.argv[3], "measured.json").write_text(json.dumps({"cpu": time.process_time()}))
