"""`torch.distributed.checkpoint` with our writer and reader: any number of ranks loads what any number saved."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.attempt.commit_worker import merge_rank_directories
from tests.integrations.states import DirectoryMaker, to_plain

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]
torch = pytest.importorskip("torch")
if True:  # only with torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from prefect_tune.integrations.torch_distributed import CheckpointReader, CheckpointWriter
    from tests.integrations.ranks import saving
    from tests.integrations.ranks.saving import make_state, run_on_ranks, zero_state


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of one process."""
    directory = tmp_path / "saved"
    directory.mkdir()
    dcp.save(make_state(), storage_writer=CheckpointWriter(directory), no_dist=True)
    return directory


def load_state(checkpoint: Path | pt.Checkpoint) -> Any:
    state = zero_state(make_state())
    dcp.load(state, storage_reader=CheckpointReader(checkpoint), no_dist=True)
    return state


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_loads_what_another_number_saved(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(ranks, saving.save, tmp_path)
    merge_ranks(tmp_path, ranks)
    for readers in (1, 2, 3, 4):
        run_on_ranks(readers, saving.load, tmp_path)


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_an_asynchronous_save_holds_the_state_of_its_call(worker: str, tmp_path: Path) -> None:
    run_on_ranks(2, getattr(saving, f"save_in_{worker}"), tmp_path)
    merge_ranks(tmp_path, 2)
    run_on_ranks(2, saving.load, tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA, and PyTorch for CUDA")
@pytest.mark.parametrize("save", ["save", "save_in_thread", "save_in_process"])
def test_tensors_on_gpus_are_saved_and_loaded(save: str, tmp_path: Path) -> None:
    ranks = torch.cuda.device_count()
    run_on_ranks(ranks, getattr(saving, save), tmp_path)
    merge_ranks(tmp_path, ranks)
    run_on_ranks(ranks, saving.load, tmp_path)


def merge_ranks(folder: Path, ranks: int) -> None:
    """Merge the directories of all ranks into `folder`, like the supervisor of a trial."""
    first, *others = [folder / f"rank-{rank}" for rank in range(ranks)]
    merge_rank_directories(first, dict(enumerate(others, 1)))
    merge_rank_directories(folder, {0: first})


def test_a_save_in_which_no_rank_knows_of_the_others_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pt.InvalidInput, match="expected use_collectives=True"):
        dcp.save({"a": 1}, storage_writer=CheckpointWriter(tmp_path), no_dist=True, use_collectives=False)
    assert not list(tmp_path.iterdir())


def test_one_process_saves_two_files_and_loads_them_from_a_directory_and_from_a_checkpoint(checkpoint: Path) -> None:
    assert sorted(path.name for path in checkpoint.iterdir()) == ["checkpoint.json", "shard-0.bin"]
    assert to_plain(load_state(checkpoint)) == to_plain(make_state())
    assert to_plain(load_state(pt.Checkpoint.from_directory(checkpoint))) == to_plain(make_state())


def make_all_tensors() -> Mapping[str, Any]:
    """Return tensors with strided bytes, with one element, and without elements."""
    rows = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    numbers = torch.view_as_complex(torch.arange(12, dtype=torch.float32).reshape(2, 3, 2))
    layouts = {
        "one of a column": rows[0][:1, 0],
        "one of a row": rows[:1, :1, :1],
        "one of three": rows[::3, ::4, ::5],
        "scalar": rows[1, 2, 3],
        "scalar of one": rows[:1, 0, 0].squeeze(),
        "column": rows[0, :, 1],
        "every second": rows[..., ::2],
        "transposed": rows.permute(2, 0, 1),
        "expanded": torch.ones(1).expand(4, 5),
        "expanded scalar": torch.tensor(2.5).expand(3),
        "empty of a column": rows[0][:0, 0],
        "empty": torch.empty(0),
        "empty rows": torch.empty(3, 0, 2),
        "at an offset": rows[2],
        "own strides": torch.as_strided(rows, (2, 2), (7, 3), 4),
        "overlapping": torch.as_strided(rows, (3, 3), (1, 1)),
        "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "conjugate": numbers.conj(),
        "one conjugate": numbers.conj()[:1, 0],
        "scalar conjugate": numbers.conj()[1, 1],
        "negative": numbers.conj().imag,
        "one negative": numbers.conj().imag[:1, 1],
        "real": numbers.real,
        "parameter": torch.nn.Parameter(rows[:, 0]),
        "one parameter": torch.nn.Parameter(rows[0][:1, 2]),
    }
    types = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex128)
    more = (torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2)
    dtypes = {f"one {dtype}": torch.arange(6).reshape(2, 3).to(dtype)[:1, 1] for dtype in (*types, *more)}
    return {**layouts, **dtypes}


@pytest.mark.parametrize("name", [*make_all_tensors(), "all"])
def test_every_tensor_that_the_writer_of_pytorch_saves_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    tensors = make_all_tensors()
    state = dict(tensors) if name == "all" else {name: tensors[name]}
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    dcp.save(dict(state), storage_writer=CheckpointWriter(tmp_path / "ours"), no_dist=True)
    for checkpoint in (tmp_path / "ours", pt.Checkpoint.from_directory(tmp_path / "ours")):
        loaded = {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in state.items()}
        dcp.load(loaded, storage_reader=CheckpointReader(checkpoint), no_dist=True)
        for key, tensor in state.items():
            assert loaded[key].dtype == tensor.dtype
            assert loaded[key].tolist() == tensor.tolist(), key


def test_a_second_save_into_a_directory_is_refused_and_the_first_one_stays(checkpoint: Path) -> None:
    writer = CheckpointWriter(checkpoint / "made" / "here")
    dcp.save({"other": torch.ones(3)}, storage_writer=writer, no_dist=True)
    for again in (CheckpointWriter(checkpoint), writer):
        with pytest.raises(CheckpointException, match=r"expected a directory without an earlier dcp.save, found"):
            dcp.save({"other": torch.ones(3)}, storage_writer=again, no_dist=True)
    (checkpoint / "checkpoint.json").rename(checkpoint / "away")  # like a running save
    with pytest.raises(CheckpointException, match=r"found \['shard-0.bin'\]"):
        dcp.save({"other": torch.ones(3)}, checkpoint_id=checkpoint, storage_writer=writer, no_dist=True)
    (checkpoint / "away").rename(checkpoint / "checkpoint.json")
    assert to_plain(load_state(checkpoint)) == to_plain(make_state())


def test_a_pickle_in_place_of_a_value_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    data = pickle.dumps(DirectoryMaker(tmp_path / "ran"))
    document = json.loads((checkpoint / "checkpoint.json").read_text())
    (checkpoint / "shard-9.bin").write_bytes(data)
    document["objects"]["step"] = {"file": "shard-9.bin", "start": 0, "length": len(data)}
    (checkpoint / "checkpoint.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointException, match="its pickle may run code, so it was not read"):
        load_state(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_a_value_that_only_a_pickle_can_hold_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"path: expected tensors, numbers, text, .* weights_only=True"):
        dcp.save({"path": DirectoryMaker(tmp_path / "ran")}, storage_writer=CheckpointWriter(tmp_path), no_dist=True)
    assert not (tmp_path / "ran").exists()


def change_chunk(document: dict[str, Any], name: str, value: object) -> None:
    document["tensors"]["rows"]["chunks"][0][name] = value


def cut_rows(document: dict[str, Any], name: str, *rows: Mapping[int, int]) -> None:
    """Describe a tensor as parts of whole rows, `{first row: rows}`, each with its own bytes."""
    cut_columns(document, *((first, 0, count, 17) for part in rows for first, count in part.items()), name=name)


def cut_columns(document: dict[str, Any], *parts: tuple[int, int, int, int], name: str = "rows") -> None:
    chunks = [
        {"file": f"shard-{number + 7}.bin", "start": 0, "length": rows * columns * 4}
        | {"offsets": [row, column], "sizes": [rows, columns]}
        for number, (row, column, rows, columns) in enumerate(parts)
    ]
    document["tensors"][name]["chunks"] = chunks


def test_metadata_of_parts_that_make_up_a_tensor_is_accepted(checkpoint: Path) -> None:
    raw = bytes(31 * 17 * 4)
    for parts in (
        [(0, 0, 31, 17)],
        [(20, 0, 11, 17), (0, 0, 20, 17), (31, 0, 0, 17), (0, 0, 0, 17)],
        [(0, column, 31, 1) for column in range(17)],
        [(0, 0, 20, 10), (0, 10, 20, 7), (20, 0, 11, 7), (20, 7, 11, 10)],
    ):
        document = json.loads((checkpoint / "checkpoint.json").read_text())
        cut_columns(document, *parts)
        for number in range(len(parts)):
            (checkpoint / f"shard-{number + 7}.bin").write_bytes(raw)
        (checkpoint / "checkpoint.json").write_text(json.dumps(document))
        assert not load_state(checkpoint)["rows"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.update(version=2), "version"),
        (lambda document: document.update(more=2), "more"),
        (lambda document: change_chunk(document, "file", "../shard-0.bin"), "file"),
        (lambda document: change_chunk(document, "start", -1), "start"),
        (lambda document: change_chunk(document, "length", 4), "expected a part of"),
        (lambda document: change_chunk(document, "offsets", [1, 0]), "expected a part of"),
        (lambda document: change_chunk(document, "sizes", [31]), "expected a part of"),
        (lambda document: change_chunk(document, "sizes", [1 << 70, 17]), "sizes"),
        (lambda document: document["tensors"]["rows"].update(dtype="load"), "expected a tensor type"),
        (lambda document: cut_rows(document, "rows", {}), "with missing or repeated elements"),
        (lambda document: cut_rows(document, "rows", {0: 31}, {0: 31}), "with missing or repeated elements"),
        (lambda document: cut_rows(document, "rows", {0: 30}), "with missing or repeated elements"),
        (lambda document: cut_rows(document, "rows", {0: 16}, {17: 15}), "expected a part of"),
        (lambda document: document["objects"].update(all=document["objects"]["step"]), "a tensor and another value of"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    change: Callable[[Mapping[str, Any]], None], message: str, checkpoint: Path
) -> None:
    document = json.loads((checkpoint / "checkpoint.json").read_text())
    change(document)
    (checkpoint / "checkpoint.json").write_text(json.dumps(document))
    with pytest.raises(pt.CheckpointCorrupt, match=message):
        load_state(checkpoint)


def test_an_object_of_other_bytes_is_refused(checkpoint: Path) -> None:
    document = json.loads((checkpoint / "checkpoint.json").read_text())
    document["objects"]["step"]["length"] -= 8
    (checkpoint / "checkpoint.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointException, match=r"step: expected the format of torch.save"):
        load_state(checkpoint)


def test_a_file_that_is_too_short_is_refused(checkpoint: Path) -> None:
    os.truncate(checkpoint / "shard-0.bin", 100)
    with pytest.raises(CheckpointException, match="ends before byte"):
        load_state(checkpoint)
