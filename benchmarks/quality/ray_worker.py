"""Ray Tune's own searcher and scheduler, without a cluster, in a process of their own.

`benchmarks.quality.ray_tune` starts it with a Python that has Ray. It reads one request of JSON in each line, and
writes one line with the answer.

The scheduler is Ray's `ASHAScheduler`, the searcher its `OptunaSearch`, both with their defaults; for random search the
domains of `tune` draw the values, as they do for Ray's `BasicVariantGenerator`. They are called in the order of Ray's
`TuneController` (`_process_trial_result` and `stop_trial`): with a report first the scheduler, then, if the trial
continues, the searcher; at the end of a trial `on_trial_complete` of the scheduler, then that of the searcher, with the
last result. In place of the controller they get None, and a trial has a `trial_id` only: they use nothing more. A trial
is suggested when a slot is free, as with `TuneConfig(max_concurrent_trials=...)`.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

_QUIET = {"RAY_TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_LOG_TO_STDERR": "0"}


class RayTuner:
    """One search; `searcher` is `random` or `optuna`."""

    def __init__(self, parameters: Mapping[str, Any], max_t: int, seed: int, searcher: str) -> None:
        tune: Any = import_module("ray.tune")
        schedulers: Any = import_module("ray.tune.schedulers")
        random.seed(seed)
        import_module("numpy").random.seed(seed)
        self._max_t = max_t
        self._space = {name: _domain(tune, parameter) for name, parameter in parameters.items()}
        self._searcher: Any = None
        if searcher == "optuna":
            module: Any = import_module("ray.tune.search.optuna")
            self._searcher = module.OptunaSearch(seed=seed)
            self._searcher.set_search_properties("loss", "min", self._space)  # as `Tuner` does
        self._scheduler = schedulers.ASHAScheduler(metric="loss", mode="min", max_t=max_t)
        self._continue = schedulers.TrialScheduler.CONTINUE
        self._trials: list[Any] = []

    def start(self) -> Mapping[str, Any]:
        number = len(self._trials)
        trial = SimpleNamespace(trial_id=f"{number:05d}")
        self._trials.append(trial)
        if self._searcher is None:
            config = {name: domain.sample() for name, domain in self._space.items()}
        else:
            config = self._searcher.suggest(trial.trial_id)
        self._scheduler.on_trial_add(None, trial)
        return {"trial": number, "config": {name: _plain(value) for name, value in config.items()}}

    def report(self, number: int, step: int, loss: float) -> str:
        trial, result = self._trials[number], {"loss": loss, "training_iteration": step}
        continues = self._scheduler.on_trial_result(None, trial, result) == self._continue
        if continues and self._searcher is not None:
            self._searcher.on_trial_result(trial.trial_id, result)
        if continues and step < self._max_t:
            return "continue"
        self._scheduler.on_trial_complete(None, trial, result)
        if self._searcher is not None:
            self._searcher.on_trial_complete(trial.trial_id, result=result)
        return "stop"


def _domain(tune: Any, parameter: Mapping[str, Any]) -> Any:
    low, high = parameter["low"], parameter["high"]
    if parameter["options"]:
        return tune.choice(parameter["options"])
    if parameter["is_whole"]:
        whole = tune.lograndint if parameter["scale"] == "log" else tune.randint
        return whole(int(low), int(high) + 1)
    return (tune.loguniform if parameter["scale"] == "log" else tune.uniform)(low, high)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _main() -> None:
    os.environ.update(_QUIET)
    answers, sys.stdout = sys.stdout, sys.stderr
    import_module("optuna").logging.set_verbosity(40)
    tuner: RayTuner | None = None
    for line in sys.stdin:
        method, arguments = json.loads(line)
        if method == "begin":
            tuner = RayTuner(**arguments)
            answer: object = None
        else:
            answer = getattr(tuner, method)(*arguments)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _main()
