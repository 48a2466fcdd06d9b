"""State dicts of several ranks, and a process group of each, for `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from prefect_tune.integrations.torch_distributed import CheckpointReader, CheckpointWriter

LARGE = (31, 17)


def whole() -> dict[str, Any]:
    """Return the state of one process, with what other processes have a part of."""
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.rand(LARGE, generator=generator),
        "columns": torch.rand(LARGE, generator=generator, dtype=torch.float64),
        "all": torch.rand(5, generator=generator).to(torch.bfloat16),
        "nested": [{"empty": torch.empty(0, 3), "scalar": torch.tensor(7), 0: torch.ones(2, dtype=torch.bool)}, "text"],
        "step": 41,
        "sizes": {"0": [1, 2.5, None], "view": torch.arange(12).reshape(3, 4).t()},
    }


def device() -> str:
    """Return where the ranks of this group hold their tensors: on GPUs if there is one for each."""
    return "cuda" if torch.cuda.device_count() >= distributed.get_world_size() else "cpu"


def of_ranks() -> dict[str, Any]:
    """Return the same state with three tensors distributed over all ranks."""
    mesh = init_device_mesh(device(), (distributed.get_world_size(),))
    state = whole()
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("all", Replicate())):
        state[name] = distribute_tensor(state[name].to(device()), mesh, [placement])
    return state


def zeroed(state: Any) -> Any:
    """Return a state of the same form, to load into."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeroed(each) for key, each in state.items()}
    return [zeroed(each) for each in state] if isinstance(state, list) else None


def save(folder: Path) -> None:
    dcp.save(of_ranks(), storage_writer=CheckpointWriter(_directory_in(folder)))


def save_in_thread(folder: Path) -> None:
    _save_beside(folder, AsyncCheckpointerType.THREAD)


def save_in_process(folder: Path) -> None:
    _save_beside(folder, AsyncCheckpointerType.PROCESS)


def _save_beside(folder: Path, kind: AsyncCheckpointerType) -> None:
    """Save with `dcp.async_save`, and change the state while it is written."""
    state = of_ranks()
    writer = CheckpointWriter(_directory_in(folder))
    saved = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
    state["rows"].mul_(0)
    saved.result()


def _directory_in(folder: Path) -> Path:
    directory = folder / f"rank-{distributed.get_rank()}"
    directory.mkdir()
    return directory


def load(folder: Path) -> None:
    from tests.integrations.states import flat

    state = zeroed(of_ranks())
    dcp.load(state, storage_reader=CheckpointReader(folder))
    for name in ("rows", "columns", "all"):
        assert state[name].device.type == device()
        state[name] = state[name].full_tensor().cpu()
    assert flat(state) == flat(whole())


def _rank(rank: int, ranks: int, folder: Path, act: Callable[[Path], None]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    has_gpus = torch.cuda.device_count() >= ranks
    if has_gpus:
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpus else "gloo",
        init_method=f"file://{folder}/group-{act.__name__}-{ranks}",
        rank=rank,
        world_size=ranks,
    )
    act(folder)
    distributed.destroy_process_group()


def on_ranks(ranks: int, act: Callable[[Path], None], folder: Path) -> None:
    """Call `act` in as many processes."""
    torch.multiprocessing.spawn(_rank, args=(ranks, folder, act), nprocs=ranks)
