"""The trial's own files (logs, plots) on their way to the target and, on a resume, back.

They are not what a resume depends on: what goes wrong with them is said aloud and stops no training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefect_tune.blocks import resolve_target
from prefect_tune.core.layout import below
from prefect_tune.tasks.plan import TrialPlan
from prefect_tune.tasks.syncer import syncer_for
from prefect_tune.tasks.trial_channel import Log

__all__ = ["TrialArtifacts"]

_RETRIES = 2
_BACKOFF_SECONDS = 1.0


class TrialArtifacts:
    """One attempt's artifact directory, and who syncs it, if anybody does.

    Raises:
        InvalidInput: the syncer or the upload target that the plan names cannot be had.
    """

    def __init__(self, plan: TrialPlan, directory: Path, log: Log) -> None:
        self._sync = plan.sync
        self._directory = str(directory)
        self._log = log
        target = resolve_target(plan.sync.upload_dir or plan.target)
        self._syncer = syncer_for(plan.sync, target) if plan.sync.sync_artifacts else None
        # Who syncs by default was given the target; somebody's own syncer is given a whole URI.
        self._uri = None if plan.sync.syncer == "auto" else target.uri
        self._folder = plan.trial.artifacts
        self._remote = self._named(self._folder)
        self._excludes = list(plan.sync.excludes)

    def bring_back(self, attempt: int) -> None:
        """Fetch what an earlier attempt left, so that logs are continued.

        What could not be fetched must not be taken for deleted: this attempt's files then go beside it.
        """
        if not self._aloud(self._fetch):
            self._remote = self._named(f"{self._folder}-{attempt}")
            self._log.warning("this attempt's artifacts go to %s, beside the earlier ones", self._remote)

    def after_commit(self) -> None:
        """Begin a sync; training does not wait for it."""
        if self._sync.sync_on_checkpoint:
            self._aloud(self._send)

    def after_report(self) -> None:
        """Begin a sync if the last one is `sync_period` ago."""
        self._aloud(self._send_if_needed)

    def close(self) -> None:
        """Sync what there is a last time, and wait for it."""
        self._aloud(self._send)
        self._aloud(self._wait)

    def settle(self) -> None:
        """Let what is under way end: the directory is about to go, and a half-removed one must not be shown."""
        if self._syncer is not None:
            self._aloud(self._syncer.close)

    def _named(self, folder: str) -> str:
        return folder if self._uri is None else below(self._uri, folder)

    def _fetch(self) -> None:
        if self._syncer is not None:
            self._syncer.sync_down(self._remote, self._directory, self._excludes)
        self._wait()

    def _send(self) -> None:
        if self._syncer is not None:
            self._syncer.sync_up(self._directory, self._remote, self._excludes)

    def _send_if_needed(self) -> None:
        if self._syncer is not None:
            self._syncer.sync_up_if_needed(self._directory, self._remote, self._excludes)

    def _wait(self) -> None:
        if self._syncer is not None:
            self._syncer.wait_or_retry(_RETRIES, _BACKOFF_SECONDS)

    def _aloud(self, act: Callable[[], None]) -> bool:
        """Whether it went well."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a user's syncer may raise anything, and stops no training
            self._log.warning("the trial's artifacts are not synced: %s: %s", type(error).__name__, error)
            return False
        return True
