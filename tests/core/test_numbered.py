"""Artifact indexes and metadata: numbered documents on stores with lagging listings, races and lost replies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefect_tune.core.checkpoints import metadata
from prefect_tune.core.checkpoints.artifacts import (
    ArtifactFile,
    ArtifactIndex,
    ArtifactPart,
    newest_index,
    publish_index,
)
from prefect_tune.core.checkpoints.metadata import revise_metadata
from prefect_tune.core.errors import CheckpointCorrupt, CommitUnknown, ObjectNotFound, StoreUnavailable
from prefect_tune.core.storage.documents import seal
from prefect_tune.core.storage.object_store import Buffer, Listed
from prefect_tune.core.values import digest_of
from tests.fakes.stores.memory_store import MemoryStore

FOLDER = "e/1/trials/t/artifacts"


def index(number: int, path: str = "files/x-1/log.txt") -> ArtifactIndex:
    part = ArtifactPart(object=path, size_bytes=1, digest=digest_of(b"x"))
    file = ArtifactFile(path="log.txt", parts=(part,))
    return ArtifactIndex(number=number, write_id=f"w{number}", files=(file,))


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "a\\b", "nul\0l", ""])
def test_no_artifact_leads_out(path: str) -> None:
    with pytest.raises(ValueError, match="not a plain relative path"):
        index(1, path)


def test_an_index_in_the_place_of_another_is_noticed() -> None:
    store = MemoryStore()
    store.objects[f"{FOLDER}/index/0000000001.json"] = seal(index(2))
    with pytest.raises(CheckpointCorrupt, match="another number"):
        newest_index(store, FOLDER)


class Vanishing(MemoryStore):
    """A store that lists a deleted object, `times` times."""

    times = 1

    def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
        listed = super().list(prefix, after=after)
        if self.times > 0:
            self.times -= 1
            return [*listed, Listed(f"{FOLDER}/index/0000000009.json", 1)]
        return listed

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith("0000000009.json"):
            raise ObjectNotFound(path)
        return super().read(path, offset=offset, length=length)


@pytest.mark.parametrize(("times", "found"), [(0, 1), (1, 1), (9, 1)])
def test_an_index_that_was_removed_after_it_was_listed_is_looked_for_again(times: int, found: int) -> None:
    store = Vanishing()
    store.times = 0
    publish_index(store, FOLDER, index(1))
    store.times = times
    newest = newest_index(store, FOLDER)
    assert newest
    assert newest.number == found


class Silent(MemoryStore):
    """A store whose creates have an unknown outcome and write nothing."""

    def create(self, path: str, data: Buffer) -> None:
        del data
        raise CommitUnknown(f"{path}: no answer")


def test_a_target_that_never_answers_is_said_not_to() -> None:
    with pytest.raises(CommitUnknown):
        revise_metadata(Silent(), FOLDER, dict, before={}, write_id="w")


class Crowded(MemoryStore):
    """A store on which another writer is always faster."""

    def create(self, path: str, data: Buffer) -> None:
        if path not in self.objects:
            super().create(path, seal(metadata._Revision(write_id=f"theirs {path}", metadata={})))
        super().create(path, data)


def test_a_change_that_always_comes_second_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "_TRIES", 5)
    with pytest.raises(StoreUnavailable, match="5 other writers were faster"):
        revise_metadata(Crowded(), FOLDER, dict, before={}, write_id="w")
