"""A checkpoint for tests: its files, and a way to publish it on a target."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

from prefect_tune.core.checkpoints.commit import commit_checkpoint, find_reusable_bytes
from prefect_tune.core.checkpoints.manifest import CheckpointMetadata
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.local.staging import StagedFiles
from prefect_tune.stores.open_location import open_location, parse_uri

KEY = CheckpointKey(trial=TrialKey(experiment="digits", generation=1, trial="best"), step=40, sequence=12)
FILES = {"model/weights.bin": bytes(range(256)) * 20_000, "model/config.json": b"{}", "empty.txt": b""}
MINUTE = timedelta(minutes=1)


def write_files(directory: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


def read_files(directory: str | Path) -> dict[str, bytes]:
    root = Path(directory)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def commit_files(store: ObjectStore, staged: Path, key: CheckpointKey = KEY, **fields: object) -> None:
    metadata = CheckpointMetadata(attempt=1, term=1, write_id=f"{key.name}", created_at="now", **fields)
    commit_checkpoint(store, key, StagedFiles(staged), metadata, reuse=find_reusable_bytes(store, key.trial, None, 0))


class TargetOpener:
    """Like the `open` of a block: it can be pickled, and opens a target's root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, *, timeout: timedelta) -> AbstractContextManager[ObjectStore]:
        return open_location(parse_uri(self.root), timeout=timeout)


def shared_copies(temporary_files: Path) -> list[str]:
    return sorted(str(path) for path in temporary_files.glob("prefect-tune-*/node/*/*copy*"))


def first_generation(experiment: str) -> JournalKey:
    """Return the key of the journal of a name that was never deleted."""
    return JournalKey(experiment=experiment, generation=1)
