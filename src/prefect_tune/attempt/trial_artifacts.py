"""Sync a trial's own files (logs, plots) to the target and, on a resume, back.

A resume does not depend on them: errors are logged as warnings, and training continues.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from prefect_tune.artifact_sync import Syncer, TargetSyncer
from prefect_tune.attempt.processes.process_output import Log
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target
from prefect_tune.core.errors import CheckpointNotFound, InvalidInput
from prefect_tune.core.storage.layout import below

_RETRIES = 2
_BACKOFF_SECONDS = 1.0


class TrialArtifacts:
    """Syncs the artifact directory of one attempt; does nothing if the specification has no syncer.

    Raises:
        InvalidInput: its syncer or upload target is invalid.
    """

    def __init__(self, spec: TrialSpec, directory: Path, log: Log) -> None:
        self._sync = spec.sync
        self._directory = str(directory)
        self._log = log
        target = resolve_target(spec.sync.upload_dir or spec.target)
        self._syncer = syncer_for(spec.sync, target) if spec.sync.sync_artifacts else None
        # The default syncer has the target already; a user's syncer needs a whole URI.
        self._uri = None if spec.sync.syncer == "auto" else target.uri
        self._folder = spec.trial.artifacts
        self._remote = self._named(self._folder)
        self._excludes = list(spec.sync.excludes)
        self._had_files = False
        if isinstance(self._syncer, TargetSyncer):
            self._syncer.warn_with(log.warning)

    def begin(self, attempt: int) -> None:
        """Download the files of earlier attempts, so that logs are continued.

        If that fails, this attempt uses a folder of its own: its files would replace those of the same names.
        """
        if attempt == 1:
            if isinstance(self._syncer, TargetSyncer) and self._sync.upload_dir is not None:
                # What an experiment of this name on another target has left there.
                self._aloud(partial(self._syncer.delete, self._remote))
        elif not self._aloud(self._fetch):
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
        """Sync the files a last time, and wait for it."""
        self._aloud(self._send)
        self._aloud(self._wait)

    def settle(self) -> None:
        """Wait for running syncs, before the directory is removed: a half-removed one must not be uploaded."""
        if self._syncer is not None:
            self._aloud(self._syncer.close)

    def _named(self, folder: str) -> str:
        return folder if self._uri is None else below(self._uri, folder)

    def _fetch(self) -> None:
        if self._syncer is not None:
            with suppress(CheckpointNotFound):  # no earlier attempt has synced any
                self._syncer.sync_down(self._remote, self._directory, self._excludes)
                self._wait()

    def _send(self) -> None:
        if self._syncer is not None:
            self._sync_up(self._syncer.sync_up)

    def _send_if_needed(self) -> None:
        if self._syncer is not None:
            self._sync_up(self._syncer.sync_up_if_needed)

    def _sync_up(self, sync_up: Callable[[str, str, list[str]], object]) -> None:
        """Call `sync_up`; of the default syncer not before there is a first file, since most trials have none."""
        if isinstance(self._syncer, TargetSyncer) and not self._had_files:
            self._had_files = any(Path(self._directory).iterdir())
            if not self._had_files:
                return
        sync_up(self._directory, self._remote, self._excludes)

    def _wait(self) -> None:
        if self._syncer is not None:
            self._syncer.wait_or_retry(_RETRIES, _BACKOFF_SECONDS)

    def _aloud(self, act: Callable[[], object]) -> bool:
        """Run `act`; on an error log a warning and return False."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a user's syncer may raise anything, and stops no training
            self._log.warning("the trial's artifacts are not synced: %s: %s", type(error).__name__, error)
            return False
        return True


# ------------------------------------------------------------------------------------------- the syncer of an attempt


def syncer_for(config: SyncConfig, target: StorageTarget) -> Syncer | None:
    """Return the syncer of artifacts for one attempt, which must close it; None if `config.syncer` is None.

    Raises:
        InvalidInput: `config.syncer` is not a syncer, cannot be imported, or cannot be copied.
    """
    syncer = config.syncer
    if syncer is None:
        return None
    if syncer == "auto":
        return TargetSyncer(target, sync_period=config.sync_period, sync_timeout=config.sync_timeout)
    if isinstance(syncer, str):
        return _named(syncer, config)
    if isinstance(syncer, Syncer):
        return _copied(syncer)
    raise InvalidInput(f"syncer: expected 'auto', 'package.module:Name', a pt.Syncer or None, found {syncer!r}")


def _named(name: str, config: SyncConfig) -> Syncer:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as missing:
        raise InvalidInput(f"syncer {name!r}: cannot be imported: {missing}") from missing
    if isinstance(found, Syncer):
        return _copied(found)
    if isinstance(found, type) and issubclass(found, Syncer):
        return _made(found, name, config)
    raise InvalidInput(f"syncer {name!r}: expected a pt.Syncer, or a class of them, found {found!r}")


def _copied(syncer: Syncer) -> Syncer:
    """Return a copy: several attempts may run at once, and each closes its own syncer."""
    try:
        return copy.deepcopy(syncer)
    except Exception as uncopied:
        kind = type(syncer).__name__
        raise InvalidInput(
            f"syncer: each attempt needs its own copy, and this {kind} cannot be copied ({uncopied}). Name the class, "
            f"syncer='package.module:{kind}', create what cannot be copied inside its methods, or define __deepcopy__"
        ) from uncopied


def _made(kind: type[Syncer], name: str, config: SyncConfig) -> Syncer:
    """Create a syncer; the config's periods are passed only to a class that has the constructor of `Syncer`."""
    try:
        made = kind() if kind.__init__ is not Syncer.__init__ else kind(config.sync_period, config.sync_timeout)
    except TypeError as unmade:
        raise InvalidInput(f"syncer {name!r}: cannot be constructed without arguments: {unmade}") from unmade
    return made
