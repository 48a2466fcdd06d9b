"""One search of a real trainable with one peer: `benchmarks.imports` starts it as a process of its own.

python -m benchmarks.peers.real PEER WORK

PEER is `ours`, `ray`, `ray-reuse` or `optuna`; WORK the JSON of a `Work`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

_MIN_LR, _MAX_LR = 1e-4, 1e-1


@dataclass(frozen=True)
class Work:
    """A search: of a module of `benchmarks.real`, with `fifo` or `asha`, in an empty directory."""

    trainable: str
    scheduler: str
    trials: int
    epochs: int
    folder: str

    @property
    def first(self) -> str:
        """The file that receives the time at which the first trial begins to train."""
        return f"{self.folder}/first"


def _ours(work: Work) -> int:
    import prefect_tune as pt

    results = pt.tune(
        f"benchmarks.real.{work.trainable}:train",
        {"lr": pt.loguniform(_MIN_LR, _MAX_LR), "epochs": work.epochs, "first": work.first},
        target=f"{work.folder}/target",
        experiment="real",
        metric="loss",
        num_samples=work.trials,
        scheduler=pt.ASHA(max_t=work.epochs, grace_period=1, variant="stopping") if work.scheduler == "asha" else None,
        max_concurrent_trials=2,
    )
    return len(results.trials) - len(results.errors)


def _ray(work: Work, *, reuse: bool = False) -> int:
    ray: Any = import_module("ray")
    tune: Any = import_module("ray.tune")
    trainable = f"benchmarks.real.{work.trainable}"

    def train(config: Mapping[str, object]) -> None:
        import_module(trainable).train(config)

    local = {"address": "local", "num_cpus": 2, "include_dashboard": False}  # and in no cluster that was left behind
    address: dict[str, Any] = {} if "RAY_ADDRESS" in os.environ else local
    ray.init(log_to_driver=False, **address)
    results = tune.Tuner(
        train,
        param_space={"lr": tune.loguniform(_MIN_LR, _MAX_LR), "epochs": work.epochs, "first": work.first},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=work.trials,
            max_concurrent_trials=2,
            reuse_actors=reuse,
            scheduler=tune.schedulers.ASHAScheduler(max_t=work.epochs, grace_period=1)
            if work.scheduler == "asha"
            else None,
        ),
        run_config=tune.RunConfig(name="real", storage_path=f"{work.folder}/target", verbose=0),
    ).fit()
    return len(results) - len(results.errors)


def _optuna(work: Work) -> int:
    """Two processes that share a study in a file, as Optuna's documentation shows it."""
    command = [sys.executable, "-m", "benchmarks.peers.real", "optuna-worker"]
    shares = [replace(work, trials=work.trials // 2), replace(work, trials=work.trials - work.trials // 2)]
    workers = [subprocess.Popen([*command, json.dumps(asdict(share))]) for share in shares]
    failed = [worker.wait() for worker in workers]
    return 0 if any(failed) else len(_study(work).trials)


def _optuna_worker(work: Work) -> int:
    from benchmarks.real.reporting import OptunaTrial

    train = import_module(f"benchmarks.real.{work.trainable}").train

    def objective(trial: Any) -> float:
        reporting = OptunaTrial(trial)
        lr = trial.suggest_float("lr", _MIN_LR, _MAX_LR, log=True)
        train({"lr": lr, "epochs": work.epochs, "first": work.first})
        return reporting.loss

    _study(work).optimize(objective, n_trials=work.trials)
    return work.trials


def _study(work: Work) -> Any:
    optuna: Any = import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=4)
    backend: Any = import_module("optuna.storages.journal").JournalFileBackend(f"{work.folder}/study")
    return optuna.create_study(
        study_name="real",
        storage=optuna.storages.JournalStorage(backend),
        sampler=optuna.samplers.RandomSampler(),
        pruner=halving if work.scheduler == "asha" else optuna.pruners.NopPruner(),
        load_if_exists=True,
    )


_PEERS: Mapping[str, Callable[[Work], int]] = {
    "ours": _ours,
    "ray": _ray,
    "ray-reuse": partial(_ray, reuse=True),
    "optuna": _optuna,
    "optuna-worker": _optuna_worker,
}


def _main(peer: str, work: Work) -> None:
    os.environ["BENCHMARK_PEER"] = peer.partition("-")[0]
    completed = _PEERS[peer](work)
    if completed != work.trials:
        raise SystemExit(f"{peer}: {completed} of {work.trials} trials are done")


if __name__ == "__main__":
    _main(sys.argv[1], Work(**json.loads(sys.argv[2])))
