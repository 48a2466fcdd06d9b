"""Read the demo's experiment from the target; the demo takes its measurements only from there."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

from prefect_tune.blocks import LocalTarget, StorageTarget
from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.journal.journal import history
from prefect_tune.core.journal_events.experiment_events import Started
from prefect_tune.core.recovery.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey, blob_sequence
from prefect_tune.core.storage.object_store import Listed, ObjectStore
from prefect_tune.stores.local.download import fetch_committed
from prefect_tune.stores.path_validation import TEMPORARY

_PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True)
class TrialListing:
    """One listing of a trial."""

    committed: tuple[CheckpointKey, ...] = ()
    """Every checkpoint that has a manifest, oldest first."""
    in_flight: tuple[Listed, ...] = ()
    """Blobs of a save that has no manifest, or none yet."""

    @classmethod
    def of(cls, trial: TrialKey, listing: list[Listed]) -> Self:
        """Parse a listing; the name of a blob has the number of its save."""
        keys = (CheckpointKey.from_manifest_path(trial, each.path) for each in listing)
        committed = sorted((key for key in keys if key), key=lambda key: key.sequence)
        newest = committed[-1].sequence if committed else -1
        blobs = (each for each in listing if each.path.startswith(f"{trial.blobs}/"))
        return cls(tuple(committed), tuple(blob for blob in blobs if blob_sequence(blob.path) > newest))

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0 where there is none."""
        return self.committed[-1].step if self.committed else 0

    @property
    def in_flight_bytes(self) -> int:
        """The size of the blobs of saves without a manifest."""
        return sum(blob.size_bytes for blob in self.in_flight)


class TargetProbe:
    """A read-only view of a trial on its target."""

    def __init__(self, target: StorageTarget, store: ObjectStore, trial: TrialKey) -> None:
        self._target = target
        self._store = store
        self.trial = trial

    def look(self) -> TrialListing:
        """List the trial."""
        return TrialListing.of(self.trial, list(self._store.list(self.trial.folder)))

    def starts(self) -> list[int]:
        """Return the step from which each attempt started."""
        entries = history(self._store, self.trial.experiment, side_by_side=map)
        return [event.from_step for entry in entries for event in entry.events if isinstance(event, Started)]

    def manifest(self, key: CheckpointKey) -> Manifest:
        """Return the manifest of a committed checkpoint."""
        return read_manifest(self._store, key)

    def digests(self, key: CheckpointKey) -> dict[str, str]:
        """Read the checkpoint back, and return the SHA-256 of each of its files."""
        with tempfile.TemporaryDirectory(prefix="prefect-tune-demo-") as scratch:
            directory = Path(scratch) / "checkpoint"
            fetch_committed(self._store, self.manifest(key), directory)
            files = sorted(path for path in directory.rglob("*") if path.is_file())
            return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def torn_files(self) -> int:
        """Count the unfinished files under hidden names that killed writers left; other stores have none."""
        if not isinstance(self._target, LocalTarget):
            return 0
        hidden = Path(self._target.path) / TEMPORARY
        return sum(path.stat().st_nlink == 1 for path in hidden.iterdir()) if hidden.is_dir() else 0

    def remove(self) -> None:
        """Delete the whole experiment, which is the demo's own."""
        self._store.delete([each.path for each in self._store.list(self.trial.experiment)])


@contextmanager
def watch(target: StorageTarget, experiment: str) -> Iterator[TargetProbe]:
    """Watch the trial of `experiment`."""
    with target.open(timeout=_PATIENCE) as store:
        yield TargetProbe(target, store, TrialKey(experiment=experiment, trial="trial"))
