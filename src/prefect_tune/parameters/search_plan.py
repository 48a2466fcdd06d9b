"""`SearchPlan`: the parsed and validated parameters of a search, and the settings that the journal stores.

    name: Annotated[type, Option(stored, at_resume, fixed), Flag(flag, metavar, help, panel)] = default
                              │       │          │               └──► the flags of `prefect-tune run` and `resume`
                              │       └──────────┴──► what a resume may change
                              └──► the settings in the journal, and which of them need trust before a resume

The flows repeat these names, types and defaults in their signatures, for type checkers and forms; tests check this.
This module imports Prefect only inside functions, because a command's help reads these declarations, and must be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum, StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainValidator,
    ValidationError,
    model_validator,
)

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Cadence, Retention
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.messages.process_messages import MetricsSource
from prefect_tune.core.metrics import short_repr
from prefect_tune.core.resources import Processes, Resources, parse_processes, parse_resources
from prefect_tune.core.schedulers.base import Scheduler
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.domains import SampleFrom, convert_to_dicts, find_domains
from prefect_tune.core.search.objective import Mode, Objective, make_objective
from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.core.search.space import check_sample_functions
from prefect_tune.core.search.space_json import is_distribution, space_from_json, space_to_json
from prefect_tune.core.seeded_random import seed_from_name
from prefect_tune.core.values import Number, Value, WholeNumber, argument_error, canonical_json
from prefect_tune.parameters.argument_checks import (
    component_to_json,
    compute_source_digest,
    make_stopper,
    make_trainable_fingerprint,
    parse_scheduler,
    parse_search,
    stop_to_json,
    validate_experiment_name,
    validate_trainable,
    value_to_json,
    with_samples,
)
from prefect_tune.runtime.load_named import find_import_name, load_object
from prefect_tune.runtime.trainable import Reuse, require_save_checkpoint

if TYPE_CHECKING:
    from prefect_tune.blocks import StorageTarget, SyncConfig
else:  # the help of the command line reads this plan without importing Prefect
    StorageTarget = SyncConfig = Any


class StoredForm(Enum):
    """Whether an option's value, as the journal stores it, can name code, a file, a location or a command."""

    DATA = "data"
    """The value never names any of these."""
    CHOICE = "choice"
    """The value can name one of these, so `prefect_tune.trust` checks the value before a resume."""


class Panel(StrEnum):
    """The panels in the help of `prefect-tune run`, in the order in which the help shows them."""

    SEARCH = "Options"
    FAILURES = "Checkpoints and failures"
    MORE = "More on the search"
    RESUME = "If EXPERIMENT exists"
    WHERE = "Where trials run"


@dataclass(frozen=True, slots=True)
class Flag:
    """A command-line flag that sets an option of the search; without the flag, the default applies."""

    metavar: str | None
    """None for a switch."""
    help: str
    panel: Panel | None = Panel.SEARCH
    """The flag's panel in the help of `run`; None if `run` does not have the flag."""
    kind: Any = None
    """The type of the values. None means integers if `minimum` is set, and otherwise the type of the option."""
    minimum: int | None = None
    flag: str = ""
    """Empty to derive the flag from the option's name, such as `--keep-best` from `keep_best`."""
    resume_position: int | None = None
    """The flag's position in the help of `resume`; None if `resume` does not have the flag."""

    @property
    def name(self) -> str:
        """The name of the command's parameter: `keep_best` for `--keep-best`."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, slots=True)
class Option:
    """The properties of a search's option, except its flags."""

    stored: StoredForm | None = None
    """The kind of the option's values in the journal; None if the option belongs to one run, and so is not stored."""
    at_resume: bool = False
    """Whether `pt.resume` accepts the option."""
    fixed_reason: str = ""
    """Why a resume may not change the option; empty if a resume may change the option."""


def collect_flags(plan: type[BaseModel]) -> Mapping[str, Sequence[Flag]]:
    """Return the flags of each option that the class `plan` declares, in the order of the options."""
    return {
        name: [
            replace(flag, flag=flag.flag or f"--{name.replace('_', '-')}")
            for flag in field.metadata
            if isinstance(flag, Flag)
        ]
        for name, field in plan.model_fields.items()
    }


class ValidatedParameters(Value):
    """Parsed and validated parameters of a flow or task; fields have the names and defaults of the parameters.

    Raises:
        InvalidInput: a parameter is invalid; the message names it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def __init__(self, **parameters: Any) -> None:
        invalid: Exception | None = None
        try:
            super().__init__(**parameters)
        except ValidationError as error:
            invalid = argument_error(error)
        if invalid is not None:
            raise invalid  # not raised in `except`, where the traceback would show pydantic's error with its secrets


# The `resume=` option: whether the experiment must, may or must not exist, and whether errored trials are retried.

Presence: TypeAlias = Literal["auto", "must", "never"]
RerunErrored: TypeAlias = bool | Literal["only"]

_PRESENCES: dict[str, Presence] = {"auto": "auto", "must": "must", "remote": "must", "local": "must", "never": "never"}
_RERUNS: dict[str, RerunErrored] = {"errored": True, "errored_only": "only"}
_UNSUPPORTED_WORDS = {
    "prompt": "a flow cannot prompt: use 'auto', 'must' (the experiment must exist) or 'never' (it must not exist)",
    "restart_errored": "a trial that has a checkpoint never restarts from step 0; 'errored' resumes from the "
    "checkpoint, and pt.resume(..., fork='name', at=entry) starts from an earlier entry",
}
_UNSUPPORTED_WORDS["restart_errored_only"] = _UNSUPPORTED_WORDS["restart_errored"]


@dataclass(frozen=True, slots=True)
class ResumeOption:
    """The parsed `resume=` option."""

    presence: Presence = "auto"
    rerun_errored: RerunErrored = False
    requires_local_target: bool = False
    """Whether the target must be a folder on this machine."""


def parse_resume(resume: object) -> ResumeOption:
    """Parse `resume=`: None, True, False, or words such as Ray's, joined by a plus, in upper or lower case.

    Raises:
        InvalidInput: a word is unknown or not supported here, or words contradict each other.
    """
    if resume is None or isinstance(resume, bool):
        return ResumeOption("auto" if resume is None else "must" if resume else "never")
    if not isinstance(resume, str):
        raise InvalidInput(f"resume: expected 'auto', 'must' or 'never', found {resume!r}")
    words = [word.strip() for word in resume.lower().split("+")]
    for word in words:
        if word in _UNSUPPORTED_WORDS:
            raise InvalidInput(f"resume={resume!r}: {_UNSUPPORTED_WORDS[word]}")
        if word not in _PRESENCES and word not in _RERUNS:
            allowed = ", ".join(repr(word) for word in (*_PRESENCES, *_RERUNS))
            raise InvalidInput(f"resume={resume!r}: expected True, False, {allowed}, or a pair such as 'auto+errored'")
    presence = {_PRESENCES[word] for word in words if word in _PRESENCES} or {"must"}
    if len(presence) > 1:
        raise InvalidInput(f"resume={resume!r}: {' and '.join(map(repr, sorted(presence)))} contradict each other")
    rerun_errored: RerunErrored = next((_RERUNS[word] for word in words if word in _RERUNS), False)
    return ResumeOption(presence.pop(), rerun_errored, requires_local_target="local" in words)


_DATA, _CHOICE = StoredForm.DATA, StoredForm.CHOICE
_FAILURES, _MORE, _EXISTING, _WHERE = Panel.FAILURES, Panel.MORE, Panel.RESUME, Panel.WHERE
_Function: TypeAlias = Callable[[Mapping[str, Any]], object]
_MAX_SECONDS = 1e10
"""The maximum of a time parameter, about 300 years; a `timedelta` or a date cannot represent much larger numbers."""
_MAX_NODES = 1024
PositiveSeconds: TypeAlias = Annotated[Number, Field(gt=0, le=_MAX_SECONDS)]


def _resolve_target(target: Any) -> StorageTarget:
    from prefect_tune.blocks import resolve_target

    return resolve_target(target)


def _parse_sync(sync: object) -> SyncConfig | None:
    from prefect_tune.blocks import SyncConfig

    try:
        return None if sync is None else SyncConfig.model_validate(sync)
    except ValidationError as error:
        invalid = argument_error(error, "sync")
    raise invalid


def parse_space(space: object) -> dict[str, object]:
    """Return a space (a mapping or a dataclass) as a dict, with every domain in JSON form converted to a domain object.

    Raises:
        InvalidInput: the space is invalid, or the function that a `sample_from` names cannot be imported.
    """
    plain_space = cast("Mapping[str, Any]", convert_to_dicts(space))
    domains = space_from_json(plain_space, load=lambda name: cast("_Function", load_object(name, "sample_from")))
    if not any(find_domains(domains)) and is_distribution(domains):
        raise InvalidInput(
            f"space: expected parameters by name, found one distribution, {short_repr(domains)}; name it, as in "
            '{"lr": {"uniform": [0, 1]}}'
        )
    return domains


class SearchOptions(ValidatedParameters):
    """The parameters of `prefect_tune.flows.tune.tune`, each parsed and validated separately; the flow documents them.

    The fields have the flow's names and defaults. The journal omits values that equal their default, so a change of a
    default also changes all resumed searches. `fixed_reason` and `at_resume` determine what a resume may change;
    `plan_checks.py` rejects other changes, and a smaller number of samples.

    Raises:
        InvalidInput: a parameter is invalid.
    """

    trainable: Annotated[
        Any,
        AfterValidator(validate_trainable),
        Option(_CHOICE, at_resume=True),
        Flag("MODULE:NAME", "The trainable; needed if its stored name is not trusted.", None, resume_position=10),
    ]
    target: Annotated[StorageTarget, PlainValidator(_resolve_target), Option()]
    space: Annotated[
        Annotated[Mapping[str, Any], BeforeValidator(parse_space)] | None,
        Option(_CHOICE, at_resume=True),
        Flag("NAME=VALUE", "A parameter of the space: n=choice(1,2).", kind=list[str], resume_position=6, flag="--set"),
        Flag("FILE", "The space, as JSON or YAML.", kind=Path, resume_position=7),
    ] = None
    experiment: Annotated[str, BeforeValidator(validate_experiment_name), Option()] = Field(
        default=None, validate_default=True
    )
    metric: Annotated[
        str | list[str] | None,
        Option(_DATA, fixed_reason="earlier decisions compared trials by the earlier metric"),
        Flag("NAME", "The metric that ranks the trials.", kind=list[str]),
    ] = None
    mode: Annotated[
        Mode | list[Mode] | None,
        Option(_DATA, fixed_reason="earlier decisions ranked trials in the other direction"),
        Flag("min|max", "Direction of the metric. Default: min.", kind=list[Mode]),
    ] = None
    """The passed value; None means `min`."""
    num_samples: Annotated[
        WholeNumber | None,
        Option(_DATA, at_resume=True),
        Flag("N", "Number of trials (with a grid, per grid point). Default: 10; for a grid alone 1."),
        Flag("N", "New total of trials (with a grid, per grid point), not fewer than now.", None, resume_position=3),
    ] = None
    scheduler: Annotated[
        Annotated[InstanceOf[Scheduler], BeforeValidator(parse_scheduler)] | None,
        Option(_DATA, at_resume=True),
        Flag("JSON", "Stops poor trials early.", resume_position=11),
    ] = None
    search: Annotated[
        Annotated[InstanceOf[Search], BeforeValidator(parse_search)] | None,
        Option(_DATA, at_resume=True),
        Flag("JSON", "Default: random and grid.", resume_position=12),
    ] = None
    stop: Annotated[
        Any,
        BeforeValidator(convert_to_dicts),
        Option(_CHOICE, at_resume=True),
        Flag("step=N", "When a trial ends; or MODULE:NAME.", kind=list[str], resume_position=5),
    ] = None
    """The passed value, converted to dicts and plain scalars for the journal; `stopper` is the parsed criterion."""
    max_concurrent_trials: Annotated[
        Annotated[WholeNumber, Field(ge=1)] | None,
        Option(_DATA, at_resume=True),
        Flag("N", "Trials that run at once. Default: one per CPU.", resume_position=8),
    ] = None
    resources_per_trial: Annotated[
        Mapping[str, Number] | None,
        Option(_DATA, at_resume=True),
        Flag("NAME=N", "A trial's resource: gpu=0.5 or cpu=2.", flag="--resource"),
    ] = None
    resources_total: Annotated[Mapping[str, Number] | None, Option(at_resume=True)] = None
    checkpoint: Annotated[
        Cadence | None,
        Option(_DATA),
        Flag(
            "STEPS",
            "Save every STEPS steps. Default: every 60 s, and at the end.",
            _FAILURES,
            minimum=1,
            flag="--checkpoint-every",
        ),
    ] = None
    retention: Annotated[
        Retention | None,
        Option(_DATA),
        Flag("N", "Newest checkpoints to keep per trial. Default: all.", _FAILURES, minimum=1, flag="--keep-last"),
        Flag(
            "N", "Best checkpoints to keep per trial, by the first --metric.", _FAILURES, minimum=1, flag="--keep-best"
        ),
    ] = None
    failures: Annotated[
        FailurePolicy | None,
        Option(_DATA),
        Flag("N", "Retries of a trial that raised. Default: 0.", _FAILURES, minimum=0, flag="--max-failures"),
    ] = None
    fail_fast: Annotated[
        bool | None,
        Option(_DATA),
        Flag(None, "Stop at the first error.", _FAILURES),
        Flag(None, "Succeed despite failed trials.", _FAILURES, bool, flag="--ignore-errors"),
    ] = None
    allow_missing_metric: Annotated[
        bool, Option(_DATA, at_resume=True), Flag(None, "Reports may lack the --metric.", _FAILURES)
    ] = False
    silence_timeout_seconds: Annotated[
        PositiveSeconds | None, Option(_DATA), Flag("S", "Restart a trial after S without a report.", _FAILURES)
    ] = None
    grace_period_seconds: Annotated[
        Number,
        Field(ge=0, le=_MAX_SECONDS),
        Option(_DATA),
        Flag("S", "Time to save after a stop signal. Default: 25.", _FAILURES),
    ] = 25
    sync: Annotated[SyncConfig | None, PlainValidator(_parse_sync), Option(_CHOICE, at_resume=True)] = None
    samples_per_run: Annotated[
        Annotated[WholeNumber, Field(ge=1)] | None,
        Option(at_resume=True),
        Flag("N", "Samples that this run adds, in place of a total.", _MORE, minimum=1, resume_position=4),
    ] = None
    seed: Annotated[
        WholeNumber | None,
        Option(_DATA, fixed_reason="a search with another seed does not reproduce the earlier proposals"),
        Flag("N", "Seed of all draws. Default: from EXPERIMENT.", _MORE, minimum=0),
    ] = None
    warm_start: Annotated[
        list[str] | None,
        Option(_CHOICE, at_resume=True),
        Flag("NAME", "Learn from the trials of this experiment.", _MORE),
    ] = None
    time_budget_seconds: Annotated[
        PositiveSeconds | None,
        Option(at_resume=True),
        Flag("S", "After S seconds, save all trials and end.", _MORE, resume_position=9),
    ] = None
    callbacks: Annotated[
        list[Any] | None,
        Option(_CHOICE, at_resume=True),
        Flag("MODULE:NAME", "A callback for the search.", _MORE, list[str], resume_position=13, flag="--callback"),
    ] = None
    resume: Annotated[
        ResumeOption,
        BeforeValidator(parse_resume),
        Option(),
        Flag("HOW", "auto (default); must: EXPERIMENT exists; never: it is new.", _EXISTING, Presence),
    ] = Field(default="auto", validate_default=True)
    rerun_errored: Annotated[
        RerunErrored,
        Option(at_resume=True),
        Flag(None, "Retry errored trials.", _EXISTING, bool, resume_position=1),
        Flag(None, "Retry errored trials only.", _EXISTING, bool, resume_position=2, flag="--only-errored"),
    ] = False
    on_code_change: Annotated[
        Literal["warn", "refuse"],
        Option(at_resume=True),
        Flag("WHAT", "Changed code: warn (default) or refuse.", _EXISTING),
    ] = "warn"
    trials: Annotated[
        Literal["tasks", "deployment"],
        Option(_DATA),
        Flag("WHERE", "tasks (default): in this flow run; deployment: in others.", _WHERE),
    ] = "tasks"
    trial_deployment: Annotated[str, Option(_CHOICE), Flag("NAME", "Deployment for --trials deployment.", _WHERE)] = (
        "train-trial/train-trial"
    )
    trial_job_variables: Annotated[
        Annotated[Mapping[str, Any], BeforeValidator(partial(value_to_json, where="trial_job_variables"))] | None,
        Option(_CHOICE, at_resume=True),
        Flag("NAME=VALUE", "Job variable of each run of that deployment.", _WHERE, flag="--job-variable"),
    ] = None
    trial_tags: Annotated[
        list[str] | None,
        Option(_DATA),
        Flag("TAG", "Tag of each task run, for Prefect's tag limits.", _WHERE, flag="--tag"),
    ] = None
    concurrency_limits: Annotated[
        list[str] | None,
        Option(_DATA),
        Flag("NAME", "Global concurrency limit for attempts.", _WHERE, flag="--concurrency-limit"),
    ] = None
    isolation: Annotated[
        Literal["process", "thread"],
        Option(_DATA),
        Flag("WHAT", "process (default): a process per trial; thread: for debuggers.", _WHERE),
    ] = "process"
    processes_per_trial: Annotated[
        Processes,
        BeforeValidator(parse_processes),
        Option(_DATA, at_resume=True),
        Flag("N", "Processes of a trial: 4, or 1-8. Default: 1.", _WHERE, kind=str),
    ] = 1
    nodes_per_trial: Annotated[
        WholeNumber,
        Field(ge=1, le=_MAX_NODES),
        Option(_DATA, at_resume=True),
        Flag("N", "Nodes of a trial. Default: 1.", _WHERE, minimum=1),
    ] = 1
    min_nodes: Annotated[
        WholeNumber | None,
        Field(ge=1, le=_MAX_NODES),
        Option(_DATA, at_resume=True),
        Flag("N", "Minimum number of nodes. Default: all.", _WHERE, minimum=1),
    ] = None
    metrics_from: Annotated[
        MetricsSource, Option(_DATA, at_resume=True), Flag("WHAT", "rank 0 (default), or mean of all ranks.", _WHERE)
    ] = "rank 0"
    reuse: Annotated[Reuse, Option(_DATA), Flag("HOW", "Share imports: auto (default) or never.", _WHERE)] = "auto"

    @model_validator(mode="after")
    def _require_valid_options(self) -> Self:
        if self.num_samples is not None and self.samples_per_run is not None:
            raise InvalidInput(
                f"num_samples={self.num_samples} is the total, samples_per_run={self.samples_per_run} is what this run "
                "adds: pass only one of them"
            )
        for name in ("resources_per_trial", "resources_total"):
            if (resources := getattr(self, name)) is not None:
                parse_resources(resources, name)
        _ = self.stopper
        return self

    @property
    def stopper(self) -> Stopper:
        """The stopper of the trials and of the experiment."""
        return make_stopper(self.stop)


class SearchPlan(SearchOptions):
    """The parameters of a search, checked against each other, and values that follow from several parameters.

    Raises:
        InvalidInput: a parameter is invalid, or contradicts another parameter.
    """

    @model_validator(mode="after")
    def _require_consistent(self) -> Self:
        if self.trials == "deployment" and self.resources_per_trial is not None:
            raise InvalidInput(
                "resources_per_trial: with trials='deployment' the work pool assigns resources; pass "
                "trial_job_variables={...} with variables of its base job template"
            )
        if self.trials != "deployment" and self.trial_job_variables is not None:
            raise InvalidInput("trial_job_variables: requires trials='deployment'")
        if self.resources_total is not None and self.resources_per_trial is None:
            raise InvalidInput("resources_total: requires resources_per_trial, the share of each trial")
        if self.metric is None and self.mode is not None:
            raise InvalidInput(f"mode={self.mode!r}: requires a metric, such as metric='loss'")
        is_range = not isinstance(self.processes_per_trial, int)
        if is_range and self.nodes_per_trial > 1:
            raise InvalidInput(
                f"processes_per_trial={self.processes_per_trial}: expected one number with nodes_per_trial, since all "
                "nodes have the same number of ranks"
            )
        if (is_range or self.processes_per_trial != 1) and self.isolation == "thread":
            raise InvalidInput(
                f"processes_per_trial={self.processes_per_trial}: expected isolation='process', since each rank is a "
                "process; with isolation='thread' pass processes_per_trial=1"
            )
        if self.nodes_per_trial > 1 and self.isolation == "thread":
            raise InvalidInput(
                f"nodes_per_trial={self.nodes_per_trial}: expected isolation='process', since each rank is a process"
            )
        if (nodes := self.min_nodes) is not None and nodes > self.nodes_per_trial:
            raise InvalidInput(f"min_nodes={nodes}: expected at most nodes_per_trial, which is {self.nodes_per_trial}")
        if isinstance(self.trainable, type):
            require_save_checkpoint(self.trainable, self.checkpoint or Cadence())
        _ = self.objective, self.effective_search
        if self.space is not None:
            check_sample_functions(self.space, self.effective_seed)
        return self

    @property
    def objective(self) -> Objective | None:
        """The metrics by which trials are compared, with their modes; None without a metric."""
        return make_objective(self.metric, self.mode or "min")

    @property
    def effective_search(self) -> Search:
        """The search algorithm; `num_samples`, if set, replaces the algorithm's own number of samples."""
        return with_samples(RandomSearch() if self.search is None else self.search, self.num_samples)

    @property
    def trial_count(self) -> int | None:
        """The total number of trials that the search proposes; None if unknown beforehand."""
        return self.effective_search.trial_count(self.space or {})

    @property
    def effective_seed(self) -> int:
        """The seed of all draws; derived from the experiment's name by default."""
        return seed_from_name(self.experiment) if self.seed is None else self.seed

    @property
    def resources(self) -> Resources | None:
        """The resources of each trial; None if the plan has none."""
        resources = self.resources_per_trial
        return None if resources is None else parse_resources(resources, "resources_per_trial")

    @property
    def time_budget(self) -> timedelta | None:
        """The time after which this run saves all trials and ends; None if the run has no time budget."""
        return None if self.time_budget_seconds is None else timedelta(seconds=self.time_budget_seconds)

    @property
    def failure_policy(self) -> FailurePolicy:
        """The retry budgets of each trial."""
        return self.failures or FailurePolicy()

    @property
    def effective_rerun_errored(self) -> RerunErrored:
        """Whether errored trials are retried; `"only"` means that no other trials run."""
        return self.rerun_errored or self.resume.rerun_errored

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """The identity of the trainable; see `make_trainable_fingerprint`."""
        return make_trainable_fingerprint(self.trainable)

    @property
    def source_digest(self) -> str:
        """The digest of the trainable's source; empty if the source is not available."""
        return compute_source_digest(self.trainable)

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings that the journal stores: all values that have a JSON form and differ from their default.

        `list_unstored_options` returns the options without a JSON form, which a resume by name alone cannot restore.
        """
        fields = type(self).model_fields
        defaults = {name: fields[name].default for name, option in OPTIONS.items() if option.stored}
        values = {name: value for name in defaults if (value := getattr(self, name)) is not None}
        json_values = {name: _option_to_json(name, value) for name, value in values.items() if value != defaults[name]}
        in_code = [name for name, value in json_values.items() if value is None]
        return {
            **{name: value for name, value in json_values.items() if value is not None},
            **({"only_in_code": in_code} if in_code else {}),
            **({"code": self.source_digest} if self.source_digest else {}),
        }

    def with_changes(self, **changes: Any) -> Self:
        """Return the plan with changed fields, without validating them again."""
        return self.model_copy(update=changes)


OPTIONS: Mapping[str, Option] = {
    name: option
    for name, field in SearchPlan.model_fields.items()
    for option in field.metadata
    if isinstance(option, Option)
}
"""The `Option` of each field, by name, in the order of the fields."""


def _option_to_json(name: str, value: Any) -> object | None:
    """Return the value of an option as JSON; None if the value has no JSON form."""
    try:
        match value:
            case Value():
                return value.model_dump(mode="json")
            case Scheduler() | Search():
                return component_to_json(value)
            case _ if name == "sync":
                return cast("object", value.parameters())
            case _ if name == "stop":
                return stop_to_json(value)
            case _ if name == "space":
                samples = (item for item in find_domains(value) if isinstance(item, SampleFrom))
                are_named = all(find_import_name(item.function) is not None for item in samples if item.path is None)
                return space_to_json(value) if are_named else None
            case _ if name == "trainable":
                return value if isinstance(value, str) else find_import_name(value)
            case _ if name == "callbacks":
                import_paths = [item if isinstance(item, str) else find_import_name(item) for item in value]
                return None if None in import_paths else import_paths
            case _:
                return canonical_json(value) and value
    except (InvalidInput, TypeError, ValueError):
        return None


def list_unstored_options(settings: Mapping[str, object]) -> list[str]:
    """Return the names of the passed parameters that the journal could not store as JSON."""
    names: Any = settings.get("only_in_code", ())
    return list(names)


def plan_from_settings(
    settings: Mapping[str, object], run: Mapping[str, Any], changed: Mapping[str, Any]
) -> SearchPlan:
    """Return an experiment's plan from its stored settings, this run's own parameters (`run`), and the user's changes.

    Raises:
        InvalidInput: the journal could not store a parameter, and `changed` does not have it. Only callbacks may be
            missing, because they affect no decision.
    """
    names = dict.fromkeys([*({"trainable"} - settings.keys()), *list_unstored_options(settings)])
    if missing_names := [name for name in names if name not in changed and name != "callbacks"]:
        raise InvalidInput(
            f"the journal of experiment {run['experiment']!r} does not store {', '.join(map(repr, missing_names))}, "
            "for lack of an import path or a JSON form. Pass what is missing to pt.resume (--trainable MODULE:NAME), "
            "or call pt.tune(...) again with the same arguments and experiment name"
        )
    stored_values = {name: value for name, value in settings.items() if name in OPTIONS and OPTIONS[name].stored}
    if "search" in changed or run.get("samples_per_run") is not None:
        stored_values.pop("num_samples", None)  # the stored total is that of another search, or this run raises it
    return SearchPlan(**{**stored_values, **run, **changed})
