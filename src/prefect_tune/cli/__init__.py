"""The command line `prefect-tune`. Each command is in the module of its name; it imports heavy modules when it runs."""

from __future__ import annotations

from importlib import import_module

from prefect_tune.cli.shared.app import COMMANDS, app, main

__all__ = ["app", "main"]

for _command in COMMANDS:
    import_module(f"{__name__}.{_command}")  # it adds itself to `app`
