"""The options of `run` and `resume`: their parsing, the parameters that they set, and the flow run in this process."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, StrEnum
from inspect import Parameter, signature
from pathlib import Path
from types import GenericAlias, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import typer

import prefect_tune
from prefect_tune.cli.app import import_from_here, short_errors
from prefect_tune.cli.inspect import show_search
from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.errors import InvalidInput, SearchFailed
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.messages.live_status import ExperimentView
from prefect_tune.core.shown_text import did_you_mean, visible
from prefect_tune.parameters.options import Flag, Panel, flags_of
from prefect_tune.parameters.search_plan import SearchPlan

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
    return values_from(criteria, "--stop", "step=100, or package.module:name")


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


def _one_or_more(given: Sequence[str]) -> object:
    plain = [str(each) for each in given]
    return plain[0] if len(plain) == 1 else plain


def _retention(last: int | None, best: int | None, metrics: Sequence[str], modes: Sequence[str]) -> object:
    if best is None:
        return Retention(last=last)
    if not metrics:
        raise InvalidInput("--keep-best: which checkpoints are the best? Name the metric: --metric NAME")
    mode = "max" if "max" in modes[:1] else "min"
    return Retention(last=last, best=best, metric=metrics[0], mode=mode)


# The flags that `SearchPlan` declares: as parameters of a command, in messages, and what they set.


@dataclass(frozen=True, slots=True)
class _Setting:
    """A flag, and the option of the search that it sets."""

    option: str
    flag: Flag

    @property
    def kind(self) -> Any:
        """The type of its values, as typer reads it."""
        if self.flag.at_least is not None:
            return int
        kind = self.flag.kind or _without_none(SearchPlan.model_fields[self.option].annotation)
        if get_origin(kind) is list:
            return GenericAlias(list, (_typer_kind(get_args(kind)[0]),))
        return list[str] if get_origin(kind) is Mapping else _typer_kind(kind)

    def parameter(self, panel: str) -> Parameter:
        """Return the command's parameter, as typer reads it."""
        flag = self.flag
        info = typer.Option(
            flag.flag,
            metavar=flag.metavar,
            help=flag.help,
            show_default=False,
            min=flag.at_least,
            rich_help_panel=panel,
        )
        kind = self.kind if self.kind is bool else self.kind | None
        default = False if kind is bool else None
        return Parameter(flag.name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, info])

    def read(self, given: Any) -> object:
        """Return the option's value; None for its default."""
        if self.flag.name in _READERS:
            return _READERS[self.flag.name](given)
        return given.value if isinstance(given, Enum) else given


def _without_none(kind: Any) -> Any:
    """Return the type of an option that is given: without None, and without what validates it."""
    kinds = [each for each in get_args(kind) if each is not type(None)]
    given = kinds[0] if get_origin(kind) in (Union, UnionType) and len(kinds) == 1 else kind
    return get_args(given)[0] if get_origin(given) is Annotated else given


def _typer_kind(kind: Any) -> Any:
    """Return the type for typer: choices for words, text for what has a form of its own."""
    if get_origin(kind) is Literal:
        return StrEnum("Choice", [(word, word) for word in get_args(kind)])
    return kind if kind in (int, float, bool, Path) else str


_READERS: Mapping[str, Callable[[Any], object]] = {
    "metric": _one_or_more,
    "mode": _one_or_more,
    "scheduler": lambda text: spelling_from(text, "--scheduler"),
    "search": lambda text: spelling_from(text, "--search"),
    "stop": stop_from,
    "resource": lambda given: values_from(given, "--resource", "name=number"),
    "job_variable": lambda given: values_from(given, "--job-variable"),
    "checkpoint_every": lambda steps: Cadence(every_steps=steps),
    "max_failures": lambda count: FailurePolicy(max_failures=count) if count else None,
    "only_errored": lambda _: "only",
    "ignore_errors": lambda _: False,
}
"""What makes the value of an option of other flags than numbers, words and lists of text."""
_SETTINGS = [_Setting(option, flag) for option, flags in flags_of(SearchPlan).items() for flag in flags]
_BY_NAME = {each.flag.name: each for each in _SETTINGS}
RUN = [(panel, each) for panel in Panel for each in _SETTINGS if each.flag.panel is panel]
"""The options of `run` with their panels of its help, the common ones first."""
RESUME = [
    (Panel.SEARCH, each)
    for each in sorted(_SETTINGS, key=lambda each: each.flag.resume_place or 0)
    if each.flag.resume_place
]
"""Those of `resume`."""


def takes(settings: Sequence[tuple[Panel, _Setting]]) -> Callable[[_Command], _Command]:
    """Return a decorator: the command, a function of `**options`, takes these before its keyword-only parameters."""

    def decorated(command: _Command) -> _Command:
        own = [each for each in signature(command, eval_str=True).parameters.values() if each.name != "options"]
        last = [each for each in own if each.kind is Parameter.KEYWORD_ONLY]
        options = [each.parameter(panel) for panel, each in settings]
        command.__signature__ = signature(command).replace(  # type: ignore[attr-defined]  # typer reads it
            parameters=[
                *(each for each in own if each not in last),
                *options,
                *(each.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for each in last),
            ]
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
    read = {_BY_NAME[name].option: _BY_NAME[name].read(value) for name, value in given.items()}
    if last or best:
        read["retention"] = _retention(last, best, given.get("metric", []), given.get("mode", []))
    return {name: value for name, value in read.items() if value is not None}


# The search that `run` and `resume` run in this process, and the checks before it.

_SOME_ERRORED = 3


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Check what needs neither the target nor a server, before one is started.

    Raises:
        InvalidInput: a parameter is not valid.
    """
    from prefect_tune.blocks import LocalTarget
    from prefect_tune.parameters.search_limits import require_one_count

    require_one_count(parameters.get("num_samples"), parameters.get("samples_per_run"))
    given = {name: value for name, value in parameters.items() if name in SearchPlan.model_fields}
    # A saved block would be read from the server, and the journal's trainable from the target.
    SearchPlan(**{"trainable": print, "experiment": "any", **given, "target": LocalTarget(path=str(Path.cwd()))})


def resume_command(target: str, experiment: str, trainable: str | None) -> str:
    """Return the command that resumes; it names the trainable, which a journal on a bucket may not choose."""
    named = ["--trainable", trainable] if trainable else []
    return shlex.join(["prefect-tune", "resume", target, experiment, *named])


def search_in_this_process(
    flow: Literal["tune", "resume"], parameters: Mapping[str, Any], again: str, *, as_json: bool
) -> None:
    """Search, print the results, and exit with 3 if trials errored. `again` is the command that resumes."""
    import_from_here()
    message = ""
    with short_errors(f"stopped; resume with: {again}"):
        check_parameters(parameters)
        try:
            results: Results = getattr(prefect_tune, flow)(**parameters)
        except SearchFailed as failed:
            results, message = cast("Results", failed.results), str(failed)
            if len(results.errors) < len(results.trials):  # no report had the metric
                raise
    show_search(ExperimentView(results.experiment, datetime.now(UTC).isoformat()), as_json=as_json)
    if message:
        print(f"prefect-tune: {visible(message)}", file=sys.stderr)
    if results.errors:
        raise typer.Exit(_SOME_ERRORED)
