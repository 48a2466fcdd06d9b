"""Flows and scripts that search in the main thread or in another thread of their process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

from prefect import flow, task

import prefect_tune as pt
from prefect_tune.prefect_api import flow_with_server
from prefect_tune.prefect_api.flow_with_server import validate_arguments
from tests.trainables.counting import Fragile

_ONLY_ON_REQUEST = pt.Cadence(every_steps=4000, every_seconds=None)


def search(target: str, experiment: str) -> None:
    """Search with two trials that save only when they are asked to stop."""
    pt.tune(
        Fragile,
        {"step_seconds": 0.2, "x": pt.grid_search([1, 2])},
        target=target,
        experiment=experiment,
        metric="loss",
        stop={"step": 5000},
        num_samples=1,
        max_concurrent_trials=2,
        checkpoint=_ONLY_ON_REQUEST,
    )


@flow
async def await_search(target: str) -> None:
    """Search in a thread of the event loop, like in docs/own-flows.md."""
    await asyncio.to_thread(search, target, "e")


@flow
def submit_search(target: str) -> None:
    """Search in a submitted task."""
    task(search).submit(target, "e").result()


@flow
def interrupt_check(target: str) -> None:
    """Interrupt the check of the arguments of a search in a submitted task."""
    check = validate_arguments

    def interrupt(*args: Any) -> Mapping[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        return check(*args)

    with patch.object(flow_with_server, "validate_arguments", interrupt):
        task(search).submit(target, "e").result()


def search_in_main_thread(target: str) -> None:
    search(target, "e")


def train_in_main_thread(target: str) -> None:
    pt.durable_trainable(
        Fragile,
        {"step_seconds": 0.2, "x": 1},
        target=target,
        experiment="e",
        stop={"step": 5000},
        checkpoint=_ONLY_ON_REQUEST,
    )


def search_in_threads(target: str) -> None:
    """Run two searches in threads, without a flow around them."""
    with ThreadPoolExecutor() as threads:
        for future in [threads.submit(search, target, name) for name in ("e", "f")]:
            future.result()


async def search_in_thread(target: str) -> None:
    """Search in a thread of the event loop, without a flow around it."""
    await asyncio.to_thread(search, target, "e")


if __name__ == "__main__":
    result = globals()[sys.argv[1]](sys.argv[2])
    if asyncio.iscoroutine(result):
        asyncio.run(result)
