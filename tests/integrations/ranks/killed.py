"""Trainables of `examples/`, one rank of which is killed after one of its optimizer's steps, in its first attempt."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import prefect_tune as pt


def killed(config: Mapping[str, Any]) -> None:
    """Train `config["example"]` with the rest of the configuration; `strike` is a rank and a step, or None."""
    kill_if_struck(config["strike"])
    train: Callable[[Mapping[str, Any]], None] = importlib.import_module(f"examples.{config['example']}").train
    train({name: each for name, each in config.items() if name not in ("example", "strike")})


def kill_if_struck(strike: Sequence[int] | None) -> None:
    """Kill this process after an optimizer's step of its first attempt, if `strike` names its rank and that step."""
    trial = pt.get_trial()
    if trial.attempt == 1 and strike is not None and strike[0] == trial.rank:
        _kill_after(strike[1])


def _kill_after(steps: int) -> None:
    hooks: Any = importlib.import_module("torch.optim.optimizer")
    taken = 0

    def count(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken == steps:
            os.kill(os.getpid(), signal.SIGKILL)

    hooks.register_optimizer_step_post_hook(count)
