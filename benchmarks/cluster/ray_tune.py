"""The search with Ray Tune on a running cluster: a process of its own, for an interpreter that has nothing of ours.

python -m benchmarks.cluster.ray_tune WORK new|resume
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.cluster.work import NAME, RAY_CPUS, Outcome, Sleeping, Work, append, has_state


def _main(work: Work, act: str) -> None:
    ray: Any = import_module("ray")  # which is not here where types are checked
    tune: Any = import_module("ray.tune")
    ray.init(address=work.address, log_to_driver=False)
    steps = type("Steps", (Sleeping, tune.Trainable), {})
    trainable = tune.with_resources(steps, {"cpu": RAY_CPUS / work.concurrent})
    if act == "resume":
        tuner = tune.Tuner.restore(str(Path(work.target, NAME)), trainable, resume_errored=True)
    else:
        tuner = _tuner(tune, trainable, work)
    _outcome(tuner.fit(), work).write(work)


def _tuner(tune: Any, trainable: object, work: Work) -> Any:
    return tune.Tuner(
        trainable,
        param_space=work.config(tune.uniform(0, 1)),
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=work.trials,
            max_concurrent_trials=work.concurrent,
            reuse_actors=True,  # not its default, with which each trial costs a process
            scheduler=_scheduler(tune, work),
        ),
        run_config=tune.RunConfig(
            name=NAME,
            storage_path=work.target,
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=work.save_every, checkpoint_at_end=True),
            failure_config=tune.FailureConfig(max_failures=10),  # as many as ours forgives a machine
            verbose=0,
        ),
    )


def _scheduler(tune: Any, work: Work) -> Any:
    class Timed(tune.schedulers.ASHAScheduler):  # type: ignore[misc]  # of no known type
        """Records how long after the report each decision is made."""

        def on_trial_result(self, tune_controller: object, trial: object, result: Mapping[str, Any]) -> Any:
            decision = super().on_trial_result(tune_controller, trial, result)
            append(work.decisions, {"step": result["training_iteration"], "lag": time.time() - result["at"]})
            return decision

    return Timed(max_t=work.steps, grace_period=1, reduction_factor=3)


def _outcome(results: Any, work: Work) -> Outcome:
    complete, reported, readable = 0, 0, list[bool]()
    for result in results:
        last = (result.metrics or {}).get("training_iteration")
        complete += result.error is None and last == work.steps
        steps = [] if result.metrics_dataframe is None else list(result.metrics_dataframe["training_iteration"])
        reported += steps == list(range(1, work.steps + 1))
        for checkpoint, metrics in result.best_checkpoints:
            with checkpoint.as_directory() as folder:
                readable.append(has_state(folder, metrics["training_iteration"]))
    return Outcome(complete, reported, len(readable), readable.count(False))


if __name__ == "__main__":
    _main(Work(**json.loads(sys.argv[1])), sys.argv[2])
