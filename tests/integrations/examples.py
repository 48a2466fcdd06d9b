"""Run an example as a user does, kill its trials, and compare them with undisturbed trainings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prefect_tune as pt

ROOT = Path(__file__).resolve().parents[2]
_STRIKES = ROOT / "tests" / "integrations" / "strikes"


@dataclass(frozen=True)
class Struck:
    """The result of an example whose trials were killed."""

    results: pt.Results
    witness: Sequence[Mapping[str, Any]]

    @property
    def kills(self) -> int:
        return sum(each["at"] != "started" for each in self.witness)

    @property
    def steps_lost(self) -> Sequence[int]:
        """For each kill, the steps trained by then and trained again."""
        return [
            each["step"] - start
            for place, each in enumerate(self.witness)
            if each["at"] != "started"
            for start in [self._next_start(each["trial"], place)]
            if start is not None
        ]

    def _next_start(self, trial: str, place: int) -> int | None:
        """Return the step from which the trial resumed; None if it was killed after its last commit."""
        starts = (each["step"] for each in self.witness[place:] if (each["trial"], each["at"]) == (trial, "started"))
        return next(starts, None)


@dataclass(frozen=True)
class Example:
    """A file in `examples/`, and the name of its trainable."""

    file: str
    experiment: str
    trainable: str
    folder: Path
    api_url: str
    timeout_seconds: float = 900

    @property
    def path(self) -> Path:
        return ROOT / "examples" / self.file

    def struck(self, *, kills: int, seed: int, reach: int) -> Struck:
        """Run the example to its end; `kills` times a trial's process dies at most `reach` steps after its start."""
        strikes = self.folder / "strikes"
        strikes.mkdir()
        for number in range(kills):
            (strikes / f"strike-{number}").touch()
        environment = {
            "PREFECT_TUNE_TEST_STRIKES": str(strikes),
            "PREFECT_TUNE_TEST_SEED": str(seed),
            "PREFECT_TUNE_TEST_REACH": str(reach),
            "PYTHONPATH": str(_STRIKES),
        }
        self._python([str(self.path), str(self.folder / "runs")], environment, "")
        witness = [json.loads(line) for line in (strikes / "witness").read_text().splitlines()]
        return Struck(pt.load_results(str(self.folder / "runs"), self.experiment), witness)

    def undisturbed(self, results: pt.Results) -> Mapping[str, Path]:
        """Train each trial once more, as far as its newest checkpoint; return where its state lies."""
        asked = {
            each.id: {
                "trainable": self.trainable,
                "config": dict(each.config),
                "steps": each.checkpoints[-1].step,
                "directory": str(self.folder / "undisturbed" / each.id),
            }
            for each in results.trials.values()
        }
        command = ["-m", "tests.integrations.undisturbed", str(self.path)]
        self._python(command, {"PYTHONPATH": str(ROOT)}, json.dumps(list(asked.values())))
        return {trial: Path(str(each["directory"])) for trial, each in asked.items()}

    def ends_as_undisturbed(
        self, learned: Callable[[Path], Mapping[str, object]], *, reach: int, interval: int, steps: set[int]
    ) -> int:
        """Kill three of its trials; their states are then those of undisturbed ones. Return how many were killed.

        Args:
            learned: returns the state in a checkpoint's directory.
            reach: the most steps from a start to a kill.
            interval: the most steps from one checkpoint to the next.
            steps: at which the trials end.
        """
        struck = self.struck(kills=3, seed=1, reach=reach)
        assert struck.kills == 3
        assert all(0 <= lost <= interval for lost in struck.steps_lost), struck.witness
        for trial, truth in self.undisturbed(struck.results).items():
            assert learned(Path(struck.results.checkpoint(trial).to_directory())) == learned(truth)
        assert {each.step for each in struck.results.trials.values()} == steps
        return struck.kills

    def _python(self, arguments: Sequence[str], environment: Mapping[str, str], said: str) -> None:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PREFECT_API_URL": self.api_url, "OMP_NUM_THREADS": "1", **environment},
            input=said,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.timeout_seconds,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
