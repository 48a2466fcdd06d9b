"""The command line `prefect-tune`: the commands of each panel of the help are in the module of its name.

A command imports heavy modules when it runs, so that `--help` does not wait for them.
"""

from __future__ import annotations

import signal
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["application", "main"]


def main() -> None:
    """Run the command line. Ctrl-C before all commands are imported ends the process at once: nothing has begun."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of the module that is imported just then
    application()
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    from prefect_tune.cli.app import run_app

    run_app()


def application() -> typer.Typer:
    """Import all commands, which add themselves to the application, and return it."""
    from prefect_tune.cli.app import COMMANDS, app

    for panel in COMMANDS:
        import_module(f"{__name__}.{panel}")
    return app
