"""The same search with Ray Tune, for an interpreter that has Ray and nothing of ours.

python benchmarks/peers/ray_tune.py WORKLOAD TRIALS REPORTS ROOM
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

ray: Any = import_module("ray")  # which is not here where types are checked
tune: Any = import_module("ray.tune")


def train(config: Mapping[str, object]) -> None:
    """Report as often as the configuration says."""
    record_start(config)
    for _ in range(int(str(config["reports"]))):
        tune.report({"loss": config["x"]})


class Steps(tune.Trainable):  # type: ignore[misc]  # of no known type
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

    def reset_config(self, new_config: Mapping[str, object]) -> bool:
        self._config = new_config
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
    is_function = workload == "function"
    called = time.monotonic()
    local = {"address": "local", "num_cpus": 2, "include_dashboard": False}  # and in no cluster that was left behind
    address: dict[str, Any] = {} if "RAY_ADDRESS" in os.environ else local
    ray.init(log_to_driver=False, **address)
    tuner = tune.Tuner(
        train if is_function else Steps,
        param_space={"x": tune.uniform(0, 1), "reports": reports, "first": str(first)},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=trials,
            max_concurrent_trials=2,
            reuse_actors=True,  # not its default, with which each trial costs a process
        ),
        run_config=tune.RunConfig(
            name="throughput",
            storage_path=str(folder / "target"),
            stop=None if is_function else {"training_iteration": reports},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=not is_function),
            verbose=0,
        ),
    )
    results = tuner.fit()
    returned = time.monotonic()
    steps = [trial.metrics["training_iteration"] for trial in results if not results.errors]
    measured = {"called": called, "first": float(first.read_text()), "returned": returned, "trials": len(steps)}
    (folder / "measured.json").write_text(json.dumps({**measured, "reports": sum(steps)}))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
