"""Save the complete state of a PyTorch training to one file. Loading the file runs no code."""

from __future__ import annotations

import io
import operator
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from prefect_tune.core.errors import InvalidInput
from prefect_tune.integrations.common import missing_extra_error

try:
    import numpy as np
    import torch
except ModuleNotFoundError as error:
    raise missing_extra_error(error, "torch", "numpy", "torch") from error

__all__ = ["ResumableLoader", "Stateful", "load_state", "random_state", "save_state", "set_random_state"]

_STATE_FILE = "state.pt"


class Stateful(Protocol):
    """An object with a state, such as a model, an optimizer, a scheduler, a scaler or a `ResumableLoader`."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def save_state(directory: str | Path, *, extra: Mapping[str, Any] | None = None, **parts: Any) -> None:
    """Write the states of all parts and of every random generator to `directory`.

    ```python
    save_state(directory, model=model, optimizer=optimizer, scheduler=scheduler, data=loader, best=0.4)
    ```

    The generators are the global ones of Python and NumPy, and those of PyTorch for the CPU and for each CUDA device.

    Args:
        extra: more plain values, under names that are not in `parts`.
        parts: everything that the next step needs, under names that you choose: `Stateful` objects and plain values.
            Plain values are numbers, text, None, tensors, NumPy's arrays and numbers, and lists, tuples and dicts of
            these. `load_state` returns the plain values.

    Raises:
        InvalidInput: a part is neither `Stateful` nor plain, its state cannot be loaded, or its name is in `extra`.
    """
    states = {name: part.state_dict() for name, part in parts.items() if _is_stateful(part)}
    values = {name: part for name, part in parts.items() if name not in states}
    saved = {"parts": states, "values": values, "extra": dict(extra or {})}
    if twice := values.keys() & saved["extra"].keys():
        raise InvalidInput(f"save_state: expected each name once, found {sorted(twice)} in both the parts and extra")
    for kind, by_name in saved.items():
        saved[kind] = {name: _encode_value(value, str(name), name) for name, value in by_name.items()}
    Path(directory).mkdir(parents=True, exist_ok=True)  # it may be missing: a rank's subdirectory, for example
    torch.save({**saved, "random": random_state()}, Path(directory, _STATE_FILE))


def load_state(directory: str | Path, **parts: Any) -> dict[str, Any]:
    """Restore the state of each part and of every random generator; return the plain parts and `extra`.

    ```python
    best = load_state(directory, model=model, optimizer=optimizer, scheduler=scheduler, data=loader)["best"]
    ```

    You need not pass plain parts, since they are returned. Lists, dicts, tensors and arrays that you do pass are also
    changed in place. Numbers and text cannot be changed in place, so assign the returned values.

    The file is read with `weights_only=True`, so an untrusted checkpoint cannot run code. An optimizer's learning rate
    is part of its state, so if a scheduler changes the trial's configuration (PBT), set the rate again after the load.

    Raises:
        InvalidInput: the parts differ from the saved parts.
    """
    saved = torch.load(Path(directory, _STATE_FILE), map_location="cpu", weights_only=True)
    states, values, extra = (_decode_value(saved.get(kind, {})) for kind in ("parts", "values", "extra"))
    stateful = {name for name, part in parts.items() if _is_stateful(part)}
    if states.keys() != stateful or not parts.keys() - stateful <= values.keys():
        raise InvalidInput(
            f"{directory}: expected the parts {sorted(parts)}, of which {sorted(stateful)} have a state; found "
            f"{sorted(states)} with a state, and the values {sorted(values)}"
        )
    for name, part in parts.items():
        if name in stateful:
            part.load_state_dict(states[name])
        else:
            _assign_in_place(name, part, values[name])
    set_random_state(saved["random"])
    return {**extra, **values}


_NUMPY_KEY = "prefect_tune.numpy"
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))


def _is_stateful(part: object) -> bool:
    methods = (getattr(part, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(part, type) and all(map(callable, methods))


def _encode_value(value: Any, path: str, part: str) -> Any:
    """Return `value`, with NumPy's arrays and numbers converted to tensors of bytes.

    Raises:
        InvalidInput: the result would not load with `weights_only=True`. The message names `part` and `path`.
    """
    if type(value) in _PLAIN_TYPES or isinstance(value, torch.Tensor):
        return value
    array = np.asarray(value) if isinstance(value, np.ndarray | np.generic) else None
    if array is not None and array.dtype.isbuiltin != 2 and not array.dtype.hasobject:  # 2: another package's type
        data = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.size else torch.empty(0)
        header = {_NUMPY_KEY: np.lib.format.dtype_to_descr(array.dtype), "shape": array.shape}
        return {**header, "data": data, "is_array": array is value}
    if type(value) in (list, tuple):
        items = [_encode_value(item, f"{path}[{number}]", part) for number, item in enumerate(value)]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if type(value) in (dict, OrderedDict) and all(type(key) in _PLAIN_TYPES for key in value):
        by_key = {key: _encode_value(item, f"{path}[{key!r}]", part) for key, item in value.items()}
        return value if all(map(operator.is_, by_key.values(), value.values())) else by_key
    try:
        data = io.BytesIO()
        torch.save(value, data)
        torch.load(io.BytesIO(data.getbuffer()), weights_only=True)
    except Exception as error:
        raise InvalidInput(
            f"save_state({part}=...): expected an object with state_dict() and load_state_dict(), or numbers, text, "
            "None, tensors, NumPy arrays, and lists, tuples and dicts of these; found a value of type "
            f"{type(value).__module__}.{type(value).__qualname__} at {path}"
        ) from error
    return value


def _decode_value(value: Any) -> Any:
    """Return the value that `_encode_value` has encoded."""
    if type(value) is dict and _NUMPY_KEY in value:
        array = np.frombuffer(value["data"].numpy().tobytes(), np.lib.format.descr_to_dtype(value[_NUMPY_KEY]))
        array = array.reshape(value["shape"]).copy()
        return array if value["is_array"] else array[()]
    if type(value) in (list, tuple):
        return type(value)(map(_decode_value, value))
    return {key: _decode_value(item) for key, item in value.items()} if type(value) is dict else value


def _assign_in_place(name: str, part: Any, value: Any) -> None:
    """Copy `value` into `part` if `part` is mutable. Raise InvalidInput if an array's shape or type differs."""
    if isinstance(part, torch.Tensor | np.ndarray):
        kind = torch.Tensor if isinstance(part, torch.Tensor) else np.ndarray
        if not isinstance(value, kind) or (part.shape, part.dtype) != (value.shape, value.dtype):
            raise InvalidInput(f"load_state({name}=...): expected {_format_shape(part)}, found {_format_shape(value)}")
        with torch.no_grad():
            part[...] = value
    elif isinstance(part, list) and isinstance(value, list):
        part[:] = value
    elif isinstance(part, dict) and isinstance(value, dict):
        part.clear()
        part.update(value)


def _format_shape(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)} and type {dtype}"


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
    """Restore the global generators from a result of `random_state`.

    The states of CUDA devices are restored only if the number of devices is the same.
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

    The order of epoch n is shuffled, and depends only on `seed` and n. Each `for` loop over the loader yields the rest
    of the current epoch; a yielded batch counts as trained. Lightning saves and restores the loader. In Lightning and
    Fabric, each loop starts a new epoch, even after a partial epoch (`limit_train_batches`, sanity check).

    The ranks of `torch.distributed` split each global batch of `batch_size * world size` examples. A resume may have
    more or fewer ranks; the epoch continues with the examples that no rank has seen. If an epoch's last batch has fewer
    examples than there are ranks, some examples repeat. In Lightning, use `Trainer(use_distributed_sampler=False)`.

    Args:
        dataset: a map-style dataset, which has a length, and examples by index.
        batch_size: the number of examples in each rank's batch.
        shuffle: whether each epoch has its own order. If False, each epoch has the order of the dataset.
        seed: the seed of the order.
        options: all other options of a `DataLoader`, except samplers.

    Raises:
        InvalidInput: the dataset is a stream, an option such as `sampler` sets another order, or a value is invalid.
    """

    def __init__(
        self, dataset: Any, batch_size: int = 1, *, shuffle: bool = True, seed: int = 0, **options: Any
    ) -> None:
        if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
            raise InvalidInput(
                f"ResumableLoader: expected a map-style dataset, with a length and examples by index, found "
                f"{type(dataset).__name__}; a loader over a stream must save its position itself, with state_dict and "
                "load_state_dict (like torchdata's StatefulDataLoader)"
            )
        for name in ("sampler", "batch_sampler"):
            if options.pop(name, None) is not None:
                raise InvalidInput(
                    f"ResumableLoader({name}=...): expected no {name}, since shuffle and seed define the order; to "
                    "train on other examples, or in another order, pass torch.utils.data.Subset(dataset, indexes)"
                )
        if options.get("in_order", True) is not True:
            raise InvalidInput("ResumableLoader(in_order=False): expected True, since a resume needs batches in order")
        for name, number, minimum in (("batch_size", batch_size, 1), ("seed", seed, 0)):
            if isinstance(number, bool) or not hasattr(number, "__index__") or not minimum <= number < 1 << 63:
                raise InvalidInput(f"ResumableLoader({name}={number!r}): expected an integer of {minimum} or more")
        flags = {"shuffle": shuffle, "drop_last": options.pop("drop_last", False)}
        for name, flag in flags.items():
            if not isinstance(flag, bool | np.bool_):
                raise InvalidInput(f"ResumableLoader({name}={flag!r}): expected True or False")
        self._batches = _ResumableBatchSampler(len(dataset), int(batch_size), int(seed), **flags)
        # Each iterator draws a number. Use a generator other than the global one, as a resume makes one more iterator.
        options.setdefault("generator", torch.Generator().manual_seed(int(seed)))
        super().__init__(dataset, batch_sampler=self._batches, **options)

    def __iter__(self) -> Iterator[Any]:
        self._batches.end_epoch_if_done()
        for batch in super().__iter__():
            self._batches.examples_done += self._batches.global_batch_size
            self._batches.end_epoch_if_done()
            yield batch

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned process; the generator becomes bytes, as PyTorch 2.13 cannot pickle it."""
        generator = self.generator
        return self.__dict__ | {"generator": None if generator is None else generator.get_state().numpy().tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if (random_bytes := state["generator"]) is not None:
            state["generator"] = torch.Generator()
            state["generator"].set_state(torch.frombuffer(bytearray(random_bytes), dtype=torch.uint8))
        self.__dict__.update(state)

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data, which is the same on all ranks."""
        return {"epoch": self._batches.epoch, "examples_done": self._batches.examples_done}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue at the position in `state_dict`."""
        self._batches.epoch, self._batches.examples_done = state_dict["epoch"], state_dict["examples_done"]
        self._batches.is_restored = True


class _ResumableBatchSampler:
    """The batches of indexes that this rank still has to train in this epoch."""

    def __init__(self, size: int, batch_size: int, seed: int, *, shuffle: bool, drop_last: bool) -> None:
        self._size, self._batch_size, self._seed, self._drop_last = size, batch_size, seed, drop_last
        self._shuffle = shuffle
        self.epoch = self.examples_done = 0
        self.is_restored = False

    @property
    def sampler(self) -> _ResumableBatchSampler:
        """The object whose `set_epoch` Lightning calls."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin the next epoch if a part of the current epoch is done, unless the position has just been restored."""
        del epoch  # not used: after a resume, some trainers count the earlier epochs, and some do not
        if self.examples_done and not self.is_restored:
            self.epoch, self.examples_done = self.epoch + 1, 0
        self.is_restored = False

    @property
    def global_batch_size(self) -> int:
        """The number of examples in a global batch, which all ranks split."""
        return self._batch_size * _get_rank_and_world_size()[1]

    def __len__(self) -> int:
        return len(self._find_batch_starts(0))

    def __iter__(self) -> Iterator[list[int]]:
        generator = np.random.default_rng((self._seed, self.epoch))
        order = generator.permutation(self._size) if self._shuffle else np.arange(self._size)
        rank, world_size = _get_rank_and_world_size()
        for start in self._find_batch_starts(self.examples_done):
            batch = order[start : start + self._batch_size * world_size]
            yield batch[rank::world_size].tolist() or [int(batch[rank % len(batch)])]

    def end_epoch_if_done(self) -> None:
        """Begin the next epoch if no batch is left; with `drop_last`, too few examples for a batch may be left over."""
        if self.examples_done and not self._find_batch_starts(self.examples_done):
            self.epoch, self.examples_done = self.epoch + 1, 0

    def _find_batch_starts(self, begin: int) -> range:
        """Return the positions, from `begin` on, at which global batches start in the order of an epoch."""
        return range(begin, self._size - (self.global_batch_size - 1 if self._drop_last else 0), self.global_batch_size)


def _get_rank_and_world_size() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
