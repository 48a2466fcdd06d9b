"""The program of `examples/torchrun_digits.py`; in the first attempt it kills one rank as `strike` says."""

from __future__ import annotations

import os
from pathlib import Path

import prefect_tune as pt
from examples import torchrun_digits
from tests.integrations.ranks.several_ranks import maybe_kill


def train(config: dict[str, object]) -> None:
    """Train like the example, with this file as the program."""
    vars(torchrun_digits)["__file__"] = __file__
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[3])
    torchrun_digits.train(config)


if __name__ == "__main__":
    maybe_kill(pt.get_trial().config["strike"])
    torchrun_digits.train_rank()
