"""The command line `prefect-tune`. The commands of each help panel are in the module named after the panel.

A command imports heavy modules only when it runs, so that `--help` stays fast.
"""

from __future__ import annotations

import signal
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["load_application", "main"]


def main() -> None:
    """Run the command line. Ctrl-C during the import of the commands ends the process at once, with no traceback."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing has started yet, so Ctrl-C can end the process at once
    load_application()
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    from prefect_tune.cli.app import run_app

    run_app()


def load_application() -> typer.Typer:
    """Import all commands, which register themselves with the application, and return the application."""
    from prefect_tune.cli.app import COMMANDS, app

    for panel in COMMANDS:
        import_module(f"{__name__}.{panel}")
    return app
