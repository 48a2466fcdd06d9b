"""Refuse searches with several writers of one journal on a target that is safe for one writer only."""

from __future__ import annotations

from typing import Any

from prefect.context import FlowRunContext
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from prefect_tune.core.errors import InvalidInput


def runner_elsewhere() -> TaskRunner[Any] | None:
    """Return the flow's task runner; None if it is a thread pool of this process."""
    context = FlowRunContext.get()
    runner = context.task_runner if context is not None else None
    return None if isinstance(runner, ThreadPoolTaskRunner) else runner


def require_one_runner(uri: str, *, exploiting: str, elsewhere: str) -> None:
    """Refuse a search in which two processes could write one journal at once; call it before the search starts.

    Args:
        uri: of the target, which has no atomic create-if-absent.
        exploiting: name of a scheduler whose trials clone each other's checkpoints; empty for any other scheduler.
        elsewhere: what runs the trials outside this process, such as a task runner; empty if this process does.

    Raises:
        InvalidInput: `exploiting` or `elsewhere` is not empty.
    """
    if exploiting:
        why = "its trials clone each other's checkpoints, and write that into each other's journals"
        _refuse(
            uri,
            f"scheduler: {exploiting}",
            why,
            "a scheduler that clones no checkpoints (FIFO, ASHA, Hyperband, MedianStopping)",
        )
    if elsewhere:
        why = "an attempt in another process may be presumed lost, still run, and write beside its successor"
        _refuse(uri, elsewhere, why, "trials='tasks' with a thread pool task runner")


def _refuse(uri: str, asked: str, why: str, instead: str) -> None:
    raise InvalidInput(
        f"{asked}, at {uri}: {why}. Expected a target with atomic create-if-absent, found one without (ONE RUNNER "
        "ONLY), where the second of two writers overwrites the first. Nothing was started: use S3, GCS, Azure or a "
        f"folder (prefect-tune blocks check TARGET), or {instead}"
    )
