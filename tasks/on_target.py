"""Use a target for work that is too small for a task run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.storage_retries import with_retries

_Result = TypeVar("_Result")


def on_target(
    target: StorageTarget, act: Callable[[ObjectStore], _Result], timeout: timedelta = timedelta(minutes=2)
) -> _Result:
    """Return `act(store)`; each try opens the target anew, and may last `timeout`. Retried as `with_retries` does."""

    def acted() -> _Result:
        with target.open(timeout=timeout) as store:
            return act(store)

    return with_retries(acted)
