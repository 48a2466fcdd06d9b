"""One search with prefect-tune, timed from inside: `benchmarks.throughput` starts it as a process of its own.

python benchmarks/peers/ours.py WORKLOAD TRIALS REPORTS ROOM
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import prefect_tune as pt


def train(config: Mapping[str, object]) -> None:
    """Report as often as the configuration says."""
    record_start(config)
    for _ in range(int(str(config["reports"]))):
        pt.report({"loss": config["x"]})


class Steps(pt.Trainable):
    """The same as a class, with a state of a few bytes."""

    def setup(self, config: Mapping[str, object]) -> None:
        record_start(config)
        self._config = config

    def step(self) -> Mapping[str, object]:
        return {"loss": self._config["x"]}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "state").write_text("1")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "state").read_text()

    def reset_config(self, config: Mapping[str, object]) -> bool:
        self._config = config
        return True


def record_start(config: Mapping[str, object]) -> None:
    """Leave the time of the first trial's first step."""
    try:
        descriptor = os.open(str(config["first"]), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(descriptor, str(time.monotonic()).encode())
    os.close(descriptor)


def _main(workload: str, trials: int, reports: int, folder: Path) -> None:
    first = folder / "first"
    tune = pt.tune  # comes when it is asked for; the peer's modules, too, are loaded before its call
    called = time.monotonic()
    results = tune(
        train if workload == "function" else Steps,
        {"x": pt.uniform(0, 1), "reports": reports, "first": str(first)},
        target=str(folder / "target"),
        experiment="throughput",
        metric="loss",
        num_samples=trials,
        stop=None if workload == "function" else {"step": reports},
        max_concurrent_trials=2,
    )
    returned = time.monotonic()
    steps = [trial.step for trial in results.trials.values() if not results.errors]
    measured = {"called": called, "first": float(first.read_text()), "returned": returned, "trials": len(steps)}
    (folder / "measured.json").write_text(json.dumps({**measured, "reports": sum(steps), "cpu": time.process_time()}))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
