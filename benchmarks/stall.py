"""The time that a training step waits for its 256 MiB checkpoint, with `commit="sync"` and with `commit="async"`.

    python -m benchmarks.stall

A function trainable reports a fresh checkpoint every few seconds; the wait is what `pt.report` takes, without
the writing of the files. "own" is a directory of the user's, which async copies before it returns; "new" is one
from `new_checkpoint_dir()`, which is taken over. The target is the counting S3 server on loopback.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Literal
from uuid import uuid4

SIZE_BYTES = 256 * 1024 * 1024
FILES = 4
STEPS = 5


def train(config: Mapping[str, object]) -> None:
    """Report `STEPS` checkpoints of random bytes, and write down how long each report took."""
    import prefect_tune as pt

    waits: list[float] = []
    for step in range(STEPS):
        with tempfile.TemporaryDirectory() as user_directory:
            directory = Path(user_directory) if config["directory"] == "own" else pt.get_trial().new_checkpoint_dir()
            for file in range(FILES):
                Path(directory, f"shard-{file}").write_bytes(os.urandom(SIZE_BYTES // FILES))
            start = time.perf_counter()
            pt.report({"at": step}, checkpoint=pt.Checkpoint.from_directory(directory))
            waits.append(time.perf_counter() - start)
        time.sleep(float(str(config["compute_seconds"])))
    Path(str(config["results"])).write_text(json.dumps(waits))


def main() -> None:
    """Print one row for each way to commit."""
    from benchmarks.measuring.s3_process import S3SinkProcess
    from prefect_tune.blocks import S3Target, SyncConfig
    from prefect_tune.core.experiment.retention import Retention
    from prefect_tune.flows.durable_trainable import durable_trainable

    print("| store latency | sync, s | async, own directory | async, new_checkpoint_dir |")
    print("|---|---|---|---|")
    with S3SinkProcess() as sink, tempfile.TemporaryDirectory() as results:
        target = S3Target(
            bucket="bench", endpoint_url=sink.endpoint, access_key_id="x", secret_access_key="x", allow_http=True
        )

        def measure_wait(commit: Literal["sync", "async"], directory: str) -> float:
            out = Path(results, "waits.json")
            durable_trainable(
                train,
                {"results": str(out), "compute_seconds": 4.0, "directory": directory},
                target=target,
                experiment=f"stall-{uuid4().hex}",
                retention=Retention(last=1),
                sync=SyncConfig(commit=commit),
            )
            sink.drop()
            return float(statistics.median(json.loads(out.read_text())))

        for milliseconds in (0, 25):
            sink.set_latency(timedelta(milliseconds=milliseconds))
            sync, own, new = measure_wait("sync", "own"), measure_wait("async", "own"), measure_wait("async", "new")
            shares = f"{own:.3f} s ({own / sync:.1%}) | {new:.3f} s ({new / sync:.1%})"
            print(f"| {milliseconds} ms | {sync:.3f} s | {shares} |", flush=True)


if __name__ == "__main__":
    main()
