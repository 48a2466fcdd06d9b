"""Trainables that several ranks train together, without a framework."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt
from prefect_tune.integrations.common import get_validated_rank
from tests.trainables.witness import record_act


class Sharded(pt.Trainable):
    """Each rank has a number of its own, which depends on all steps before; `config` says which rank misbehaves."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.trial = config, pt.get_trial()
        self.rank, self.number, self.at = self.trial.rank, float(self.trial.rank + 1), 0

    def step(self) -> Mapping[str, object]:
        self.at += 1
        self.number = (self.number * 1.5 + self.at) % 97
        self._misbehave()
        size = int(os.environ.get("WORLD_SIZE", self.trial.world_size))  # MPI has other variables
        return {"loss": 1 / self.at, "number": self.number, "world_size": size}

    def _misbehave(self) -> None:
        config = self.config
        if config.get("rank") == self.rank and config.get("at") == self.at and self.trial.attempt == 1:
            match config["does"]:
                case "raise":
                    raise ValueError("this rank raises")
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "end launcher":
                    os.kill(os.getppid(), config["signal"])
                    time.sleep(3600)
                case _:
                    pass
        elif config.get("others") == "hang" and config["at"] == self.at and self.trial.attempt == 1:
            time.sleep(3600)  # as in a collective operation

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, f"rank-{self.rank}.json").write_text(json.dumps([self.at, self.number]))
        Path(checkpoint_dir, "shared.txt").write_text("the same on each rank")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.at, self.number = json.loads(Path(checkpoint_dir, f"rank-{self.rank}.json").read_text())


def elastic(config: dict[str, Any]) -> None:
    """Any number of ranks trains it; its checkpoint has the number of ranks of each step. It dies once."""
    trial, sizes = pt.get_trial(), []
    if (checkpoint := pt.get_checkpoint()) is not None:
        with checkpoint.as_directory() as restored:
            sizes = json.loads(Path(restored, "sizes.json").read_text())
    with tempfile.TemporaryDirectory() as directory:
        while True:
            sizes.append(trial.world_size)
            if len(sizes) == config["dies_at"] and trial.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            Path(directory, "sizes.json").write_text(json.dumps(sizes))
            saved = pt.Checkpoint.from_directory(directory) if len(sizes) % 2 == 0 else None
            pt.report({"loss": 1 / len(sizes)}, checkpoint=saved)


class Paced(Sharded):
    """Takes 0.5 s for a step, and reports the longest time between two of its steps."""

    longest, before = 0.0, math.inf

    def step(self) -> Mapping[str, object]:
        self.longest = max(self.longest, time.monotonic() - self.before)
        time.sleep(0.5)
        self.before = time.monotonic()
        return {**super().step(), "longest": self.longest}


def sharded(config: dict[str, Any]) -> None:
    """The same as a function."""
    model = Sharded()
    model.setup(config)
    if (checkpoint := pt.get_checkpoint()) is not None:
        with checkpoint.as_directory() as restored:
            model.load_checkpoint(restored)
    while True:
        metrics = model.step()
        directory = pt.get_trial().new_checkpoint_dir()
        withholds = config.get("does") == "withhold" and model.rank == config["rank"]
        saves = not withholds and (model.at % 2 == 0 or pt.get_trial().should_checkpoint)
        if saves:
            model.save_checkpoint(str(directory))
        pt.report(metrics, checkpoint=pt.Checkpoint.from_directory(directory) if saves else None)


def napping(config: dict[str, Any]) -> None:
    """As `sharded`, but one rank reports a step only once rank 0 has reported a later one."""
    model = Sharded()
    model.setup({})
    awake = Path(config["until"])
    while True:
        metrics = model.step()
        if model.rank == config["rank"] and model.at == config["step"]:
            while not awake.exists():
                time.sleep(0.01)
        directory = pt.get_trial().new_checkpoint_dir()
        model.save_checkpoint(str(directory))
        pt.report(metrics, checkpoint=pt.Checkpoint.from_directory(directory))
        if model.rank != config["rank"] and model.at == config["step"]:
            awake.touch()


def raises_late(config: dict[str, Any]) -> None:
    """Rank 1 raises in a step that rank 0 has trained long before, or as it leaves."""
    is_late = pt.get_trial().rank == 1
    try:
        for step in range(1, 4):
            if is_late and step == config["step"]:
                time.sleep(1)
                raise ValueError("this rank raises late")
            pt.report({"loss": 1 / step})
    finally:
        if is_late and config["step"] > 3:
            raise ValueError("it raises as it leaves")


def reports_on_rank_0(_config: dict[str, Any]) -> None:
    for step in range(1, 4):
        if pt.get_trial().rank == 0:
            time.sleep(0.5)
            pt.report({"loss": 1 / step})


def patient(_config: dict[str, Any]) -> None:
    """Train slowly, and save only when asked to: the ranks have to agree on the step."""
    trial = pt.get_trial()
    at = 0
    if (checkpoint := pt.get_checkpoint()) is not None:
        with checkpoint.as_directory() as restored:
            at = int(Path(restored, f"rank-{trial.rank}").read_text())
            assert {each.name for each in Path(restored).iterdir()} == {"rank-0", "rank-1"}
    while True:
        time.sleep(0.02 * (1 + trial.rank))
        at += 1
        saves = trial.should_checkpoint
        directory = trial.new_checkpoint_dir()
        Path(directory, f"rank-{trial.rank}").write_text(str(at))
        pt.report({"loss": 1 / at}, checkpoint=pt.Checkpoint.from_directory(directory) if saves else None)


def _rank_of_launcher(rank: int, world_size: int, config: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    if config.get("does") == "join late" and config["rank"] == rank:
        time.sleep(1)
    sharded(config)


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")


def runs_programs(config: dict[str, Any], names: tuple[str, ...] = _TORCHRUN) -> None:
    """Start two ranks as torchrun does: as programs, which find all in their environment."""
    program = f"from tests.trainables.grouped import sharded; sharded({config!r})"
    variables = [dict(zip(names, (str(rank), "2", str(rank)), strict=True)) for rank in range(2)]
    ranks = [subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **each}) for each in variables]
    failed = [each for each in ranks if each.wait()]
    if failed:
        raise RuntimeError(f"{len(failed)} of 2 ranks failed")


def loses_its_launcher(config: dict[str, Any]) -> None:
    """Start two ranks by a launcher of its own, which rank 0 ends at step 5 of the first attempt, and train on."""
    model = {"rank": 0, "at": 5, "does": "end launcher", "signal": config["signal"]}
    program = f"""
import os, signal
from tests.trainables.grouped import runs_programs
if {config.get("exits")} is not None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit({config.get("exits")}))
runs_programs({model})
"""
    subprocess.run([sys.executable, "-c", program], check=config.get("check", False))


def runs_as_open_mpi(config: dict[str, Any]) -> None:
    runs_programs(config, _OPEN_MPI)


def runs_as_mpich(config: dict[str, Any]) -> None:
    runs_programs(config, _MPICH)


def runs_mpirun(config: dict[str, Any]) -> None:
    """Start two ranks by the installed `mpirun`."""
    program = f"from tests.trainables.grouped import sharded; sharded({config!r})"
    subprocess.run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-c", program], check=True
    )


def _restart_program() -> None:
    if "LOCAL_RANK" not in os.environ:
        os.environ |= {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        program = str(getattr(sys.modules["__main__"].__spec__, "name", ""))
        subprocess.Popen([sys.executable, "-m", program, *sys.argv[1:]], env={**os.environ, "LOCAL_RANK": "1"})


def restarts_its_program(config: dict[str, Any]) -> None:
    """Start the second rank as Lightning's `ddp` does, by the program of this process, which is the first one."""
    _restart_program()
    sharded(config)


class RestartsItsProgram(Sharded):
    """The same, in a class."""

    def setup(self, config: dict[str, Any]) -> None:
        _restart_program()
        super().setup(config)


def restarts_and_returns(config: dict[str, Any]) -> dict[str, object]:
    """The last step is what the function returns; the second rank writes its last checkpoint late."""
    _restart_program()
    trial = pt.get_trial()
    for at in range(1, config["steps"]):
        directory = trial.new_checkpoint_dir()
        (directory / f"rank-{trial.rank}").write_text(str(at))
        if trial.rank == 1 and at == config["steps"] - 1:
            time.sleep(2)
        pt.report({"loss": 1 / at}, checkpoint=pt.Checkpoint.from_directory(directory))
    return {"loss": 0.0}


def trains_with_two(_config: dict[str, Any]) -> None:
    """As the callback of a framework that trains with two processes."""
    get_validated_rank("Trainer", 2)


def restarts_late(_config: dict[str, Any]) -> None:
    pt.report({"loss": 1.0})
    _restart_program()


def restarts_without_rank(_config: dict[str, Any]) -> None:
    """Start the program of this process again, as a program does that restarts itself."""
    subprocess.run(sys.orig_argv, check=False)


def launches(config: dict[str, Any]) -> None:
    """Start two ranks as `torch.multiprocessing.spawn` does, and fail as it does if one fails."""
    context = multiprocessing.get_context(config.get("by", "spawn"))
    ranks = [context.Process(target=_rank_of_launcher, args=(rank, 2, config)) for rank in range(2)]
    for each in ranks:
        each.start()
    while any(each.is_alive() for each in ranks):
        failed = [each for each in ranks if each.exitcode]
        for each in ranks if failed else []:
            each.kill()
        time.sleep(0.01)
    for rank, each in enumerate(ranks):
        each.join()
        if each.exitcode:
            raise RuntimeError(f"process {rank} ended with exit code {each.exitcode}")


def _report_as_rank_0() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    pt.get_trial()
    time.sleep(60)


def joins_twice(_config: dict[str, Any]) -> None:
    """Start two processes that are both rank 0."""
    first = multiprocessing.get_context("fork").Process(target=_report_as_rank_0)
    first.start()
    time.sleep(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    pt.get_trial()


def lagging(config: dict[str, Any]) -> None:
    """Report metrics only; one rank begins late, when the other has reported more than a pipe holds."""
    trial = pt.get_trial()
    if trial.rank == config["rank"]:
        time.sleep(2)
    for at in range(config["steps"]):
        pt.report({"loss": 1 / (at + 1)})


class Witnessed(Sharded):
    """Records which process trains which step of which rank."""

    def step(self) -> Mapping[str, object]:
        time.sleep(0.2)
        record_act(self.config["witness"], f"rank-{self.rank}", self.at + 1)
        return super().step()


class SlowSetup(Sharded):
    """Rank 0 prepares something before it begins."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if self.rank == 0:
            time.sleep(4)


def _reads(seen: Any) -> None:
    seen.put(pt.get_trial().rank)


def with_worker(config: dict[str, Any]) -> None:
    """A rank starts a worker that reads which rank it is."""
    rank = pt.get_trial().rank
    context = multiprocessing.get_context("fork")
    seen = context.SimpleQueue()
    worker = context.Process(target=_reads, args=(seen,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert seen.get() == rank
    sharded(config)


def runs_workers(config: dict[str, Any]) -> None:
    """Start two ranks as programs, each of which has a worker."""
    program = f"from tests.trainables.grouped import with_worker; with_worker({config!r})"
    variables = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    ranks = [subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **each}) for each in variables]
    failed = [each for each in ranks if each.wait()]
    if failed:
        raise RuntimeError("a rank failed")


def runs_one(config: dict[str, Any]) -> None:
    """Start one rank, as `torchrun --nproc-per-node 1` does."""
    program = f"from tests.trainables.grouped import sharded; sharded({config!r})"
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if subprocess.run([sys.executable, "-c", program], env={**os.environ, **variables}, check=False).returncode:
        raise RuntimeError("the rank failed")


class Talkative(Sharded):
    """Each rank prints; rank 1 writes its checkpoints slowly."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        print(f"rank {self.rank} is here")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        if self.rank == 1:
            time.sleep(0.2)
        super().save_checkpoint(checkpoint_dir)


def differs(config: dict[str, Any]) -> dict[str, object]:
    """Each rank reports a loss of its own, and metrics that not all ranks have."""
    rank = pt.get_trial().rank
    for step in range(1, config["steps"] + 1):
        if (rank, step) == (config.get("rank", 1), config.get("at")):
            pt.report({"loss": 0.0})  # a report more than the other rank
        loss = 10.0 - step + 2 * rank
        more: dict[str, object] = {"first": 7} if rank == 0 else {"other": 8}
        pt.report({"loss": loss, "eval": {"loss": loss}, "epoch": step, "name": f"rank {rank}", **more})
    return {"loss": 2.0 + 2 * rank, "last": True}


class Different(Sharded):
    """Each rank has another loss and score."""

    def step(self) -> Mapping[str, object]:
        return {**super().step(), "loss": 10.0 - self.at + 2 * self.rank, "score": self.at + 2 * self.rank}
