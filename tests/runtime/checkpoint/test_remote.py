"""`pt.Checkpoint` on remote targets and in foreign buckets; processes of one machine share downloads."""

from __future__ import annotations

import errno
import http.client
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import fsspec
import pyarrow.fs as arrow
import pytest

import prefect_tune as pt
from prefect_tune.core.checkpoints.manifest import CHUNK_BYTES
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, DeadlineExceeded, StoreUnavailable
from prefect_tune.core.storage.object_store import ListedObject
from prefect_tune.stores.local.staging import fetch_plain_directory
from prefect_tune.stores.open_location import open_location, parse_uri
from tests.fakes.checkpoint_user import CheckpointUser
from tests.fakes.checkpoints import FILES, KEY, MINUTE, commit_files, read_files, shared_copies, write_files
from tests.fakes.servers.s3_sink import Fault, S3Sink, SinkRequest
from tests.fakes.stores.memory_store import MemoryStore

SIZE = sum(map(len, FILES.values()))
PLAIN = {"model.safetensors": b"weights" * 1000, "a folder/odd name?#%.txt": b"text", "empty": b""}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def sink() -> Iterator[S3Sink]:
    with S3Sink() as sink:
        yield sink


@pytest.fixture
def uri(sink: S3Sink, source: Path) -> str:
    """The URI of a committed checkpoint on S3."""
    with open_location(parse_uri(f"s3://bucket/runs?endpoint_url={sink.endpoint}"), timeout=MINUTE) as store:
        commit_files(store, source)
    sink.reset()
    return f"s3://bucket/runs/{KEY.folder}?endpoint_url={sink.endpoint}"


def is_blob_download(request: SinkRequest) -> bool:
    return request.method == "GET" and "/blobs/" in request.path


class Gate:
    """Blocks the first download of a blob until the gate opens, then answers with `fault`."""

    def __init__(self, sink: S3Sink, fault: Fault | None) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self._fault_after_open = fault
        sink.fault = self._fault

    def open(self) -> None:
        self._open.set()

    def _fault(self, request: SinkRequest) -> Fault | None:
        if not is_blob_download(request) or self._open.is_set():
            return None
        self.reached.set()
        self._open.wait(60)
        return self._fault_after_open


def count_blob_bytes(sink: S3Sink) -> int:
    return sum(request.bytes_out for request in tuple(sink.log) if is_blob_download(request))


def put_object(sink: S3Sink, path: str, data: bytes) -> None:
    """Write or overwrite an object, like another tool."""
    with closing(http.client.HTTPConnection(sink.endpoint.removeprefix("http://"))) as connection:
        connection.request("PUT", f"/{path}", body=data)
        assert connection.getresponse().status == 200


# ------------------------------------------------------------------------------------- one download per machine


@pytest.mark.long
def test_processes_with_objects_of_their_own_share_one_download_until_the_last_leaves(
    sink: S3Sink, uri: str, temporary_files: Path
) -> None:
    with ExitStack() as stack:
        users = [stack.enter_context(CheckpointUser(pt.Checkpoint(uri), "borrow")) for _ in range(3)]
        directories = [user.read_line() for user in users]
        assert count_blob_bytes(sink) == SIZE
        for user, directory in zip(users, directories, strict=True):
            assert read_files(directory) == FILES
            assert user.finish() == 0
            assert not Path(directory).exists()
    assert shared_copies(temporary_files) == []


@pytest.mark.parametrize("has_links", [True, False])
def test_new_metadata_makes_a_reader_download_nothing_that_another_has(
    has_links: bool, sink: S3Sink, uri: str, temporary_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    with pt.Checkpoint(uri).as_directory() as first:
        pt.Checkpoint(uri).update_metadata({"note": 1})
        with pt.Checkpoint(uri).as_directory() as second:
            pt.Checkpoint(uri).update_metadata({"note": 2})
            with pt.Checkpoint(uri).as_directory() as third:
                assert read_files(first) == FILES
                assert read_files(second) == {**FILES, ".metadata.json": b'{"note": 1}'}
                assert read_files(third) == {**FILES, ".metadata.json": b'{"note": 2}'}
    assert count_blob_bytes(sink) == SIZE
    assert shared_copies(temporary_files) == []


@pytest.mark.long
def test_a_download_that_fails_gives_nothing_to_processes_that_waited_for_it(
    uri: str, source: Path, temporary_files: Path
) -> None:
    reached, proceed = threading.Event(), threading.Event()

    def refuse(request: SinkRequest) -> Fault | None:
        if not is_blob_download(request):
            return None
        reached.set()
        proceed.wait(60)
        return Fault.REFUSE_403

    with S3Sink() as other:  # another server has the same checkpoint and refuses to serve it
        root = f"s3://bucket/runs?endpoint_url={other.endpoint}"
        with open_location(parse_uri(root), timeout=MINUTE) as store:
            commit_files(store, source)
        other.fault = refuse
        with CheckpointUser(pt.Checkpoint(root.replace("/runs", f"/runs/{KEY.folder}")), "borrow") as first:
            assert reached.wait(30)
            with CheckpointUser(pt.Checkpoint(uri), "borrow") as second:
                time.sleep(1)  # usually enough for `second` to wait for `first`; the outcome is the same without
                proceed.set()
                assert first.finish() == 1
                assert read_files(second.read_line()) == FILES
                assert second.finish() == 0
    assert shared_copies(temporary_files) == []


def test_a_download_whose_process_was_killed_is_made_by_a_process_that_waited(
    sink: S3Sink, uri: str, temporary_files: Path
) -> None:
    gate = Gate(sink, fault=Fault.RESET)
    with CheckpointUser(pt.Checkpoint(uri), "borrow") as first:
        assert gate.reached.wait(30)
        with CheckpointUser(pt.Checkpoint(uri), "borrow") as second:
            first.kill()
            gate.open()
            assert read_files(second.read_line()) == FILES
            assert second.finish() == 0
    assert shared_copies(temporary_files) == []


def test_processes_that_ask_for_one_directory_download_once(sink: S3Sink, uri: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with CheckpointUser(pt.Checkpoint(uri), "have", out) as one, CheckpointUser(pt.Checkpoint(uri), "have", out) as two:
        assert one.read_line() == two.read_line() == out
        assert one.finish() == two.finish() == 0
    assert count_blob_bytes(sink) == SIZE
    assert read_files(out) == FILES


def test_a_killed_download_into_a_directory_leaves_nothing_once_it_is_done_again(
    sink: S3Sink, uri: str, tmp_path: Path
) -> None:
    gate = Gate(sink, fault=Fault.RESET)
    out = tmp_path / "out"
    with CheckpointUser(pt.Checkpoint(uri), "have", str(out)) as reader:
        assert gate.reached.wait(30)
        reader.kill()
    gate.open()
    assert not out.exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".out.")]
    pt.Checkpoint(uri).to_directory(out)
    assert read_files(out) == FILES
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out.")]


def test_a_server_that_never_answers_is_given_up_at_the_timeout(sink: S3Sink, uri: str) -> None:
    sink.fault = lambda request: Fault.STALL if is_blob_download(request) else None
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded), pt.Checkpoint(uri).as_directory(timeout=timedelta(seconds=1)):
        pass
    assert time.monotonic() - start < 5


def test_altered_bytes_on_the_wire_are_asked_for_again_and_altered_bytes_at_rest_are_refused(
    sink: S3Sink, uri: str
) -> None:
    blob = next(name for name in sink.names() if "/blobs/" in name)
    data = sink.bytes_of(blob)
    put_object(sink, blob, b"\xff" + data[1:])
    with pytest.raises(CheckpointCorrupt), pt.Checkpoint(uri).as_directory():
        pass


# -------------------------------------------------------------------------------------- directories of other tools


@pytest.fixture
def plain_uri(sink: S3Sink) -> str:
    """The URI of a directory of another tool, with the folder markers that some tools create."""
    for path, data in {**PLAIN, "": b"", "a folder/": b"", "bare/": b""}.items():
        quoted = path.replace("%", "%25").replace(" ", "%20").replace("?", "%3F").replace("#", "%23")
        put_object(sink, f"bucket/theirs/ckpt/{quoted}", data)
    return f"s3://bucket/theirs/ckpt?endpoint_url={sink.endpoint}"


@pytest.mark.parametrize("how", ["uri", "pyarrow"])
def test_a_plain_directory_is_read_as_it_is(how: str, plain_uri: str, sink: S3Sink, tmp_path: Path) -> None:
    checkpoint = pt.Checkpoint(plain_uri)
    if how == "pyarrow":
        endpoint = sink.endpoint.removeprefix("http://")
        s3 = arrow.S3FileSystem(endpoint_override=endpoint, scheme="http", region="us-east-1")
        checkpoint = pickle.loads(pickle.dumps(pt.Checkpoint("bucket/theirs/ckpt", filesystem=s3)))
    with checkpoint.as_directory() as directory:
        assert read_files(directory) == PLAIN
    assert read_files(checkpoint.to_directory(tmp_path / "out")) == PLAIN
    directory = checkpoint.to_directory()
    assert read_files(directory) == PLAIN
    assert checkpoint.to_directory() == directory


def test_a_plain_directory_keeps_its_metadata_file_and_gets_versions_beside_it(plain_uri: str, sink: S3Sink) -> None:
    checkpoint = pt.Checkpoint(plain_uri)
    assert checkpoint.get_metadata() == {}
    with open_location(parse_uri(f"s3://bucket/theirs?endpoint_url={sink.endpoint}"), timeout=MINUTE) as store:
        store.create("ckpt/.metadata.json", b'{"theirs": 1}')
    assert checkpoint.get_metadata() == {"theirs": 1}
    checkpoint.update_metadata({"mine": 2})
    assert pt.Checkpoint(plain_uri).get_metadata() == {"theirs": 1, "mine": 2}
    assert sink.bytes_of("bucket/theirs/ckpt/.metadata.json") == b'{"theirs": 1}'
    with checkpoint.as_directory() as directory:
        assert read_files(directory) == {**PLAIN, ".metadata.json": b'{"mine": 2, "theirs": 1}'}


def test_a_plain_directory_may_have_changed_the_next_time(plain_uri: str, sink: S3Sink) -> None:
    with pt.Checkpoint(plain_uri).as_directory() as before:
        put_object(sink, "bucket/theirs/ckpt/model.safetensors", b"WEIGHTS" * 1000)
        with pt.Checkpoint(plain_uri).as_directory() as after:
            assert read_files(after)["model.safetensors"] == b"WEIGHTS" * 1000
            assert read_files(before) == PLAIN


def test_the_file_system_of_a_plain_directory_opens_its_files(plain_uri: str) -> None:
    checkpoint = pt.Checkpoint(plain_uri)
    assert checkpoint.filesystem.type_name == "s3"
    with checkpoint.filesystem.open_input_file(f"{checkpoint.path}/model.safetensors") as file:
        assert file.read() == PLAIN["model.safetensors"]


def test_a_read_of_a_committed_file_costs_its_chunks_once_however_it_is_cut(sink: S3Sink, tmp_path: Path) -> None:
    half = CHUNK_BYTES // 2
    content = random.Random(0).randbytes(5 * half)
    target = f"s3://bucket/large?endpoint_url={sink.endpoint}"
    with open_location(parse_uri(target), timeout=MINUTE) as store:
        commit_files(store, write_files(tmp_path / "large", {"model.bin": content}))
    checkpoint = pt.Checkpoint(target.replace("large", f"large/{KEY.folder}"))
    sink.reset()
    with checkpoint.filesystem.open_input_file(f"{checkpoint.path}/model.bin") as file:
        for start, end in ((10, 3 * half), (3 * half, 4 * half), (4 * half, 5 * half), (2 * half + 1, 4 * half)):
            file.seek(start)
            assert file.read(end - start) == content[start:end]
    assert count_blob_bytes(sink) == len(content) + CHUNK_BYTES, "each chunk once, except one that was no longer cached"


def test_file_systems_of_fsspec_are_taken_too(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path, data in PLAIN.items():
        memory.pipe(f"/{tmp_path.name}/theirs/{path}", data)
    from_object = pt.Checkpoint(f"/{tmp_path.name}/theirs", filesystem=memory)
    named = pt.Checkpoint(f"memory://{tmp_path.name}/theirs")
    for checkpoint in (from_object, named):
        with checkpoint.as_directory() as directory:
            assert read_files(directory) == PLAIN


def test_a_file_system_that_might_hang_is_used_in_a_process_that_can_be_ended(tmp_path: Path) -> None:
    write_files(tmp_path / "theirs", PLAIN)
    unknown = fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file"))
    with pt.Checkpoint("theirs", filesystem=unknown).as_directory() as directory:
        assert read_files(directory) == PLAIN


@pytest.mark.parametrize("make", [pt.Checkpoint, lambda uri: pt.Checkpoint(f"{uri.partition('?')[0]}")])
def test_where_there_is_nothing_there_is_no_checkpoint(
    make: Callable[[str], pt.Checkpoint], sink: S3Sink, plain_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", sink.endpoint)  # for URIs without an endpoint
    absent = make(plain_uri.replace("/ckpt", "/absent"))
    with pytest.raises(CheckpointNotFound), absent.as_directory():
        pass
    with pytest.raises(CheckpointNotFound):
        absent.to_directory()


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "a//evil", "..", "a\\..\\evil", "nul\0l"])
def test_a_name_that_leads_out_is_never_followed(name: str, tmp_path: Path) -> None:
    store = MemoryStore()
    store.objects = {"theirs/good": b"good", f"theirs/{name}": b"evil"}
    with pytest.raises(CheckpointCorrupt, match="leads out"):
        fetch_plain_directory(store, "theirs", tmp_path / "deep" / "out")
    assert read_files(tmp_path / "deep") == {}
    assert not (tmp_path / "evil").exists()


def test_a_name_that_is_both_file_and_folder_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    store.objects = {"theirs/a": b"file", "theirs/a/b": b"file"}
    with pytest.raises(CheckpointCorrupt, match="both a file"):
        fetch_plain_directory(store, "theirs", tmp_path / "out")


class _Moving(MemoryStore):
    """A store that changes while it is read."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        data = super().read(path, offset=offset, length=length)
        self.objects["theirs/a"] = b"shorter"
        self.objects["theirs/late"] = b"late"
        return data


class _Truncating(MemoryStore):
    """A store whose listing has wrong sizes."""

    def list(self, prefix: str, *, after: str = "") -> list[ListedObject]:
        return [ListedObject(entry.path, entry.size_bytes + 1) for entry in super().list(prefix, after=after)]


@pytest.mark.parametrize("kind", [_Moving, _Truncating])
def test_a_directory_that_is_written_to_meanwhile_is_not_handed_out(kind: type[MemoryStore], tmp_path: Path) -> None:
    store = kind()
    store.objects = {"theirs/a": b"a" * 100, "theirs/b": b"b" * 100}
    with pytest.raises(StoreUnavailable, match="read it again"):
        fetch_plain_directory(store, "theirs", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "tmp"]


# ------------------------------------------------------------------------------------- an S3 server of another kind


def test_no_credentials_and_no_secret_ever_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "AWS_SECRET_ACCESS_KEY", "very-secret")
    checkpoint = pt.Checkpoint("s3://bucket/a?endpoint_url=http://127.0.0.1:9")
    assert b"very-secret" not in pickle.dumps(checkpoint)
    with pytest.raises(pt.TuneError) as error, checkpoint.as_directory(timeout=timedelta(seconds=0.5)):
        pass
    assert "very-secret" not in str(error.value)
