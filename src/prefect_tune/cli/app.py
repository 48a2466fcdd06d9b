"""The Typer application, the arguments that commands share, the printing of errors, and the opening of targets."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from prefect_tune.core.errors import BadMetric, CheckpointNotFound, InvalidInput, JournalCorrupt, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import trial_named
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import load, next_entry
from prefect_tune.core.messages.target_messages import ExperimentView, view_of
from prefect_tune.core.shown_text import visible
from prefect_tune.core.storage.generations import current_journal, no_experiment
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.open_location import LocalFolder, local_folder

if TYPE_CHECKING:
    from prefect_tune.blocks import StorageTarget

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

    def says_more(record: logging.LogRecord) -> bool:
        """Keep each `TuneError` out of Prefect's log: `main` prints the message, and the state has it."""
        return not (record.exc_info and isinstance(record.exc_info[1], TuneError))

    # During a flow Prefect handles SIGTERM; when the run has ended, it sends the signal again, to this handler.
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)
    logger = logging.getLogger("prefect.flow_runs")
    logger.addFilter(says_more)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        advice = when_interrupted if has_begun(interrupt) else "stopped before it began; nothing was started"
        print(advice, file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except ValidationError as error:
        raise argument_error(error) from error
    except (httpx.HTTPError, PrefectException, RuntimeError) as error:
        if not isinstance(error, httpx.HTTPError | PrefectException) and not is_missing_server(error):
            raise
        raise TuneError(f"Prefect: {' '.join(str(error).split()) or type(error).__name__}") from error
    finally:
        logger.removeFilter(says_more)
        signal.signal(signal.SIGTERM, terminate)


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


class _WithoutTypeOfFlags:
    """Leaves `<bool>` out of the help: typer shows it for a flag, as if the flag took a value."""

    def get_params(self, ctx: Any) -> list[Any]:  # the class of `ctx` depends on typer's version
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the other base class
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Group(_WithoutTypeOfFlags, TyperGroup):
    """A group of commands."""


class Command(_WithoutTypeOfFlags, TyperCommand):
    """A command."""


class _InOrder(Group):
    """Lists groups such as `blocks` in their place among the commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = typer.Typer(
    name="prefect-tune",
    cls=_InOrder,
    help="Durable training and search as Prefect flows. TARGET is a URI (s3://bucket/prefix), a path, or a block's "
    "'type/name'. Exit codes: 0 done, 1 failed, 2 wrong usage, or no verdict (drill, audit), "
    "3 a search ended and some of its trials errored, 4 maintenance found damage, 130 interrupted.",
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


def asks(
    option: str, metavar: str | None, about: str, *, at_least: int | None = None, panel: str | None = None
) -> typer.models.OptionInfo:
    """Return an option without a default in its help, which fits a terminal of 80 columns."""
    texts: dict[str, Any] = {"metavar": metavar, "help": about, "rich_help_panel": panel}
    info: typer.models.OptionInfo = typer.Option(option, **texts, show_default=False, min=at_least)
    return info


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


# Open a target and load an experiment for reading only; not even a missing folder is created.

_TIMEOUT = timedelta(minutes=30)


def existing_place(target: str) -> StorageTarget | LocalFolder:
    """Return the target. A folder that exists needs no import of Prefect.

    Raises:
        InvalidInput: it is a path on this machine that is not a folder.
    """
    if folder := local_folder(target):
        return folder
    from prefect_tune.blocks import LocalTarget, resolve_existing

    place = resolve_existing(target)
    if isinstance(place, LocalTarget) and not place.may_hang:
        with suppress(OSError):  # such as a folder above it that this user may not read: the first read says so
            if not Path(place.path).is_dir():
                raise InvalidInput(f"{place.path}: there is no such folder")
    return place


@contextmanager
def looked_at(target: str) -> Iterator[ObjectStore]:
    """Open a target for reading. Raises as `existing_place`."""
    with existing_place(target).open(timeout=_TIMEOUT) as store:
        yield store


@contextmanager
def opened(target: str, experiment: str) -> Iterator[tuple[ObjectStore, Experiment]]:
    """Open a target for reading, and load an experiment. Raises `InvalidInput` if there is none of this name."""
    with looked_at(target) as store:
        state = load(store, current_journal(store, experiment))
        if not state.number:
            raise InvalidInput(no_experiment(store, experiment, existing_place(target).uri))
        yield store, state


def chosen_trials(state: Experiment, trial: str | None) -> Sequence[Trial]:
    """Return the trial that `trial` names (see `trial_named`), or all trials if it is None."""
    return list(state.trials.values()) if trial is None else [trial_named(state, trial)]


def written_at(store: ObjectStore, state: Experiment) -> str:
    """Return when the last entry of the journal was written."""
    last = next_entry(store, state.key, state.number - 1)
    return last.at if last else ""


def viewed(store: ObjectStore, state: Experiment) -> ExperimentView:
    """Return the experiment with the newest reports of its running trials, and the time of that."""
    return view_of(store, state, written_at(store, state))
