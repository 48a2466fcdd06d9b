"""`pt.Checkpoint` on this machine: references, local directories, committed checkpoints, metadata, error messages."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pyarrow.fs as arrow
import pytest

import prefect_tune as pt
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, InvalidInput
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.local import scratch
from prefect_tune.stores.local.scratch import DirectoryContent, fill_directory, shared_copy
from prefect_tune.stores.open_location import open_location, parse_uri
from prefect_tune.tasks.checkpoints import download_checkpoint
from tests.fakes.checkpoint_user import CheckpointUser
from tests.fakes.checkpoints import (
    FILES,
    KEY,
    MINUTE,
    TargetOpener,
    commit_files,
    read_files,
    shared_copies,
    write_files,
)
from tests.long_cases import long_after

# --------------------------------------------------------------------------------------------- references


def test_making_printing_copying_and_pickling_one_opens_nothing() -> None:
    checkpoint = pt.Checkpoint("s3://bucket/folder?endpoint_url=http://127.0.0.1:9")
    for same in (checkpoint, copy.deepcopy(checkpoint), pickle.loads(pickle.dumps(checkpoint))):
        assert repr(same) == "Checkpoint(filesystem=s3, path=bucket/folder)"


@pytest.mark.parametrize(
    ("location", "kind", "path"),
    [
        ("/data/checkpoint", "local", "/data/checkpoint"),
        ("file:///data/with%20space", "local", "/data/with space"),
        ("s3://bucket/a/b/", "s3", "bucket/a/b"),
        ("gs://bucket/a", "gs", "bucket/a"),
        ("abfss://container@account.dfs.core.windows.net/a", "abfss", "container/a"),
    ],
)
def test_path_is_what_pyarrow_wants(location: str, kind: str, path: str) -> None:
    checkpoint = pt.Checkpoint(location)
    assert checkpoint.path == path
    assert f"filesystem={kind}" in repr(checkpoint)


def test_a_relative_path_means_the_same_directory_wherever_the_checkpoint_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = pt.Checkpoint.from_directory("here")
    monkeypatch.chdir("/")
    assert checkpoint.path == str(tmp_path / "here")


@pytest.mark.parametrize(
    "bad", ["", "a\0b", "s3://", "nosuch://bucket/a", "s3://key:secret@bucket/a", "s3://b/a?colour=1"]
)
def test_what_names_nothing_is_refused_at_once_and_in_one_line(bad: str) -> None:
    with pytest.raises(InvalidInput) as error:
        pt.Checkpoint(bad)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_a_uri_is_no_directory_and_a_scheme_does_not_go_with_a_file_system() -> None:
    with pytest.raises(InvalidInput, match=r"pt\.Checkpoint\(uri\)"):
        pt.Checkpoint.from_directory("s3://bucket/a")
    with pytest.raises(InvalidInput, match="without a scheme"):
        pt.Checkpoint("s3://bucket/a", filesystem=arrow.LocalFileSystem())


def test_a_checkpoint_is_no_path_and_says_what_to_do(source: Path) -> None:
    with pytest.raises(TypeError, match="as_directory"):
        os.fspath(pt.Checkpoint.from_directory(source))


@pytest.mark.parametrize("owner", [pt.Checkpoint, pt.Checkpoint("/nowhere")], ids=["class", "instance"])
@pytest.mark.parametrize(
    "name",
    [
        *("from_dict", "to_dict", "from_bytes", "to_bytes", "get_internal_representation"),
        *("from_uri", "to_uri", "uri", "get_preprocessor", "set_preprocessor"),
    ],
)
def test_an_attribute_of_older_apis_is_answered_with_an_example_that_compiles(owner: object, name: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(owner, name)
    message, _, example = str(error.value).partition("\n\n")
    assert name in message
    compile(example, name, "exec")
    assert not hasattr(owner, name)


def test_an_attribute_of_no_api_is_a_plain_error() -> None:
    with pytest.raises(AttributeError, match=r"^'Checkpoint' has no attribute 'colour'$"):
        pt.Checkpoint("/nowhere").colour  # type: ignore[attr-defined]  # noqa: B018  the access raises


def test_importing_it_imports_neither_pyarrow_nor_prefect_nor_pydantic() -> None:
    script = "import sys, prefect_tune.runtime.checkpoint as c; c.Checkpoint('/x'); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"pyarrow", "prefect", "pydantic", "obstore", "fsspec", "numpy"} & set(modules)


def test_a_local_directory_is_lent_as_it_is_and_stays(source: Path, temporary_files: Path) -> None:
    with pt.Checkpoint.from_directory(source).as_directory() as directory:
        assert directory == str(source)
    assert read_files(source) == FILES
    assert shared_copies(temporary_files) == []


def test_a_local_directory_is_copied_where_one_wants_it(source: Path, tmp_path: Path) -> None:
    directory = pt.Checkpoint.from_directory(source).to_directory(tmp_path / "deep" / "copy")
    assert directory == str(tmp_path / "deep" / "copy")
    assert read_files(directory) == FILES


def test_a_local_directory_that_is_not_there_is_no_checkpoint(tmp_path: Path) -> None:
    absent = pt.Checkpoint.from_directory(tmp_path / "absent")
    with pytest.raises(CheckpointNotFound, match="absent"), absent.as_directory():
        pass
    for act in (absent.to_directory, absent.get_metadata, lambda: absent.set_metadata({})):
        with pytest.raises(CheckpointNotFound):
            act()


def test_a_link_that_leads_out_is_not_copied(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (source / "weights").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInput, match="leads out"):
        pt.Checkpoint.from_directory(source).to_directory(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_link_to_a_file_inside_becomes_that_file(source: Path, tmp_path: Path) -> None:
    (source / "last.ckpt").symlink_to("model/weights.bin")
    copied = pt.Checkpoint.from_directory(source).to_directory(tmp_path / "copy")
    assert read_files(copied)["last.ckpt"] == FILES["model/weights.bin"]


def test_the_file_system_of_a_local_directory_is_the_local_one(source: Path) -> None:
    checkpoint = pt.Checkpoint(str(source), filesystem=arrow.LocalFileSystem())
    assert checkpoint.filesystem == arrow.LocalFileSystem()
    with checkpoint.as_directory() as directory:
        assert directory == str(source)


@pytest.mark.parametrize("how", ["path", "uri", "given"])
def test_a_committed_checkpoint_is_lent_whole_and_removed_afterwards(
    how: str, target: Path, temporary_files: Path
) -> None:
    path = str(target / KEY.folder)
    factories = {"path": lambda: pt.Checkpoint(path), "uri": lambda: pt.Checkpoint(f"file://{path}")}
    factories["given"] = lambda: pt.Checkpoint._from_target(TargetOpener(target), target.as_uri(), KEY)
    with factories[how]().as_directory() as directory:
        assert read_files(directory) == FILES
    assert not Path(directory).exists()
    assert shared_copies(temporary_files) == []


def test_one_of_a_block_prints_and_pickles_like_any_other(target: Path) -> None:
    checkpoint = pickle.loads(pickle.dumps(pt.Checkpoint._from_target(TargetOpener(target), "s3://bucket/runs", KEY)))
    assert repr(checkpoint) == f"Checkpoint(filesystem=s3, path=bucket/runs/{KEY.folder})"
    with checkpoint.as_directory() as directory:
        assert read_files(directory) == FILES


def test_altered_bytes_are_never_lent_and_leave_nothing_behind(
    checkpoint: pt.Checkpoint, target: Path, temporary_files: Path, tmp_path: Path
) -> None:
    blob = next((target / KEY.trial.blobs_folder).iterdir())
    blob.write_bytes(b"\xff" + blob.read_bytes()[1:])
    with pytest.raises(CheckpointCorrupt), checkpoint.as_directory():
        pass
    with pytest.raises(CheckpointCorrupt):
        checkpoint.to_directory(tmp_path / "out")
    assert shared_copies(temporary_files) == []
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_one_that_was_never_committed_is_not_found(target: Path) -> None:
    other = KEY.model_copy(update={"step": 41})
    absent = pt.Checkpoint(f"file://{target / other.folder}")
    with pytest.raises(CheckpointNotFound), absent.as_directory():
        pass


def test_the_last_of_several_readers_in_one_process_removes_the_copy(target: Path, temporary_files: Path) -> None:
    path = target / KEY.folder
    first, second = pt.Checkpoint(path).as_directory(), pt.Checkpoint(path).as_directory()
    one, other = Path(first.__enter__()), Path(second.__enter__())
    assert (one / "model/weights.bin").samefile(other / "model/weights.bin")  # two objects, one copy
    first.__exit__(None, None, None)
    assert not one.exists()
    assert read_files(other) == FILES
    assert shared_copies(temporary_files)
    second.__exit__(None, None, None)
    assert not other.exists()
    assert shared_copies(temporary_files) == []


def test_many_threads_that_come_and_go_all_see_the_whole_checkpoint_and_leave_nothing(
    checkpoint: pt.Checkpoint, temporary_files: Path
) -> None:
    def read(_: int) -> bool:
        with checkpoint.as_directory() as directory:
            return read_files(directory) == FILES

    with ThreadPoolExecutor(16) as readers:
        assert all(readers.map(read, range(64)))
    assert shared_copies(temporary_files) == []


def test_a_reader_that_writes_into_its_copy_changes_no_other_copy(checkpoint: pt.Checkpoint) -> None:
    with checkpoint.as_directory() as first:
        Path(first, "model/config.json").write_text("mine")
        with checkpoint.as_directory() as second:
            assert read_files(second) == FILES


def test_a_forked_child_that_leaves_the_block_takes_nothing_with_it(checkpoint: pt.Checkpoint) -> None:
    with checkpoint.as_directory() as directory:
        child = os.fork()
        if child == 0:
            os._exit(0 if read_files(directory) == FILES else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert read_files(directory) == FILES
    assert not Path(directory).exists()


@pytest.mark.parametrize("act", ["borrow", "borrow and fork"])
def test_a_reader_that_was_killed_pins_its_copy_only_until_the_next_one_comes(
    act: str, checkpoint: pt.Checkpoint, target: Path, temporary_files: Path
) -> None:
    with CheckpointUser(checkpoint, act) as reader:
        answer = reader.read_line()
        reader.kill()
        try:
            assert shared_copies(temporary_files)
            with pt.Checkpoint(target / KEY.folder).as_directory() as directory:
                assert read_files(directory) == FILES
            assert shared_copies(temporary_files) == []
        finally:
            if act == "borrow and fork":
                os.kill(int(answer), signal.SIGKILL)


def test_a_copy_that_a_killed_reader_left_is_removed_when_nobody_used_it_for_a_week(
    checkpoint: pt.Checkpoint, source: Path, target: Path, temporary_files: Path
) -> None:
    with CheckpointUser(checkpoint, "borrow") as reader:
        reader.read_line()
        reader.kill()
    (lock,) = temporary_files.glob("prefect-tune-*/node/*.lock")
    other = KEY.model_copy(update={"step": 50})
    (source / "more").write_text("other bytes")
    with open_location(parse_uri(target), timeout=MINUTE) as store:
        commit_files(store, source, other)
    week_seconds = 7 * 24 * 60 * 60
    for age_seconds, is_removed in ((week_seconds - 600, False), (week_seconds + 1, True)):
        os.utime(lock, (time.time() - age_seconds,) * 2)
        with pt.Checkpoint(target / other.folder).as_directory():
            assert lock.exists() is lock.with_suffix("").exists() is not is_removed


def test_a_copy_of_an_earlier_boot_of_this_machine_or_of_another_machine_is_not_used(
    checkpoint: pt.Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checkpoint.as_directory() as first:
        monkeypatch.setattr("socket.gethostname", lambda: "another")
        with checkpoint.as_directory() as second:
            assert not Path(first, "model/weights.bin").samefile(Path(second, "model/weights.bin"))


def test_without_a_path_it_is_the_same_directory_each_time_and_it_stays(checkpoint: pt.Checkpoint) -> None:
    directory = checkpoint.to_directory()
    changed = Path(directory, "model/weights.bin").stat().st_mtime_ns
    assert pickle.loads(pickle.dumps(checkpoint)).to_directory() == directory
    assert Path(directory, "model/weights.bin").stat().st_mtime_ns == changed  # files in use are not fetched again
    with checkpoint.as_directory() as lent:
        assert lent != directory
    assert read_files(directory) == FILES


def test_without_a_path_two_objects_have_two_directories(target: Path) -> None:
    one, two = (pt.Checkpoint(target / KEY.folder).to_directory() for _ in range(2))
    assert one != two
    assert read_files(one) == read_files(two) == FILES


def test_without_a_path_a_directory_that_its_owner_changed_is_left_to_them(checkpoint: pt.Checkpoint) -> None:
    directory = Path(checkpoint.to_directory())
    (directory / "model/config.json").write_text("mine")
    assert read_files(checkpoint.to_directory()) == FILES
    assert (directory / "model/config.json").read_text() == "mine"


def test_an_empty_directory_is_filled_and_one_that_is_filled_is_verified_not_fetched(
    checkpoint: pt.Checkpoint, target: Path, tmp_path: Path, temporary_files: Path
) -> None:
    (tmp_path / "out").mkdir()
    directory = checkpoint.to_directory(tmp_path / "out")
    assert read_files(directory) == FILES
    for blob in (target / KEY.trial.blobs_folder).iterdir():
        blob.unlink()  # now nothing can be fetched
    assert pt.Checkpoint(checkpoint.path).to_directory(directory) == directory
    for note in temporary_files.rglob("*.lock"):
        note.unlink()  # as after a reboot: the bytes are verified
    assert pt.Checkpoint(checkpoint.path).to_directory(directory) == directory


@pytest.mark.parametrize("name", ["model/config.json", "stale.bin"])
def test_a_directory_with_anything_else_in_it_is_refused_and_left_alone(
    name: str, checkpoint: pt.Checkpoint, tmp_path: Path
) -> None:
    directory = Path(checkpoint.to_directory(tmp_path / "out"))
    (directory / name).write_bytes(b"[]")
    with pytest.raises(InvalidInput, match="not this checkpoint"):
        checkpoint.to_directory(directory)
    assert (directory / name).read_bytes() == b"[]"


def test_a_file_and_a_mount_point_are_refused(checkpoint: pt.Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInput, match="found a file"):
        checkpoint.to_directory(tmp_path / "file")
    with pytest.raises(InvalidInput, match="a mount point cannot be replaced"):
        checkpoint.to_directory("/proc")


def test_threads_do_not_wait_for_each_other_without_end() -> None:
    """A thread that waits for another thread's download gives up at its own deadline."""
    entered, leave = threading.Event(), threading.Event()

    def fetch(destination: Path, _: object) -> None:
        entered.set()
        leave.wait()
        destination.mkdir(parents=True)

    content = DirectoryContent("bytes", "source", fetch, lambda _: False)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: shared_copy(content, Deadline.after(MINUTE)).__enter__())
        entered.wait()
        with pytest.raises(pt.DeadlineExceeded), shared_copy(content, Deadline.after(timedelta(seconds=0.1))):
            pass
        leave.set()
        first.result()


def test_what_another_process_fetched_of_a_source_that_may_change_counts_if_it_was_requested_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fill(bytes_id: str, *seconds: int) -> None:
        times = iter(seconds)  # of the request and of the end
        monkeypatch.setattr(scratch, "time", SimpleNamespace(monotonic=lambda: next(times)))
        content = DirectoryContent(bytes_id, "source", lambda path, _: write_files(path, FILES), lambda _: False)
        fill_directory(tmp_path / "out", content, Deadline.never())

    fill("first", 10, 20)
    fill("second", 19, 30)
    with pytest.raises(InvalidInput, match="not this checkpoint"):
        fill("third", 31)


def test_metadata_of_a_local_directory_is_a_json_file_in_it(source: Path) -> None:
    checkpoint = pt.Checkpoint.from_directory(source)
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"a": 1, "b": [2.5, None]})
    checkpoint.update_metadata({"a": 3})
    assert (
        checkpoint.get_metadata() == json.loads((source / ".metadata.json").read_text()) == {"a": 3, "b": [2.5, None]}
    )
    checkpoint.set_metadata({"c": 1})
    assert checkpoint.get_metadata() == {"c": 1}
    assert sorted(read_files(source)) == sorted([*FILES, ".metadata.json"])


def test_metadata_of_a_committed_checkpoint_are_versions_beside_it(checkpoint: pt.Checkpoint, target: Path) -> None:
    before = read_files(target)
    checkpoint.update_metadata({"a": 1})
    pt.Checkpoint(checkpoint.path).update_metadata({"b": 2})
    assert checkpoint.get_metadata() == {"a": 1, "b": 2}
    checkpoint.set_metadata({"c": 3})
    assert pickle.loads(pickle.dumps(checkpoint)).get_metadata() == {"c": 3}
    after = read_files(target)
    assert before.items() <= after.items()  # no existing file has changed
    assert len(after) == len(before) + 3
    with checkpoint.as_directory() as directory:
        assert read_files(directory) == {**FILES, ".metadata.json": b'{"c": 3}'}


def _download_by_task(checkpoint: pt.Checkpoint, copy: Path) -> None:
    download_checkpoint.fn(pt.LocalTarget(path=checkpoint.path.removesuffix(f"/{KEY.folder}")), KEY, copy)


def _copy_through_file_system(checkpoint: pt.Checkpoint, copy: Path) -> None:
    infos = checkpoint.filesystem.get_file_info(arrow.FileSelector(checkpoint.path, recursive=True))
    files = [info.path for info in infos if info.is_file]
    write_files(
        copy, {f.removeprefix(checkpoint.path)[1:]: checkpoint.filesystem.open_input_file(f).read() for f in files}
    )


def _copy_lent_directory(checkpoint: pt.Checkpoint, copy: Path) -> None:
    with checkpoint.as_directory() as directory:
        shutil.copytree(directory, copy)


@pytest.mark.parametrize(
    "make_copy",
    long_after(
        2,
        [
            lambda checkpoint, copy: checkpoint.to_directory(copy),
            lambda checkpoint, copy: shutil.copytree(checkpoint.to_directory(), copy),
            _copy_through_file_system,
            _copy_lent_directory,
            _download_by_task,
        ],
    ),
    ids=["to_directory", "to_a_temporary_directory", "filesystem", "as_directory", "task"],
)
def test_every_copy_has_the_metadata_of_its_checkpoint(
    make_copy: Callable[[pt.Checkpoint, Path], object], target: Path, tmp_path: Path
) -> None:
    """Also a copy of the copy, and a checkpoint that is committed from it."""
    checkpoint = pt.Checkpoint(target / KEY.folder)
    large = {"note": "x" * 5 * 1024 * 1024}  # more than a chunk
    for number, metadata in enumerate([{}, {"note": "best"}, large, {"more": 1, "note": "best"}]):
        checkpoint.set_metadata(metadata)
        make_copy(checkpoint, copy := tmp_path / f"copy{number}")
        assert read_files(copy) == {**FILES, ".metadata.json": json.dumps(metadata).encode()}
        again = pt.Checkpoint.from_directory(pt.Checkpoint.from_directory(copy).to_directory())
        assert again.get_metadata() == metadata
    key = KEY.model_copy(update={"step": 41})
    with open_location(parse_uri(target), timeout=MINUTE) as store:
        commit_files(store, copy, key)
    assert pt.Checkpoint(target / key.folder).get_metadata() == {"note": "best", "more": 1}


def test_a_copy_is_brought_up_to_date_with_new_metadata_unless_it_was_changed(
    checkpoint: pt.Checkpoint, target: Path, tmp_path: Path
) -> None:
    copy, temporary = tmp_path / "copy", checkpoint.to_directory()
    checkpoint.to_directory(copy)
    blobs = next((target / KEY.trial.blobs_folder).iterdir())
    blobs.rename(away := tmp_path / "away")  # so that no file can be downloaded again
    checkpoint.set_metadata({"note": "best"})
    assert (checkpoint.to_directory(copy), checkpoint.to_directory()) == (str(copy), temporary)
    assert pt.Checkpoint.from_directory(copy).get_metadata() == {"note": "best"}
    assert pt.Checkpoint.from_directory(temporary).get_metadata() == {"note": "best"}
    away.rename(blobs)

    pt.Checkpoint.from_directory(copy).set_metadata({"note": "mine"})
    with pytest.raises(InvalidInput, match="not this checkpoint"):
        checkpoint.to_directory(copy)
    assert pt.Checkpoint.from_directory(copy).get_metadata() == {"note": "mine"}


@pytest.mark.parametrize("make_copy", [lambda checkpoint, copy: checkpoint.to_directory(copy), _download_by_task])
def test_damaged_metadata_costs_no_copy_its_files(
    make_copy: Callable[[pt.Checkpoint, Path], object], checkpoint: pt.Checkpoint, target: Path, tmp_path: Path
) -> None:
    checkpoint.set_metadata({"a": 1})
    next((target / KEY.folder / "metadata").iterdir()).write_bytes(b"{")
    with pytest.warns(UserWarning, match=r"lacks metadata that was set after the commit: .*metadata/0000000001.json"):
        make_copy(checkpoint, tmp_path / "copy")
    assert read_files(tmp_path / "copy") == FILES


def test_metadata_starts_as_what_was_committed(target: Path, source: Path) -> None:
    pt.Checkpoint.from_directory(source).set_metadata({"from": "file", "both": "file"})
    key = KEY.model_copy(update={"step": 41})
    with open_location(parse_uri(target), timeout=MINUTE) as store:
        commit_files(store, source, key, user_metadata={"both": "commit"})
    checkpoint = pt.Checkpoint(target / key.folder)
    assert checkpoint.get_metadata() == {"from": "file", "both": "commit"}
    checkpoint.update_metadata({"later": True})
    assert checkpoint.get_metadata() == {"from": "file", "both": "commit", "later": True}


@pytest.mark.long
@pytest.mark.parametrize("where", ["local", "committed"])
def test_of_updates_at_the_same_time_none_is_lost(where: str, source: Path, checkpoint: pt.Checkpoint) -> None:
    shared = pt.Checkpoint.from_directory(source) if where == "local" else checkpoint
    others = [CheckpointUser(shared, "say", name, "10") for name in ("x", "y")]
    with others[0], others[1], ThreadPoolExecutor(4) as writers:
        for number in range(20):
            writers.submit(shared.update_metadata, {f"z{number}": number})
            shared.get_metadata()  # a concurrent read never fails
        assert [other.finish() for other in others] == [0, 0]
    expected = {f"{name}{number}": number for name in "xy" for number in range(10)}
    assert shared.get_metadata() == expected | {f"z{number}": number for number in range(20)}


@pytest.mark.parametrize("metadata", [{"a": float("nan")}, {"a": object()}, {"a": b"bytes"}, "text"])
def test_what_json_cannot_say_is_refused_before_anything_is_written(
    metadata: dict[str, object], source: Path, checkpoint: pt.Checkpoint, target: Path
) -> None:
    before = read_files(target)
    for shared in (pt.Checkpoint.from_directory(source), checkpoint):
        with pytest.raises(InvalidInput, match="metadata"):
            shared.set_metadata(metadata)
    assert read_files(target) == before
    assert read_files(source) == FILES


def test_metadata_that_cannot_be_read_is_not_taken_for_none(
    source: Path, checkpoint: pt.Checkpoint, target: Path
) -> None:
    (source / ".metadata.json").write_text('{"a": ')
    with pytest.raises(CheckpointCorrupt, match=r"\.metadata\.json"):
        pt.Checkpoint.from_directory(source).get_metadata()
    checkpoint.set_metadata({"a": 1})
    version = next((target / KEY.folder / "metadata").iterdir())
    version.write_bytes(version.read_bytes().replace(b'"a":1', b'"a":2'))
    with pytest.raises(CheckpointCorrupt, match="metadata"):
        checkpoint.get_metadata()


def test_the_file_system_of_a_committed_checkpoint_shows_its_files(checkpoint: pt.Checkpoint) -> None:
    files = pickle.loads(pickle.dumps(checkpoint.filesystem))
    infos = files.get_file_info(arrow.FileSelector(checkpoint.path, recursive=True))
    relative = {info.path.removeprefix(f"{checkpoint.path}/"): info for info in infos}
    assert sorted(relative) == sorted([*FILES, "model"])
    assert relative["model/weights.bin"].size == len(FILES["model/weights.bin"])
    for path, data in FILES.items():
        assert files.open_input_file(f"{checkpoint.path}/{path}").read() == data
    with files.open_input_file(f"{checkpoint.path}/model/weights.bin") as file:
        file.seek(5_000_003)
        assert file.read(7) == FILES["model/weights.bin"][5_000_003:5_000_010]


def test_the_file_system_of_a_committed_checkpoint_shows_no_altered_byte_and_takes_none(
    checkpoint: pt.Checkpoint, target: Path
) -> None:
    files = checkpoint.filesystem
    with pytest.raises(OSError, match="is read-only"):
        files.open_output_stream(f"{checkpoint.path}/model/weights.bin")
    with pytest.raises(FileNotFoundError):
        files.open_input_file(f"{checkpoint.path}/absent")
    blob = next((target / KEY.trial.blobs_folder).iterdir())
    blob.write_bytes(b"\xff" + blob.read_bytes()[1:])
    with pytest.raises(CheckpointCorrupt):
        [files.open_input_file(f"{checkpoint.path}/{path}").read() for path in FILES]
