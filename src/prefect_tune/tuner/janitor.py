"""Writes snapshots and deletes what the journal has made superfluous: a slow target does not delay the search."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context

from prefect_tune.blocks import StorageTarget
from prefect_tune.core.errors import TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import write_snapshot
from prefect_tune.core.journal.outbox import delete_posts
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.storage_retries import READ_TIMEOUT, on_target
from prefect_tune.tasks.checkpoints import delete_retired_checkpoints


class Janitor:
    """Works in one thread, which ends after `close`. What it fails to delete, maintenance deletes."""

    def __init__(self, target: StorageTarget) -> None:
        self._target = target
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def write_snapshot(self, experiment: Experiment) -> None:
        """Write the snapshot of an experiment."""
        self._start(lambda: on_target(self._target, lambda store: write_snapshot(store, experiment)))

    def delete_post(self, key: TrialKey, outbox: int, number: int) -> None:
        """Delete a post whose events the journal holds."""

        def delete() -> None:  # without retries: maintenance finds the post
            with self._target.open(timeout=READ_TIMEOUT) as store:
                delete_posts(store, key, outbox, number, number)

        self._start(delete)

    def delete_checkpoints(self, key: TrialKey, trial: Trial, retired: Sequence[CheckpointKey]) -> None:
        """Delete checkpoints that the journal has retired in `trial`."""
        self._start(lambda: delete_retired_checkpoints.fn(self._target, key, trial, retired))

    def close(self) -> None:
        """Take no more work, and end once the present work is done; does not wait."""
        self._work.put(None)

    def _start(self, act: Callable[[], object]) -> None:
        self._work.put(act)
        if self._thread is None:
            run = copy_context().run
            self._thread = threading.Thread(target=run, args=(self._run,), name="janitor", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (act := self._work.get()) is not None:
            with suppress(TuneError):
                act()
