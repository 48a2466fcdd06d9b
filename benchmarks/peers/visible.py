"""One search whose steps compute, with everything that Prefect's UI shows of it or without: `benchmarks.visible`.

python benchmarks/peers/visible.py SHOWN UNITS TRIALS STEPS ROOM
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import prefect_tune as pt

_BLOCK = bytes(1 << 16)


def compute(units: int) -> None:
    """Do so many units of work, however long that takes."""
    for _ in range(units):
        hashlib.sha256(_BLOCK).digest()


class Computes(pt.Trainable):
    """Each step is the same work; a checkpoint is a few bytes."""

    def setup(self, config: Mapping[str, object]) -> None:
        self._units, self._step = int(str(config["units"])), 0

    def step(self) -> Mapping[str, object]:
        compute(self._units)
        self._step += 1
        return {"loss": 1 / self._step, "accuracy": 1 - 1 / self._step}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "step").write_text(str(self._step))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self._step = int((Path(checkpoint_dir) / "step").read_text())


def _show_nothing(run_search: ModuleType) -> None:
    """Disable report, log lines, progress, live status, events and assets; leave everything else unchanged."""

    class NoReporter:
        def begin_final_report(self) -> None:
            pass

    @contextmanager
    def observing_nothing(*_: object, **__: object) -> Iterator[tuple[Sequence[Any], NoReporter]]:
        yield (), NoReporter()

    assert hasattr(run_search, "observing_run")  # else this would disable nothing
    run_search.observing_run = observing_nothing  # type: ignore[attr-defined]  # the name in this module


def _main(is_visible: bool, units: int, trials: int, steps: int, folder: Path) -> None:  # noqa: FBT001  a command line
    from prefect_tune.core.experiment.retention import Cadence
    from prefect_tune.tuner import run_search  # with most of Prefect: both load it before their call

    if not is_visible:
        _show_nothing(run_search)
    called = time.monotonic()
    results = pt.tune(
        Computes,
        {"rate": pt.loguniform(1e-4, 1), "width": pt.choice([16, 32, 64]), "units": units},
        target=str(folder / "target"),
        experiment="visible",
        metric="loss",
        num_samples=trials,
        stop={"step": steps},
        checkpoint=Cadence(every_steps=10),
        max_concurrent_trials=2,
    )
    step_count = sum(trial.step for trial in results.trials.values())
    (folder / "measured.json").write_text(json.dumps({"seconds": time.monotonic() - called, "steps": step_count}))


if __name__ == "__main__":
    units, trials, steps = map(int, sys.argv[2:5])
    _main(sys.argv[1] == "shown", units, trials, steps, Path(sys.argv[5]))
