"""The Typer application, the arguments that commands share, the printing of errors, and the opening of targets."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from prefect_tune.core.display_text import make_visible
from prefect_tune.core.errors import BadMetric, CheckpointNotFound, InvalidInput, JournalCorrupt, TuneError
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import require_trial
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.core.journal.journal import load_experiment, read_entry_if_exists
from prefect_tune.core.messages.target_messages import ExperimentView, read_view
from prefect_tune.core.storage.generations import find_current_journal, no_experiment_message
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.open_location import LocalFolder, find_local_folder

if TYPE_CHECKING:
    from prefect_tune.blocks import StorageTarget

# Print each error of a flow that runs in this process as one line.

_EXIT_INTERRUPTED = 130


@contextmanager
def printing_short_errors(when_interrupted: str) -> Iterator[None]:
    """Print each error of Prefect as one line; print `when_interrupted` after Ctrl-C or SIGTERM."""
    import httpx
    from prefect.exceptions import PrefectException
    from pydantic import ValidationError

    from prefect_tune.core.values import argument_error
    from prefect_tune.prefect_api.api_client import is_no_server_error
    from prefect_tune.prefect_api.flow_with_server import had_run_begun

    def has_no_tune_error(record: logging.LogRecord) -> bool:
        """Hide each `TuneError` from Prefect's log, since `run_app` and the run's state show the error's message."""
        return not (record.exc_info and isinstance(record.exc_info[1], TuneError))

    # Raise KeyboardInterrupt on SIGTERM. During a flow run, Prefect first handles SIGTERM, then sends it again.
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)
    logger = logging.getLogger("prefect.flow_runs")
    logger.addFilter(has_no_tune_error)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        message = when_interrupted if had_run_begun(interrupt) else "stopped before the run began; nothing was started"
        print(message, file=sys.stderr)
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    except ValidationError as error:
        raise argument_error(error) from error
    except (httpx.HTTPError, PrefectException, RuntimeError) as error:
        if not isinstance(error, httpx.HTTPError | PrefectException) and not is_no_server_error(error):
            raise
        raise TuneError(f"Prefect: {' '.join(str(error).split()) or type(error).__name__}") from error
    finally:
        logger.removeFilter(has_no_tune_error)
        signal.signal(signal.SIGTERM, terminate)


_EXIT_NO_VERDICT = 2
PANELS = {
    "getting_started": "Getting started",
    "search": "Search",
    "inspect": "Inspect",
    "storage": "Checkpoints and storage",
}
"""The title of each help panel, by the module of the panel's commands."""
COMMANDS: Mapping[str, Sequence[str]] = {
    "getting_started": ("demo", "drill", "blocks"),
    "search": ("run", "resume", "stop", "deploy"),
    "inspect": ("ls", "show", "logs", "report", "audit"),
    "storage": ("checkpoints", "verify", "export", "gc", "maintain", "delete"),
}
"""The commands of each help panel, in the order of the help. `cli/PANEL.py` defines these commands."""
_COMMAND_ORDER = [name for names in COMMANDS.values() for name in names]


class _FlagHelpMixin:
    """Removes `<bool>` from the help of flags, which take no value."""

    def get_params(self, ctx: Any) -> list[Any]:  # the class of `ctx` depends on typer's version
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the other base class
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Group(_FlagHelpMixin, TyperGroup):
    """A group of commands. Its help lists flags without `<bool>`."""


class Command(_FlagHelpMixin, TyperCommand):
    """A command. Its help lists flags without `<bool>`."""


class _OrderedGroup(Group):
    """Lists commands and groups, such as `blocks`, in the order of `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_COMMAND_ORDER.index)


app = typer.Typer(
    name="prefect-tune",
    cls=_OrderedGroup,
    help="Durable training and search as Prefect flows. TARGET is a URI (s3://bucket/prefix), a path, or a block's "
    "'type/name'. Exit codes: 0 done; 1 failed; 2 wrong usage, or no verdict (drill, audit); "
    "3 a search ended, but some of its trials errored; 4 maintenance found damage; 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from prefect_tune import __version__

        print(f"prefect-tune {__version__}")
        raise typer.Exit


@app.callback()
def _add_version_option(
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
    """Add a function to the application as a command of the same name, in the help panel of the function's module."""
    panel = function.__module__.rpartition(".")[2]
    return app.command(function.__name__, cls=Command, rich_help_panel=PANELS[panel])(function)


def option_without_default(
    option: str, metavar: str | None, about: str, *, at_least: int | None = None, panel: str | None = None
) -> typer.models.OptionInfo:
    """Return an option whose help omits the default, so that the help fits into 80 columns."""
    texts: dict[str, Any] = {"metavar": metavar, "help": about, "rich_help_panel": panel}
    info: typer.models.OptionInfo = typer.Option(option, **texts, show_default=False, min=at_least)
    return info


def add_working_directory_to_path() -> None:
    """Make the modules in the working directory importable, as `python -m` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


DAMAGED_JOURNAL_ADVICE = (
    "restore this object from a backup, or from an older version in the bucket; resume, show, checkpoints and "
    "export work as long as they need only newer entries: see 'A damaged journal' in docs/maintain.md"
)


def exit_without_verdict(error: Exception) -> NoReturn:
    """Print why a drill or an audit has no verdict, and exit with 2, since 1 would mean that it found a difference."""
    print(f"prefect-tune: {make_visible(str(error))}", file=sys.stderr)
    raise typer.Exit(_EXIT_NO_VERDICT) from None


def run_app() -> None:
    """Run the application; print a `TuneError` or an `OSError` as one message without a traceback.

    Exit with 2 after wrong usage, and with 1 after other errors, such as a bad metric that a trial reported.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the locale lacks must not end the command
    arguments, sys.argv[1:] = sys.argv[1:], []  # a trainable that reads `sys.argv` must not see these arguments
    try:
        app(args=arguments)
    except (TuneError, OSError) as error:
        advice = f"; {DAMAGED_JOURNAL_ADVICE}" if isinstance(error, JournalCorrupt) else ""
        print(f"prefect-tune: {make_visible(str(error))}{advice}", file=sys.stderr)
        is_wrong_usage = isinstance(error, InvalidInput | CheckpointNotFound) and not isinstance(error, BadMetric)
        sys.exit(_EXIT_NO_VERDICT if is_wrong_usage else 1)


# Open an existing target, and load an experiment. A missing folder is not created.

_TIMEOUT = timedelta(minutes=30)


def resolve_existing_target(target: str) -> StorageTarget | LocalFolder:
    """Return the target; do not import Prefect for a local folder. Raise `InvalidInput` for a missing folder."""
    if folder := find_local_folder(target):
        return folder
    from prefect_tune.blocks import LocalTarget, resolve_existing

    resolved = resolve_existing(target)
    if isinstance(resolved, LocalTarget) and not resolved.may_hang:
        with suppress(OSError):  # if, for example, a parent folder is unreadable, the first read reports the error
            if not Path(resolved.path).is_dir():
                raise InvalidInput(f"{resolved.path}: there is no such folder")
    return resolved


def open_existing_store(target: str) -> AbstractContextManager[ObjectStore]:
    """Open the store of a target. Raises the errors of `resolve_existing_target`."""
    return resolve_existing_target(target).open(timeout=_TIMEOUT)


@contextmanager
def open_store_and_load_experiment(target: str, experiment: str) -> Iterator[tuple[ObjectStore, Experiment]]:
    """Open a target, and load an experiment. Raises `InvalidInput` if the experiment does not exist."""
    with open_existing_store(target) as store:
        state = load_experiment(store, find_current_journal(store, experiment))
        if not state.entry_count:
            raise InvalidInput(no_experiment_message(store, experiment, resolve_existing_target(target).uri))
        yield store, state


def select_trials(state: Experiment, trial: str | None) -> Sequence[Trial]:
    """Return the trial named `trial` (see `require_trial`); all trials if `trial` is None."""
    return list(state.trials.values()) if trial is None else [require_trial(state, trial)]


def read_last_entry_time(store: ObjectStore, state: Experiment) -> str:
    """Return the time of the last journal entry; "" if there is none."""
    last = read_entry_if_exists(store, state.key, state.entry_count)
    return last.at if last else ""


def load_view(store: ObjectStore, state: Experiment) -> ExperimentView:
    """Return the experiment with the newest reports of its running trials, and the times of these reports."""
    return read_view(store, state, read_last_entry_time(store, state))
