"""The commands of the panel *Search*: `run`, `resume`, `stop` and `deploy`; the options of the first two."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from inspect import Parameter, signature
from pathlib import Path
from types import GenericAlias, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import typer

import prefect_tune
from prefect_tune.cli.app import (
    AsJson,
    ExperimentName,
    Target,
    TrialName,
    asks,
    command,
    existing_place,
    import_from_here,
    short_errors,
)
from prefect_tune.cli.inspect import show_search
from prefect_tune.core.errors import InvalidInput, SearchFailed, TuneError
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Cadence, Retention
from prefect_tune.core.messages.target_messages import ExperimentView
from prefect_tune.core.shown_text import did_you_mean, visible
from prefect_tune.deploy.deployment_specs import (
    Collision,
    DeploymentSchedule,
    Interval,
    named,
    of_one_experiment,
    wanted,
)
from prefect_tune.parameters.search_plan import Flag, Panel, SearchPlan, flags_of

if TYPE_CHECKING:
    from prefect_tune.deploy.automations import Installed
    from prefect_tune.deploy.deployments import Deployed
    from prefect_tune.results import Results

_Command = TypeVar("_Command", bound=Callable[..., None])

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
    space: dict[str, Any] = {}
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"--space {file}: {error}") from error
        space = _yaml(text, file) if file.suffix in {".yaml", ".yml"} else _json(text, f"--space {file}")
        if not isinstance(space, dict):
            raise InvalidInput(f'--space {file}: expected an object such as {{"lr": {{"uniform": [0, 1]}}}}')
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


def object_from(text: str, where: str) -> dict[str, Any]:
    """Parse `text` as a JSON object. Raises `InvalidInput` if it is none."""
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
    name, text = call[1], call[2]
    try:
        arguments = list(json.loads(f"[{text}]"))
    except ValueError as error:  # choice(adam,sgd)
        if _NOT_PLAIN.search(text):
            expected = 'JSON, such as choice("adam","sgd") or choice([1,2],[3]), or words alone: choice(adam,sgd)'
            raise InvalidInput(f"--set {setting!r}: in the brackets expected {expected}") from error
        arguments = [_plain(word.strip()) for word in text.split(",")]
    if name not in _DOMAINS:
        meant = did_you_mean(name, _DOMAINS) or ";"
        raise InvalidInput(f"--set {setting!r}: unknown distribution {name!r}{meant} {_QUOTED}")
    is_list = name in _CHOICES and len(arguments) == 1 and isinstance(arguments[0], list)
    return {name: arguments[0] if is_list else arguments}


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return float(text) if _DECIMAL.fullmatch(text) else text


def stop_from(criteria: Sequence[str]) -> str | dict[str, Any] | None:
    """Parse stop criteria: `step=100` (of several, the first one reached stops), `package.module:Name`, or JSON."""
    match criteria:
        case [text] if text.lstrip().startswith("{"):
            return object_from(text, "--stop")
        case [name] if ":" in name and "=" not in name:
            return name
    return values_from(criteria, "--stop", "step=100, or package.module:name")


def values_from(settings: Sequence[str], option: str, expected: str = "name=value") -> dict[str, Any] | None:
    """Parse `name=value` settings into one dict, each value as JSON or else as text; None if there are none."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not (name and equals):
            raise InvalidInput(f"{option} {setting!r}: expected {expected}")
        found[name] = _plain(text)
    return found or None


def _spelling_from(text: str, option: str) -> str | Mapping[str, Any]:
    """Parse a scheduler or a search from JSON; a name alone stands for its defaults."""
    return object_from(text, option) if text.lstrip().startswith("{") else text


def _one_or_more(given: Sequence[str]) -> object:
    words = [str(word) for word in given]
    return words[0] if len(words) == 1 else words


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
        flag, kind = self.flag, self.kind
        info = asks(flag.flag, flag.metavar, flag.help, at_least=flag.at_least, panel=panel)
        default = False if kind is bool else None
        given = kind if kind is bool else kind | None
        return Parameter(flag.name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[given, info])

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
    "scheduler": lambda text: _spelling_from(text, "--scheduler"),
    "search": lambda text: _spelling_from(text, "--search"),
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
    """Return the flow's parameters that the options set."""
    given = {name: value for name, value in options.items() if not (value is None or value is False or value == [])}
    if given.keys() >= {"fail_fast", "ignore_errors"}:
        raise InvalidInput("--fail-fast stops the search at the first error, --ignore-errors at none: give one of them")
    last, best = given.pop("keep_last", None), given.pop("keep_best", None)
    read = {_BY_NAME[name].option: _BY_NAME[name].read(value) for name, value in given.items()}
    if best:
        metrics, modes = given.get("metric", []), given.get("mode", [])
        if not metrics:
            raise InvalidInput("--keep-best: which checkpoints are the best? Name the metric: --metric NAME")
        mode: Literal["min", "max"] = "max" if "max" in modes[:1] else "min"
        read["retention"] = Retention(last=last, best=best, metric=metrics[0], mode=mode)
    elif last:
        read["retention"] = Retention(last=last)
    return {name: value for name, value in read.items() if value is not None}


# The search that `run` and `resume` run in this process, and the checks before it.

_SOME_ERRORED = 3


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Check what needs neither the target nor a server, before one is started."""
    from prefect_tune.blocks import LocalTarget

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
            if len(results.errors) < len(results.trials):  # it ended at the first errors, which are alike
                raise
    show_search(ExperimentView(results.experiment, datetime.now(UTC).isoformat()), as_json=as_json)
    if message:
        print(f"prefect-tune: {visible(message)}", file=sys.stderr)
    if results.errors:
        raise typer.Exit(_SOME_ERRORED)


# The commands.


@command
@takes(RUN)
def run(
    trainable: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="The trainable: a function or a class.", show_default=False)
    ],
    target: Annotated[str, asks("--target", "TARGET", "Where it is stored.")],
    experiment: Annotated[str, asks("--experiment", "EXPERIMENT", "Its name there.")],
    *,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Search a space for the best configuration of MODULE:NAME; resume EXPERIMENT if it exists.

    For example:

    prefect-tune run my_project.train:Net --target ./runs --experiment first
      --set "lr=loguniform(1e-4,1e-1)" --metric loss --num-samples 20
      --scheduler '{"ASHA": {"max_t": 100}}'
    """
    space = space_from(options.pop("space"), options.pop("set") or ())
    named = {"trainable": trainable, "target": target, "experiment": experiment}
    parameters = {"space": space, **named, **parameters_from(options)}
    search_in_this_process("tune", parameters, resume_command(target, experiment, trainable), as_json=as_json)


@command
@takes(RESUME)
def resume(
    target: Target,
    experiment: ExperimentName,
    fork: Annotated[str | None, asks("--fork", "NAME", "Resume a copy of EXPERIMENT under this name.")] = None,
    at: Annotated[int | None, asks("--at", "ENTRY", "Fork at this journal entry. Default: the last.")] = None,
    *,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Resume the search EXPERIMENT with the settings in its journal; options given here replace them.

    It never starts a new experiment.
    A space given here replaces the whole earlier one.
    """
    space = space_from(options.pop("space"), options.pop("set") or ())
    asked = {"fork": fork, "at": at, "space": space or None}
    given = {name: value for name, value in asked.items() if value is not None}
    parameters = {"experiment": experiment, "target": target, **given, **parameters_from(options)}
    again = resume_command(target, fork or experiment, parameters.get("trainable"))
    search_in_this_process("resume", parameters, again, as_json=as_json)


@command
def stop(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, for the journal.", show_default=False)] = "",
    wait_seconds: Annotated[
        float, typer.Option(min=0, metavar="S", help="How long to wait for the end; 0: do not wait.")
    ] = 60,
    as_json: AsJson = False,
) -> None:
    """Stop a running search, after every trial has saved; with --trial, end one of its trials for good.

    The search checks TARGET for requests every few seconds. Exits with 1 if it has not answered.
    """
    from prefect_tune.tuner.stop_requests import stop as send_stop_request

    existing_place(target)
    outcome = send_stop_request(experiment, target=target, trial=trial, reason=reason, wait_seconds=wait_seconds)
    done = outcome.status in ("stopped", "had-ended", "stopping")
    if as_json:
        print(json.dumps({"status": outcome.status, "message": outcome.message}, indent=2))
    else:
        print(visible(outcome.message), file=sys.stdout if done else sys.stderr)
    if not done and wait_seconds:
        raise typer.Exit(1)


_Flows = Annotated[
    list[str] | None, typer.Argument(metavar="FLOW", help="Such as tune. Default: all.", show_default=False)
]
_Variables = Annotated[list[str] | None, asks("--job-variable", "NAME=VALUE", "Variable of the pool's job template.")]
_Params = Annotated[str, asks("--params", "JSON", "Parameters, as a JSON object.")]
_Param = Annotated[list[str] | None, asks("--param", "NAME=VALUE", "One parameter; VALUE is JSON or text.")]
_Crons = Annotated[list[str] | None, asks("--cron", "CRON", 'Schedule, such as "0 2 * * *".')]


@command
def deploy(
    flows: _Flows = None,
    work_pool: Annotated[str, asks("--work-pool", "POOL", "Work pool of the runs; required.")] = "",
    work_queue: Annotated[str | None, asks("--work-queue", "QUEUE", "Work queue of that pool.")] = None,
    image: Annotated[str | None, asks("--image", "IMAGE", "Container image with this package.")] = None,
    job_variables: _Variables = None,
    prefix: Annotated[str, asks("--prefix", "TEXT", "Prefix of each deployment's name, such as staging-.")] = "",
    name: Annotated[str | None, asks("--name", "NAME", "One FLOW, for the experiment NAME.")] = None,
    params: _Params = "{}",
    param: _Param = None,
    cron: _Crons = None,
    every_seconds: Annotated[float | None, asks("--every-seconds", "S", "Run it every S seconds.")] = None,
    time_zone: Annotated[
        str, typer.Option("--timezone", metavar="ZONE", help="Time zone of --cron, such as Europe/Berlin.")
    ] = "UTC",
    collision: Annotated[
        Collision, typer.Option(metavar="WHAT", help="If the last run is active: cancel-new, or enqueue.")
    ] = "cancel-new",
    automations: Annotated[
        bool,
        typer.Option("--automations/--no-automations", help="Restart crashed runs; with --notify, alerts too."),
    ] = True,
    notify: Annotated[str | None, asks("--notify", "BLOCK", "Block that sends alerts: slack-webhook/NAME.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create a deployment of each FLOW, by default of all flows; with --name, one for a single experiment.

    Run it again to update the deployments; schedules that were changed in the UI stay. The worker imports the
    trainable: install its project there, or name its folder in PYTHONPATH, as in the second example.

    prefect-tune deploy --work-pool training

    prefect-tune deploy --work-pool training --job-variable 'env={"PYTHONPATH": "/home/me/project"}'

    prefect-tune deploy tune --name nightly --params "$(cat nightly.json)"
      --work-pool training --cron "0 2 * * *" --timezone Europe/Berlin
    """
    from prefect_tune.deploy.automations import apply_automations, require_block
    from prefect_tune.deploy.deployments import Pool, deploy

    if not work_pool:
        raise InvalidInput("--work-pool: expected a work pool for the runs; `prefect work-pool ls` lists them")
    if notify is not None and not automations:
        raise InvalidInput(f"--notify {notify}: alerts are automations; leave out --no-automations")
    variables = {**(values_from(job_variables or (), "--job-variable") or {}), **({"image": image} if image else {})}
    asked = {**object_from(params, "--params"), **(values_from(param or (), "--param") or {})}
    schedules = [DeploymentSchedule(when, time_zone) for when in cron or ()]
    if every_seconds is not None:
        if not 0 < every_seconds <= timedelta.max.total_seconds():
            raise InvalidInput(f"--every-seconds: expected more than 0, and a finite time, found {every_seconds:g}")
        schedules.append(DeploymentSchedule(Interval(timedelta(seconds=every_seconds)), time_zone))
    if name is None and (asked or schedules):
        raise InvalidInput("--params, --param, --cron and --every-seconds need one FLOW and --name NAME")
    if name is not None and len(flows or ()) != 1:
        raise InvalidInput(f"--name {name}: expected one FLOW, as in: prefect-tune deploy tune --name {name}")
    offers = named(flows or ())
    if name is None:
        specs = wanted(offers, prefix)
    else:
        specs = [of_one_experiment(offers[0], name, asked, schedules or None, collision, prefix)]
    if notify is not None:
        require_block(notify)
    done = deploy(specs, Pool(name=work_pool, queue=work_queue, job_variables=variables))
    try:
        installed = apply_automations(notify=notify, without_action="leave out") if automations else []
    except TuneError as error:
        _print_outcome(done, (), work_pool, as_json=as_json)
        raise TuneError(f"{error}; the deployments were applied; --no-automations skips the automations") from error
    _print_outcome(done, installed, work_pool, as_json=as_json)


def _print_outcome(done: Sequence[Deployed], installed: Sequence[Installed], pool: str, *, as_json: bool) -> None:
    if as_json:
        names = [each.name for each in installed]
        print(json.dumps({"deployments": [asdict(each) for each in done], "automations": names}, indent=2))
        return
    width = max(len(each.name) for each in done)
    for each in done:
        print(f"{each.outcome}  {each.name:{width}}  {each.link or ''}".rstrip())
        for schedule in each.schedules:
            print(f"         runs at {schedule}")
    for automation in installed:
        print(f"automation  {'on ' if automation.enabled else 'off'}  {automation.name}")
    if installed and not any(each.is_alert and each.acts for each in installed):
        print("alerts are not installed; to install them: --notify slack-webhook/NAME")
    print(f"work pool {pool!r}: runs start when a worker serves it: prefect worker start --pool {pool}")
