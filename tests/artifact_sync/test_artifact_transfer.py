"""The transfer of a sync: plain objects, only changed files, bounded memory, no path that leads outside."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.artifact_sync import ArtifactMirror, TargetSyncer
from prefect_tune.blocks import LocalTarget, S3Target
from prefect_tune.core.errors import CheckpointCorrupt, InvalidInput, StoreUnavailable, TuneError
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.artifacts import FILES, REMOTE, Bucket, download_files
from tests.fakes.checkpoints import read_files, write_files
from tests.fakes.servers.s3_sink import S3Sink
from tests.fakes.stores.dying_store import Crash, DyingStore, Failure
from tests.fakes.stores.memory_store import ParallelMemoryStore
from tests.fakes.stores.object_stores import object_store

# ---------------------------------------------------------------------------------------- transferred files


def test_a_directory_arrives_whole(syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path) -> None:
    assert syncer.sync_up(str(local), REMOTE) is True
    syncer.wait()
    assert bucket.objects == {f"{REMOTE}/{path}": data for path, data in FILES.items()}  # plain objects, for every tool
    assert syncer.sync_down(REMOTE, str(tmp_path / "back")) is True
    syncer.wait()
    assert read_files(tmp_path / "back") == FILES


def test_only_what_changed_is_sent(syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path) -> None:
    def sync_and_count() -> tuple[dict[str, int], int]:
        bucket.operations.clear()
        before = bucket.bytes_in
        syncer.sync_up(str(local), REMOTE)
        syncer.wait()
        return dict(bucket.operations), bucket.bytes_in - before

    backdate_files(local)
    assert sync_and_count() == ({"replace": 4}, sum(map(len, FILES.values())))
    assert sync_and_count() == ({}, 0)
    (local / "log.txt").write_bytes(b"line\nanother\n")
    (local / "plots/loss.svg").write_bytes(b"<SVG/>")  # the same size, a moment later
    (local / "empty").unlink()
    backdate_files(local, age_seconds=1)
    assert sync_and_count() == ({"replace": 2, "delete": 1}, 19)
    assert download_files(bucket, tmp_path) == read_files(local)
    assert "empty" not in read_files(local)


def backdate_files(local: Path, age_seconds: int = 10) -> None:
    """Backdate files changed in the last seconds by more than a tick of the clock."""
    now = time.time()
    for path in local.rglob("*"):
        if path.is_file() and path.stat().st_mtime > now - 5:
            os.utime(path, (now - age_seconds, now - age_seconds))


def test_what_was_brought_back_is_not_sent_again(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    ArtifactMirror(local).upload(bucket, REMOTE, ())
    syncer.sync_down(REMOTE, str(tmp_path / "back"))
    syncer.wait()
    bucket.operations.clear()
    (tmp_path / "back" / "log.txt").unlink()
    syncer.sync_up(str(tmp_path / "back"), REMOTE)
    syncer.wait()
    assert bucket.operations == {"delete": 1}


def test_after_a_sync_down_what_the_target_has_lost_is_sent_again(bucket: Bucket, local: Path, tmp_path: Path) -> None:
    backdate_files(local)
    mirror = ArtifactMirror(local)
    mirror.upload(bucket, REMOTE, ())
    del bucket.objects[f"{REMOTE}/log.txt"]
    mirror.download(bucket, REMOTE, ())
    mirror.upload(bucket, REMOTE, ())
    assert download_files(bucket, tmp_path) == FILES


def test_what_others_have_on_the_target_is_not_deleted(bucket: Bucket, local: Path) -> None:
    bucket.objects = {f"{REMOTE}/theirs": b"1", "digits/1/trials/best/checkpoints/a": b"2"}
    theirs = dict(bucket.objects)
    mirror = ArtifactMirror(local)
    mirror.upload(bucket, REMOTE, ())
    shutil.rmtree(local)
    local.mkdir()
    mirror.upload(bucket, REMOTE, ())
    assert bucket.objects == theirs


def test_a_file_that_changes_within_one_tick_of_the_clock_is_sent_again(local: Path, tmp_path: Path) -> None:
    store, mirror, now = ParallelMemoryStore(), ArtifactMirror(local), time.time_ns() + 10**9
    os.utime(local / "log.txt", ns=(now, now))
    mirror.upload(store, REMOTE, ())
    with (local / "log.txt").open("r+b") as file:
        file.write(b"LINE\n")
    os.utime(local / "log.txt", ns=(now, now))
    mirror.upload(store, REMOTE, ())
    assert download_files(store, tmp_path)["log.txt"] == b"LINE\n"


def test_a_file_takes_the_name_of_a_folder_and_a_folder_that_of_a_file(local: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    store, mirror = PosixStore(tmp_path / "target"), ArtifactMirror(local)
    mirror.upload(store, REMOTE, ())
    shutil.rmtree(local / "plots")
    (local / "log.txt").unlink()
    write_files(local, {"plots": b"a file", "log.txt/first": b"a folder"})
    mirror.upload(store, REMOTE, ())
    assert download_files(store, tmp_path) == read_files(local)


def test_excluded_files_stay_behind_both_ways(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    write_files(local, {"a.tmp": b"", "deep/b.tmp": b"", "rank_0/c": b"", "checkpoint_tmpx/d": b""})
    syncer.sync_up(str(local), REMOTE, ["*.tmp", "./plots"])
    syncer.wait()
    assert sorted(download_files(bucket, tmp_path)) == ["big.bin", "empty", "log.txt"]
    syncer.sync_down(REMOTE, str(tmp_path / "back"), ["*.bin"])
    syncer.wait()
    assert sorted(read_files(tmp_path / "back")) == ["empty", "log.txt"]


def test_a_sync_down_replaces_files_and_deletes_none(syncer: TargetSyncer, local: Path, tmp_path: Path) -> None:
    syncer.sync_up(str(local), REMOTE)
    back = write_files(tmp_path / "back", {"log.txt": b"old", "mine.txt": b"mine"})
    syncer.sync_down(REMOTE, str(back))
    syncer.wait()
    assert read_files(back) == {**FILES, "mine.txt": b"mine"}


def test_links_that_lead_out_and_odd_things_stay_behind(bucket: Bucket, local: Path, tmp_path: Path) -> None:
    write_files(tmp_path, {"secret": b"mine", "elsewhere/a": b"a"})
    (local / "out").symlink_to(tmp_path / "secret")
    (local / "plots/out").symlink_to("../../secret")
    (local / "folder").symlink_to(tmp_path / "elsewhere")
    (local / "dangling").symlink_to("nowhere")
    (local / "plots/latest").symlink_to("../log.txt")
    os.mkfifo(local / "pipe")
    (local / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(local / "socket"))
    (local / os.fsdecode(b"latin-\xe9")).write_text("x")
    (local / "back\\slash").write_text("x")
    (local / "tab\tand\nnew line").write_text("x")
    (local / "delete\x7f").mkdir()
    (local / f".{'a' * 32}.part").write_text("half received")
    write_files(local, {"rank_0.log": b"x", "deep/rank_0.log": b"y"})
    link = "a link to a folder, to nothing, or out of the trial's directory"
    mirror = ArtifactMirror(local)
    left_out = {
        **dict.fromkeys(["out", "plots/out", "folder", "dangling"], link),
        **dict.fromkeys(["pipe", "socket"], "neither a file nor a folder"),
        "loop": "it cannot be read: Too many levels of symbolic links",
        os.fsdecode(b"latin-\xe9"): "its name is not UTF-8",
        "back\\slash": "its name has a backslash",
        **dict.fromkeys(["tab\tand\nnew line", "delete\x7f"], "its name has control characters"),
        "rank_0.log": "files of this name are never artifacts",
    }
    for _ in range(2):
        assert mirror.upload(bucket, REMOTE, ("*.tmp",)) == left_out
        assert download_files(bucket, tmp_path) == {**FILES, "plots/latest": FILES["log.txt"], "deep/rank_0.log": b"y"}


def test_a_name_that_the_target_reserves_stays_behind(bucket: Bucket, local: Path, tmp_path: Path) -> None:
    mirror = ArtifactMirror(write_files(local, {".tmp/a": b"x"}))
    (reason,) = mirror.upload(bucket, "", ()).values()
    assert "'.tmp' is reserved" in reason
    (local / ".tmp" / "a").unlink()
    assert mirror.upload(bucket, "", ()) == {}
    assert download_files(bucket, tmp_path, "") == FILES


NAMES = [
    "Screenshot\N{NARROW NO-BREAK SPACE}3.04.png",
    "全角\N{IDEOGRAPHIC SPACE}空白.txt",
    "no\N{NO-BREAK SPACE}break",
    "family \N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}.svg",
    "soft\N{SOFT HYPHEN}hyphen",
    "right\N{RIGHT-TO-LEFT OVERRIDE}left",
    "line\N{LINE SEPARATOR}separator",
    "private \ue000 and not assigned \U000e0fff",
    "percent%20+plus&?#;'\"<>|*:",
    " spaces ",
    ".hidden",
    "...",
    "~",
    "e\N{COMBINING ACUTE ACCENT} and \N{LATIN SMALL LETTER E WITH ACUTE}",
    "界" * 85,
    "\N{NO-BREAK SPACE}" * 127,
]


def test_files_of_any_name_without_control_characters_come_back(tmp_path: Path) -> None:
    files = {name: name.encode() for name in NAMES}
    files |= {f"{name}/{name}": b"same" for name in ("a\N{IDEOGRAPHIC SPACE}b", "....")}
    local = write_files(tmp_path / "local", files)
    (tmp_path / "target").mkdir()
    with S3Sink() as sink:
        for store in (Bucket(), PosixStore(tmp_path / "target"), object_store(sink.endpoint)):
            assert ArtifactMirror(local).upload(store, REMOTE, ()) == {}
            assert download_files(store, tmp_path) == files


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_sent(
    bucket: Bucket, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, original = ArtifactMirror(local), Path.open
    mirror.upload(bucket, REMOTE, ())
    write_files(local, {"log.txt": b"another", "secret": b"mine", "new": b"new"})

    def open_unless_denied(path: Path, *args: Any, **options: Any) -> Any:  # root may read everything
        if path.name in ("secret", "log.txt"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return original(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_unless_denied)
    left_out = mirror.upload(bucket, REMOTE, ())
    monkeypatch.undo()
    assert left_out == dict.fromkeys(["log.txt", "secret"], "it cannot be read: Permission denied")
    assert download_files(bucket, tmp_path) == {**FILES, "new": b"new"}


@pytest.mark.parametrize("unreadable", ["plots", ""], ids=["a folder", "the directory"])
def test_files_of_a_folder_that_cannot_be_listed_stay_on_the_target(
    unreadable: str, bucket: Bucket, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, original = ArtifactMirror(local), os.scandir
    mirror.upload(bucket, REMOTE, ())

    def scandir_unless_broken(path: Path) -> Any:
        if Path(path) == local / unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir_unless_broken)
        assert mirror.upload(bucket, REMOTE, ()) == {unreadable: "it cannot be read: Input/output error"}
    assert download_files(bucket, tmp_path) == FILES
    shutil.rmtree(local / "plots")
    mirror.upload(bucket, REMOTE, ())
    assert download_files(bucket, tmp_path) == read_files(local)


def test_a_file_of_which_the_disk_loses_a_part_is_named_and_stays_as_it_was(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").mkdir()
    store, mirror, original = PosixStore(tmp_path / "target"), ArtifactMirror(local), os.pread
    mirror.upload(store, REMOTE, ())
    write_files(local, {"big.bin": b"more" + FILES["big.bin"], "new": b"new"})

    def pread(file: int, length: int, offset: int) -> bytes:
        if offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(file, length, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        assert mirror.upload(store, REMOTE, ()) == {"big.bin": "it cannot be read: Input/output error"}
    assert download_files(store, tmp_path) == {**FILES, "new": b"new"}


def test_what_lies_too_deep_is_named_and_the_rest_is_sent(bucket: Bucket, local: Path, tmp_path: Path) -> None:
    folder = os.open(local, os.O_RDONLY)
    name = "d" * 100
    for _ in range(45):  # a path of 4,545 bytes: only relative calls reach it
        os.mkdir(name, dir_fd=folder)
        folder, above = os.open(name, os.O_RDONLY, dir_fd=folder), folder
        os.close(above)
    os.close(folder)
    try:
        left_out = ArtifactMirror(local).upload(bucket, REMOTE, ())
    finally:
        shutil.rmtree(local)  # pytest cannot remove it
    assert left_out == {"/".join([name] * 9): "its path on the target is longer than 900 bytes"}
    assert download_files(bucket, tmp_path) == FILES


def test_what_a_syncer_leaves_out_is_logged_once(
    syncer: TargetSyncer, local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (local / "dangling").symlink_to("nowhere")
    for step in range(3):
        (local / "log.txt").write_text(f"{step}")
        if step:
            (local / f"{step}").symlink_to("nowhere")
        syncer.sync_up(str(local), REMOTE, ["plots"])
        syncer.wait()
    logged = [message for message in caplog.messages if "left out" in message]
    assert [message.count("a link to a folder") for message in logged] == [1, 1, 1]
    assert ["'dangling'" in message for message in logged] == [True, False, False]
    for number in range(20):
        (local / f"many-{number}").symlink_to("nowhere")
    syncer.sync_up(str(local), REMOTE, ["plots"])
    syncer.wait()
    assert caplog.messages[-1].endswith(", and 15 more")


def test_a_large_file_takes_little_memory_both_ways(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    os.truncate(write_files(tmp_path / "local", {"large": b""}) / "large", 64 << 20)
    store = PosixStore(tmp_path / "target")
    tracemalloc.start()
    try:
        ArtifactMirror(tmp_path / "local").upload(store, REMOTE, ())
        ArtifactMirror(tmp_path / "back").download(store, REMOTE, ())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "back" / "large").stat().st_size == 64 << 20
    assert peak_bytes < 20 << 20


def test_a_local_link_cannot_lead_a_sync_down_astray(bucket: Bucket, tmp_path: Path) -> None:
    bucket.objects = {f"{REMOTE}/plots/new/loss.svg": b"<svg/>"}
    outside, back = tmp_path / "outside", tmp_path / "back"
    outside.mkdir()
    back.mkdir()
    (back / "plots").symlink_to(outside)
    with pytest.raises(InvalidInput, match="leads out"):
        ArtifactMirror(back).download(bucket, REMOTE, ())
    assert list(outside.iterdir()) == []  # no folder either


def test_a_local_link_is_replaced_and_not_written_through(bucket: Bucket, tmp_path: Path) -> None:
    bucket.objects = {f"{REMOTE}/log.txt": b"line\n"}
    write_files(tmp_path, {"secret": b"mine"})
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "log.txt").symlink_to(tmp_path / "secret")
    ArtifactMirror(tmp_path / "back").download(bucket, REMOTE, ())
    assert read_files(tmp_path / "back") == {"log.txt": b"line\n"}
    assert (tmp_path / "secret").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "name", ["../escaped", "a/../../escaped", "/escaped", "a//escaped", "a/./escaped", "..\\x", "n\0l"]
)
def test_no_key_leads_out_of_the_directory(name: str, bucket: Bucket, tmp_path: Path) -> None:
    bucket.objects = {f"{REMOTE}/log.txt": b"line\n", f"{REMOTE}/{name}": b"theirs"}
    with pytest.raises(CheckpointCorrupt, match="leads out"):
        ArtifactMirror(tmp_path / "deep" / "back").download(bucket, REMOTE, ())
    assert read_files(tmp_path) == {}


def test_a_sync_down_of_a_folder_without_files_is_an_error_and_changes_nothing(bucket: Bucket, tmp_path: Path) -> None:
    back = write_files(tmp_path / "back", {"mine.txt": b"mine"})
    with pytest.raises(FileNotFoundError, match="nobodys: there are no files"):
        ArtifactMirror(back).download(bucket, "nobodys", ())
    assert read_files(back) == {"mine.txt": b"mine"}


class Shrinking(Bucket):
    """A store whose listing shows one byte more than each object has."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        return super().read(path, offset=offset, length=length)[:-1]


def test_an_object_that_is_shorter_than_listed_leaves_the_local_file(local: Path, tmp_path: Path) -> None:
    bucket = Shrinking()
    ArtifactMirror(local).upload(bucket, REMOTE, ())
    back = write_files(tmp_path / "back", {"log.txt": b"mine"})
    with pytest.raises(StoreUnavailable, match=r"log\.txt at 0: expected 5 bytes, found 4"):
        ArtifactMirror(back).download(bucket, REMOTE, ("*.bin", "plots", "empty"))
    assert read_files(back) == {"log.txt": b"mine"}


def test_uris_and_paths_are_taken_where_no_target_was_given(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with S3Sink() as sink:
        s3 = f"s3://bucket/runs/artifacts?endpoint_url={sink.endpoint}"
        for remote in (s3, str(tmp_path / "remote/a"), (tmp_path / "remote/b").as_uri()):
            syncer = TargetSyncer()
            syncer.sync_up(str(local), remote)
            syncer.sync_down(remote, str(tmp_path / "back"))
            syncer.delete(remote)
            syncer.wait_or_retry()
            assert read_files(tmp_path / "back") == FILES
        assert sink.names() == []
    assert read_files(tmp_path / "remote") == {}


def test_a_uri_below_the_given_target_is_the_folder_on_it(local: Path, tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path / "target"))
    syncer = TargetSyncer(target)
    syncer.sync_up(str(local), f"{target.uri}/a/b")
    syncer.sync_down("a/b", str(tmp_path / "back"))
    syncer.wait()
    assert read_files(tmp_path / "back") == FILES
    for remote in ("file:///elsewhere/a", f"{target.uri}ish/a", "../a", "a//b", "", target.uri):
        with pytest.raises(InvalidInput):
            syncer.sync_up(str(local), remote)
        with pytest.raises(InvalidInput):
            syncer.delete(remote)


@pytest.mark.parametrize("options", ["", "?endpoint_url={}"])
def test_the_options_of_a_target_are_no_part_of_the_folder_on_it(options: str, local: Path) -> None:
    with S3Sink() as sink:
        keys: dict[str, Any] = {"access_key_id": "key", "secret_access_key": "secret", "allow_http": True}
        syncer = TargetSyncer(S3Target(bucket="bucket", prefix="runs", endpoint_url=sink.endpoint, **keys))
        with pytest.raises(InvalidInput, match="expected a folder below"):
            syncer.sync_up(str(local), "s3://bucket/runs/a?region=eu")
        syncer.sync_up(str(local), f"s3://bucket/runs/a{options.format(sink.endpoint)}")
        syncer.wait()
        assert any("runs/a" in name for name in sink.names())


# ----------------------------------------------------------------------------------------------- crashes


@pytest.mark.parametrize("failure", Failure)
def test_a_sync_that_dies_at_any_operation_leaves_every_file_whole(
    failure: Failure, local: Path, tmp_path: Path
) -> None:
    (local / "big.bin").unlink()
    first = read_files(local)
    points = 0
    for nth in range(1, 100):
        store, mirror = ParallelMemoryStore(), ArtifactMirror(local)
        write_files(local, first)
        mirror.upload(store, REMOTE, ())
        write_files(local, {"log.txt": b"changed", "new.txt": b"new"})
        (local / "empty").unlink()
        dying = DyingStore(store, nth, failure)
        try:
            mirror.upload(dying, REMOTE, ())
        except (Crash, TuneError):
            files = download_files(store, tmp_path)
            assert all(data in (first.get(path), read_files(local).get(path)) for path, data in files.items())
        if dying.failed_at is None:
            break
        points += 1
        (local / "new.txt").unlink()  # it may have been uploaded
        mirror.upload(store, REMOTE, ())
        assert download_files(store, tmp_path) == read_files(local)
    assert points >= 3


def test_what_a_failed_sync_has_sent_is_not_sent_again(local: Path) -> None:
    store, mirror = ParallelMemoryStore(), ArtifactMirror(local)
    backdate_files(local)
    with pytest.raises(StoreUnavailable):
        mirror.upload(DyingStore(store, 4, Failure.UNAVAILABLE), REMOTE, ())
    assert store.operations["replace"] == 3
    mirror.upload(store, REMOTE, ())
    assert store.operations["replace"] == 4
