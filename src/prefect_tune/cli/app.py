"""The Typer application, the arguments that commands share, and the printing of errors."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from prefect_tune.core.errors import BadMetric, CheckpointNotFound, InvalidInput, JournalCorrupt, TuneError
from prefect_tune.core.shown_text import visible

# Errors of a flow that a command runs in this process, each printed as one line.

_INTERRUPTED = 130


@contextmanager
def short_errors(when_interrupted: str) -> Iterator[None]:
    """Print Prefect's errors as one line, and an interrupt, Ctrl-C or SIGTERM, as `when_interrupted`."""
    import httpx
    from prefect.exceptions import PrefectException
    from pydantic import ValidationError

    from prefect_tune.core.values import argument_error
    from prefect_tune.prefect_api.api_client import is_missing_server
    from prefect_tune.prefect_api.flow_with_server import has_begun

    # During a flow Prefect handles SIGTERM; when the run has ended, it sends the signal again, to this handler.
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _without_traces():
            yield
    except KeyboardInterrupt as interrupt:
        advice = when_interrupted if has_begun(interrupt) else "stopped before it began; nothing was started"
        print(advice, file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except (httpx.HTTPError, PrefectException) as error:
        raise TuneError(f"Prefect: {_in_one_line(error)}") from error
    except ValidationError as error:
        raise argument_error(error) from error
    except RuntimeError as error:
        if is_missing_server(error):
            raise TuneError(f"Prefect: {_in_one_line(error)}") from error
        raise
    finally:
        signal.signal(signal.SIGTERM, terminate)


@contextmanager
def _without_traces() -> Iterator[None]:
    """Keep each `TuneError` out of Prefect's log: `main` prints the message, and the state has it."""

    def says_more(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], TuneError))

    logger = logging.getLogger("prefect.flow_runs")
    logger.addFilter(says_more)
    try:
        yield
    finally:
        logger.removeFilter(says_more)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


_COULD_NOT_RUN = 2
PANELS = {
    "getting_started": "Getting started",
    "search": "Search",
    "inspect": "Inspect",
    "storage": "Checkpoints and storage",
}
"""The panels of the help: the module of their commands, and their title."""
COMMANDS: Mapping[str, Sequence[str]] = {
    "getting_started": ("demo", "drill", "blocks"),
    "search": ("run", "resume", "stop", "deploy"),
    "inspect": ("ls", "show", "logs", "report", "audit"),
    "storage": ("checkpoints", "verify", "export", "gc", "maintain", "delete"),
}
"""The commands of each panel, in the order of the help: they are in the module `cli/PANEL.py`."""
_ORDER = [name for names in COMMANDS.values() for name in names]


class Group(TyperGroup):
    """A group of commands, without the type of flags in its help."""

    def get_params(self, ctx: Any) -> list[Any]:  # the class of `ctx` depends on typer's version
        return _without_type_of_flags(super().get_params(ctx))


class Command(TyperCommand):
    """A command, without the type of flags in its help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type_of_flags(super().get_params(ctx))


def _without_type_of_flags(parameters: list[Any]) -> list[Any]:
    """Leave `<bool>` out of the help: typer shows it for a flag, as if the flag took a value."""
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return parameters


class _InOrder(Group):
    """Lists groups such as `blocks` in their place among the commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = typer.Typer(
    name="prefect-tune",
    cls=_InOrder,
    help="Durable training and search as Prefect flows. TARGET is a URI (s3://bucket/prefix), a path, or a block's "
    "'type/name'. Exit codes: 0 done, 1 failed, 2 wrong usage, or no verdict (drill, audit), "
    "3 a search ended and some of its trials errored, 4 maintenance found new damage, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from prefect_tune import __version__

        print(f"prefect-tune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="A URI, a path, or a block's type/name.", show_default=False)
]
ExperimentName = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Its name on TARGET.", show_default=False)]
TrialName = Annotated[
    str | None, typer.Option("--trial", metavar="TRIAL", help="One trial of a search, such as 3.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Function = TypeVar("_Function", bound=Callable[..., object])


def command(function: _Function) -> _Function:
    """Add a command to the application: its name is the function's, and its module, `cli/PANEL.py`, gives its panel."""
    panel = function.__module__.rpartition(".")[2]
    return app.command(function.__name__, cls=Command, rich_help_panel=PANELS[panel])(function)


def asks(option: str, metavar: str, about: str, *, at_least: int | None = None) -> typer.models.OptionInfo:
    """Return an option whose help fits a terminal of 80 columns."""
    found: typer.models.OptionInfo = typer.Option(option, metavar=metavar, help=about, show_default=False, min=at_least)
    return found


def import_from_here() -> None:
    """Let MODULE be a file in the working directory, as `python -m` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


OF_A_DAMAGED_JOURNAL = (
    "restore this object from a backup, or an older version of it from the bucket; resume, show, checkpoints and "
    "export work as long as they need only newer entries: see 'A damaged journal' in docs/maintain.md"
)


def could_not_run(error: Exception) -> NoReturn:
    """Print why a drill or an audit has no verdict, and exit with 2: exit code 1 would be a finding."""
    print(f"prefect-tune: {visible(str(error))}", file=sys.stderr)
    raise typer.Exit(_COULD_NOT_RUN) from None


def run_app() -> None:
    """Run the application; print a `TuneError`, or one of the operating system, as one message without a traceback.

    What the same command would meet again exits with 2. But a metric is of the trials, not of the command.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the locale lacks must not end the command
    arguments, sys.argv[1:] = sys.argv[1:], []  # they are not for trainables, which may read `sys.argv`
    try:
        app(args=arguments)
    except (TuneError, OSError) as error:
        advice = f"; {OF_A_DAMAGED_JOURNAL}" if isinstance(error, JournalCorrupt) else ""
        print(f"prefect-tune: {visible(str(error))}{advice}", file=sys.stderr)
        is_wrong_usage = isinstance(error, InvalidInput | CheckpointNotFound) and not isinstance(error, BadMetric)
        sys.exit(_COULD_NOT_RUN if is_wrong_usage else 1)
