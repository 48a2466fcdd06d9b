"""A process that runs the flow, as a user's script would; it starts when it reads a request from its stdin."""

from __future__ import annotations

import os
import sys
import threading

from prefect_tune.core.models import Value

__all__ = ["WEIGHTS_FILE", "ActRequest"]

WEIGHTS_FILE = "weights.npy"


class ActRequest(Value):
    """The arguments of the flow."""

    target: str
    experiment: str
    steps: int
    save_every: int
    width: int

    @property
    def config(self) -> dict[str, object]:
        """The configuration of the trial."""
        return {"width": self.width, "batch": 128, "rate": 0.001, "seed": 7}


def _perform() -> None:
    from prefect_tune.core.checkpoints.cadence import Cadence
    from prefect_tune.core.experiment.retention import Retention
    from prefect_tune.flows.durable_trainable import durable_trainable

    line = sys.stdin.readline()
    if not line:
        return  # the demo has ended
    act = ActRequest.model_validate_json(line)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    durable_trainable(
        "prefect_tune.demo.model:Digits",
        act.config,
        target=act.target,
        experiment=act.experiment,
        stop={"step": act.steps},
        checkpoint=Cadence(every_steps=act.save_every, every_seconds=None),
        retention=Retention(last=2),
    )


def _end_with_parent() -> None:
    """Exit when stdin is closed: after the request nothing is written to it."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    _perform()
