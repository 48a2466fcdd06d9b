"""Empty Prefect tasks, two at a time, for `benchmarks.trial_cost`: what Prefect alone costs for each task run.

python benchmarks/peers_tasks.py COUNT ROOM
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture


@task(cache_policy=NO_CACHE, persist_result=False, refresh_cache=True, task_run_name="empty {number}")
def empty(number: int) -> int:
    """Return the number."""
    return number


@flow
def tasks(count: int) -> None:
    """Run the tasks."""
    running: deque[PrefectFuture[int]] = deque()
    for number in range(count):
        running.append(empty.submit(number))
        if len(running) > 1:
            running.popleft().wait()
    for last in running:
        last.wait()


if __name__ == "__main__":
    tasks(int(sys.argv[1]))
    Path(sys.argv[2], "told.json").write_text(json.dumps({"cpu": time.process_time()}))
