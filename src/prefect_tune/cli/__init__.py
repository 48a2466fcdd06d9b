"""The command line `prefect-tune`: each command is in the module of its name, in the folder of its panel.

A command imports heavy modules when it runs, so that `--help` does not wait for them.
"""

from __future__ import annotations

from importlib import import_module

from prefect_tune.cli.shared.app import COMMANDS, app, main

__all__ = ["app", "main"]

for _panel, _names in COMMANDS.items():
    for _name in _names:
        import_module(f"{__name__}.{_panel}.{_name}")  # it adds itself to `app`
