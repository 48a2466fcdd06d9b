"""The options of `run` and `resume`: their parsing, the parameters that they set, and the flow run in this process."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, StrEnum
from inspect import Parameter, signature
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from prefect_tune.cli.app import short_errors
from prefect_tune.cli.inspect import show_search
from prefect_tune.core.errors import InvalidInput, SearchFailed, TuneError
from prefect_tune.core.messages.live_status import ExperimentView
from prefect_tune.core.models import valid_name
from prefect_tune.core.texts import did_you_mean, visible

if TYPE_CHECKING:
    from prefect_tune.results import Results


# Parse spaces, stop criteria, schedulers and settings from command line options and files.

_CALL = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.DOTALL)
_DECIMAL = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_CHOICES = frozenset({"choice", "grid_search"})
_RANGES = frozenset({"uniform", "loguniform", "randint", "lograndint", "randn"})
_DOMAINS = _CHOICES | _RANGES | {f"q{name}" for name in _RANGES}
_TORN = re.compile(rf"\s*({'|'.join(_DOMAINS)})\s*[(\[{{]")
_NOT_PLAIN = re.compile(r"""["'()\[\]{}]""")
_QUOTED = "write a text in quotes: '\"...\"'"


def space_from(file: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    """Return the space as JSON: the file's, with each `name=value` set in it; `model.depth=3` sets it in `model`.

    Raises:
        InvalidInput: the file cannot be read, or a setting is not valid.
    """
    space = _read(file) if file else {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        *above, last = name.split(".")
        if not (equals and last and all(above)):
            raise InvalidInput(f"--set {setting!r}: expected name=value, such as lr=loguniform(1e-4,1e-1)")
        within = space
        for each in above:
            within = within.setdefault(each, {})
            if not isinstance(within, dict):
                raise InvalidInput(f"--set {setting!r}: expected {each!r} to be an object, found a value")
        within[last] = _value(text, setting)
    return space


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--space {file}: {error}") from error
    found = _yaml(text, file) if file.suffix in {".yaml", ".yml"} else _json(text, f"--space {file}")
    if isinstance(found, dict):
        return found
    raise InvalidInput(f'--space {file}: expected an object such as {{"lr": {{"uniform": [0, 1]}}}}')


def object_from(text: str, where: str) -> dict[str, Any]:
    """Parse `text` as a JSON object.

    Raises:
        InvalidInput: it is not a JSON object.
    """
    found = _json(text, where)
    if isinstance(found, dict):
        return found
    raise InvalidInput(f'{where}: expected a JSON object such as {{"name": "value"}}, found {text[:40]!r}')


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: not valid JSON: {error}") from error


def _yaml(text: str, file: Path) -> Any:
    """Parse YAML with the floats of YAML 1.2, where 1e-4 is a number."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})  # of its own: a resolver stays with the class
    loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"{_DECIMAL.pattern}$"), list("-+.0123456789"))
    try:
        return yaml.load(text, loader)  # noqa: S506  it is a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidInput(f"--space {file}: not valid YAML: {' '.join(str(error).split())}") from error


def _value(text: str, setting: str) -> Any:
    call = _CALL.fullmatch(text.strip())
    if call is None:
        if torn := _TORN.match(text):
            raise InvalidInput(f"--set {setting!r}: expected {torn[1]}(...) in round brackets; {_QUOTED}")
        return _plain(text)
    name, arguments = call[1], _arguments(call[2], setting)
    if name not in _DOMAINS:
        meant = did_you_mean(name, _DOMAINS) or ";"
        raise InvalidInput(f"--set {setting!r}: unknown distribution {name!r}{meant} {_QUOTED}")
    is_list = name in _CHOICES and len(arguments) == 1 and isinstance(arguments[0], list)
    return {name: arguments[0] if is_list else arguments}


def _arguments(text: str, setting: str) -> list[Any]:
    try:
        return list(json.loads(f"[{text}]"))
    except ValueError as error:  # choice(adam,sgd)
        if _NOT_PLAIN.search(text):
            expected = 'JSON, such as choice("adam","sgd") or choice([1,2],[3]), or words alone: choice(adam,sgd)'
            raise InvalidInput(f"--set {setting!r}: in the brackets expected {expected}") from error
        return [_plain(each.strip()) for each in text.split(",")]


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return float(text) if _DECIMAL.fullmatch(text) else text


def stop_from(criteria: Sequence[str]) -> str | dict[str, Any] | None:
    """Parse stop criteria: `step=100` (of several, the first one reached stops), `package.module:Name`, or JSON.

    Raises:
        InvalidInput: a criterion is none of these.
    """
    match criteria:
        case [text] if text.lstrip().startswith("{"):
            found: dict[str, Any] = _json(text, "--stop")
            return found
        case [name] if ":" in name and "=" not in name:
            return name
    return numbers_from(criteria, "--stop", "step=100, or package.module:name")


def numbers_from(settings: Sequence[str], option: str, expected: str = "name=number") -> dict[str, float] | None:
    """Parse `name=number` settings into one dict; None if there are none.

    Raises:
        InvalidInput: a setting is not of this form.
    """
    for setting in settings:
        found = _plain(setting.partition("=")[2])
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise InvalidInput(f"{option} {setting!r}: expected {expected}")
    return values_from(settings, option, expected)


def values_from(settings: Sequence[str], option: str, expected: str = "name=value") -> dict[str, Any] | None:
    """Parse `name=value` settings into one dict, each value as JSON or else as text; None if there are none.

    Raises:
        InvalidInput: a setting is not of this form.
    """
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not (name and equals):
            raise InvalidInput(f"{option} {setting!r}: expected {expected}")
        found[name] = _plain(text)
    return found or None


def spelling_from(text: str | None, option: str) -> str | Mapping[str, Any] | None:
    """Parse a scheduler or a search from JSON; a name alone stands for its defaults."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    found = _json(text, option)
    return found if isinstance(found, dict) else text


_Command = TypeVar("_Command", bound=Callable[..., None])
_Mode = StrEnum("_Mode", ["min", "max"])
_Trials = StrEnum("_Trials", ["tasks", "deployment"])
_Isolation = StrEnum("_Isolation", ["process", "thread"])
_Reuse = StrEnum("_Reuse", ["auto", "never"])
_Resume = StrEnum("_Resume", ["auto", "must", "never"])
_OnCodeChange = StrEnum("_OnCodeChange", ["warn", "refuse"])


@dataclass(frozen=True, kw_only=True)
class _Option:
    """An option of the command line. Unless it is given, the parameter keeps the flow's default."""

    about: str
    metavar: str | None = None
    flag: str | None = None
    """By default the parameter's name: `--time-budget-seconds`."""
    kind: Any = str
    at_least: int | None = None
    default: object = None
    sets: str | None = None
    """The flow's parameter, where the option has another name."""
    read: Callable[[Any], object] = lambda given: given.value if isinstance(given, Enum) else given
    """Makes the parameter's value; None leaves the flow's default."""

    def parameter(self, name: str, panel: str) -> Parameter:
        """Return the command's parameter, as typer reads it."""
        info = typer.Option(
            self.flag or f"--{name.replace('_', '-')}",
            metavar=self.metavar,
            help=self.about,
            show_default=False,
            min=self.at_least,
            rich_help_panel=panel,
        )
        kind = self.kind | None if self.default is None else self.kind
        return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=self.default, annotation=Annotated[kind, info])


def _one_or_more(given: Sequence[str]) -> object:
    plain = [str(each) for each in given]
    return plain[0] if len(plain) == 1 else plain


def _seconds(option: str, about: str) -> _Option:
    """Return an option of seconds, which refuses nan and inf."""

    def read(given: float) -> float:
        if isfinite(given):
            return given
        raise InvalidInput(f"{option}: expected a finite number of seconds, found {given:g}")

    return _Option(metavar="S", kind=float, read=read, about=about)


def _cadence(steps: int) -> object:
    from prefect_tune.core.checkpoints.cadence import Cadence

    return Cadence(every_steps=steps)


def _retention(last: int | None, best: int | None, metrics: Sequence[str], modes: Sequence[str]) -> object:
    from prefect_tune.core.experiment.retention import Retention

    if best is None:
        return Retention(last=last)
    if not metrics:
        raise InvalidInput("--keep-best: which checkpoints are the best? Name the metric: --metric NAME")
    mode = "max" if "max" in modes[:1] else "min"
    return Retention(last=last, best=best, metric=metrics[0], mode=mode)


def _failures(count: int) -> object:
    from prefect_tune.core.experiment.failure_policy import FailurePolicy

    return FailurePolicy(max_failures=count) if count else None


_OPTIONS: Mapping[str, _Option] = {
    "space": _Option(metavar="FILE", kind=Path, about="The space, as JSON or YAML."),
    "settings": _Option(metavar="NAME=VALUE", flag="--set", kind=list[str], about="A parameter: n=choice(1,2)."),
    "metric": _Option(metavar="NAME", kind=list[str], read=_one_or_more, about="What trials are compared by."),
    "mode": _Option(metavar="min|max", kind=list[_Mode], read=_one_or_more, about="Its direction. Default: min."),
    "num_samples": _Option(
        metavar="N", kind=int, at_least=1, about="Trials; with a grid, per point. Default: 10; grid alone: 1."
    ),
    "samples_per_run": _Option(metavar="N", kind=int, at_least=1, about="N new samples, in place of a total."),
    "scheduler": _Option(
        metavar="JSON",
        read=lambda text: spelling_from(text, "--scheduler"),
        about="Stops poor trials early.",
    ),
    "search": _Option(
        metavar="JSON",
        read=lambda text: spelling_from(text, "--search"),
        about="Default: random and grid.",
    ),
    "warm_start": _Option(metavar="NAME", kind=list[str], about="Learn from the trials of this experiment."),
    "seed": _Option(metavar="N", kind=int, at_least=0, about="Seed of all draws. Default: from EXPERIMENT."),
    "stop": _Option(metavar="step=N", kind=list[str], read=stop_from, about="Ends a trial; or MODULE:NAME."),
    "max_concurrent_trials": _Option(metavar="N", kind=int, about="Default: one per CPU."),
    "time_budget_seconds": _seconds("--time-budget-seconds", "After S seconds save all trials and end."),
    "checkpoint_every": _Option(
        metavar="STEPS",
        kind=int,
        at_least=1,
        sets="checkpoint",
        read=_cadence,
        about="Save every STEPS steps. Default: every 60 s, and at the end.",
    ),
    "keep_last": _Option(
        metavar="N",
        kind=int,
        at_least=1,
        sets="retention",
        about="Newest checkpoints to keep per trial. Default: all.",
    ),
    "keep_best": _Option(
        metavar="N",
        kind=int,
        at_least=1,
        sets="retention",
        about="Best checkpoints to keep per trial, by the first --metric.",
    ),
    "max_failures": _Option(
        metavar="N",
        kind=int,
        at_least=0,
        sets="failures",
        read=_failures,
        about="Retries of a trial that raised. Default: 0.",
    ),
    "fail_fast": _Option(kind=bool, default=False, about="Stop at the first trial that errors."),
    "callbacks": _Option(metavar="MODULE:NAME", flag="--callback", kind=list[str], about="A callback for the search."),
    "trials": _Option(
        metavar="WHERE",
        kind=_Trials,
        default=_Trials.tasks,
        about="tasks (default): in this run; deployment: a flow run each.",
    ),
    "trial_deployment": _Option(metavar="NAME", about="Deployment for --trials deployment."),
    "trial_job_variables": _Option(
        metavar="NAME=VALUE",
        flag="--job-variable",
        kind=list[str],
        read=lambda given: values_from(given, "--job-variable"),
        about="Job variable of each run of that deployment.",
    ),
    "trial_tags": _Option(
        metavar="TAG", flag="--tag", kind=list[str], about="Tag of each task run, for Prefect's tag limits."
    ),
    "concurrency_limits": _Option(
        metavar="NAME", flag="--concurrency-limit", kind=list[str], about="Global limit that each attempt waits for."
    ),
    "resources_per_trial": _Option(
        metavar="NAME=N",
        flag="--resource",
        kind=list[str],
        read=lambda given: numbers_from(given, "--resource"),
        about="Of a trial: gpu=0.5 or cpu=2.",
    ),
    "isolation": _Option(
        metavar="WHAT",
        kind=_Isolation,
        default=_Isolation.process,
        about="process (default): one for each trial; thread: for debuggers.",
    ),
    "reuse": _Option(metavar="HOW", kind=_Reuse, default=_Reuse.auto, about="Share imports: auto (default) or never."),
    "grace_period_seconds": _seconds("--grace-period-seconds", "Time to save after a stop signal. Default: 25."),
    "silence_timeout_seconds": _seconds("--silence-timeout-seconds", "Restart a trial after S without a report."),
    "resume": _Option(
        metavar="HOW",
        kind=_Resume,
        default=_Resume.auto,
        about="auto (default); must: EXPERIMENT exists; never: it is new.",
    ),
    "rerun_errored": _Option(kind=bool, default=False, about="Retry errored trials."),
    "only_errored": _Option(
        kind=bool, default=False, sets="rerun_errored", read=lambda _: "only", about="Retry errored trials only."
    ),
    "on_code_change": _Option(
        metavar="WHAT",
        kind=_OnCodeChange,
        default=_OnCodeChange.warn,
        about="If the code has changed: warn (default), or refuse.",
    ),
    "fork": _Option(metavar="NAME", about="Resume a copy of EXPERIMENT under this name."),
    "at": _Option(metavar="ENTRY", kind=int, about="Fork at this journal entry. Default: the last."),
    "total_samples": _Option(
        metavar="N",
        flag="--num-samples",
        kind=int,
        at_least=1,
        sets="num_samples",
        about="New --num-samples, not fewer than now: of trials, with a grid per point.",
    ),
    "trainable": _Option(metavar="MODULE:NAME", about="Replaces the one in the journal; required on a bucket."),
}
RUN: Mapping[str, Sequence[str]] = {
    "Options": (
        *("settings", "space", "metric", "mode", "num_samples", "scheduler", "search", "stop"),
        *("max_concurrent_trials", "resources_per_trial"),
    ),
    "Checkpoints and failures": (
        *("checkpoint_every", "keep_last", "keep_best", "max_failures", "fail_fast"),
        *("silence_timeout_seconds", "grace_period_seconds"),
    ),
    "More on the search": ("samples_per_run", "seed", "warm_start", "time_budget_seconds", "callbacks"),
    "If EXPERIMENT exists": ("resume", "rerun_errored", "only_errored", "on_code_change"),
    "Where trials run": (
        *("trials", "trial_deployment", "trial_job_variables", "trial_tags", "concurrency_limits"),
        *("isolation", "reuse"),
    ),
}
"""The options of `run` by panel of its help, the common ones first."""
RESUME: Mapping[str, Sequence[str]] = {
    "Options": (
        *("fork", "at", "rerun_errored", "only_errored", "total_samples", "samples_per_run", "stop", "settings"),
        *("space", "max_concurrent_trials", "time_budget_seconds", "trainable", "scheduler", "search", "callbacks"),
    )
}
"""Those of `resume`."""


def flag_of(name: str) -> str:
    """Return the flag of the option `name`, with its metavar, for messages."""
    option = _OPTIONS[name]
    return f"{option.flag or '--' + name.replace('_', '-')} {option.metavar}"


def with_flags(message: str) -> str:
    """Return a message that names parameters of the flow with their flags: `num_samples=2` as `--num-samples 2`."""

    def flag(found: re.Match[str]) -> str:
        value = "" if found["value"] in (None, "True") else f" {found['value']}"
        return _FLAGS[found["given"] or found["named"] or found["first"]] + value

    return _PARAMETER.sub(flag, message)


def _flags() -> Mapping[str, str]:
    """Return by parameter of the flow the flag that sets it, where it is one flag that does."""
    found: dict[str, set[str]] = {}
    for name, option in _OPTIONS.items():
        parameter = name if option.sets is None or option.sets in _OPTIONS else option.sets
        found.setdefault(parameter, set()).add(option.flag or f"--{name.replace('_', '-')}")
    return {name: next(iter(flags)) for name, flags in found.items() if len(flags) == 1}


_FLAGS = _flags()
_SEVERAL_WORDS = "|".join(name for name in _FLAGS if "_" in name)
_PARAMETER = re.compile(
    # With its value; at the start of a message, before a colon; or of several words, and so a parameter anywhere.
    rf"(?<![\w./'\"-])(?:(?P<given>{'|'.join(_FLAGS)})=(?P<value>True\b|-?\d[\d.]*\b|'[^'\s]*'|N\b)"
    rf"|(?P<named>{_SEVERAL_WORDS})\b(?!=))|^(?P<first>{'|'.join(_FLAGS)})(?=:)"
)


def takes(panels: Mapping[str, Sequence[str]]) -> Callable[[_Command], _Command]:
    """Return a decorator: the command, a function of `**options`, takes these options before its own flags."""

    def decorated(command: _Command) -> _Command:
        own = [each for each in signature(command, eval_str=True).parameters.values() if each.name != "options"]
        arguments = [each.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for each in own]
        required = [each for each in arguments if each.default is each.empty]
        options = [_OPTIONS[name].parameter(name, panel) for panel, names in panels.items() for name in names]
        flags = [each for each in arguments if each.default is not each.empty]
        command.__signature__ = signature(command).replace(  # type: ignore[attr-defined]  # typer reads it
            parameters=[*required, *options, *flags]
        )
        return command

    return decorated


def parameters_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flow's parameters that the options set.

    Raises:
        InvalidInput: an option is invalid.
    """
    given = {name: value for name, value in options.items() if not (value is None or value is False or value == [])}
    last, best = given.pop("keep_last", None), given.pop("keep_best", None)
    read = {_OPTIONS[name].sets or name: _OPTIONS[name].read(value) for name, value in given.items()}
    if last or best:
        read["retention"] = _retention(last, best, given.get("metric", []), given.get("mode", []))
    return {name: value for name, value in read.items() if value is not None}


# The search that `run` and `resume` run in this process, and the checks before it.

_SOME_ERRORED = 3


def checked(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check, before a server is used, what can be checked without reading the target; return `parameters` unchanged.

    Raises:
        InvalidInput: one of them is not valid.
    """
    from prefect_tune.blocks import LocalTarget
    from prefect_tune.blocks.resolve_target import validate_target
    from prefect_tune.parameters.import_check import require_importable
    from prefect_tune.parameters.search_limits import require_one_count
    from prefect_tune.parameters.search_plan import SearchPlan
    from prefect_tune.runtime.load_named import load_named
    from prefect_tune.tuner.warm_start import source_names

    validate_target(parameters["target"])
    valid_name(parameters.get("fork", parameters["experiment"]))
    require_one_count(parameters.get("num_samples"), parameters.get("samples_per_run"))
    given = {name: value for name, value in parameters.items() if name in SearchPlan.model_fields}
    # A saved block would be read from the server, and the journal's trainable from the target.
    plan = SearchPlan(**{"trainable": print, **given, "target": LocalTarget(path=str(Path.cwd()))})
    source_names(plan.warm_start or ())
    for callback in plan.callbacks or ():
        load_named(callback, "callback")
    if plan.trials != "deployment":
        require_importable(plan.trainable, plan.isolation, logging.getLogger(__name__))
    return parameters


def resume_command(target: str, experiment: str, trainable: str | None) -> str:
    """Return the command that resumes; it names the trainable, which a journal on a bucket may not choose."""
    named = ["--trainable", trainable] if trainable else []
    return shlex.join(["prefect-tune", "resume", target, experiment, *named])


def search_in_this_process(search: Callable[[], Results], again: str, *, as_json: bool) -> None:
    """Search, print the results, and exit with 3 if trials errored. `again` is the command that resumes."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: MODULE may be a file in this folder
    with short_errors(f"stopped; resume with: {again}"), _named_by_flags():
        results, error = _results_of(search)
    show_search(ExperimentView(results.experiment, datetime.now(UTC).isoformat()), as_json=as_json)
    if error:
        print(f"prefect-tune: {visible(error)}", file=sys.stderr)
    if results.errors:
        raise typer.Exit(_SOME_ERRORED)


@contextmanager
def _named_by_flags() -> Iterator[None]:
    """Name the options in the message of an error as the command line does."""
    try:
        yield
    except TuneError as error:
        error.args = (with_flags(str(error)), *error.args[1:])
        raise


def _results_of(search: Callable[[], Results]) -> tuple[Results, str]:
    """Return the results also of a search in which every trial errored, with the error, empty for others."""
    try:
        return search(), ""
    except SearchFailed as failed:
        results = cast("Results", failed.results)
        if len(results.errors) < len(results.trials):  # no report had the metric
            raise
        return results, with_flags(str(failed))
