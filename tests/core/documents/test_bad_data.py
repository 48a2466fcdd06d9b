"""Foreign and damaged data on a target: it is detected, never executed, and never written outside."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.core.checkpoints.manifest import CHUNK_BYTES, BlobRef, Manifest
from prefect_tune.core.errors import CheckpointCorrupt, InvalidInput, JournalCorrupt, UnknownVersion
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal import journal
from prefect_tune.core.restore import read_manifest, restore_files
from prefect_tune.core.storage.documents import seal, unseal
from prefect_tune.core.values import canonical_json, hash_bytes
from prefect_tune.stores.local.staging import restoring_directory
from tests.core.checkpoints.test_save_and_restore import save
from tests.core.driver import JOURNAL, KEY, Session, Witness
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_files import load_files
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")

Record = Callable[[str, object], None]
Json = dict[str, object]


@pytest.fixture(scope="module")
def manifest() -> bytes:
    saved = save(MemoryStore(), {"weights": bytes(range(50)), "logs/é": b"fine"}, empty=("none",))
    return seal(saved.manifest)


@pytest.fixture(scope="module")
def target() -> MemoryStore:
    """The store of a trial with two saved steps."""
    session = Session(MemoryStore(), Witness())
    session.open()
    session.start()
    for _ in range(2):
        session.train()
        session.save()
    assert isinstance(session.store, MemoryStore)
    return session.store


def flip_bits(data: bytes) -> Iterator[bytes]:
    for index in range(len(data)):
        for bit in range(8):
            yield data[:index] + bytes([data[index] ^ 1 << bit]) + data[index + 1 :]


def truncate(data: bytes) -> Iterator[bytes]:
    return (data[:length] for length in range(len(data)))


def replace_entry(target: MemoryStore, number: int, data: bytes) -> MemoryStore:
    return MemoryStore({**target.objects, JOURNAL.entry_path(number): data})


def decode_manifest(data: bytes) -> Manifest:
    return unseal(Manifest, data, "here", CheckpointCorrupt)


def load(store: MemoryStore) -> Experiment:
    return journal.load_experiment(store, JOURNAL)


# --------------------------------------------------------------------------------- flips and truncation


def test_every_flipped_bit_of_a_manifest_is_noticed(manifest: bytes, record_property: Record) -> None:
    for data in flip_bits(manifest):
        with pytest.raises((CheckpointCorrupt, UnknownVersion)):
            decode_manifest(data)
    record_property("figure: bits flipped in documents, all noticed", 8 * len(manifest))


def test_a_manifest_that_was_cut_anywhere_is_noticed(manifest: bytes, record_property: Record) -> None:
    for data in truncate(manifest):
        with pytest.raises(CheckpointCorrupt):
            decode_manifest(data)
    record_property("figure: documents cut, all noticed", len(manifest))


@pytest.mark.parametrize("number", [1, 5, 6])
def test_every_flipped_bit_of_an_entry_is_noticed(target: MemoryStore, number: int, record_property: Record) -> None:
    data = target.objects[JOURNAL.entry_path(number)]
    for altered in flip_bits(data):
        with pytest.raises((JournalCorrupt, UnknownVersion)):
            journal.decode_entry(altered, JOURNAL.entry_path(number))
    record_property("figure: bits flipped in documents, all noticed", 8 * len(data))
    with pytest.raises(JournalCorrupt):
        load(replace_entry(target, number, next(flip_bits(data))))


@pytest.mark.parametrize("number", [1, 3, 6])
def test_an_entry_that_was_cut_anywhere_is_noticed(target: MemoryStore, number: int, record_property: Record) -> None:
    data = target.objects[JOURNAL.entry_path(number)]
    for torn in truncate(data):
        with pytest.raises(JournalCorrupt):
            journal.decode_entry(torn, JOURNAL.entry_path(number))
    record_property("figure: documents cut, all noticed", len(data))
    for torn in (b"", data[:1], data[:-1]):
        with pytest.raises(JournalCorrupt):
            load(replace_entry(target, number, torn))


def test_a_document_in_another_documents_place_is_noticed(target: MemoryStore) -> None:
    manifests = [data for path, data in target.objects.items() if path.endswith("manifest.json")]
    entry = target.objects[JOURNAL.entry_path(1)]
    with pytest.raises(CheckpointCorrupt):
        decode_manifest(entry)
    with pytest.raises(JournalCorrupt):
        load(replace_entry(target, 2, manifests[0]))
    with pytest.raises(JournalCorrupt):
        load(replace_entry(target, 2, entry))


# ------------------------------------------------------------------------- code execution and path escapes


class _Bomb:
    """Unpickling this object creates a file."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self._mark,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_read(target: MemoryStore, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "was-here"
    payload = pickle.dumps(_Bomb(mark), protocol)
    with pytest.raises(CheckpointCorrupt):
        decode_manifest(payload)
    with pytest.raises(JournalCorrupt):
        load(replace_entry(target, 2, payload))
    assert not mark.exists()


def reseal(manifest: bytes, change: Callable[[Json], object]) -> bytes:
    """Change the manifest, and give it a valid digest."""
    body = json.loads(manifest)
    change(body)
    del body["digest_of_document"]
    return canonical_json({**body, "digest_of_document": hash_bytes(canonical_json(body))})


ESCAPES = [
    "../outside",
    "/etc/passwd",
    "a/../../outside",
    "a/./b",
    "a//b",
    "a/",
    "..",
    ".",
    "",
    "a\\..\\b",
    "C:\\x",
    "nul\0l",
]


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize("field", ["file", "empty directory", "blob"])
def test_no_path_in_a_manifest_leads_out(manifest: bytes, field: str, path: str) -> None:
    def escape(body: Json) -> None:
        files, blobs = body["files"], body["blobs"]
        assert isinstance(files, list)
        assert isinstance(blobs, list)
        match field:
            case "file":
                files[0]["path"] = path
            case "empty directory":
                body["empty_directories"] = [path]
            case _:
                blobs[0]["path"] = path

    with pytest.raises(CheckpointCorrupt, match="not a plain relative path"):
        decode_manifest(reseal(manifest, escape))


def first_chunk(body: Json) -> Json:
    files = body["files"]
    assert isinstance(files, list)
    chunk: Json = next(file["chunks"][0] for file in files if file["chunks"])
    return chunk


def _lengthen_chunk(body: Any) -> None:
    """Give the first file one chunk of a byte more than this package writes."""
    file = next(file for file in body["files"] if file["chunks"])
    file["size_bytes"] = CHUNK_BYTES + 1
    file["chunks"] = [{**file["chunks"][0], "offset": 0, "length": CHUNK_BYTES + 1}]
    body["blobs"][file["chunks"][0]["blob"]]["size_bytes"] = 2**40


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda body: body.update(files=body["files"] * 2), id="a file twice"),
        pytest.param(lambda body: body.update(empty_directories=["weights"]), id="a directory over a file"),
        pytest.param(lambda body: body.update(empty_directories=["weights/x"]), id="a directory in a file"),
        pytest.param(lambda body: body["files"][0].update(path="weights/x"), id="a file in a file"),
        pytest.param(lambda body: body["files"][0].update(size_bytes=9**9), id="more bytes than chunks"),
        pytest.param(lambda body: body["files"][0].update(size_bytes=-1), id="a negative size"),
        pytest.param(lambda body: body["files"][0].update(mode=0o4755), id="set-user-id"),
        pytest.param(lambda body: body["files"][0].update(mode=-1), id="a negative mode"),
        pytest.param(lambda body: first_chunk(body).update(blob=99), id="a blob that is not listed"),
        pytest.param(lambda body: first_chunk(body).update(blob=-1), id="a negative blob"),
        pytest.param(lambda body: first_chunk(body).update(offset=9**9), id="beyond its blob"),
        pytest.param(lambda body: first_chunk(body).update(offset=-8), id="a negative offset"),
        pytest.param(lambda body: first_chunk(body).update(length=0), id="an empty chunk"),
        pytest.param(lambda body: first_chunk(body).update(length=2**62), id="an absurd chunk"),
        pytest.param(lambda body: first_chunk(body).update(length=1.5), id="half a byte"),
        pytest.param(_lengthen_chunk, id="a chunk of more than 4 MiB"),
        pytest.param(lambda body: body["files"][0].update(path="n" * 256), id="a name that no file system takes"),
        pytest.param(lambda body: body["files"][0].update(path="\u00fc" * 128), id="a name of too many bytes"),
        pytest.param(lambda body: body["files"][0].update(path="d/" * 2048 + "n"), id="a path that is too long"),
        pytest.param(lambda body: first_chunk(body).update(digest="../../x"), id="a digest that is none"),
        pytest.param(lambda body: body["blobs"][0].update(size_bytes=2**63), id="an absurd blob"),
        pytest.param(lambda body: body["blobs"][0].update(path="trials/another/blobs/x"), id="another trial's blob"),
        pytest.param(lambda body: body["blobs"][0].update(path="journal/0000000001.json"), id="no blob"),
        pytest.param(lambda body: body.update(step="one"), id="a step that is no number"),
        pytest.param(lambda body: body.update(extra=1), id="an unknown field"),
        pytest.param(lambda body: body.pop("metadata"), id="a field that is missing"),
        pytest.param(lambda body: body.update(format="another/format"), id="another format"),
        pytest.param(lambda body: body.update(version=0), id="a version before the first"),
        pytest.param(lambda body: body.update(version="1"), id="a version that is no number"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused_though_its_digest_is_right(
    manifest: bytes, change: Callable[[Json], object]
) -> None:
    with pytest.raises(CheckpointCorrupt):
        decode_manifest(reseal(manifest, change))
    assert reseal(manifest, lambda body: body) == manifest


def test_a_link_in_the_place_of_a_restored_file_is_not_followed(tmp_path: Path) -> None:
    """An existing link is an error: the directory must be new, and nothing is written through the link."""
    store = MemoryStore()
    saved = save(store, {"weights": b"new"}).manifest
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "restored").symlink_to(outside)
    with pytest.raises(OSError, match="restored"), restoring_directory(saved, tmp_path / "restored") as sink:
        sink.write(0, 0, memoryview(b"new"))
    assert list(outside.iterdir()) == []


def test_a_manifest_that_asks_for_more_than_there_is_costs_what_there_is() -> None:
    """The manifest claims four gigabytes, the blob has three bytes: no larger buffer is allocated."""
    store = MemoryStore()
    saved = save(store, {"weights": b"abc"}).manifest
    (path,) = saved.blob_paths()
    chunk = saved.files[0].chunks[0].model_copy(update={"length": CHUNK_BYTES})
    files = tuple(
        saved.files[0].model_copy(update={"path": f"{n}", "size_bytes": CHUNK_BYTES, "chunks": (chunk,)})
        for n in range(1000)
    )
    blob = BlobRef(path=path.removeprefix(f"{saved.key.trial.journal_key.folder}/"), size_bytes=CHUNK_BYTES)
    absurd = Manifest.model_validate(saved.model_copy(update={"files": files, "blobs": (blob,)}).model_dump())

    class RejectingSink:
        def write(self, file: int, offset: int, data: memoryview) -> None:
            raise AssertionError(f"{len(data)} bytes at {offset} of file {file}")

    with pytest.raises(CheckpointCorrupt):
        restore_files(store, absurd, RejectingSink())


# ------------------------------------------------------------------------------- a modified bucket


def test_an_entry_without_its_manifest_is_said_to_be_corruption(target: MemoryStore) -> None:
    store = replace_entry(target, 1, target.objects[JOURNAL.entry_path(1)])
    store.delete([path for path in store.objects if path.endswith("manifest.json")])
    session = Session(store, Witness(), owner="next")
    session.open()
    session.start()
    assert session.trial.checkpoints == ()
    assert len(session.trial.quarantined_sequences) == 2


def test_a_damaged_newest_checkpoint_is_put_aside_and_the_one_before_it_used(target: MemoryStore) -> None:
    store = replace_entry(target, 1, target.objects[JOURNAL.entry_path(1)])
    session = Session(store, Witness(), owner="next")
    session.open()
    first, second = session.trial.checkpoints
    old, new = (read_manifest(store, KEY.checkpoint_key(checkpoint)).blob_paths() for checkpoint in (first, second))
    for path in new - old:
        store.objects[path] = b"\0" * len(store.objects[path])

    session.start()

    assert session.trial.quarantined_sequences == (second.sequence,)
    assert (session.trial.step, session.trial.restored_sequence) == (1, first.sequence)
    session.train()
    session.save()
    newest = read_manifest(store, KEY.checkpoint_key(session.trial.checkpoints[-1]))
    assert load_files(store, newest)["head"] == session.head


def test_an_experiment_with_a_name_that_leads_out_is_never_looked_for() -> None:
    store = MemoryStore()
    for name in ("../e", "/e", "", "e/../f"):
        with pytest.raises(InvalidInput):
            journal.load_experiment(store, first_generation(name))
    assert store.operations.total() == 0
