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
    """Each rank has its own number, which depends on all earlier steps; `config` says which rank fails, and how."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.trial = config, pt.get_trial()
        self.rank, self.number, self.count = self.trial.rank, float(self.trial.rank + 1), 0

    def step(self) -> Mapping[str, object]:
        self.count += 1
        self.number = (self.number * 1.5 + self.count) % 97
        self._misbehave()
        size = int(os.environ.get("WORLD_SIZE", self.trial.world_size))  # MPI has other variables
        return {"loss": 1 / self.count, "number": self.number, "world_size": size}

    def _misbehave(self) -> None:
        config = self.config
        if config.get("rank") == self.rank and config.get("at") == self.count and self.trial.attempt == 1:
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
        elif config.get("others") == "hang" and config["at"] == self.count and self.trial.attempt == 1:
            time.sleep(3600)  # as in a collective operation

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, f"rank-{self.rank}.json").write_text(json.dumps([self.count, self.number]))
        Path(checkpoint_dir, "shared.txt").write_text("the same on each rank")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.count, self.number = json.loads(Path(checkpoint_dir, f"rank-{self.rank}.json").read_text())


def train_elastic(config: dict[str, Any]) -> None:
    """Train with any number of ranks, and save the number of ranks of each step; die once."""
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


def train_sharded(config: dict[str, Any]) -> None:
    """Train like `Sharded`, as a function."""
    model = Sharded()
    model.setup(config)
    if (checkpoint := pt.get_checkpoint()) is not None:
        with checkpoint.as_directory() as restored:
            model.load_checkpoint(restored)
    while True:
        metrics = model.step()
        directory = pt.get_trial().new_checkpoint_dir()
        is_withheld = config.get("does") == "withhold" and model.rank == config["rank"]
        should_save = not is_withheld and (model.count % 2 == 0 or pt.get_trial().should_checkpoint)
        if should_save:
            model.save_checkpoint(str(directory))
        pt.report(metrics, checkpoint=pt.Checkpoint.from_directory(directory) if should_save else None)


def wait_at_step(config: dict[str, Any]) -> None:
    """Train like `Sharded`, but one rank reports a step only after rank 0 has reported a later one."""
    model, go_on = Sharded(), Path(config["until"])
    model.setup({})
    while True:
        metrics = model.step()
        if model.rank == config["rank"] and model.count == config["step"]:
            while not go_on.exists():
                time.sleep(0.01)
        directory = pt.get_trial().new_checkpoint_dir()
        model.save_checkpoint(str(directory))
        pt.report(metrics, checkpoint=pt.Checkpoint.from_directory(directory))
        if model.rank != config["rank"] and model.count == config["step"]:
            go_on.touch()


def raise_late(config: dict[str, Any]) -> None:
    """Raise on rank 1, in a step that rank 0 has trained long before, or at the end."""
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


def report_on_rank_0(_config: dict[str, Any]) -> None:
    for step in range(1, 4):
        if pt.get_trial().rank == 0:
            time.sleep(0.5)
            pt.report({"loss": 1 / step})


def save_on_request(_config: dict[str, Any]) -> None:
    """Train slowly, and save only on request: the ranks have to agree on the step."""
    trial, step = pt.get_trial(), 0
    if (checkpoint := pt.get_checkpoint()) is not None:
        with checkpoint.as_directory() as restored:
            step = int(Path(restored, f"rank-{trial.rank}").read_text())
            assert {path.name for path in Path(restored).iterdir()} == {"rank-0", "rank-1"}
    while True:
        time.sleep(0.02 * (1 + trial.rank))
        step += 1
        should_save, directory = trial.should_checkpoint, trial.new_checkpoint_dir()
        Path(directory, f"rank-{trial.rank}").write_text(str(step))
        pt.report({"loss": 1 / step}, checkpoint=pt.Checkpoint.from_directory(directory) if should_save else None)


def _run_rank(rank: int, world_size: int, config: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    if config.get("does") == "join late" and config["rank"] == rank:
        time.sleep(1)
    train_sharded(config)


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")


def _make_command(function: str, config: dict[str, Any]) -> list[str]:
    return [sys.executable, "-c", f"from tests.trainables.grouped import {function}; {function}({config!r})"]


def run_programs(config: dict[str, Any], names: tuple[str, ...] = _TORCHRUN, function: str = "train_sharded") -> None:
    """Start two ranks like torchrun: as programs, with environment variables."""
    environments = [dict(zip(names, (str(rank), "2", str(rank)), strict=True)) for rank in range(2)]
    command = _make_command(function, config)
    processes = [subprocess.Popen(command, env={**os.environ, **variables}) for variables in environments]
    if failed := [process for process in processes if process.wait()]:
        raise RuntimeError(f"{len(failed)} of 2 ranks failed")


def lose_launcher(config: dict[str, Any]) -> None:
    """Start two ranks by a separate launcher, which rank 0 ends at step 5 of the first attempt; train on."""
    model = {"rank": 0, "at": 5, "does": "end launcher", "signal": config["signal"]}
    program = f"""
import os, signal
from tests.trainables.grouped import run_programs
if {config.get("exits")} is not None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit({config.get("exits")}))
run_programs({model})
"""
    subprocess.run([sys.executable, "-c", program], check=config.get("check", False))


def run_as_open_mpi(config: dict[str, Any]) -> None:
    run_programs(config, _OPEN_MPI)


def run_as_mpich(config: dict[str, Any]) -> None:
    run_programs(config, _MPICH)


def run_mpirun(config: dict[str, Any]) -> None:
    """Start two ranks by the installed `mpirun`."""
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    subprocess.run([*mpirun, *_make_command("train_sharded", config)], check=True)


def _start_second_rank() -> None:
    if "LOCAL_RANK" not in os.environ:
        os.environ |= {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        program = str(getattr(sys.modules["__main__"].__spec__, "name", ""))
        subprocess.Popen([sys.executable, "-m", program, *sys.argv[1:]], env={**os.environ, "LOCAL_RANK": "1"})


def restart_program(config: dict[str, Any]) -> None:
    """Start the second rank like Lightning's `ddp`: by the program of this process, which is the first rank."""
    _start_second_rank()
    train_sharded(config)


class RestartsItsProgram(Sharded):
    """Like `restart_program`, as a class."""

    def setup(self, config: dict[str, Any]) -> None:
        _start_second_rank()
        super().setup(config)


def restart_and_return(config: dict[str, Any]) -> dict[str, object]:
    """Return the metrics of the last step; the second rank writes its last checkpoint late."""
    _start_second_rank()
    trial = pt.get_trial()
    for step in range(1, config["steps"]):
        directory = trial.new_checkpoint_dir()
        (directory / f"rank-{trial.rank}").write_text(str(step))
        if trial.rank == 1 and step == config["steps"] - 1:
            time.sleep(2)
        pt.report({"loss": 1 / step}, checkpoint=pt.Checkpoint.from_directory(directory))
    return {"loss": 0.0}


def train_with_two(_config: dict[str, Any]) -> None:
    """Check the ranks like the callback of a framework that trains with two processes."""
    get_validated_rank("Trainer", 2)


def restart_late(_config: dict[str, Any]) -> None:
    pt.report({"loss": 1.0})
    _start_second_rank()


def restart_without_rank(_config: dict[str, Any]) -> None:
    """Start the program of this process again, like a program that restarts itself."""
    subprocess.run(sys.orig_argv, check=False)


def launch_ranks(config: dict[str, Any]) -> None:
    """Start two ranks and fail if one fails, like `torch.multiprocessing.spawn`."""
    context = multiprocessing.get_context(config.get("by", "spawn"))
    processes = [context.Process(target=_run_rank, args=(rank, 2, config)) for rank in range(2)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.01)
    for rank, process in enumerate(processes):
        process.join()
        if process.exitcode:
            raise RuntimeError(f"process {rank} ended with exit code {process.exitcode}")


def _join_as_rank_0() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    pt.get_trial()
    time.sleep(60)


def join_twice(_config: dict[str, Any]) -> None:
    """Start two processes that are both rank 0."""
    first = multiprocessing.get_context("fork").Process(target=_join_as_rank_0)
    first.start()
    time.sleep(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    pt.get_trial()


def start_late(config: dict[str, Any]) -> None:
    """Report metrics only; one rank starts late, when the other has reported more than a pipe holds."""
    if pt.get_trial().rank == config["rank"]:
        time.sleep(2)
    for step in range(config["steps"]):
        pt.report({"loss": 1 / (step + 1)})


class Witnessed(Sharded):
    """Records which process trains which step of which rank."""

    def step(self) -> Mapping[str, object]:
        time.sleep(0.2)
        record_act(self.config["witness"], f"rank-{self.rank}", self.count + 1)
        return super().step()


class SlowSetup(Sharded):
    """Rank 0 prepares something before it begins."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        if self.rank == 0:
            time.sleep(4)


def _send_rank(queue: Any) -> None:
    queue.put(pt.get_trial().rank)


def train_with_worker(config: dict[str, Any]) -> None:
    """Start a worker, which reads the rank, and train."""
    rank, context = pt.get_trial().rank, multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    worker = context.Process(target=_send_rank, args=(queue,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert queue.get() == rank
    train_sharded(config)


def run_with_workers(config: dict[str, Any]) -> None:
    run_programs(config, function="train_with_worker")


def run_one_rank(config: dict[str, Any]) -> None:
    """Start one rank, like `torchrun --nproc-per-node 1`."""
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    subprocess.run(_make_command("train_sharded", config), env=environment, check=True)


class Talkative(Sharded):
    """Each rank prints; rank 1 writes its checkpoints slowly."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        print(f"rank {self.rank} is here")

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        if self.rank == 1:
            time.sleep(0.2)
        super().save_checkpoint(checkpoint_dir)


def report_different(config: dict[str, Any]) -> dict[str, object]:
    """Report a different loss on each rank, and metrics that not all ranks have."""
    rank = pt.get_trial().rank
    for step in range(1, config["steps"] + 1):
        if (rank, step) == (config.get("rank", 1), config.get("at")):
            pt.report({"loss": 0.0})  # one report more than the other rank
        loss = 10.0 - step + 2 * rank
        more: dict[str, object] = {"first": 7} if rank == 0 else {"other": 8}
        pt.report({"loss": loss, "eval": {"loss": loss}, "epoch": step, "name": f"rank {rank}", **more})
    return {"loss": 2.0 + 2 * rank, "last": True}


class Different(Sharded):
    """Each rank has another loss and score."""

    def step(self) -> Mapping[str, object]:
        return {**super().step(), "loss": 10.0 - self.count + 2 * self.rank, "score": self.count + 2 * self.rank}
