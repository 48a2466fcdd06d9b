"""Save the complete state of a PyTorch training in one file that loads without running code."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from prefect_tune.core.errors import InvalidInput
from prefect_tune.integrations.common import missing

try:
    import numpy as np
    import torch
except ModuleNotFoundError as error:
    raise missing(error, "torch", "numpy", "torch") from error

__all__ = ["ResumableLoader", "Stateful", "load_state", "random_state", "save_state", "set_random_state"]

_FILE = "state.pt"


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, a scaler, a `ResumableLoader`."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def save_state(directory: str | Path, *, extra: Mapping[str, Any] | None = None, **parts: Stateful) -> None:
    """Write the states of all parts, and of every random generator, into `directory`.

    ```python
    save_state(directory, model=model, optimizer=optimizer, scheduler=scheduler, data=loader, extra={"epoch": 3})
    ```

    Generators: Python's, NumPy's global one, PyTorch's on the CPU and on each CUDA device.

    Args:
        extra: tensors, numbers, text, and dicts and lists of these; `load_state` returns it.
        parts: everything that the next step depends on, under names of your own.
    """
    states = {name: part.state_dict() for name, part in parts.items()}
    Path(directory).mkdir(parents=True, exist_ok=True)  # such as that of a rank
    torch.save({"parts": states, "random": random_state(), "extra": dict(extra or {})}, Path(directory, _FILE))


def load_state(directory: str | Path, **parts: Stateful) -> dict[str, Any]:
    """Restore the state of each part and of every random generator; return what was saved as `extra`.

    The file is read with `weights_only=True`, so an untrusted checkpoint runs no code. An optimizer's learning rate is
    part of its state: if a scheduler changes the trial's configuration (PBT), set it again afterwards.

    Raises:
        InvalidInput: the parts are not those that were saved.
    """
    saved = torch.load(Path(directory, _FILE), map_location="cpu", weights_only=True)
    if saved["parts"].keys() != parts.keys():
        raise InvalidInput(f"{directory}: expected the parts {sorted(parts)}, found {sorted(saved['parts'])}")
    for name, part in parts.items():
        part.load_state_dict(saved["parts"][name])
    set_random_state(saved["random"])
    extra: dict[str, Any] = saved["extra"]
    return extra


def random_state() -> dict[str, Any]:
    """Return the states of the global generators, as tensors, numbers and text."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  the global generator is what libraries draw from
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the global generators from what `random_state` returned.

    States of CUDA devices count only where there are as many devices.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002  as above
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count() > 0:
        torch.cuda.set_rng_state_all(state["cuda"])


class ResumableLoader(torch.utils.data.DataLoader[Any]):
    """A `DataLoader` that resumes in the middle of an epoch, with the next batch.

    The order of epoch n depends only on `seed` and n. Each `for` over it yields the rest of the current epoch; a
    yielded batch counts as trained. Lightning saves and restores it by itself.

    The ranks of `torch.distributed` divide each `batch_size * world size` examples among them, and may be more or fewer
    after a resume: the epoch goes on with the examples that no rank has had. Where the last examples of an epoch are
    fewer than the ranks, some are in two batches. (Lightning: `Trainer(use_distributed_sampler=False)`.)

    Args:
        dataset: with a length.
        batch_size: examples a batch, on each rank.
        seed: of the order.
        options: everything else that a `DataLoader` takes, but no sampler.
    """

    def __init__(self, dataset: Any, batch_size: int = 1, *, seed: int = 0, **options: Any) -> None:
        self._order = _Order(len(dataset), batch_size, seed, drop_last=options.pop("drop_last", False))
        # Its own generator: making an iterator draws a number, which a resumed training draws once more.
        options.setdefault("generator", torch.Generator().manual_seed(seed))
        super().__init__(dataset, batch_sampler=self._order, **options)

    def __iter__(self) -> Iterator[Any]:
        self._order.leave_ended_epoch()
        for batch in super().__iter__():
            self._order.examples_done += self._order.examples_each
            self._order.leave_ended_epoch()
            yield batch

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled for a spawned process, which cannot receive a generator (PyTorch 2.13)."""
        made = self.generator
        return self.__dict__ | {"generator": None if made is None else made.get_state().numpy().tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made = state["generator"]
        if made is not None:
            state["generator"] = torch.Generator()
            state["generator"].set_state(torch.frombuffer(bytearray(made), dtype=torch.uint8))
        self.__dict__.update(state)

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data, which is the same on all ranks."""
        return {"epoch": self._order.epoch, "examples_done": self._order.examples_done}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue at that place."""
        self._order.epoch, self._order.examples_done = state_dict["epoch"], state_dict["examples_done"]


class _Order:
    """Batches of indexes: those of this epoch that are not done, of this rank."""

    def __init__(self, size: int, batch_size: int, seed: int, *, drop_last: bool) -> None:
        self._size, self._batch_size, self._seed, self._drop_last = size, batch_size, seed, drop_last
        self.epoch = self.examples_done = 0

    @property
    def examples_each(self) -> int:
        """The examples in a batch of all ranks."""
        return self._batch_size * _rank_and_world_size()[1]

    def __len__(self) -> int:
        return len(self._places(0))

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng((self._seed, self.epoch)).permutation(self._size)
        rank, world_size = _rank_and_world_size()
        for place in self._places(self.examples_done):
            batch = order[place : place + self._batch_size * world_size]
            yield batch[rank::world_size].tolist() or [int(batch[rank % len(batch)])]

    def leave_ended_epoch(self) -> None:
        """Begin the next epoch if nothing is left of this one: other ranks may have read fewer examples at a time."""
        if self.examples_done and not self._places(self.examples_done):
            self.epoch, self.examples_done = self.epoch + 1, 0

    def _places(self, begin: int) -> range:
        """Return where the rest of an epoch's batches begin."""
        return range(begin, self._size - (self.examples_each - 1 if self._drop_last else 0), self.examples_each)


def _rank_and_world_size() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
