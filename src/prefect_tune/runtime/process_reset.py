"""Reset a forked or reused process to the state of one that was newly started for its trial."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time

from prefect_tune.core.messages.process_messages import Surroundings

_TORCH_SEED = 67280421310721  # torch's default seed


def settle_in(surroundings: Surroundings) -> None:
    """Set the environment, working directory and temporary directory, and seed the random generators anew.

    The state of the trainable itself (its object, its modules) is not reset: that is the task of `reset_config`.
    """
    _take_on({_bytes(name): _bytes(value) for name, value in surroundings.environment.items()})
    if surroundings.working_directory:
        os.chdir(_bytes(surroundings.working_directory))
    tempfile.tempdir = None  # so that it is read from the environment again
    time.tzset()
    _forget_what_was_drawn()


def _take_on(environment: dict[bytes, bytes]) -> None:
    for name in os.environb.keys() - environment.keys():
        del os.environb[name]
    os.environb.update({name: value for name, value in environment.items() if os.environb.get(name) != value})


def _forget_what_was_drawn() -> None:
    """Seed the generators of imported libraries; one that is imported later is new anyway."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(_TORCH_SEED)


def _bytes(characters: str) -> bytes:
    return characters.encode("latin-1")
