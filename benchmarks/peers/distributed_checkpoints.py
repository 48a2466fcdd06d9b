"""A state that two ranks share, saved on S3 and loaded by `torch.distributed.checkpoint`, with four writers.

    pip install torch s3fs s3torchconnector
    python -m benchmarks.peers.distributed_checkpoints [--write] [--rounds 3] [--mib 256]

Ours is what an attempt of two ranks does: each rank writes its files, and one process hashes them, sends them, and
creates the manifest. `FsspecWriter` (s3fs) and `S3StorageWriter` (s3torchconnector) write to the store from each rank.
`FileSystemWriter` writes to a folder in memory: what a disk that all machines share costs at least. Each measurement is
two processes of their own (gloo); the rounds are interleaved; seconds are those of the slower rank, medians of rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring.clients import BUCKET, KEYS, client_act
from benchmarks.measuring.s3_process import S3SinkProcess
from benchmarks.measuring.tables import circumstances, table, write
from benchmarks.transfer import memory_room

_RANKS = 2
_TENSORS = 16
_WRITERS = ("ours", "FsspecWriter", "S3StorageWriter", "FileSystemWriter")
_ACTS = ("save", "save again", "load")
_IMPORTED_FIRST = {
    "ours": (
        "pyarrow.fs",
        "obstore.store",
        "prefect_tune.stores.checkpoint_filesystem",
        "prefect_tune.attempt.commit_worker",
    ),
    "FsspecWriter": ("s3fs", "aiobotocore.session"),
    "S3StorageWriter": ("s3torchconnectorclient",),
    "FileSystemWriter": (),
}
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of one act, on all ranks."""

    wall_seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class _Act:
    """What the ranks do, and where."""

    writer: str
    act: str
    endpoint: str
    room: Path
    mib: int

    @property
    def step(self) -> int:
        """Of the checkpoint."""
        return 2 if self.act == "save again" else 1

    def part(self, rank: int) -> Path:
        """The folder into which a rank writes, if its writer is ours."""
        return self.room / f"part-{self.step}-{rank}"


# ------------------------------------------------------------------------------------------------ one rank


def _state(mib: int, *, changed: bool) -> dict[str, Any]:
    """Return tensors whose rows the ranks share; `changed` changes one of them."""
    torch: Any = import_module("torch")
    placement: Any = import_module("torch.distributed.tensor")
    mesh = import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (_RANKS,))
    rows = (mib << 20) // _TENSORS // 4 // 1024
    torch.manual_seed(0)
    whole = [torch.rand(rows, 1024) for _ in range(_TENSORS)]
    if changed:
        whole[0] += 1
    return {
        f"weight.{at}": placement.distribute_tensor(each, mesh, [placement.Shard(0)]) for at, each in enumerate(whole)
    }


def _writer_and_reader(asked: _Act, rank: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what makes the writer of the checkpoint, and its reader."""
    where = f"s3://{BUCKET}/{asked.writer}/{asked.step}"
    for each in _IMPORTED_FIRST[asked.writer]:  # no import is measured
        import_module(each)
    match asked.writer:
        case "ours":
            ours: Any = import_module("prefect_tune.integrations.torch_distributed")
            asked.part(rank).mkdir(exist_ok=True)
            stored = _stored(asked)
            return partial(ours.CheckpointWriter, asked.part(rank)), partial(ours.CheckpointReader, stored)
        case "FsspecWriter":
            fsspec: Any = import_module("torch.distributed.checkpoint._fsspec_filesystem")
            client = {"endpoint_url": asked.endpoint, "region_name": "us-east-1"}
            options = {"key": KEYS[0], "secret": KEYS[1], "client_kwargs": client}
            return partial(fsspec.FsspecWriter, where, **options), partial(fsspec.FsspecReader, where, **options)
        case "S3StorageWriter":
            dcp: Any = import_module("s3torchconnector.dcp")
            return partial(_connector, dcp.S3StorageWriter, where, asked), partial(
                _connector, dcp.S3StorageReader, where, asked
            )
        case _:
            plain: Any = import_module("torch.distributed.checkpoint")
            folder = asked.room / f"shared-{asked.step}"
            return partial(plain.FileSystemWriter, folder), partial(plain.FileSystemReader, folder)


def _connector(kind: Any, where: str, asked: _Act) -> Any:
    """Return a writer or reader of s3torchconnector for a server of our own."""
    package: Any = import_module("s3torchconnector")
    client: Any = import_module("s3torchconnector._s3client")
    settings = package.S3ClientConfig(force_path_style=True)
    made = kind("us-east-1", where, s3client_config=settings)
    made.fs._client = client.S3Client("us-east-1", endpoint=asked.endpoint, s3client_config=settings)  # noqa: SLF001  neither takes an address
    return made


def _stored(asked: _Act) -> Any:
    """Return the committed checkpoint, on the store."""
    checkpoint, blocks = import_module("prefect_tune.runtime.checkpoint"), import_module("prefect_tune.blocks")
    layout: Any = import_module("prefect_tune.core.storage.layout")
    keys = {"access_key_id": KEYS[0], "secret_access_key": KEYS[1]}
    target = blocks.S3Target(bucket=BUCKET, endpoint_url=asked.endpoint, region="us-east-1", allow_http=True, **keys)
    trial = layout.TrialKey(experiment="experiment", generation=1, trial="trial")
    key = layout.CheckpointKey(trial=trial, step=asked.step, sequence=asked.step)
    return checkpoint.Checkpoint._on_target(target.open, target.uri, key)  # noqa: SLF001  as results.checkpoint does


def _rank_main(asked: _Act, rank: int) -> None:
    distributed = import_module("torch.distributed")
    import_module("torch").set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=_RANKS)
    state = _state(asked.mib, changed=asked.act == "save again")
    make_writer, make_reader = _writer_and_reader(asked, rank)
    dcp: Any = import_module("torch.distributed.checkpoint")

    def load() -> None:
        dcp.load(state, storage_reader=make_reader())

    def save() -> None:
        dcp.save(state, storage_writer=make_writer())
        if asked.writer == "ours" and rank == 0:
            commit()

    def commit() -> None:
        merge: Any = import_module("prefect_tune.attempt.commit_worker").merge_rank_directories
        merge(asked.part(0), {other: asked.part(other) for other in range(1, _RANKS)})
        client_act("ours", "save", asked.endpoint, asked.part(0), asked.step)()

    if asked.act == "load":
        for each in state.values():
            each.to_local().zero_()
    distributed.barrier()
    cost = _measured(load if asked.act == "load" else save, distributed.barrier)
    if asked.act == "load":
        _require_same(state, _state(asked.mib, changed=False))
    print(json.dumps(asdict(cost)), flush=True)
    distributed.destroy_process_group()


def _measured(act: Callable[[], None], together: Callable[[], object]) -> _Cost:
    """Measure until all ranks are done."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    act()
    together()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return _Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _require_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    torch: Any = import_module("torch")
    wrong = [name for name in expected if not torch.equal(found[name].to_local(), expected[name].to_local())]
    if wrong:
        raise AssertionError(f"did not come back as they were: {', '.join(wrong)}")


# ------------------------------------------------------------------------------------------------ all ranks


def _run(asked: _Act, port: int) -> _Cost:
    """Run one act on all ranks, each a process of its own."""
    named = {name: str(value) for name, value in asdict(asked).items()}
    command = [sys.executable, "-m", "benchmarks.peers.distributed_checkpoints", "--asked", json.dumps(named)]
    keys = {"AWS_ACCESS_KEY_ID": KEYS[0], "AWS_SECRET_ACCESS_KEY": KEYS[1], "AWS_EC2_METADATA_DISABLED": "true"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(_RANKS)}
    ranks = [
        subprocess.Popen(
            command,
            cwd=_REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **keys, **place, "RANK": str(rank)},
        )
        for rank in range(_RANKS)
    ]
    printed = [each.communicate()[0] for each in ranks]
    if failed := [rank for rank, each in enumerate(ranks) if each.returncode]:
        raise RuntimeError(f"{asked.writer}, {asked.act}: ranks {failed} failed")
    costs = [_Cost(**json.loads(each.splitlines()[-1])) for each in printed]
    return _Cost(max(each.wall_seconds for each in costs), sum(each.cpu_seconds for each in costs))


_HEAD = ["S3 at", "act", "writer", "s", "CPU s", "requests", "MiB sent", "MiB read", "s of ours"]


def _rows(latency: timedelta, rounds: int, mib: int) -> Iterator[list[str]]:
    found: dict[tuple[str, str], list[tuple[_Cost, dict[str, int]]]] = {}
    with S3SinkProcess() as sink:
        sink.set_latency(latency)
        for at in range(rounds):
            for number, writer in enumerate(_WRITERS):
                with memory_room() as room:
                    for turn, act in enumerate(_ACTS):
                        sink.counted()
                        port = 21_000 + (at * len(_WRITERS) + number) * len(_ACTS) + turn
                        cost = _run(_Act(writer, act, sink.endpoint, room, mib), port)
                        found.setdefault((act, writer), []).append((cost, sink.counted()))
                sink.drop()
    for act in _ACTS:
        ours = median(cost.wall_seconds for cost, _ in found[act, "ours"])
        for writer in _WRITERS:
            costs = found[act, writer]
            wall, cpu = (median(getattr(cost, name) for cost, _ in costs) for name in ("wall_seconds", "cpu_seconds"))
            counted = costs[0][1]
            sent, read = (f"{counted[name] / (1 << 20):.1f}" for name in ("bytes_in", "bytes_out"))
            milliseconds = f"{latency.total_seconds() * 1000:g} ms"
            times = f"{wall / ours:.1f}"
            yield [
                milliseconds,
                act,
                writer,
                f"{wall:.2f}",
                f"{cpu:.2f}",
                f"{counted['requests']:,}",
                sent,
                read,
                times,
            ]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=256, help="of tensors")
    parser.add_argument("--asked", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.asked:
        named = asked.asked
        act = _Act(named["writer"], named["act"], named["endpoint"], Path(named["room"]), int(named["mib"]))
        _rank_main(act, int(os.environ["RANK"]))
        return
    rows = [row for ms in (0, 25) for row in _rows(timedelta(milliseconds=ms), asked.rounds, asked.mib)]
    about = f"{_RANKS} ranks, {asked.mib} MiB in {_TENSORS} tensors; medians of {asked.rounds}."
    text = f"{table(_HEAD, rows)}\n\n{about} {circumstances('torch', 's3fs', 's3torchconnector', 'obstore')}"
    print(text)
    if asked.write:
        write("distributed checkpoints", text)


if __name__ == "__main__":
    _main()
