"""Read reused blobs back, each one once in so many commits, so that none is reused for ever on its size alone.

A listing tells that a blob is there and how long it is, and nothing of its bytes: one that rots on the target would
spoil every later checkpoint. An attempt begins with a restore, which verifies every byte of the checkpoint before its
first commit. From then on each commit verifies, of the blobs that it shares with the checkpoint before it, those whose
turn it is. Of others that it reuses it verifies all: a save that was cut short has left them, or content has come back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from prefect_tune.core.errors import CheckpointCorrupt, DeadlineExceeded, StoreRefused, StoreUnavailable
from prefect_tune.core.layout import blob_sequence
from prefect_tune.core.manifest import Manifest
from prefect_tune.core.store import ObjectStore
from prefect_tune.core.values import digest_of
from prefect_tune.core.verified_reads import NoSink, Read, fetch, reads

__all__ = ["Reverification", "Unverified", "due_reads", "verify_read"]

_HASH_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Reverification:
    """Which reused blobs a commit reads back: in `every` consecutive turns, each of them once."""

    turn: int
    """How many commits the attempt has made before this one."""
    every: int
    """At least 1, which is all of them in each commit."""

    def is_due(self, path: str) -> bool:
        """Return whether it is the turn of the blob at `path`."""
        place = int(digest_of(path.encode())[:_HASH_DIGITS], 16)
        return place % self.every == self.turn % self.every


@dataclass(frozen=True, slots=True)
class Unverified:
    """A blob that was to be verified, and is not to be reused."""

    path: str
    why: str
    is_damaged: bool
    """Whether its bytes are missing or altered; otherwise they could not be read."""


def due_reads(manifest: Manifest, shared: Collection[str], reverification: Reverification) -> Sequence[Read]:
    """Return the requests that verify what is due of the blobs that `manifest` reuses.

    `shared` are those of the checkpoint before it. A blob of the save's own sequence is new: a try of this save has
    sent it.
    """
    due = {
        index
        for index in range(len(manifest.blobs))
        if blob_sequence(path := manifest.blob_path(index)) < manifest.sequence
        and (path not in shared or reverification.is_due(path))
    }
    return [read for read in reads(manifest) if read.blob in due]


def verify_read(store: ObjectStore, manifest: Manifest, read: Read) -> Unverified | None:
    """Read the chunks of one request back; return None where each of them is what its digest says.

    What cannot be read is not reused either: sending it again keeps the bound, and needs nothing but the writes that a
    commit needs in any case.

    Raises:
        DeadlineExceeded: there is no time to send it again.
    """
    try:
        fetch(store, manifest, read, NoSink())
    except DeadlineExceeded:
        raise
    except (CheckpointCorrupt, StoreUnavailable, StoreRefused) as error:
        return Unverified(manifest.blob_path(read.blob), str(error), is_damaged=isinstance(error, CheckpointCorrupt))
    return None
