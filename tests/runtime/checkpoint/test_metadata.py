"""Metadata that is added after a commit, and the file system view of a committed checkpoint."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.fs as arrow
import pytest

import prefect_tune as pt
from prefect_tune.core.errors import CheckpointCorrupt, InvalidInput
from prefect_tune.stores.open_location import open_location, read_uri
from prefect_tune.tasks.checkpoints import download_checkpoint
from tests.fakes.checkpoint_user import CheckpointUser
from tests.fakes.checkpoints import FILES, KEY, MINUTE, committed, files_in, write
from tests.long_cases import long_after

# ------------------------------------------------------------------------------------------ the metadata


def test_metadata_of_a_local_directory_is_a_json_file_in_it(staged: Path) -> None:
    checkpoint = pt.Checkpoint.from_directory(staged)
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"a": 1, "b": [2.5, None]})
    checkpoint.update_metadata({"a": 3})
    assert (
        checkpoint.get_metadata() == json.loads((staged / ".metadata.json").read_text()) == {"a": 3, "b": [2.5, None]}
    )
    checkpoint.set_metadata({"c": 1})
    assert checkpoint.get_metadata() == {"c": 1}
    assert sorted(files_in(staged)) == sorted([*FILES, ".metadata.json"])


def test_metadata_of_a_committed_checkpoint_are_versions_beside_it(checkpoint: pt.Checkpoint, target: Path) -> None:
    before = files_in(target)
    checkpoint.update_metadata({"a": 1})
    pt.Checkpoint(checkpoint.path).update_metadata({"b": 2})
    assert checkpoint.get_metadata() == {"a": 1, "b": 2}
    checkpoint.set_metadata({"c": 3})
    assert pickle.loads(pickle.dumps(checkpoint)).get_metadata() == {"c": 3}
    after = files_in(target)
    assert before.items() <= after.items()  # no existing file has changed
    assert len(after) == len(before) + 3
    with checkpoint.as_directory() as directory:
        assert files_in(directory) == {**FILES, ".metadata.json": b'{"c": 3}'}


def _restored_by_a_task(checkpoint: pt.Checkpoint, copy: Path) -> None:
    download_checkpoint.fn(pt.LocalTarget(path=checkpoint.path.removesuffix(f"/{KEY.folder}")), KEY, copy)


def _through_its_file_system(checkpoint: pt.Checkpoint, copy: Path) -> None:
    found = checkpoint.filesystem.get_file_info(arrow.FileSelector(checkpoint.path, recursive=True))
    files = [each.path for each in found if each.is_file]
    write(copy, {f.removeprefix(checkpoint.path)[1:]: checkpoint.filesystem.open_input_file(f).read() for f in files})


def _lent(checkpoint: pt.Checkpoint, copy: Path) -> None:
    with checkpoint.as_directory() as directory:
        shutil.copytree(directory, copy)


@pytest.mark.parametrize(
    "copied_by",
    long_after(
        2,
        [
            lambda checkpoint, copy: checkpoint.to_directory(copy),
            lambda checkpoint, copy: shutil.copytree(checkpoint.to_directory(), copy),
            _through_its_file_system,
            _lent,
            _restored_by_a_task,
        ],
    ),
    ids=["to_directory", "to_a_temporary_directory", "filesystem", "as_directory", "task"],
)
def test_every_copy_has_the_metadata_of_its_checkpoint(
    copied_by: Callable[[pt.Checkpoint, Path], object], target: Path, tmp_path: Path
) -> None:
    """So has a copy of the copy, and a checkpoint that is committed from it."""
    checkpoint = pt.Checkpoint(target / KEY.folder)
    large = {"note": "x" * 5 * 1024 * 1024}  # more than a chunk
    for number, said in enumerate([{}, {"note": "best"}, large, {"more": 1, "note": "best"}]):
        checkpoint.set_metadata(said)
        copied_by(checkpoint, copy := tmp_path / f"copy{number}")
        assert files_in(copy) == {**FILES, ".metadata.json": json.dumps(said).encode()}
        again = pt.Checkpoint.from_directory(pt.Checkpoint.from_directory(copy).to_directory())
        assert again.get_metadata() == said
    key = KEY.model_copy(update={"step": 41})
    with open_location(read_uri(target), timeout=MINUTE) as store:
        committed(store, copy, key)
    assert pt.Checkpoint(target / key.folder).get_metadata() == {"note": "best", "more": 1}


def test_a_copy_is_brought_up_to_date_with_new_metadata_unless_it_was_changed(
    checkpoint: pt.Checkpoint, target: Path, tmp_path: Path
) -> None:
    copy, temporary = tmp_path / "copy", checkpoint.to_directory()
    checkpoint.to_directory(copy)
    blobs = next((target / KEY.trial.blobs).iterdir())
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


@pytest.mark.parametrize("copied_by", [lambda checkpoint, copy: checkpoint.to_directory(copy), _restored_by_a_task])
def test_damaged_metadata_costs_no_copy_its_files(
    copied_by: Callable[[pt.Checkpoint, Path], object], checkpoint: pt.Checkpoint, target: Path, tmp_path: Path
) -> None:
    checkpoint.set_metadata({"a": 1})
    next((target / KEY.folder / "metadata").iterdir()).write_bytes(b"{")
    with pytest.warns(UserWarning, match=r"no metadata that was set after the commit: .*metadata/0000000001.json"):
        copied_by(checkpoint, tmp_path / "copy")
    assert files_in(tmp_path / "copy") == FILES


def test_metadata_starts_as_what_was_committed(target: Path, staged: Path) -> None:
    pt.Checkpoint.from_directory(staged).set_metadata({"from": "file", "both": "file"})
    key = KEY.model_copy(update={"step": 41})
    with open_location(read_uri(target), timeout=MINUTE) as store:
        committed(store, staged, key, metadata={"both": "commit"})
    checkpoint = pt.Checkpoint(target / key.folder)
    assert checkpoint.get_metadata() == {"from": "file", "both": "commit"}
    checkpoint.update_metadata({"later": True})
    assert checkpoint.get_metadata() == {"from": "file", "both": "commit", "later": True}


@pytest.mark.long
@pytest.mark.parametrize("where", ["local", "committed"])
def test_of_updates_at_the_same_time_none_is_lost(where: str, staged: Path, checkpoint: pt.Checkpoint) -> None:
    shared = pt.Checkpoint.from_directory(staged) if where == "local" else checkpoint
    others = [CheckpointUser(shared, "say", name, "10") for name in ("x", "y")]
    with others[0], others[1], ThreadPoolExecutor(4) as writers:
        for number in range(20):
            writers.submit(shared.update_metadata, {f"z{number}": number})
            shared.get_metadata()  # a concurrent read never fails
        assert [other.go_on() for other in others] == [0, 0]
    expected = {f"{name}{number}": number for name in "xy" for number in range(10)}
    assert shared.get_metadata() == expected | {f"z{number}": number for number in range(20)}


@pytest.mark.parametrize("unsaid", [{"a": float("nan")}, {"a": object()}, {"a": b"bytes"}, "text"])
def test_what_json_cannot_say_is_refused_before_anything_is_written(
    unsaid: dict[str, object], staged: Path, checkpoint: pt.Checkpoint, target: Path
) -> None:
    before = files_in(target)
    for each in (pt.Checkpoint.from_directory(staged), checkpoint):
        with pytest.raises(InvalidInput, match="metadata"):
            each.set_metadata(unsaid)
    assert files_in(target) == before
    assert files_in(staged) == FILES


def test_metadata_that_cannot_be_read_is_not_taken_for_none(
    staged: Path, checkpoint: pt.Checkpoint, target: Path
) -> None:
    (staged / ".metadata.json").write_text('{"a": ')
    with pytest.raises(CheckpointCorrupt, match=r"\.metadata\.json"):
        pt.Checkpoint.from_directory(staged).get_metadata()
    checkpoint.set_metadata({"a": 1})
    version = next((target / KEY.folder / "metadata").iterdir())
    version.write_bytes(version.read_bytes().replace(b'"a":1', b'"a":2'))
    with pytest.raises(CheckpointCorrupt, match="metadata"):
        checkpoint.get_metadata()


# ------------------------------------------------------------------- the file system of a committed checkpoint


def test_the_file_system_of_a_committed_checkpoint_shows_its_files(checkpoint: pt.Checkpoint) -> None:
    files = pickle.loads(pickle.dumps(checkpoint.filesystem))
    shown = files.get_file_info(arrow.FileSelector(checkpoint.path, recursive=True))
    relative = {info.path.removeprefix(f"{checkpoint.path}/"): info for info in shown}
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
    blob = next((target / KEY.trial.blobs).iterdir())
    blob.write_bytes(b"\xff" + blob.read_bytes()[1:])
    with pytest.raises(CheckpointCorrupt):
        [files.open_input_file(f"{checkpoint.path}/{path}").read() for path in FILES]
