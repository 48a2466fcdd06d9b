"""Ray Tune's searcher and scheduler as tuners of a simulation, in a process with the Python that has them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.quality.problems import Problem
from benchmarks.quality.simulation import Answer, Start, Tuner

__all__ = ["ray_tuners"]

_REPOSITORY = Path(__file__).resolve().parents[2]
_SEARCHES = {"Ray: random, ASHAScheduler": "random", "Ray: OptunaSearch, ASHAScheduler": "optuna"}


class RayTuner:
    """A search in the process of `worker`, which serves one at a time."""

    def __init__(self, worker: Worker, problem: Problem, seed: int, searcher: str) -> None:
        self._worker = worker
        parameters = {name: asdict(parameter) for name, parameter in problem.parameters.items()}
        worker.ask("begin", {"parameters": parameters, "max_t": problem.max_t, "seed": seed, "searcher": searcher})

    def start(self) -> Start:
        return Start(**self._worker.ask("start", []))

    def report(self, trial: int, step: int, loss: float) -> Answer:
        return Answer(self._worker.ask("report", [trial, step, loss]))


class Worker:
    """`benchmarks.quality.ray_worker`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, method: str, arguments: object) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process with Ray ended at {method!r}, with code {self._process.wait()}")
        return json.loads(answer)


@contextmanager
def ray_tuners(python: str) -> Iterator[Mapping[str, Callable[[Problem, int], Tuner]]]:
    """Yield the tuners; the process that they use ends with the block."""
    command = [python, "-m", "benchmarks.quality.ray_worker"]
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=_REPOSITORY
    ) as process:
        worker = Worker(process)
        yield {name: _tuner(worker, searcher) for name, searcher in _SEARCHES.items()}
        assert process.stdin
        process.stdin.close()


def _tuner(worker: Worker, searcher: str) -> Callable[[Problem, int], Tuner]:
    return lambda problem, seed: RayTuner(worker, problem, seed, searcher)
