"""Run an example like a user, kill its trials, and compare them with undisturbed trainings."""

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
class KilledRun:
    """The result of an example whose trials were killed."""

    results: pt.Results
    records: Sequence[Mapping[str, Any]]

    @property
    def kill_count(self) -> int:
        return sum(record["event"] != "started" for record in self.records)

    @property
    def steps_lost(self) -> Sequence[int]:
        """For each kill after which the trial resumed, the number of steps that were trained again."""
        lost, killed_at = [], dict[str, int]()
        for record in self.records:
            if record["event"] != "started":
                killed_at[record["trial"]] = record["step"]
            elif record["trial"] in killed_at:
                lost.append(killed_at.pop(record["trial"]) - record["step"])
        return lost


@dataclass(frozen=True)
class Example:
    """A file in `examples/`, and its trainable."""

    file: str
    experiment: str
    trainable: str
    folder: Path
    api_url: str
    timeout_seconds: float = 900

    @property
    def path(self) -> Path:
        return ROOT / "examples" / self.file

    def run_with_kills(self, *, kills: int, seed: int, reach: int) -> KilledRun:
        """Run the example; kill a trial's process `kills` times, each at most `reach` steps after its start."""
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
        return KilledRun(pt.load_results(str(self.folder / "runs"), self.experiment), witness)

    def train_undisturbed(self, results: pt.Results) -> Mapping[str, Path]:
        """Train each trial again up to its newest checkpoint; return the directory of each state."""
        directories = {trial: self.folder / "undisturbed" / trial for trial in results.trials}
        trainings = [
            {
                "trainable": self.trainable,
                "config": dict(trial.config),
                "steps": trial.checkpoints[-1].step,
                "directory": str(directories[trial.id]),
            }
            for trial in results.trials.values()
        ]
        command = ["-m", "tests.integrations.undisturbed", str(self.path)]
        self._python(command, {"PYTHONPATH": str(ROOT)}, json.dumps(trainings))
        return directories

    def require_undisturbed_end(
        self, read_state: Callable[[Path], Mapping[str, object]], *, reach: int, interval: int, steps: set[int]
    ) -> int:
        """Kill three trials; require the states of undisturbed trials. Return the number of kills.

        Args:
            read_state: returns the state in a checkpoint's directory.
            reach: the maximum number of steps from a start to a kill.
            interval: the maximum number of steps between two checkpoints.
            steps: the last steps of the trials.
        """
        run = self.run_with_kills(kills=3, seed=1, reach=reach)
        assert run.kill_count == 3
        assert all(0 <= lost <= interval for lost in run.steps_lost), run.records
        for trial, directory in self.train_undisturbed(run.results).items():
            assert read_state(Path(run.results.checkpoint(trial).to_directory())) == read_state(directory)
        assert {trial.step for trial in run.results.trials.values()} == steps
        return run.kill_count

    def _python(self, arguments: Sequence[str], environment: Mapping[str, str], stdin: str) -> None:
        process = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PREFECT_API_URL": self.api_url, "OMP_NUM_THREADS": "1", **environment},
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.timeout_seconds,
            check=False,
        )
        assert process.returncode == 0, process.stdout[-6000:]
