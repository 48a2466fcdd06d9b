"""The command line `prefect-tune`. A command imports heavy modules only when it runs."""

from __future__ import annotations

from prefect_tune.cli import (
    checkpoints,
    collecting,
    deploying,
    maintaining,
    places,
    reporting,
    searches,
    standing,
    stopping,
)
from prefect_tune.cli.app import app, main

__all__ = ["app", "main"]

# Each module adds its commands to `app`.
_ = (places, searches, stopping, deploying, standing, checkpoints, reporting, collecting, maintaining)
