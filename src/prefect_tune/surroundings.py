"""Make a process that was forked, or has served another trial, like one that was started for this one."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time

from prefect_tune.core.wire import Surroundings

__all__ = ["settle_in"]

_TORCH_SEED = 67280421310721  # what every process begins with


def settle_in(surroundings: Surroundings) -> None:
    """Take on environment, working directory and temporary directory, and forget what was drawn at random.

    What the trainable itself remembers (its object, its modules) is its own affair: `reset_config` sees to it.
    """
    _take_on({_bytes(name): _bytes(value) for name, value in surroundings.environment.items()})
    if surroundings.working_directory:
        os.chdir(_bytes(surroundings.working_directory))
    tempfile.tempdir = None  # decided anew, from the environment
    time.tzset()
    _forget_what_was_drawn()


def _take_on(environment: dict[bytes, bytes]) -> None:
    for name in os.environb.keys() - environment.keys():
        del os.environb[name]
    os.environb.update({name: value for name, value in environment.items() if os.environb.get(name) != value})


def _forget_what_was_drawn() -> None:
    """Only of what is imported: what is imported later begins afresh anyway."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(_TORCH_SEED)


def _bytes(characters: str) -> bytes:
    return characters.encode("latin-1")
