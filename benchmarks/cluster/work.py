"""The search that is measured, and what its steps record. Imports neither of the peers: both import it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "Sleeping", "Step", "Work", "steps_of"]

NAME = "cluster"
"""The experiment's name."""
RAY_CPUS = 2
"""Of Ray's cluster: each trial has its part of them."""


@dataclass(frozen=True)
class Work:
    """A search of `trials` trials of `steps` steps, each of which sleeps; a checkpoint every `save_every` steps."""

    trials: int
    concurrent: int
    steps: int
    step_seconds: float
    save_every: int
    folder: str
    """The folder of the target, the record of the steps and the outcome."""
    address: str = ""
    """Of the cluster that runs the trials."""

    @property
    def record(self) -> Path:
        """The file to which every step of every trial appends a line."""
        return Path(self.folder, "steps.jsonl")

    @property
    def decisions(self) -> Path:
        """The file to which Ray's scheduler appends a line for each decision."""
        return Path(self.folder, "decisions.jsonl")

    @property
    def outcome(self) -> Path:
        """The file that the search's process writes at its end."""
        return Path(self.folder, "outcome.json")

    @property
    def target(self) -> str:
        return str(Path(self.folder, "target"))

    @property
    def rungs(self) -> frozenset[int]:
        """The steps at which ASHA decides, with its defaults; it ends the trial at the last one."""
        rung, rungs = 1, {self.steps}
        while rung < self.steps:
            rungs.add(rung)
            rung *= 3
        return frozenset(rungs)

    def with_address(self, address: str) -> Work:
        return replace(self, address=address)

    def config(self, x: object) -> dict[str, object]:
        """Return the configuration of a trial; `x` is drawn, and identifies the trial."""
        return {"x": x, "record": str(self.record), "step_seconds": self.step_seconds}

    def json(self) -> str:
        return json.dumps(asdict(self))


class Sleeping:
    """A trainable whose steps sleep and record when; as a base class, beside that of either peer."""

    def setup(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._step = 0
        self._before: float | None = None

    def reset_config(self, config: Mapping[str, Any]) -> bool:
        self.setup(config)
        return True

    def step(self) -> Mapping[str, object]:
        start = time.time()
        time.sleep(self._config["step_seconds"])
        self._step += 1
        end = time.time()
        line = {"x": self._config["x"], "step": self._step, "pid": os.getpid(), "at": end}
        append(self._config["record"], {**line, "waited": None if self._before is None else start - self._before})
        self._before = end
        return {"loss": 1.0, "at": end}  # all are equal, so that no scheduler ends a trial early

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {"x": self._config["x"], "step": self._step}
        Path(checkpoint_dir, "state.json").write_text(json.dumps(state))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self._step = int(json.loads(Path(checkpoint_dir, "state.json").read_text())["step"])
        self._before = None


def append(path: str | Path, line: Mapping[str, object]) -> None:
    """Append a line in one write: many processes share the file, and any may be killed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Step:
    """One step that was trained."""

    x: float
    step: int
    pid: int
    at: float
    """When it ended, in seconds since 1970."""
    waited: float | None
    """Seconds between the end of the step before, in the same attempt, and its beginning."""


def steps_of(record: Path) -> Iterator[Step]:
    """Yield the steps so far; of a line that is being written, nothing."""
    if record.exists():
        for line in record.read_text().split("\n")[:-1]:
            yield Step(**json.loads(line))


@dataclass(frozen=True)
class Outcome:
    """The result of a search, as its process reads it at its end."""

    complete: int
    """Trials that ended at the last step."""
    reported: int
    """Trials whose learning curve has each step once."""
    checkpoints: int
    unreadable: int
    """Checkpoints that do not hold what the trial saved at their step."""

    def write(self, work: Work) -> None:
        work.outcome.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(work: Work) -> Outcome:
        return Outcome(**json.loads(work.outcome.read_text()))


def has_state(checkpoint: str, step: int) -> bool:
    """Whether the files of a checkpoint are those of `step`."""
    try:
        return bool(json.loads(Path(checkpoint, "state.json").read_text())["step"] == step)
    except (OSError, ValueError, KeyError):
        return False
