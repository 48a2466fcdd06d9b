"""The transfer of a sync: only changed files, never a mixture of two attempts, no path that leads outside."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from prefect_tune.artifact_sync import TargetSyncer
from prefect_tune.blocks import LocalTarget, S3Target
from prefect_tune.core.checkpoints.artifacts import newest_index, publish_index
from prefect_tune.core.errors import (
    AlreadyExists,
    CheckpointCorrupt,
    InvalidInput,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.stores.local.artifact_transfer import Sent, delete_everything, receive_artifacts, send_artifacts
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.artifacts import FILES, REMOTE, Bucket, Raced, fetched
from tests.fakes.checkpoints import files_in, write
from tests.fakes.servers.s3_sink import S3Sink
from tests.fakes.stores.dying_store import Crash, DyingStore, Way
from tests.fakes.stores.memory_store import MemoryStore

# ---------------------------------------------------------------------------------------- transferred files


def test_a_directory_arrives_whole(syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path) -> None:
    assert syncer.sync_up(str(local), REMOTE) is True
    syncer.wait()
    assert fetched(bucket, tmp_path) == FILES
    assert syncer.sync_down(REMOTE, str(tmp_path / "back")) is True
    syncer.wait()
    assert files_in(tmp_path / "back") == FILES


def test_only_what_changed_is_sent(syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path) -> None:
    syncer.sync_up(str(local), REMOTE)
    syncer.wait()
    before = bucket.bytes_in
    syncer.sync_up(str(local), REMOTE)
    syncer.wait()
    assert bucket.bytes_in == before  # not even an index
    (local / "log.txt").write_bytes(b"line\nanother\n")
    (local / "plots/loss.svg").write_bytes(b"<SVG/>")  # as long as before, a moment later
    (local / "empty").unlink()
    with (local / "big.bin").open("ab") as file:
        file.write(b"more")  # its first 16 MiB are there already
    bucket.operations.clear()
    syncer.sync_up(str(local), REMOTE)
    syncer.wait()
    assert bucket.operations["put"] == 3
    assert bucket.bytes_in - before < 3 << 20
    assert fetched(bucket, tmp_path) == files_in(local)
    assert "empty" not in files_in(local)


def test_a_directory_in_which_nothing_was_ever_written_leaves_nothing_on_the_target(tmp_path: Path) -> None:
    store = MemoryStore()
    sent = send_artifacts(store, REMOTE, tmp_path, (), Sent())
    assert (sent, list(store.list(""))) == (Sent(), [])
    (tmp_path / "log.txt").write_bytes(b"line")
    sent = send_artifacts(store, REMOTE, tmp_path, (), sent)
    (tmp_path / "log.txt").unlink()
    emptied = send_artifacts(store, REMOTE, tmp_path, (), sent)
    assert emptied.index is not None  # that it is empty now has to be said
    assert emptied.index.files == ()


def test_an_old_file_that_did_not_change_is_not_read_again(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    for path in local.rglob("*"):
        os.utime(path, (1, 1))
    sent = send_artifacts(store, REMOTE, local, (), Sent())
    (local / "log.txt").write_bytes(b"new")
    opened: list[str] = []
    original = Path.open

    def noted(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path.name)
        return original(path, *args, **options)

    monkeypatch.setattr(Path, "open", noted)
    send_artifacts(store, REMOTE, local, (), sent)
    assert opened == ["log.txt"]


def test_a_file_that_changes_within_one_tick_of_the_clock_is_sent_again(local: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    status = (local / "log.txt").stat()
    sent = send_artifacts(store, REMOTE, local, (), Sent())
    (local / "log.txt").write_bytes(b"LINE\n")
    os.utime(local / "log.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    send_artifacts(store, REMOTE, local, (), sent)
    assert fetched(store, tmp_path)["log.txt"] == b"LINE\n"


def test_excluded_files_stay_behind_both_ways(
    syncer: TargetSyncer, bucket: Bucket, local: Path, tmp_path: Path
) -> None:
    write(local, {"a.tmp": b"", "deep/b.tmp": b"", "rank_0/c": b"", "checkpoint_tmpx/d": b""})
    syncer.sync_up(str(local), REMOTE, ["*.tmp", "./plots"])
    syncer.wait()
    assert sorted(fetched(bucket, tmp_path)) == ["big.bin", "empty", "log.txt"]
    syncer.sync_down(REMOTE, str(tmp_path / "back"), ["*.bin"])
    syncer.wait()
    assert sorted(files_in(tmp_path / "back")) == ["empty", "log.txt"]


def test_a_sync_down_replaces_what_differs_and_deletes_nothing(
    syncer: TargetSyncer, local: Path, tmp_path: Path
) -> None:
    syncer.sync_up(str(local), REMOTE)
    back = write(tmp_path / "back", {"log.txt": b"old", "mine.txt": b"mine", "big.bin": FILES["big.bin"]})
    kept = (back / "big.bin").stat().st_ino
    syncer.sync_down(REMOTE, str(back))
    syncer.wait()
    assert files_in(back) == {**FILES, "mine.txt": b"mine"}
    assert (back / "big.bin").stat().st_ino == kept


def test_links_that_lead_out_and_odd_things_stay_behind(bucket: Bucket, local: Path, tmp_path: Path) -> None:
    write(tmp_path, {"secret": b"mine", "elsewhere/a": b"a"})
    (local / "out").symlink_to(tmp_path / "secret")
    (local / "plots/out").symlink_to("../../secret")
    (local / "folder").symlink_to(tmp_path / "elsewhere")
    (local / "dangling").symlink_to("nowhere")
    (local / "plots/latest").symlink_to("../log.txt")
    os.mkfifo(local / "pipe")
    (local / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(local / "socket"))
    (local / os.fsdecode(b"latin-\xe9")).write_text("x")
    (local / "back\\slash").write_text("x")
    write(local, {"rank_0.log": b"x", "deep/rank_0.log": b"y"})
    link = "a link to a folder, to nothing, or out of the trial's directory"
    sent = send_artifacts(bucket, REMOTE, local, ("*.tmp",), Sent())
    left_out = {
        **dict.fromkeys(["out", "plots/out", "folder", "dangling"], link),
        **dict.fromkeys(["pipe", "socket"], "neither a file nor a folder"),
        "loop": "it cannot be read: Too many levels of symbolic links",
        os.fsdecode(b"latin-\xe9"): "its name is not UTF-8",
        "back\\slash": "its name has a backslash",
        "rank_0.log": "files of this name are never artifacts",
    }
    assert sent.left_out == left_out
    expected = {**FILES, "plots/latest": FILES["log.txt"], "deep/rank_0.log": b"y"}
    assert fetched(bucket, tmp_path) == expected
    assert send_artifacts(bucket, REMOTE, local, ("*.tmp",), sent).left_out == left_out


NAMES = [
    "Screenshot\N{NARROW NO-BREAK SPACE}3.04.png",
    "全角\N{IDEOGRAPHIC SPACE}空白.txt",
    "no\N{NO-BREAK SPACE}break",
    "family \N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}.svg",
    "tab\tand\nnew\rline",
    "bell\a and escape \x1b[0m",
    "soft\N{SOFT HYPHEN}hyphen",
    "right\N{RIGHT-TO-LEFT OVERRIDE}left",
    "line\N{LINE SEPARATOR}separator",
    "private \ue000 and not assigned \U000e0fff",
    "delete\x7f",
    "percent%20+plus&?#;'\"<>|*:",
    " spaces ",
    ".hidden",
    "...",
    "~",
    "e\N{COMBINING ACUTE ACCENT} and \N{LATIN SMALL LETTER E WITH ACUTE}",
    "界" * 85,
    "\N{NO-BREAK SPACE}" * 127,
    "\t",
]


def test_files_of_any_name_that_is_utf_8_come_back(tmp_path: Path) -> None:
    files = {name: name.encode() for name in NAMES}
    files |= {f"{name}/{name}": b"same" for name in ("\t\n", "a\N{IDEOGRAPHIC SPACE}b", "....")}
    (tmp_path / "target").mkdir()
    stores = [Bucket(), PosixStore(tmp_path / "target")]
    for number, store in enumerate(stores):
        local = write(tmp_path / f"local-{number}", files)
        sent = send_artifacts(store, REMOTE, local, (), Sent())
        assert sent.left_out == {}
        assert fetched(store, tmp_path) == files
        again = send_artifacts(store, REMOTE, local, (), sent)
        assert again.index == sent.index


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_sent(
    bucket: Bucket, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = send_artifacts(bucket, REMOTE, local, (), Sent())
    write(local, {"log.txt": b"another", "secret": b"mine", "new": b"new"})
    original = Path.open

    def open_unless_denied(path: Path, *args: Any, **options: Any) -> Any:  # root may read everything
        if path.name in ("secret", "log.txt"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return original(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_unless_denied)
    sent = send_artifacts(bucket, REMOTE, local, (), sent)
    monkeypatch.undo()
    assert sent.left_out == dict.fromkeys(["log.txt", "secret"], "it cannot be read: Permission denied")
    assert fetched(bucket, tmp_path) == {**FILES, "new": b"new"}


def test_what_lies_too_deep_is_named_and_the_rest_is_sent(bucket: Bucket, local: Path, tmp_path: Path) -> None:
    folder = os.open(local, os.O_RDONLY)
    name = "d" * 100
    for _ in range(45):  # a path of 4,545 bytes, which only relative calls reach
        os.mkdir(name, dir_fd=folder)
        folder, above = os.open(name, os.O_RDONLY, dir_fd=folder), folder
        os.close(above)
    os.close(folder)
    try:
        sent = send_artifacts(bucket, REMOTE, local, (), Sent())
    finally:
        shutil.rmtree(local)  # which pytest cannot remove
    ((path, reason),) = sent.left_out.items()
    assert path.startswith(f"{name}/{name}/")
    assert reason in ("its path is longer than 4,096 bytes", "it cannot be read: File name too long")
    assert fetched(bucket, tmp_path) == FILES


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


def test_a_large_file_with_the_longest_name_of_a_file_system_is_sent_to_one(tmp_path: Path) -> None:
    files = {"界" * 85: bytes(range(256)) * 65_537}
    for folder in ("local", "target"):
        (tmp_path / folder).mkdir()
    store = PosixStore(tmp_path / "target")
    send_artifacts(store, REMOTE, write(tmp_path / "local", files), (), Sent())
    assert fetched(store, tmp_path) == files


def test_a_local_link_cannot_lead_a_sync_down_astray(bucket: Bucket, local: Path, tmp_path: Path) -> None:
    send_artifacts(bucket, REMOTE, local, (), Sent())
    outside, back = tmp_path / "outside", tmp_path / "back"
    outside.mkdir()
    back.mkdir()
    (back / "plots").symlink_to(outside)
    with pytest.raises(InvalidInput, match="leads out"):
        receive_artifacts(bucket, REMOTE, back, ())
    assert files_in(outside) == {}


def test_anybodys_folder_can_be_synced_down(bucket: Bucket, tmp_path: Path) -> None:
    bucket.objects = {"theirs/a.txt": b"a", "theirs/b/c.txt": b"c"}
    receive_artifacts(bucket, "theirs", tmp_path / "back", ["c.*"])
    assert files_in(tmp_path / "back") == {"a.txt": b"a"}


def test_a_sync_down_of_a_folder_without_files_is_an_error_and_changes_nothing(bucket: Bucket, tmp_path: Path) -> None:
    back = write(tmp_path / "back", {"mine.txt": b"mine"})
    with pytest.raises(FileNotFoundError, match="nobodys: there are no files"):
        receive_artifacts(bucket, "nobodys", back, ())
    assert files_in(back) == {"mine.txt": b"mine"}


def test_altered_bytes_are_refused_and_the_local_file_stays(bucket: Bucket, local: Path, tmp_path: Path) -> None:
    send_artifacts(bucket, REMOTE, local, (), Sent())
    path = next(path for path in bucket.objects if path.endswith("log.txt"))
    bucket.objects[path] = b"LINE\n"
    back = write(tmp_path / "back", {"log.txt": b"mine"})
    with pytest.raises(CheckpointCorrupt, match=r"log\.txt"):
        receive_artifacts(bucket, REMOTE, back, ())
    assert (back / "log.txt").read_bytes() == b"mine"


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
            assert files_in(tmp_path / "back") == FILES
        assert sink.names() == []
    assert files_in(tmp_path / "remote") == {}


def test_a_uri_below_the_given_target_is_the_folder_on_it(local: Path, tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path / "target"))
    syncer = TargetSyncer(target)
    syncer.sync_up(str(local), f"{target.uri}/a/b")
    syncer.sync_down("a/b", str(tmp_path / "back"))
    syncer.wait()
    assert files_in(tmp_path / "back") == FILES
    for elsewhere in ("file:///elsewhere/a", f"{target.uri}ish/a", "../a", "a//b", "", target.uri):
        with pytest.raises(InvalidInput):
            syncer.sync_up(str(local), elsewhere)
        with pytest.raises(InvalidInput):
            syncer.delete(elsewhere)


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


# --------------------------------------------------------------------------------------- crashes and races


@pytest.mark.parametrize("way", Way)
def test_a_sync_that_dies_at_any_operation_shows_the_state_before_or_after(
    way: Way, local: Path, tmp_path: Path
) -> None:
    (local / "big.bin").unlink()
    first = files_in(local)
    points = 0
    for nth in range(1, 100):
        store = MemoryStore()
        write(local, first)
        send_artifacts(store, REMOTE, local, (), Sent())
        write(local, {"log.txt": b"changed", "new.txt": b"new"})
        dying = DyingStore(store, nth, way)
        try:
            send_artifacts(dying, REMOTE, local, (), Sent())
        except (Crash, TuneError):
            assert fetched(store, tmp_path) in (first, files_in(local))
        if dying.failed_at is None:
            break
        points += 1
        send_artifacts(store, REMOTE, local, (), Sent())
        assert fetched(store, tmp_path) == files_in(local)
        (local / "new.txt").unlink()
    assert points >= 8


def test_what_a_killed_sync_has_sent_is_not_sent_again(local: Path) -> None:
    store = MemoryStore()
    with pytest.raises(Crash):
        send_artifacts(DyingStore(store, 1, only=frozenset({"create"})), REMOTE, local, (), Sent())
    sent = store.bytes_in
    send_artifacts(store, REMOTE, local, (), Sent())
    assert store.bytes_in - sent < 5000  # the index


def test_two_writers_never_mix_and_the_last_one_counts(local: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    other = write(tmp_path / "other", {"theirs.txt": b"theirs", "log.txt": b"theirs too"})
    os.utime(local / "log.txt", (1, 1))  # so long unchanged that it is not read again
    mine = send_artifacts(store, REMOTE, local, (), Sent())
    send_artifacts(store, REMOTE, other, (), Sent())
    assert fetched(store, tmp_path) == files_in(other)
    send_artifacts(store, REMOTE, local, (), mine)  # what it remembers was deleted meanwhile
    assert fetched(store, tmp_path) == FILES


def test_a_sync_that_another_writer_came_before_is_made_again_on_top_of_it(local: Path, tmp_path: Path) -> None:
    store = Raced()
    store.rival = write(tmp_path / "other", {"log.txt": FILES["log.txt"], "theirs.txt": b"theirs"})
    sent = send_artifacts(store, REMOTE, local, (), Sent())
    assert sent.index
    assert sent.index.number == 2
    assert fetched(store, tmp_path) == FILES


def test_an_index_that_comes_too_late_does_not_count(local: Path) -> None:
    store = MemoryStore()
    sent = send_artifacts(store, REMOTE, local, (), Sent())
    assert sent.index
    publish_index(store, REMOTE, sent.index.model_copy(update={"number": 7}))
    with pytest.raises(AlreadyExists, match="another writer has written index"):
        publish_index(store, REMOTE, sent.index.model_copy(update={"number": 5}))


def test_what_another_writer_is_sending_for_a_later_index_is_left_alone(local: Path) -> None:
    store = MemoryStore()
    name = f"{REMOTE}/files/{'a' * 64}"
    store.objects = {f"{name}-0000000002/theirs": b"theirs", f"{name}-0000000001/left": b"left by a killed one"}
    send_artifacts(store, REMOTE, local, (), Sent())
    assert f"{name}-0000000002/theirs" in store.objects
    assert f"{name}-0000000001/left" not in store.objects


def test_nothing_that_nobody_refers_to_stays(local: Path) -> None:
    store, sent = MemoryStore(), Sent()
    for number in range(20):
        (local / "log.txt").write_bytes(b"%d" % number)
        sent = send_artifacts(store, REMOTE, local, (), sent)
    index = newest_index(store, REMOTE)
    assert index is not None
    files = {path for path in store.objects if "/files/" in path}
    assert files == {f"{REMOTE}/{part.object}" for part in index.parts()}
    assert sum("/index/" in path for path in store.objects) <= 9


def test_a_remote_that_somebody_deleted_is_filled_again(local: Path, tmp_path: Path) -> None:
    store = MemoryStore()
    sent = send_artifacts(store, REMOTE, local, (), Sent())
    delete_everything(store, REMOTE)
    send_artifacts(store, REMOTE, local, (), sent)
    assert fetched(store, tmp_path) == FILES


def test_a_store_that_reports_success_for_nothing_is_not_believed(local: Path) -> None:
    class Pretends(MemoryStore):
        def put(self, path: str, data: Buffer) -> None:
            super().put(path, data)
            if path.endswith("log.txt"):
                del self.objects[path]

    store = Pretends()
    with pytest.raises(StoreUnavailable, match=r"log\.txt"):
        send_artifacts(store, REMOTE, local, (), Sent())
    assert newest_index(store, REMOTE) is None
