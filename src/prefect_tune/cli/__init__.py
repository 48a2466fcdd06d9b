"""The command line: `prefect-tune`. Nothing heavy is imported before a command needs it."""

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
