"""The command line `prefect-tune`. A command imports heavy modules only when it runs."""

from __future__ import annotations

from prefect_tune.cli import blocks, checkpoints, deploy, gc, ls, maintain, report, run, stop
from prefect_tune.cli.app import app, main

__all__ = ["app", "main"]

# Each module adds its commands to `app`.
_ = (blocks, run, stop, deploy, ls, checkpoints, report, gc, maintain)
