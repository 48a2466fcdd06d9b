"""`torch.distributed.checkpoint` with our writer and reader: any number of ranks reads what any other number wrote."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.attempt.group_saves import merge
from tests.integrations.states import flat

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]
torch = pytest.importorskip("torch")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one process."""
    from torch.distributed import checkpoint as dcp

    from prefect_tune.integrations.torch_distributed import CheckpointWriter
    from tests.integrations.ranks.saving import whole

    directory = tmp_path / "saved"
    directory.mkdir()
    dcp.save(whole(), storage_writer=CheckpointWriter(directory), no_dist=True)
    return directory


def loaded(checkpoint: Path | pt.Checkpoint) -> Any:
    from torch.distributed import checkpoint as dcp

    from prefect_tune.integrations.torch_distributed import CheckpointReader
    from tests.integrations.ranks.saving import whole, zeroed

    state = zeroed(whole())
    dcp.load(state, storage_reader=CheckpointReader(checkpoint), no_dist=True)
    return state


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_loads_what_another_number_saved(ranks: int, tmp_path: Path) -> None:
    from tests.integrations.ranks.saving import load, on_ranks, save

    on_ranks(ranks, save, tmp_path)
    merged(tmp_path, ranks)
    for readers in (1, 2, 3, 4):
        on_ranks(readers, load, tmp_path)


@pytest.mark.parametrize("beside", ["thread", "process"])
def test_an_asynchronous_save_holds_the_state_of_its_call(beside: str, tmp_path: Path) -> None:
    from tests.integrations.ranks import saving

    saving.on_ranks(2, getattr(saving, f"save_in_{beside}"), tmp_path)
    merged(tmp_path, 2)
    saving.on_ranks(2, saving.load, tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU of NVIDIA, and PyTorch for CUDA")
@pytest.mark.parametrize("save", ["save", "save_in_thread", "save_in_process"])
def test_tensors_on_gpus_are_saved_and_loaded(save: str, tmp_path: Path) -> None:
    from tests.integrations.ranks import saving

    ranks = torch.cuda.device_count()
    saving.on_ranks(ranks, getattr(saving, save), tmp_path)
    merged(tmp_path, ranks)
    saving.on_ranks(ranks, saving.load, tmp_path)


def merged(folder: Path, ranks: int) -> None:
    """Merge the directories of all ranks into `folder`, as the supervisor of a trial does."""
    first, *others = [folder / f"rank-{rank}" for rank in range(ranks)]
    merge(first, dict(enumerate(others, 1)))
    merge(folder, {0: first})


def test_a_save_in_which_no_rank_knows_of_the_others_is_refused(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    from prefect_tune.integrations.torch_distributed import CheckpointWriter

    with pytest.raises(pt.InvalidInput, match="expected use_collectives=True"):
        dcp.save({"a": 1}, storage_writer=CheckpointWriter(tmp_path), no_dist=True, use_collectives=False)
    assert not list(tmp_path.iterdir())


def test_one_process_saves_two_files_and_loads_them_from_a_directory_and_from_a_checkpoint(saved: Path) -> None:
    from tests.integrations.ranks.saving import whole

    assert sorted(each.name for each in saved.iterdir()) == ["checkpoint.json", "shard-0.bin"]
    assert flat(loaded(saved)) == flat(whole())
    assert flat(loaded(pt.Checkpoint.from_directory(saved))) == flat(whole())


def refused() -> type[BaseException]:
    """Return what DCP raises on all ranks: no `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


class Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.folder),))


def test_a_pickle_in_place_of_a_value_runs_no_code(saved: Path, tmp_path: Path) -> None:
    evil = pickle.dumps(Evil(tmp_path / "ran"))
    document = json.loads((saved / "checkpoint.json").read_text())
    (saved / "shard-9.bin").write_bytes(evil)
    document["objects"]["step"] = {"file": "shard-9.bin", "start": 0, "length": len(evil)}
    (saved / "checkpoint.json").write_text(json.dumps(document))
    with pytest.raises(refused(), match="its pickle may run code, and was not read"):
        loaded(saved)
    assert not (tmp_path / "ran").exists()


def test_a_value_that_only_a_pickle_can_hold_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    from prefect_tune.integrations.torch_distributed import CheckpointWriter

    with pytest.raises(refused(), match=r"path: expected tensors, numbers, text, .* weights_only=True"):
        dcp.save({"path": Evil(tmp_path / "ran")}, storage_writer=CheckpointWriter(tmp_path), no_dist=True)
    assert not (tmp_path / "ran").exists()


def changed(document: dict[str, Any], name: str, value: object) -> None:
    document["tensors"]["rows"]["chunks"][0][name] = value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda document: document.update(version=2), "version"),
        (lambda document: document.update(more=2), "more"),
        (lambda document: changed(document, "file", "../shard-0.bin"), "file"),
        (lambda document: changed(document, "start", -1), "start"),
        (lambda document: changed(document, "length", 4), "expected a part of"),
        (lambda document: changed(document, "offsets", [1, 0]), "expected a part of"),
        (lambda document: changed(document, "sizes", [31]), "expected a part of"),
        (lambda document: document["tensors"]["rows"].update(dtype="load"), "expected a type of tensors"),
        (lambda document: document["tensors"]["rows"].update(chunks=[]), "expected parts of all of"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    change: Callable[[Mapping[str, Any]], None], said: str, saved: Path
) -> None:
    document = json.loads((saved / "checkpoint.json").read_text())
    change(document)
    (saved / "checkpoint.json").write_text(json.dumps(document))
    with pytest.raises(pt.CheckpointCorrupt, match=said):
        loaded(saved)


def test_a_file_that_is_too_short_is_refused(saved: Path) -> None:
    os.truncate(saved / "shard-0.bin", 100)
    with pytest.raises(refused(), match="ends before byte"):
        loaded(saved)
