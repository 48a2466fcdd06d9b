"""The time from a report with a checkpoint to its commit, by the number of trials and the latency of the target.

    python -m benchmarks.commit_times [--trials 1 8 64] [--latency 0 25 100]

Each trial reports a small checkpoint ten times with `commit="sync"`, and waits half a second in between. The first
report waits until all trials have begun. The target is the counting S3 server on loopback, with a latency before each
answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

_SAVES = 10
_BETWEEN_SECONDS = 0.5
_START_TIMEOUT_SECONDS = 300


def train(config: Mapping[str, object]) -> None:
    """Report `_SAVES` checkpoints, and write down how long each report took."""
    import prefect_tune as pt

    folder, trial_count, seconds = Path(str(config["folder"])), int(str(config["trials"])), list[float]()
    name = pt.get_trial().id
    (folder / f"{name}.begun").touch()
    end = time.monotonic() + _START_TIMEOUT_SECONDS
    while len(list(folder.glob("*.begun"))) < trial_count and time.monotonic() < end:
        time.sleep(0.05)
    for step in range(_SAVES):
        time.sleep(_BETWEEN_SECONDS)
        directory = pt.get_trial().new_checkpoint_dir()
        Path(directory, "weights").write_bytes(f"{name} {step}".encode() * 256)
        start = time.perf_counter()
        pt.report({"loss": 1.0 / (step + 1)}, checkpoint=pt.Checkpoint.from_directory(directory))
        seconds.append(time.perf_counter() - start)
    (folder / f"{name}.json").write_text(json.dumps(seconds))


def measure(trial_count: int, latency_ms: int) -> tuple[float, float, float]:
    """Return the median and the 95th percentile in milliseconds, and the requests of a commit."""
    import prefect_tune as pt
    from benchmarks.measuring.s3_process import S3SinkProcess
    from prefect_tune.blocks import S3Target, SyncConfig

    with S3SinkProcess() as sink, tempfile.TemporaryDirectory() as folder:
        target = S3Target(
            bucket="bench", endpoint_url=sink.endpoint, access_key_id="x", secret_access_key="x", allow_http=True
        )
        sink.set_latency(timedelta(milliseconds=latency_ms))
        pt.tune(
            train,
            {"folder": folder, "trials": trial_count},
            num_samples=trial_count,
            max_concurrent_trials=trial_count,
            target=target,
            experiment="commits",
            sync=SyncConfig(commit="sync"),
        )
        requests = sink.take_counts()["requests"] / trial_count / _SAVES
        seconds = [duration for path in Path(folder).glob("*.json") for duration in json.loads(path.read_text())]
    ranked = statistics.quantiles(seconds, n=20)
    return statistics.median(seconds) * 1000, ranked[-1] * 1000, requests


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--latency", type=int, nargs="+", default=[0, 25, 100])
    args = parser.parse_args(arguments)
    print("| trials | latency, ms | commit, median ms | 95th percentile, ms | requests of a trial per commit |")
    print("|---|---|---|---|---|")
    for trial_count in args.trials:
        for latency_ms in args.latency:
            median, slow, requests = measure(trial_count, latency_ms)
            print(f"| {trial_count} | {latency_ms} | {median:.0f} | {slow:.0f} | {requests:.1f} |", flush=True)


if __name__ == "__main__":
    main()
