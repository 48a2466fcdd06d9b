"""Trainables that inspect their process, end it in every way, and leave child processes behind."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_tune as pt
from tests.trainables.witness import hold, record_act

Config = Mapping[str, Any]
Metrics = Mapping[str, Any]


def inspect_process(config: Config) -> Metrics:
    """Report the state of the process."""
    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "group": os.getpgid(0),
        "environment": {name: ascii(os.environ.get(name)) for name in config.get("variables", ())},
        "in_a_child": subprocess.run(["env"], capture_output=True, check=True).stdout.decode("latin-1").splitlines(),
        "directory": str(Path.cwd()),
        "temporary": tempfile.gettempdir(),
        "modules": sorted(name for name in sys.modules if "." not in name),
        "threads": threading.active_count(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())) - 1,
        "ignored": re.findall(r"SigIgn:\s*(\w+)", Path("/proc/self/status").read_text()),
        "hour": time.localtime(0).tm_hour,
        "drawn": random.random(),
        "hash": hash("seed"),
    }


def print_lines(config: Config) -> None:
    for number in range(int(config["lines"])):
        print("line", number, file=(sys.stdout, sys.stderr)[number % 2])


def die(config: Config) -> None:
    print("last words")
    how = config["how"]
    if how == "segfault":
        ctypes.string_at(0)
    elif isinstance(how, int) and how < 0:
        os.kill(os.getpid(), -how)
    else:
        os._exit(how)
    time.sleep(60)  # a signal comes when it comes


class ExitsAtSigterm:
    """Exit at SIGTERM, as many scripts for clusters do."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def exit(self, number: int, frame: object) -> None:
        del number, frame
        sys.exit(self.code)


def exit_at_sigterm(config: Config) -> None:
    code = config["code"]
    signal.signal(signal.SIGTERM, ExitsAtSigterm(code).exit if config["as_method"] else lambda *_: sys.exit(code))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def block(config: Config) -> Metrics:
    """Record an act, then train until the file `config["gate"]` exists."""
    record_act(config["witness"], "begin", 1)
    hold(config["gate"])
    return {"pid": os.getpid()}


def leave_children(config: Config) -> Metrics:
    """Leave a child, a child in its own session, and an orphan in its own session; `stubborn` ones ignore SIGTERM."""
    trap = "trap '' TERM; " if config.get("stubborn") else ""
    for detached in (False, True):
        child = subprocess.Popen(["sh", "-c", f"{trap}exec sleep 1000"], start_new_session=detached)
        record_act(config["witness"], "child", child.pid)
    ignored = "signal.signal(15, signal.SIG_IGN); " if config.get("stubborn") else ""
    sleep = "os.fork() or os.close(1) or os.execlp('sleep', 'sleep', '1000')"
    script = f"import os, signal; os.setsid(); {ignored}print({sleep})"
    orphan = subprocess.run([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    record_act(config["witness"], "orphan", int(orphan))
    for _ in range(3):  # orphans that end before the trial does
        subprocess.run(["sh", "-c", "sleep 0.01 &"], check=True)
    record_act(config["witness"], "begin", 1)
    hold(config.get("gate"), seconds=float(config.get("seconds", 60)))
    return {"pid": os.getpid()}


class Resettable(pt.Trainable):
    """Accepts any trial unless its config says `"declines": True`; records its calls in the witness."""

    def setup(self, config: Config) -> None:
        self._begin("setup", config)

    def reset_config(self, config: Config) -> bool:
        self.config, before = config, self.config
        if config.get("in_reset"):
            os.kill(os.getpid(), config["in_reset"])
        if config.get("declines"):
            self.config = before
            return False
        self._begin("reset", config)
        return True

    def step(self) -> Metrics:
        self.count += 1
        if self.config.get("signals") and self.count == 1:
            os.kill(os.getpid(), self.config["signals"])
        if self.config.get("raises"):
            raise RuntimeError("as its config says")
        hold(self.config.get("gate"))
        metrics = {
            "pid": os.getpid(),
            "object": id(self),
            "x": self.config.get("x"),
            "count": self.count,
            "directory": str(Path.cwd()),
            "temporary": tempfile.gettempdir(),
            "left": [path.name for path in Path(tempfile.gettempdir()).iterdir()],
            "variable": os.environ.get("LEFT_BY_A_TRIAL"),
            "drawn": self._draw_numbers() if self.config.get("litters") else None,
        }
        if self.config.get("litters"):
            self._litter()
        return metrics

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "count").write_text(str(self.count))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.count = int(Path(checkpoint_dir, "count").read_text())
        record_act(self.config.get("witness"), "loaded", self.count)

    def cleanup(self) -> None:
        record_act(self.config.get("witness"), "cleanup", int(self.config.get("x") or 0))
        print("cleaned up")

    def _begin(self, act: str, config: Config) -> None:
        self.config, self.count = config, 0
        record_act(config.get("witness"), act, int(config.get("x") or 0))
        print(act, config.get("x"))

    def _draw_numbers(self) -> list[float]:
        import numpy as np

        return [random.random(), float(np.random.random())]  # noqa: NPY002  the global generator

    def _litter(self) -> None:
        import numpy as np

        os.chdir("/")
        os.environ["LEFT_BY_A_TRIAL"] = "1"
        os.environ["TMPDIR"] = "/tmp"
        tempfile.NamedTemporaryFile(delete=False).close()
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002  likewise


class Leads(Resettable):
    """Is rank 0 of two, as if a launcher had started the other."""

    def setup(self, config: Config) -> None:
        pt.get_trial()._session.become_rank_0(2)
        super().setup(config)


class AnotherKind(Resettable):
    """Another class with the same behaviour."""
