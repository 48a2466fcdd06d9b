"""State dicts of several ranks, and process groups, for `torch.distributed.checkpoint`."""

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
from tests.integrations.states import to_plain

LARGE = (31, 17)


def make_state() -> dict[str, Any]:
    """Return the state of one process, with the whole of the distributed tensors."""
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.rand(LARGE, generator=generator),
        "columns": torch.rand(LARGE, generator=generator, dtype=torch.float64),
        "all": torch.rand(5, generator=generator).to(torch.bfloat16),
        "nested": [{"empty": torch.empty(0, 3), "scalar": torch.tensor(7), 0: torch.ones(2, dtype=torch.bool)}, "text"],
        "step": 41,
        "sizes": {"0": [1, 2.5, None], "view": torch.arange(12).reshape(3, 4).t()},
    }


def choose_device() -> str:
    """Return the device of the group's tensors: GPUs if each rank has one."""
    return "cuda" if torch.cuda.device_count() >= distributed.get_world_size() else "cpu"


def make_distributed_state() -> dict[str, Any]:
    """Return the state with three tensors distributed over all ranks."""
    mesh = init_device_mesh(choose_device(), (distributed.get_world_size(),))
    state = make_state()
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("all", Replicate())):
        state[name] = distribute_tensor(state[name].to(choose_device()), mesh, [placement])
    return state


def zero_state(state: Any) -> Any:
    """Return a state of the same structure, to load into."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zero_state(value) for key, value in state.items()}
    return [zero_state(value) for value in state] if isinstance(state, list) else None


def save(folder: Path) -> None:
    dcp.save(make_distributed_state(), storage_writer=CheckpointWriter(_make_directory(folder)))


def save_in_thread(folder: Path) -> None:
    _save_async(folder, AsyncCheckpointerType.THREAD)


def save_in_process(folder: Path) -> None:
    _save_async(folder, AsyncCheckpointerType.PROCESS)


def _save_async(folder: Path, kind: AsyncCheckpointerType) -> None:
    """Save with `dcp.async_save`, and change the state while it is written."""
    state, writer = make_distributed_state(), CheckpointWriter(_make_directory(folder))
    future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
    state["rows"].mul_(0)
    future.result()


def _make_directory(folder: Path) -> Path:
    directory = folder / f"rank-{distributed.get_rank()}"
    directory.mkdir()
    return directory


def load(folder: Path) -> None:
    state = zero_state(make_distributed_state())
    dcp.load(state, storage_reader=CheckpointReader(folder))
    for name in ("rows", "columns", "all"):
        assert state[name].device.type == choose_device()
        state[name] = state[name].full_tensor().cpu()
    assert to_plain(state) == to_plain(make_state())


def _run_rank(rank: int, ranks: int, folder: Path, act: Callable[[Path], None]) -> None:
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


def run_on_ranks(ranks: int, act: Callable[[Path], None], folder: Path) -> None:
    """Call `act` in `ranks` processes."""
    torch.multiprocessing.spawn(_run_rank, args=(ranks, folder, act), nprocs=ranks)
