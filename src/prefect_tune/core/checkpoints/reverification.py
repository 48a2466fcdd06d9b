"""Read reused blobs back, each once in a fixed number of commits, so that none is reused for ever on its size alone.

A listing shows a blob's existence and size, not its bytes: a blob damaged on the target would spoil every later
checkpoint that reuses it. An attempt begins with a restore, which verifies every byte of the checkpoint before its
first commit. After that each commit verifies, of the blobs that it shares with the checkpoint before it, those whose
turn it is, and all other blobs that it reuses: an interrupted save left these, or older content has come back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.checkpoints.verified_reads import NoSink, Read, fetch, reads
from prefect_tune.core.errors import CheckpointCorrupt, DeadlineExceeded, StoreRefused, StoreUnavailable
from prefect_tune.core.models import digest_of
from prefect_tune.core.storage.layout import blob_sequence
from prefect_tune.core.storage.object_store import ObjectStore

_HASH_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Reverification:
    """Which reused blobs a commit reads back: each blob once in `every` consecutive commits."""

    turn: int
    """The number of commits that the attempt has made before this one."""
    every: int
    """At least 1; with 1 every commit reads back all reused blobs."""

    def is_due(self, path: str) -> bool:
        """Return whether it is the turn of the blob at `path`."""
        place = int(digest_of(path.encode())[:_HASH_DIGITS], 16)
        return place % self.every == self.turn % self.every


@dataclass(frozen=True, slots=True)
class Unverified:
    """A blob that failed verification, and must not be reused."""

    path: str
    why: str
    is_damaged: bool
    """Whether its bytes are missing or altered; otherwise they could not be read."""


def due_reads(manifest: Manifest, shared: Collection[str], reverification: Reverification) -> Sequence[Read]:
    """Return the reads that verify the reused blobs of `manifest` that are due.

    `shared` are the blobs of the checkpoint before it. A blob with the save's own sequence is not verified: this
    save, or an earlier try of it, has sent it.
    """
    due = {
        index
        for index in range(len(manifest.blobs))
        if blob_sequence(path := manifest.blob_path(index)) < manifest.sequence
        and (path not in shared or reverification.is_due(path))
    }
    return [read for read in reads(manifest) if read.blob in due]


def verify_read(store: ObjectStore, manifest: Manifest, read: Read) -> Unverified | None:
    """Read the chunks of one request back; return None if all match their digests.

    A blob that cannot be read is not reused either: its bytes are sent again, with the same writes that any commit
    needs.

    Raises:
        DeadlineExceeded: no time is left to send the bytes again.
    """
    try:
        fetch(store, manifest, read, NoSink())
    except DeadlineExceeded:
        raise
    except (CheckpointCorrupt, StoreUnavailable, StoreRefused) as error:
        return Unverified(manifest.blob_path(read.blob), str(error), is_damaged=isinstance(error, CheckpointCorrupt))
    return None
