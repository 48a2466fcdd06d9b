"""The trial's own files (logs, plots) on their way to the target and, on a resume, back.

They are not what a resume depends on: what goes wrong with them is said aloud and stops no training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefect_tune.blocks import resolve_target
from prefect_tune.core.errors import TuneError
from prefect_tune.tasks.plan import TrialPlan
from prefect_tune.tasks.syncer import syncer_for
from prefect_tune.tasks.trial_channel import Log

__all__ = ["TrialArtifacts"]

_RETRIES = 2
_BACKOFF_SECONDS = 1.0


class TrialArtifacts:
    """One attempt's artifact directory, and who syncs it, if anybody does."""

    def __init__(self, plan: TrialPlan, directory: Path, log: Log) -> None:
        self._sync = plan.sync
        self._directory = str(directory)
        self._log = log
        target = resolve_target(plan.sync.upload_dir or plan.target)
        self._syncer = syncer_for(plan.sync, target) if plan.sync.sync_artifacts else None
        # Who syncs by default was given the target; somebody's own syncer is given a whole URI.
        self._remote = plan.trial.artifacts if plan.sync.syncer == "auto" else f"{target.uri}/{plan.trial.artifacts}"
        self._excludes = list(plan.sync.excludes)

    def bring_back(self) -> None:
        """Fetch what an earlier attempt left, so that logs are continued."""
        if self._syncer is not None:
            self._syncer.sync_down(self._remote, self._directory, self._excludes)
            self._aloud(self._wait)

    def after_commit(self) -> None:
        """Begin a sync; training does not wait for it."""
        if self._syncer is not None and self._sync.sync_on_checkpoint:
            self._syncer.sync_up(self._directory, self._remote, self._excludes)

    def after_report(self) -> None:
        """Begin a sync if the last one is `sync_period` ago."""
        if self._syncer is not None:
            self._syncer.sync_up_if_needed(self._directory, self._remote, self._excludes)

    def close(self) -> None:
        """Sync what there is a last time, and wait for it."""
        if self._syncer is not None:
            self._syncer.sync_up(self._directory, self._remote, self._excludes)
            self._aloud(self._wait)
            self._aloud(self._syncer.close)

    def _wait(self) -> None:
        if self._syncer is not None:
            self._syncer.wait_or_retry(_RETRIES, _BACKOFF_SECONDS)

    def _aloud(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (TuneError, OSError) as error:
            self._log.warning("the trial's artifacts are not synced: %s", error)
