"""`SearchPlan`: the parameters of a search, parsed and validated once, and the settings that the journal stores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, InstanceOf, ValidationError, model_validator
from pydantic_core import ErrorDetails

from prefect_tune.blocks import StorageTarget, SyncConfig, resolve_target
from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.failure_policy import FailurePolicy
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.stoppers import Stopper
from prefect_tune.core.models import Value, canonical_json
from prefect_tune.core.resources import Resources, resources_of
from prefect_tune.core.schedulers.base import Scheduler
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.domains import SampleFrom, as_dicts, domains_in
from prefect_tune.core.search.objective import Mode, Objective, objective_of
from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.core.search.space import require_drawable
from prefect_tune.core.search.space_json import space_from_json, space_to_json
from prefect_tune.core.seeded_random import seed_named
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.parameters.argument_checks import (
    existing_limits,
    experiment_name,
    name_of,
    stopper_for,
    valid_trainable,
)
from prefect_tune.parameters.code_fingerprint import code_of
from prefect_tune.parameters.json_specs import scheduler_from, search_from, stop_to_json, to_json, with_samples
from prefect_tune.runtime.load_named import import_path_of, load_named
from prefect_tune.runtime.trainable import require_saves
from prefect_tune.supervisor.trial_spec import Reuse, TrialSpec, pickled_or_path

# `ValidatedParameters`: the base class of the parameters of a flow or task, which are parsed and validated at once.


class ValidatedParameters(Value):
    """Parsed and validated parameters; the fields have the names and defaults of the parameters.

    Raises:
        InvalidInput: a parameter is invalid; the message names it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def __init__(self, **parameters: Any) -> None:
        invalid: Exception | None = None
        try:
            super().__init__(**parameters)
        except ValidationError as error:
            invalid = _first_cause(error)
        if invalid is not None:
            raise invalid  # outside of `except`: pydantic's error would print the values, which may be secret


def _first_cause(invalid: ValidationError) -> Exception:
    """Return the error that a validator raised; else the first of pydantic's: of values it shows only numbers."""
    first = invalid.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, Exception):
        return cause
    return InvalidInput(f"{'.'.join(map(str, first['loc']))}: {first['msg']}{_found(first)}")


def _found(error: ErrorDetails) -> str:
    return f", found {found!r}" if isinstance(found := error["input"], int | float) else ""


# The `resume=` option: whether the experiment must, may or must not exist, and whether errored trials run again.

Presence: TypeAlias = Literal["auto", "must", "never"]
RerunErrored: TypeAlias = bool | Literal["only"]

_PRESENCE: dict[str, Presence] = {"auto": "auto", "must": "must", "remote": "must", "local": "must", "never": "never"}
_ERRORED: dict[str, RerunErrored] = {"errored": True, "errored_only": "only"}
_REFUSED = {
    "prompt": "a flow cannot ask: use 'auto', or 'must' or 'never' for an experiment that has to exist or must not",
    "restart_errored": "a trial never starts from nothing again while it has a checkpoint; 'errored' resumes from it, "
    "and pt.resume(..., fork='name', at=entry) starts from an earlier entry",
}
_REFUSED["restart_errored_only"] = _REFUSED["restart_errored"]


@dataclass(frozen=True, slots=True)
class Resuming:
    """The parsed `resume=` option."""

    presence: Presence = "auto"
    rerun_errored: RerunErrored = False
    local: bool = False
    """Whether the target has to be a folder of this machine."""


def resuming(given: object) -> Resuming:
    """Parse `resume=`: None, True, False, or Ray's words joined by a plus, in upper or lower case.

    Raises:
        InvalidInput: an unknown word, one that is not supported here, or words that contradict each other.
    """
    if given is None or isinstance(given, bool):
        return Resuming("auto" if given is None else "must" if given else "never")
    if not isinstance(given, str):
        raise InvalidInput(f"resume: expected 'auto', 'must' or 'never', found {given!r}")
    words = [word.strip() for word in given.lower().split("+")]
    for word in words:
        if word in _REFUSED:
            raise InvalidInput(f"resume={given!r}: {_REFUSED[word]}")
        if word not in _PRESENCE and word not in _ERRORED:
            known = ", ".join(repr(each) for each in (*_PRESENCE, *_ERRORED))
            raise InvalidInput(f"resume={given!r}: expected True, False, or one of {known}; such as 'auto+errored'")
    presence = {_PRESENCE[word] for word in words if word in _PRESENCE} or {"must"}
    if len(presence) > 1:
        raise InvalidInput(f"resume={given!r}: says both {' and '.join(map(repr, sorted(presence)))}")
    errored = [_ERRORED[word] for word in words if word in _ERRORED]
    return Resuming(presence.pop(), errored[0] if errored else False, local="local" in words)


Function: TypeAlias = Callable[[Mapping[str, Any]], object]
OF_THE_RUN = frozenset(
    {
        "target",
        "experiment",
        "resume",
        "rerun_errored",
        "samples_per_run",
        "time_budget_seconds",
        "on_code_change",
        "resources_total",
    }
)
"""Parameters of one run, which the experiment's journal does not store."""
MOST_SECONDS = 1e10
"""The longest time that a parameter may set, some 300 years: a `timedelta` or a date cannot hold every number."""
_Seconds: TypeAlias = Annotated[float, Field(gt=0, le=MOST_SECONDS)]


def valid_bound(bound: int) -> int:
    """Return the bound on trials that train at once. Raises `InvalidInput` if it is less than 1."""
    if bound < 1:
        raise InvalidInput(f"max_concurrent_trials: expected 1 or more, found {bound}")
    return bound


def space_of(space: object) -> dict[str, object]:
    """Return a space, a mapping or a dataclass, with domain objects in place of their JSON; existing objects stay.

    Raises:
        InvalidInput: it is not a valid space, or a function of a `sample_from` cannot be imported.
    """
    given = cast("Mapping[str, Any]", as_dicts(space))
    return space_from_json(given, load=lambda name: cast("Function", load_named(name, "sample_from")))


class SearchPlan(ValidatedParameters):
    """The parameters of `prefect_tune.flows.tune.tune`, which documents them, parsed and validated.

    The fields have the flow's names and defaults. The journal omits values that equal their default: changing a
    default changes every search that is resumed.

    Raises:
        InvalidInput: a parameter is invalid, or does not fit another one.
    """

    trainable: Annotated[Any, AfterValidator(valid_trainable)]
    target: Annotated[InstanceOf[StorageTarget], BeforeValidator(resolve_target)]
    space: Annotated[Mapping[str, Any], BeforeValidator(space_of)] | None = None
    experiment: Annotated[str, BeforeValidator(experiment_name)] = Field(default=None, validate_default=True)
    metric: str | list[str] | None = None
    mode: Mode | list[Mode] | None = None
    """As given; None means `min`."""
    num_samples: int | None = None
    samples_per_run: int | None = None
    search: Annotated[InstanceOf[Search], BeforeValidator(search_from)] | None = None
    scheduler: Annotated[InstanceOf[Scheduler], BeforeValidator(scheduler_from)] | None = None
    seed: int | None = None
    stop: Any = None
    """As given, for the journal; `stopper` is its meaning."""
    max_concurrent_trials: Annotated[int, AfterValidator(valid_bound)] | None = None
    resources_per_trial: Mapping[str, float] | None = None
    resources_total: Mapping[str, float] | None = None
    time_budget_seconds: _Seconds | None = None
    checkpoint: Cadence | None = None
    retention: Retention | None = None
    failures: FailurePolicy | None = None
    fail_fast: bool = False
    sync: SyncConfig | None = None
    callbacks: list[Any] | None = None
    trials: Literal["tasks", "deployment"] = "tasks"
    trial_deployment: str = "train-trial/train-trial"
    trial_job_variables: Mapping[str, Any] | None = None
    trial_tags: list[str] | None = None
    concurrency_limits: list[str] | None = None
    isolation: Literal["process", "thread"] = "process"
    reuse: Reuse = "auto"
    grace_period_seconds: Annotated[float, Field(ge=0, le=MOST_SECONDS)] = 25
    silence_timeout_seconds: _Seconds | None = None
    resume: Annotated[Resuming, BeforeValidator(resuming)] = Field(default="auto", validate_default=True)
    rerun_errored: RerunErrored = False
    warm_start: list[str] | None = None
    on_code_change: Literal["warn", "refuse"] = "warn"

    @model_validator(mode="after")
    def _require_consistent(self) -> Self:
        """Compute what a plan means: it raises for parameters that contradict each other."""
        if self.trials == "deployment" and self.resources_per_trial is not None:
            raise InvalidInput(
                "resources_per_trial: with trials='deployment' the work pool assigns resources; pass "
                "trial_job_variables={...}, with the variables of its base job template"
            )
        if self.trials != "deployment" and self.trial_job_variables is not None:
            raise InvalidInput("trial_job_variables: they require trials='deployment'")
        if isinstance(self.trainable, type):
            require_saves(self.trainable, self.checkpoint or Cadence())
        _ = self.objective, self.stopper, self.proposer, self.resources
        if self.space is not None:
            require_drawable(self.space, self.seed_of_draws)
        return self

    @property
    def objective(self) -> Objective | None:
        """The metrics that trials are compared by; None without any."""
        return objective_of(self.metric, self.mode or "min")

    @property
    def stopper(self) -> Stopper:
        """The stopper of the trials and of the experiment."""
        return stopper_for(self.stop)

    @property
    def proposer(self) -> Search:
        """The search with the number of samples of this plan: `search` is as it was given."""
        return with_samples(RandomSearch() if self.search is None else self.search, self.num_samples)

    @property
    def trial_count(self) -> int | None:
        """The number of trials that the search proposes in all; None where that is not known beforehand."""
        return self.proposer.trial_count(self.space or {})

    @property
    def seed_of_draws(self) -> int:
        """The seed of all draws: by default derived from the experiment's name."""
        return seed_named(self.experiment) if self.seed is None else self.seed

    @property
    def resources(self) -> Resources | None:
        """The resources of each trial; None if none were given."""
        given = self.resources_per_trial
        return None if given is None else resources_of(given, "resources_per_trial")

    @property
    def time_budget(self) -> timedelta | None:
        """The time after which this run saves and ends."""
        return None if self.time_budget_seconds is None else timedelta(seconds=self.time_budget_seconds)

    @property
    def failure_policy(self) -> FailurePolicy:
        """The retry budgets of each trial."""
        return self.failures or FailurePolicy()

    @property
    def reruns_errored(self) -> RerunErrored:
        """Whether errored trials run again; `only` if no others do."""
        return self.rerun_errored or self.resume.rerun_errored

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """What identifies the trainable: see `name_of`."""
        return name_of(self.trainable)

    @property
    def code(self) -> str:
        """The digest of the trainable's source; empty if the source is not available."""
        return code_of(self.trainable)

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings that the journal stores: all values with a JSON form that differ from the default.

        `only_in_code` names the others: a resume by experiment name alone cannot restore them.
        """
        defaults = {name: each.default for name, each in type(self).model_fields.items() if name not in OF_THE_RUN}
        given = {name: value for name in defaults if (value := getattr(self, name)) is not None}
        said = {name: _json_of(name, value) for name, value in given.items() if value != defaults[name]}
        in_code = [name for name, value in said.items() if value is None]
        return {
            **{name: value for name, value in said.items() if value is not None},
            **({"only_in_code": in_code} if in_code else {}),
            **({"code": self.code} if self.code else {}),
        }

    def extended(self, **changes: Any) -> Self:
        """Return the plan with changed fields, which are not validated again."""
        return self.model_copy(update=changes)


def trial_spec(plan: SearchPlan, stopper: Stopper) -> TrialSpec:
    """Return how the trials of a search are trained, with a placeholder for the trial and its generation.

    Raises:
        InvalidInput: a concurrency limit does not exist, or the trainable cannot be sent to a process.
    """
    silence = plan.silence_timeout_seconds
    return TrialSpec(
        target=plan.target,
        trial=TrialKey(experiment=plan.experiment, generation=1, trial="any"),
        trainable=pickled_or_path(plan.trainable),
        fingerprint=plan.fingerprint,
        stopper=pickled_or_path(stopper),
        needs_curve=stopper.looks_back,
        cadence=plan.checkpoint or Cadence(),
        retention=plan.retention or Retention(),
        sync=plan.sync or SyncConfig(),
        isolation=plan.isolation,
        reuse=plan.reuse,
        grace=timedelta(seconds=plan.grace_period_seconds),
        silence=None if silence is None else timedelta(seconds=silence),
        tags=tuple(plan.trial_tags or ()),
        concurrency_limits=existing_limits(plan.concurrency_limits or ()),
        apart=True,
    )


def _json_of(name: str, value: Any) -> object | None:
    match value:
        case SyncConfig():
            return _or_none(value.parameters)
        case Value():
            return value.model_dump(mode="json")
        case Scheduler() | Search():
            return to_json(value)
        case _ if name == "stop":
            return stop_to_json(value)
        case _ if name == "space":
            return _or_none(lambda: space_to_json(value)) if _has_named_functions(value) else None
        case _ if name == "trainable":
            return value if isinstance(value, str) else import_path_of(value)
        case _ if name == "callbacks":
            named = [each if isinstance(each, str) else import_path_of(each) for each in value]
            return None if None in named else named
        case _:
            return _or_none(lambda: canonical_json(value) and value)


def _has_named_functions(space: dict[str, object]) -> bool:
    """Whether each function of the space is imported under the name that its JSON has."""
    functions = [each.function for each in domains_in(space) if isinstance(each, SampleFrom) and each.path is None]
    return all(import_path_of(each) is not None for each in functions)


def _or_none(write: Callable[[], object]) -> object | None:
    try:
        return write()
    except (InvalidInput, TypeError, ValueError):
        return None


def only_in_code(settings: Mapping[str, object]) -> list[str]:
    """Return the names of the parameters that were passed and that the journal could not store."""
    names: Any = settings.get("only_in_code", ())
    return list(names)


class NotInJournal(InvalidInput):
    """A resume needs parameters that the experiment's journal does not store, and that were not passed."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"resume: the journal of this experiment does not store {', '.join(map(repr, names))}; pass "
            "it here, or call pt.tune(...) as before, with the same experiment name"
        )
        self.names = names


def require_stored(settings: Mapping[str, object], changed: Collection[str]) -> None:
    """Check that the settings hold what a resume needs, apart from what is `changed`. Raises as `from_settings`."""
    missing = [name for name in only_in_code(settings) if name not in changed and name != "callbacks"]
    if "trainable" not in settings and "trainable" not in changed and "trainable" not in missing:
        missing.insert(0, "trainable")
    if missing:
        raise NotInJournal(missing)


def from_settings(settings: Mapping[str, object], run: Mapping[str, Any], changed: Mapping[str, Any]) -> SearchPlan:
    """Return the plan of an experiment from its settings, with the parameters of this `run` and those `changed`.

    Raises:
        NotInJournal: the settings lack a parameter that only the code held, and `changed` does not pass it.
            Missing callbacks are no error: they decide nothing.
    """
    require_stored(settings, changed)
    kept = {name: value for name, value in settings.items() if name in SearchPlan.model_fields}
    if "search" in changed:
        kept.pop("num_samples", None)  # it belonged to the earlier search
    return SearchPlan(**{**kept, **run, **changed})
