"""The commands of the panel *Search*: `run`, `resume`, `stop` and `deploy`; and the options of `run` and `resume`."""

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
    add_working_directory_to_path,
    command,
    option_without_default,
    printing_short_errors,
    resolve_existing_target,
)
from prefect_tune.cli.inspect import show_search
from prefect_tune.core.display_text import did_you_mean, make_visible
from prefect_tune.core.errors import InvalidInput, SearchFailed, TuneError
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Cadence, Retention
from prefect_tune.core.messages.target_messages import ExperimentView
from prefect_tune.deploy.deployment_specs import (
    CollisionStrategy,
    DeploymentSchedule,
    Interval,
    find_deployable_flows,
    make_experiment_spec,
    make_general_specs,
)
from prefect_tune.parameters.search_plan import Flag, Panel, SearchPlan, collect_flags

if TYPE_CHECKING:
    from prefect_tune.deploy.automations import InstalledAutomation
    from prefect_tune.deploy.deployments import DeploymentResult
    from prefect_tune.results import Results

_Command = TypeVar("_Command", bound=Callable[..., None])

# Parse spaces, stop criteria, schedulers and settings from command line options and files.

_CALL_PATTERN = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.DOTALL)
_DECIMAL = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_CHOICE_NAMES = frozenset({"choice", "grid_search"})
_RANGE_NAMES = frozenset({"uniform", "loguniform", "randint", "lograndint", "randn"})
_DISTRIBUTION_NAMES = _CHOICE_NAMES | _RANGE_NAMES | {f"q{name}" for name in _RANGE_NAMES}
_UNCLOSED_CALL_PATTERN = re.compile(rf"\s*({'|'.join(_DISTRIBUTION_NAMES)})\s*[(\[{{]")
_JSON_CHARACTERS = re.compile(r"""["'()\[\]{}]""")
_QUOTE_HINT = "put a text in quotes: '\"...\"'"


def parse_space_option(file: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    """Read the space from the file, then apply each setting `name=value`; `model.depth=3` sets `depth` in `model`.

    Raises:
        InvalidInput: the file cannot be read, or a setting is invalid.
    """
    space: dict[str, Any] = {}
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"--space {file}: {error}") from error
        space = _parse_yaml(text, file) if file.suffix in {".yaml", ".yml"} else _parse_json(text, f"--space {file}")
        if not isinstance(space, dict):
            raise InvalidInput(f'--space {file}: expected an object such as {{"lr": {{"uniform": [0, 1]}}}}')
    for setting in settings:
        name, equals, text = setting.partition("=")
        *parents, leaf = name.split(".")
        if not (equals and leaf and all(parents)):
            raise InvalidInput(f"--set {setting!r}: expected name=value, such as lr=loguniform(1e-4,1e-1)")
        node = space
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise InvalidInput(f"--set {setting!r}: expected {key!r} to be an object, found a value")
        node[leaf] = _parse_set_value(text, setting)
    return space


def parse_json_object(text: str, source: str) -> dict[str, Any]:
    """Parse `text` as a JSON object. Raises `InvalidInput` if `text` is not a JSON object."""
    value = _parse_json(text, source)
    if isinstance(value, dict):
        return value
    raise InvalidInput(f'{source}: expected a JSON object such as {{"name": "value"}}, found {text[:40]!r}')


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{source}: not valid JSON: {error}") from error


def _parse_yaml(text: str, file: Path) -> Any:
    """Parse YAML; read floats by the rules of YAML 1.2, so that 1e-4 is a number."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})  # a subclass, since the next line changes the class
    loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"{_DECIMAL.pattern}$"), list("-+.0123456789"))
    try:
        return yaml.load(text, loader)  # noqa: S506  it is a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidInput(f"--space {file}: not valid YAML: {' '.join(str(error).split())}") from error


def _parse_set_value(text: str, setting: str) -> Any:
    call = _CALL_PATTERN.fullmatch(text.strip())
    if call is None:
        if unclosed := _UNCLOSED_CALL_PATTERN.match(text):
            raise InvalidInput(f"--set {setting!r}: expected {unclosed[1]}(...) in parentheses; {_QUOTE_HINT}")
        return _parse_json_or_text(text)
    name, text = call[1], call[2]
    try:
        arguments = list(json.loads(f"[{text}]"))
    except ValueError as error:  # such as choice(adam,sgd)
        if _JSON_CHARACTERS.search(text):
            expected = 'choice("adam","sgd") or choice([1,2],[3]), or only words, such as choice(adam,sgd)'
            raise InvalidInput(f"--set {setting!r}: expected JSON in the parentheses, such as {expected}") from error
        arguments = [_parse_json_or_text(word.strip()) for word in text.split(",")]
    if name not in _DISTRIBUTION_NAMES:
        hint = did_you_mean(name, _DISTRIBUTION_NAMES) or ";"
        raise InvalidInput(f"--set {setting!r}: unknown distribution {name!r}{hint} {_QUOTE_HINT}")
    is_list = name in _CHOICE_NAMES and len(arguments) == 1 and isinstance(arguments[0], list)
    return {name: arguments[0] if is_list else arguments}


def _parse_json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return float(text) if _DECIMAL.fullmatch(text) else text


def parse_stop_criteria(criteria: Sequence[str]) -> str | dict[str, Any] | None:
    """Parse stop criteria: `name=value` settings, one `package.module:Name`, or JSON. Return None without criteria."""
    match criteria:
        case [text] if text.lstrip().startswith("{"):
            return parse_json_object(text, "--stop")
        case [name] if ":" in name and "=" not in name:
            return name
    return parse_name_value_pairs(criteria, "--stop", "step=100, or package.module:name")


def parse_name_value_pairs(settings: Sequence[str], option: str, expected: str = "name=value") -> dict[str, Any] | None:
    """Parse `name=value` settings into a dict; a value that is not JSON is text. Return None without settings."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not (name and equals):
            raise InvalidInput(f"{option} {setting!r}: expected {expected}")
        values[name] = _parse_json_or_text(text)
    return values or None


def _parse_name_or_object(text: str, option: str) -> str | Mapping[str, Any]:
    """Parse a scheduler or a search: a JSON object, or only a name, which means default settings."""
    return parse_json_object(text, option) if text.lstrip().startswith("{") else text


def _unwrap_single_word(values: Sequence[str]) -> object:
    words = [str(word) for word in values]
    return words[0] if len(words) == 1 else words


# Turn the flags that `SearchPlan` declares into parameters of a command, and their values into options of a search.


@dataclass(frozen=True, slots=True)
class _OptionFlag:
    """A flag, and the search option that the flag sets."""

    option: str
    flag: Flag

    @property
    def value_type(self) -> Any:
        """The type that typer gets for the flag's values."""
        if self.flag.minimum is not None:
            return int
        value_type = self.flag.kind or _unwrap_optional(SearchPlan.model_fields[self.option].annotation)
        if get_origin(value_type) is list:
            return GenericAlias(list, (_to_typer_type(get_args(value_type)[0]),))
        return list[str] if get_origin(value_type) is Mapping else _to_typer_type(value_type)

    def make_parameter(self, panel: str) -> Parameter:
        """Return the command's parameter from which typer makes this flag."""
        flag, value_type = self.flag, self.value_type
        info = option_without_default(flag.flag, flag.metavar, flag.help, at_least=flag.minimum, panel=panel)
        default = False if value_type is bool else None
        hint = value_type if value_type is bool else value_type | None
        return Parameter(flag.name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[hint, info])

    def parse_value(self, value: Any) -> object:
        """Convert the flag's `value` to the value of the search option; None means the option's default."""
        if self.flag.name in _VALUE_PARSERS:
            return _VALUE_PARSERS[self.flag.name](value)
        return value.value if isinstance(value, Enum) else value


def _unwrap_optional(value_type: Any) -> Any:
    """Return the type of an option's value, without None and without validators."""
    kinds = [argument for argument in get_args(value_type) if argument is not type(None)]
    unwrapped = kinds[0] if get_origin(value_type) in (Union, UnionType) and len(kinds) == 1 else value_type
    return get_args(unwrapped)[0] if get_origin(unwrapped) is Annotated else unwrapped


def _to_typer_type(value_type: Any) -> Any:
    """Return the type that typer gets: a choice for a literal, and text for types that typer does not support."""
    if get_origin(value_type) is Literal:
        return StrEnum("Choice", [(word, word) for word in get_args(value_type)])
    return value_type if value_type in (int, float, bool, Path) else str


_VALUE_PARSERS: Mapping[str, Callable[[Any], object]] = {
    "metric": _unwrap_single_word,
    "mode": _unwrap_single_word,
    "scheduler": lambda text: _parse_name_or_object(text, "--scheduler"),
    "search": lambda text: _parse_name_or_object(text, "--search"),
    "stop": parse_stop_criteria,
    "resource": lambda pairs: parse_name_value_pairs(pairs, "--resource", "name=number"),
    "job_variable": lambda pairs: parse_name_value_pairs(pairs, "--job-variable"),
    "checkpoint_every": lambda steps: Cadence(every_steps=steps),
    "max_failures": lambda count: FailurePolicy(max_failures=count) if count else None,
    "only_errored": lambda _: "only",
    "ignore_errors": lambda _: False,
}
"""The parsers of flag values, by flag. Flags whose values are numbers, words or lists of text need no parser."""
_FLAGS = [_OptionFlag(option, flag) for option, flags in collect_flags(SearchPlan).items() for flag in flags]
_OPTIONS = {option.flag.name: option for option in _FLAGS}
RUN_OPTIONS = [(panel, option) for panel in Panel for option in _FLAGS if option.flag.panel is panel]
"""The options of `run` and their help panels, the common options first."""
RESUME_OPTIONS = [
    (Panel.SEARCH, option)
    for option in sorted(_FLAGS, key=lambda option: option.flag.resume_position or 0)
    if option.flag.resume_position
]
"""The options of `resume` and their help panels."""


def with_flags(flags: Sequence[tuple[Panel, _OptionFlag]]) -> Callable[[_Command], _Command]:
    """Return a decorator that replaces `**options` in a command's signature with the flags, so that typer sees them."""

    def add_options(command: _Command) -> _Command:
        parameters = [p for p in signature(command, eval_str=True).parameters.values() if p.name != "options"]
        first = [p for p in parameters if p.kind is not Parameter.KEYWORD_ONLY]
        options = [option.make_parameter(panel) for panel, option in flags]
        last = [p.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for p in parameters if p not in first]
        changed = signature(command).replace(parameters=[*first, *options, *last])
        command.__signature__ = changed  # type: ignore[attr-defined]  # typer reads it
        return command

    return add_options


def options_to_parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert command line options to parameters of the flow; omit parameters that no option sets."""
    passed = {name: value for name, value in options.items() if not (value is None or value is False or value == [])}
    if passed.keys() >= {"fail_fast", "ignore_errors"}:
        raise InvalidInput("--fail-fast ends the search at an error, and --ignore-errors continues it: pass only one")
    last, best = passed.pop("keep_last", None), passed.pop("keep_best", None)
    parameters = {_OPTIONS[name].option: _OPTIONS[name].parse_value(value) for name, value in passed.items()}
    if best:
        metrics, modes = passed.get("metric", []), passed.get("mode", [])
        if not metrics:
            raise InvalidInput("--keep-best: the metric that ranks checkpoints is missing; add --metric NAME")
        mode: Literal["min", "max"] = "max" if "max" in modes[:1] else "min"
        parameters["retention"] = Retention(last=last, best=best, metric=metrics[0], mode=mode)
    elif last:
        parameters["retention"] = Retention(last=last)
    return {name: value for name, value in parameters.items() if value is not None}


# Check the parameters, and run the search of `run` or `resume` in this process.

_EXIT_TRIALS_ERRORED = 3


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Validate the parameters before a Prefect server starts; do not open the target."""
    from prefect_tune.blocks import LocalTarget

    plan_options = {name: value for name, value in parameters.items() if name in SearchPlan.model_fields}
    # Pass placeholders: the target may be a block on the server, and `resume` may get the trainable from the journal.
    SearchPlan(**{"trainable": print, "experiment": "any", **plan_options, "target": LocalTarget(path=str(Path.cwd()))})


def format_resume_command(target: str, experiment: str, trainable: str | None) -> str:
    """Return a command that resumes a search. It names the trainable, since the name in the journal is not trusted."""
    trainable_option = ["--trainable", trainable] if trainable else []
    return shlex.join(["prefect-tune", "resume", target, experiment, *trainable_option])


def run_search_in_terminal(
    flow: Literal["tune", "resume"], parameters: Mapping[str, Any], resume_with: str, *, as_json: bool
) -> None:
    """Run the search, print its results, and exit with 3 if trials errored. After Ctrl-C, print `resume_with`."""
    add_working_directory_to_path()
    message = ""
    with printing_short_errors(f"stopped; resume with: {resume_with}"):
        check_parameters(parameters)
        try:
            results: Results = getattr(prefect_tune, flow)(**parameters)
        except SearchFailed as failure:
            results, message = cast("Results", failure.results), str(failure)
            if len(results.errors) < len(results.trials):  # the same error in several trials ended the search early
                raise
    show_search(ExperimentView(results.experiment, datetime.now(UTC).isoformat()), as_json=as_json)
    if message:
        print(f"prefect-tune: {make_visible(message)}", file=sys.stderr)
    if results.errors:
        raise typer.Exit(_EXIT_TRIALS_ERRORED)


# The commands.


@command
@with_flags(RUN_OPTIONS)
def run(
    trainable: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="The trainable: a function or a class.", show_default=False)
    ],
    target: Annotated[str, option_without_default("--target", "TARGET", "Where the experiment is stored.")],
    experiment: Annotated[str, option_without_default("--experiment", "EXPERIMENT", "Its name on TARGET.")],
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
    space = parse_space_option(options.pop("space"), options.pop("set") or ())
    required = {"trainable": trainable, "target": target, "experiment": experiment}
    parameters = {"space": space, **required, **options_to_parameters(options)}
    run_search_in_terminal("tune", parameters, format_resume_command(target, experiment, trainable), as_json=as_json)


@command
@with_flags(RESUME_OPTIONS)
def resume(
    target: Target,
    experiment: ExperimentName,
    fork: Annotated[
        str | None, option_without_default("--fork", "NAME", "Resume a copy of EXPERIMENT under this name.")
    ] = None,
    at: Annotated[
        int | None, option_without_default("--at", "ENTRY", "Fork at this journal entry. Default: the last.")
    ] = None,
    *,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Resume the search EXPERIMENT with the settings in its journal; options given here replace these settings.

    The command never starts a new experiment.
    A space given here replaces the whole earlier space.
    """
    space = parse_space_option(options.pop("space"), options.pop("set") or ())
    changes = {"fork": fork, "at": at, "space": space or None}
    passed = {name: value for name, value in changes.items() if value is not None}
    parameters = {"experiment": experiment, "target": target, **passed, **options_to_parameters(options)}
    resume_with = format_resume_command(target, fork or experiment, parameters.get("trainable"))
    run_search_in_terminal("resume", parameters, resume_with, as_json=as_json)


@command
def stop(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, for the journal.", show_default=False)] = "",
    wait_seconds: Annotated[
        float, typer.Option(min=0, metavar="S", help="How long to wait for the search to end; 0: do not wait.")
    ] = 60,
    as_json: AsJson = False,
) -> None:
    """Stop a running search after every trial has saved; with --trial, end one of its trials permanently.

    The search polls TARGET for requests every few seconds. Exits with 1 if the search does not answer in time.
    """
    from prefect_tune.tuner.stop_requests import stop as send_stop_request

    resolve_existing_target(target)
    outcome = send_stop_request(experiment, target=target, trial=trial, reason=reason, wait_seconds=wait_seconds)
    done = outcome.status in ("stopped", "had-ended", "stopping")
    if as_json:
        print(json.dumps({"status": outcome.status, "message": outcome.message}, indent=2))
    else:
        print(make_visible(outcome.message), file=sys.stdout if done else sys.stderr)
    if not done and wait_seconds:
        raise typer.Exit(1)


@command
def deploy(
    flows: Annotated[
        list[str] | None, typer.Argument(metavar="FLOW", help="Such as tune. Default: all.", show_default=False)
    ] = None,
    work_pool: Annotated[str, option_without_default("--work-pool", "POOL", "Work pool of the runs; required.")] = "",
    work_queue: Annotated[
        str | None, option_without_default("--work-queue", "QUEUE", "Work queue of that pool.")
    ] = None,
    image: Annotated[
        str | None, option_without_default("--image", "IMAGE", "Container image with this package.")
    ] = None,
    job_variables: Annotated[
        list[str] | None, option_without_default("--job-variable", "NAME=VALUE", "Variable of the job template.")
    ] = None,
    prefix: Annotated[
        str, option_without_default("--prefix", "TEXT", "Prefix of each deployment's name, such as staging-.")
    ] = "",
    name: Annotated[str | None, option_without_default("--name", "NAME", "Deploy FLOW for experiment NAME.")] = None,
    params: Annotated[str, option_without_default("--params", "JSON", "Parameters, as a JSON object.")] = "{}",
    param: Annotated[
        list[str] | None, option_without_default("--param", "NAME=VALUE", "One parameter; VALUE is JSON or text.")
    ] = None,
    cron: Annotated[
        list[str] | None, option_without_default("--cron", "CRON", 'Schedule, such as "0 2 * * *".')
    ] = None,
    every_seconds: Annotated[
        float | None, option_without_default("--every-seconds", "S", "Schedule: every S seconds.")
    ] = None,
    time_zone: Annotated[
        str, typer.Option("--timezone", metavar="ZONE", help="Time zone of --cron, such as Europe/Berlin.")
    ] = "UTC",
    collision: Annotated[
        CollisionStrategy, typer.Option(metavar="WHAT", help="If the last run is still active: cancel-new or enqueue.")
    ] = "cancel-new",
    automations: Annotated[
        bool, typer.Option("--automations/--no-automations", help="Restart crashed runs; --notify also sends alerts.")
    ] = True,
    notify: Annotated[
        str | None, option_without_default("--notify", "BLOCK", "Block that sends alerts: slack-webhook/NAME.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a deployment of each FLOW, by default of all flows; with --name, one deployment for one experiment.

    Run the command again to update the deployments; schedules that were changed in the UI are kept. The worker
    imports the trainable. Install your project where the worker runs, or add its folder to PYTHONPATH (second example).

    prefect-tune deploy --work-pool training

    prefect-tune deploy --work-pool training --job-variable 'env={"PYTHONPATH": "/home/me/project"}'

    prefect-tune deploy tune --name nightly --params "$(cat nightly.json)"
      --work-pool training --cron "0 2 * * *" --timezone Europe/Berlin
    """
    from prefect_tune.deploy.automations import install_specs, require_notification_block
    from prefect_tune.deploy.deployments import WorkPool, deploy

    if not work_pool:
        raise InvalidInput("--work-pool: name a work pool for the runs; `prefect work-pool ls` lists the work pools")
    if notify is not None and not automations:
        raise InvalidInput(f"--notify {notify}: alerts are automations; remove --no-automations")
    variables = parse_name_value_pairs(job_variables or (), "--job-variable") or {}
    if image:
        variables["image"] = image
    parameters = {**parse_json_object(params, "--params"), **(parse_name_value_pairs(param or (), "--param") or {})}
    schedules = [DeploymentSchedule(when, time_zone) for when in cron or ()]
    if every_seconds is not None:
        if not 0 < every_seconds <= timedelta.max.total_seconds():
            raise InvalidInput(f"--every-seconds: expected a finite number greater than 0, found {every_seconds:g}")
        schedules.append(DeploymentSchedule(Interval(timedelta(seconds=every_seconds)), time_zone))
    if name is None and (parameters or schedules):
        raise InvalidInput("--params, --param, --cron and --every-seconds need one FLOW and --name NAME")
    if name is not None and len(flows or ()) != 1:
        raise InvalidInput(f"--name {name}: expected one FLOW, for example: prefect-tune deploy tune --name {name}")
    deployable_flows = find_deployable_flows(flows or ())
    if name is None:
        specs = make_general_specs(deployable_flows, prefix)
    else:
        specs = [make_experiment_spec(deployable_flows[0], name, parameters, schedules or None, collision, prefix)]
    if notify is not None:
        require_notification_block(notify)
    deployments = deploy(specs, WorkPool(name=work_pool, queue=work_queue, job_variables=variables))
    try:
        installed = install_specs(notify=notify, without_action="leave out") if automations else []
    except TuneError as error:
        _print_deployments(deployments, (), work_pool, as_json=as_json)
        raise TuneError(f"{error}; the deployments were applied; --no-automations skips the automations") from error
    _print_deployments(deployments, installed, work_pool, as_json=as_json)


def _print_deployments(
    deployments: Sequence[DeploymentResult], installed: Sequence[InstalledAutomation], pool: str, *, as_json: bool
) -> None:
    if as_json:
        names = [automation.name for automation in installed]
        print(json.dumps({"deployments": [asdict(result) for result in deployments], "automations": names}, indent=2))
        return
    width = max(len(deployment.name) for deployment in deployments)
    for deployment in deployments:
        print(f"{deployment.outcome}  {deployment.name:{width}}  {deployment.link or ''}".rstrip())
        for schedule in deployment.schedules:
            print(f"         runs at {schedule}")
    for automation in installed:
        print(f"automation  {'on ' if automation.enabled else 'off'}  {automation.name}")
    if installed and not any(automation.is_alert and automation.has_action for automation in installed):
        print("alerts are not installed; to install them: --notify slack-webhook/NAME")
    print(f"runs start when a worker serves the work pool {pool!r}: prefect worker start --pool {pool}")
