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
from benchmarks.measuring.tables import describe_setup, format_table, publish_section
from benchmarks.transfer import memory_folder

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
    folder: Path
    mib: int

    @property
    def step(self) -> int:
        """Of the checkpoint."""
        return 2 if self.act == "save again" else 1

    def part(self, rank: int) -> Path:
        """The folder into which a rank writes, if its writer is ours."""
        return self.folder / f"part-{self.step}-{rank}"


# ------------------------------------------------------------------------------------------------ one rank


def _state(mib: int, *, changed: bool) -> dict[str, Any]:
    """Return tensors whose rows the ranks share; `changed` changes one of them."""
    torch: Any = import_module("torch")
    placement: Any = import_module("torch.distributed.tensor")
    mesh = import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (_RANKS,))
    row_count = (mib << 20) // _TENSORS // 4 // 1024
    torch.manual_seed(0)
    whole = [torch.rand(row_count, 1024) for _ in range(_TENSORS)]
    if changed:
        whole[0] += 1
    rows = [placement.Shard(0)]
    return {f"weight.{index}": placement.distribute_tensor(tensor, mesh, rows) for index, tensor in enumerate(whole)}


def _writer_and_reader(act: _Act, rank: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what makes the writer of the checkpoint, and its reader."""
    url = f"s3://{BUCKET}/{act.writer}/{act.step}"
    for module in _IMPORTED_FIRST[act.writer]:  # no import is measured
        import_module(module)
    match act.writer:
        case "ours":
            ours: Any = import_module("prefect_tune.integrations.torch_distributed")
            act.part(rank).mkdir(exist_ok=True)
            stored = _open_checkpoint(act)
            return partial(ours.CheckpointWriter, act.part(rank)), partial(ours.CheckpointReader, stored)
        case "FsspecWriter":
            fsspec: Any = import_module("torch.distributed.checkpoint._fsspec_filesystem")
            client = {"endpoint_url": act.endpoint, "region_name": "us-east-1"}
            options = {"key": KEYS[0], "secret": KEYS[1], "client_kwargs": client}
            return partial(fsspec.FsspecWriter, url, **options), partial(fsspec.FsspecReader, url, **options)
        case "S3StorageWriter":
            dcp: Any = import_module("s3torchconnector.dcp")
            make_writer = partial(_connector, dcp.S3StorageWriter, url, act)
            return make_writer, partial(_connector, dcp.S3StorageReader, url, act)
        case _:
            plain: Any = import_module("torch.distributed.checkpoint")
            folder = act.folder / f"shared-{act.step}"
            return partial(plain.FileSystemWriter, folder), partial(plain.FileSystemReader, folder)


def _connector(kind: Any, url: str, act: _Act) -> Any:
    """Return a writer or reader of s3torchconnector for a server of our own."""
    package: Any = import_module("s3torchconnector")
    client: Any = import_module("s3torchconnector._s3client")
    settings = package.S3ClientConfig(force_path_style=True)
    connector = kind("us-east-1", url, s3client_config=settings)
    connector.fs._client = client.S3Client("us-east-1", endpoint=act.endpoint, s3client_config=settings)  # noqa: SLF001  neither takes an address
    return connector


def _open_checkpoint(act: _Act) -> Any:
    """Return the committed checkpoint, on the store."""
    checkpoint, blocks = import_module("prefect_tune.runtime.checkpoint"), import_module("prefect_tune.blocks")
    layout: Any = import_module("prefect_tune.core.storage.layout")
    keys = {"access_key_id": KEYS[0], "secret_access_key": KEYS[1]}
    target = blocks.S3Target(bucket=BUCKET, endpoint_url=act.endpoint, region="us-east-1", allow_http=True, **keys)
    trial = layout.TrialKey(experiment="experiment", generation=1, trial="trial")
    key = layout.CheckpointKey(trial=trial, step=act.step, sequence=act.step)
    return checkpoint.Checkpoint._from_target(target.open, target.uri, key)  # noqa: SLF001  as results.checkpoint does


def _rank_main(act: _Act, rank: int) -> None:
    distributed = import_module("torch.distributed")
    import_module("torch").set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=_RANKS)
    state = _state(act.mib, changed=act.act == "save again")
    make_writer, make_reader = _writer_and_reader(act, rank)
    dcp: Any = import_module("torch.distributed.checkpoint")

    def load() -> None:
        dcp.load(state, storage_reader=make_reader())

    def save() -> None:
        dcp.save(state, storage_writer=make_writer())
        if act.writer == "ours" and rank == 0:
            commit()

    def commit() -> None:
        merge: Any = import_module("prefect_tune.attempt.commit_worker").merge_rank_directories
        merge(act.part(0), {other: act.part(other) for other in range(1, _RANKS)})
        client_act("ours", "save", act.endpoint, act.part(0), act.step)()

    if act.act == "load":
        for tensor in state.values():
            tensor.to_local().zero_()
    distributed.barrier()
    cost = _measure(load if act.act == "load" else save, distributed.barrier)
    if act.act == "load":
        _require_same(state, _state(act.mib, changed=False))
    print(json.dumps(asdict(cost)), flush=True)
    distributed.destroy_process_group()


def _measure(act: Callable[[], None], together: Callable[[], object]) -> _Cost:
    """Measure until all ranks are done."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    act()
    together()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return _Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _require_same(restored: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    torch: Any = import_module("torch")
    wrong = [name for name in expected if not torch.equal(restored[name].to_local(), expected[name].to_local())]
    if wrong:
        raise AssertionError(f"did not come back as they were: {', '.join(wrong)}")


# ------------------------------------------------------------------------------------------------ all ranks


def _run(act: _Act, port: int) -> _Cost:
    """Run one act on all ranks, each a process of its own."""
    fields = {name: str(value) for name, value in asdict(act).items()}
    command = [sys.executable, "-m", "benchmarks.peers.distributed_checkpoints", "--act", json.dumps(fields)]
    keys = {"AWS_ACCESS_KEY_ID": KEYS[0], "AWS_SECRET_ACCESS_KEY": KEYS[1], "AWS_EC2_METADATA_DISABLED": "true"}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(_RANKS)}
    environments = [{**os.environ, **keys, **rendezvous, "RANK": str(rank)} for rank in range(_RANKS)]
    ranks = [
        subprocess.Popen(command, cwd=_REPOSITORY, stdout=subprocess.PIPE, text=True, env=environment)
        for environment in environments
    ]
    outputs = [process.communicate()[0] for process in ranks]
    if failed := [rank for rank, process in enumerate(ranks) if process.returncode]:
        raise RuntimeError(f"{act.writer}, {act.act}: ranks {failed} failed")
    costs = [_Cost(**json.loads(output.splitlines()[-1])) for output in outputs]
    return _Cost(max(cost.wall_seconds for cost in costs), sum(cost.cpu_seconds for cost in costs))


_HEAD = ["S3 at", "act", "writer", "s", "CPU s", "requests", "MiB sent", "MiB read", "s of ours"]


def _rows(latency: timedelta, rounds: int, mib: int) -> Iterator[list[str]]:
    costs_by_act: dict[tuple[str, str], list[tuple[_Cost, dict[str, int]]]] = {}
    with S3SinkProcess() as sink:
        sink.set_latency(latency)
        for round_index in range(rounds):
            for number, writer in enumerate(_WRITERS):
                with memory_folder() as folder:
                    for turn, act in enumerate(_ACTS):
                        sink.take_counts()
                        port = 21_000 + (round_index * len(_WRITERS) + number) * len(_ACTS) + turn
                        cost = _run(_Act(writer, act, sink.endpoint, folder, mib), port)
                        costs_by_act.setdefault((act, writer), []).append((cost, sink.take_counts()))
                sink.drop()
    for act in _ACTS:
        ours = median(cost.wall_seconds for cost, _ in costs_by_act[act, "ours"])
        for writer in _WRITERS:
            costs = costs_by_act[act, writer]
            wall, cpu = (median(getattr(cost, name) for cost, _ in costs) for name in ("wall_seconds", "cpu_seconds"))
            counts = costs[0][1]
            sent, read = (f"{counts[name] / (1 << 20):.1f}" for name in ("bytes_in", "bytes_out"))
            case = [f"{latency.total_seconds() * 1000:g} ms", act, writer, f"{wall:.2f}", f"{cpu:.2f}"]
            yield [*case, f"{counts['requests']:,}", sent, read, f"{wall / ours:.1f}"]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=256, help="of tensors")
    parser.add_argument("--act", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.act:
        fields = args.act
        act = _Act(fields["writer"], fields["act"], fields["endpoint"], Path(fields["folder"]), int(fields["mib"]))
        _rank_main(act, int(os.environ["RANK"]))
        return
    rows = [row for ms in (0, 25) for row in _rows(timedelta(milliseconds=ms), args.rounds, args.mib)]
    about = f"{_RANKS} ranks, {args.mib} MiB in {_TENSORS} tensors; medians of {args.rounds}."
    text = f"{format_table(_HEAD, rows)}\n\n{about} {describe_setup('torch', 's3fs', 's3torchconnector', 'obstore')}"
    publish_section("distributed checkpoints", text, write=args.write)


if __name__ == "__main__":
    _main()
