"""Empty Prefect tasks, two at a time, for `benchmarks.trial_cost`: what Prefect alone costs for each task run.

python benchmarks/peers_tasks.py submitted|short COUNT ROOM
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

from prefect import flow, task
from prefect.task_runners import ThreadPoolTaskRunner

from prefect_tune.prefect_api.short_task_run import run_here
from prefect_tune.retry_policy import RETRYING


@task(task_run_name="empty {number}", **RETRYING)
def empty(number: int) -> int:
    """Return the number."""
    return number


@flow(task_runner=ThreadPoolTaskRunner(max_workers=2))
def submitted(count: int) -> None:
    """Run the tasks as Prefect's users do."""
    for future in [empty.submit(number) for number in range(count)]:
        future.wait()


@flow
def short(count: int) -> None:
    """Run the tasks as a search runs its attempts."""
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(copy_context().run, run_here, empty, number) for number in range(count)]:
            future.result()


if __name__ == "__main__":
    {"submitted": submitted, "short": short}[sys.argv[1]](int(sys.argv[2]))
    Path(sys.argv[3], "told.json").write_text(json.dumps({"cpu": time.process_time()}))
