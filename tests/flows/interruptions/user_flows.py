"""Flows that search outside of the main thread of their process: a script, and what a worker runs."""

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
    """Search with two trials, which save when they are asked to stop and at no other time."""
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
async def awaiting(target: str) -> None:
    """Search in a thread of the event loop, as docs/own-flows.md says."""
    await asyncio.to_thread(search, target, "e")


@flow
def submitting(target: str) -> None:
    """Search in a submitted task."""
    task(search).submit(target, "e").result()


@flow
def checking(target: str) -> None:
    """Be interrupted while the arguments of a search in a submitted task are checked."""
    check = validate_arguments

    def interrupt(*arguments: Any) -> Mapping[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        return check(*arguments)

    with patch.object(flow_with_server, "validate_arguments", interrupt):
        task(search).submit(target, "e").result()


def main_thread(target: str) -> None:
    """Search in the main thread."""
    search(target, "e")


def training(target: str) -> None:
    """Train a single trial in the main thread."""
    pt.durable_trainable(
        Fragile,
        {"step_seconds": 0.2, "x": 1},
        target=target,
        experiment="e",
        stop={"step": 5000},
        checkpoint=_ONLY_ON_REQUEST,
    )


def waiting(target: str) -> None:
    """Run two searches in threads, without a flow around them."""
    with ThreadPoolExecutor() as threads:
        searches = [threads.submit(search, target, name) for name in ("e", "f")]
        for each in searches:
            each.result()


async def running(target: str) -> None:
    """Search in a thread of the event loop, without a flow around it."""
    await asyncio.to_thread(search, target, "e")


if __name__ == "__main__":
    result = globals()[sys.argv[1]](sys.argv[2])
    if asyncio.iscoroutine(result):
        asyncio.run(result)
