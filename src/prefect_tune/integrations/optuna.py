"""All samplers and pruners of Optuna, as searches and schedulers that a resume continues exactly.

In Optuna, all trials share one random generator, and a sampler stores notes on trials in Optuna's storage. Here, a new
copy of the sampler, seeded by the experiment's seed and the number of the trial, draws each proposal. To rebuild the
notes, a resume replays the trials in their order. So proposals depend only on the journal.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TypeAlias

try:
    import optuna as _optuna  # noqa: F401 - for the error below
except ModuleNotFoundError as error:
    if error.name != "optuna":
        raise
    raise ImportError(
        "OptunaSearch and OptunaPruner need Optuna 5: pip install 'prefect-tune[optuna]'", name="optuna"
    ) from error

from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    NopPruner,
    SuccessiveHalvingPruner,
    ThresholdPruner,
    WilcoxonPruner,
)
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from prefect_tune.core.display_text import pluralize
from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.metrics import convert_scalar_fields
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import Continue, Decision, Schedule, Scheduler, Stop, TrialReport
from prefect_tune.core.search.base import Exhausted, Proposed, Search, SearchState, Space, Suggestion
from prefect_tune.core.search.domains import Domain, convert_to_dicts, has_grid
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import UNLIMITED, validate_num_samples
from prefect_tune.core.search.space import (
    are_json_equal,
    get_fixed_parameters,
    includes_json,
    resolve_space,
    validate_initial_points,
    validate_space,
)
from prefect_tune.core.values import StepReport, TrialId
from prefect_tune.integrations.optuna_study import (
    SeededSampler,
    Study,
    TrialParameters,
    check_sampler,
    drop_functions,
    extract_parameters,
    from_optuna_value,
    get_objective_values,
    is_exhaustive,
    iter_domains,
    make_distribution,
    make_sampler,
    mask_undrawable_options,
    silencing_optuna,
    to_optuna_value,
)

__all__ = ["Constraints", "OptunaPruner", "OptunaSearch"]

# A scheduler that stops trials by one of Optuna's pruners.


@dataclass(frozen=True, slots=True)
class OptunaPruner(Scheduler):
    """Stops a trial if a pruner of Optuna prunes it by the first metric of the objective. `ASHA` has an example.

    Successive halving, Hyperband and threshold pruners are called at the steps at which they may prune a trial. All
    other pruners are called at each step.
    """

    pruner: BasePruner

    def __post_init__(self) -> None:
        pruner: object = self.pruner
        if not isinstance(pruner, BasePruner):
            value = f"the class {pruner.__name__}" if isinstance(pruner, type) else repr(pruner)
            example = "pt.OptunaPruner(optuna.pruners.MedianPruner())"
            raise InvalidInput(f"OptunaPruner: expected a pruner of Optuna, as in {example}, found {value}")

    def begin(self, objective: Objective, seed: int) -> Schedule:
        if isinstance(self.pruner, WilcoxonPruner) and find_spec("scipy") is None:
            raise InvalidInput("WilcoxonPruner: it needs scipy: pip install scipy")
        return _OptunaSchedule(copy.deepcopy(self.pruner), objective, seed)


class _OptunaSchedule(Schedule):
    """An Optuna study with the reports of all trials. Pruners draw no random numbers, so a resume repeats decisions."""

    def __init__(self, pruner: BasePruner, objective: Objective, seed: int) -> None:
        self._pruner = pruner
        self._objective = Objective(metrics=objective.metrics[:1], modes=objective.modes[:1])
        # Hyperband derives a trial's bracket from the study's name and the trial's number; so put the seed in the name.
        self._study = Study(f"prefect-tune-{seed}", self._objective.modes)
        self._study.pruner = pruner
        self._trials = self._study.trial_storage
        self._ids: dict[TrialId, int] = {}
        self._stops: dict[TrialId, Stop] = {}

    def on_trial_added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        del config
        if trial in self._ids:
            self._trials.reopen_trial(self._ids[trial])
            self._stops.pop(trial, None)
        else:
            self._ids[trial] = self._trials.add_running_trial()._trial_id  # noqa: SLF001 - there is no public name

    def next_milestone(self, trial: TrialId, step: int) -> int | None:
        del trial
        match self._pruner:
            case NopPruner():
                return None
            case SuccessiveHalvingPruner(
                _min_resource=int(first), _reduction_factor=factor, _min_early_stopping_rate=rate
            ):
                return _find_next_rung_step(first * factor**rate, factor, step)
            case HyperbandPruner(_min_resource=first, _max_resource=int(), _reduction_factor=factor):
                return _find_next_rung_step(first, factor, step)  # these steps include the rungs of all brackets
            case ThresholdPruner(_n_warmup_steps=first, _interval_steps=interval):
                return max(first, first + ((step - first) // interval + 1) * interval)
            case _:  # other pruners are called at each step
                return step + 1

    def decide(self, report: TrialReport) -> Decision:
        trial_id, step = self._ids[report.trial], report.report.step
        last_step = self._trials.get_trial(trial_id).last_step
        if last_step is None or step > last_step:
            where = f"trial {report.trial!r}, step {step}"
            (value,) = get_objective_values(self._objective, report.report.metrics, where)
            self._trials.set_trial_intermediate_value(trial_id, step, value)
            with silencing_optuna():
                is_pruned = self._pruner.prune(self._study, self._trials.get_trial(trial_id))
            if is_pruned:
                name, metric = type(self._pruner).__name__, self._objective.metrics[0]
                reason = make_reason("pruner", name=name, metric=metric, value=float(value))
                self._stops[report.trial] = Stop(reason=reason)
        return self._stops.get(report.trial) or Continue()

    def on_trial_ended(self, trial: TrialId) -> None:
        stored = self._trials.get_trial(self._ids[trial])
        if stored.last_step is None:
            self._trials.set_trial_state_values(self._ids[trial], TrialState.FAIL)
            return
        state = TrialState.PRUNED if trial in self._stops else TrialState.COMPLETE
        self._trials.set_trial_state_values(self._ids[trial], state, [stored.intermediate_values[stored.last_step]])


def _find_next_rung_step(first: int, factor: int, step: int) -> int:
    rung = first
    while rung <= step:
        rung *= factor
    return rung


Constraints: TypeAlias = Sequence[str] | Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[float]]
"""Names of metrics, or a function of (config, metrics). A trial is feasible if each metric or result is at most 0."""

_log = logging.getLogger("prefect_tune")
_STUDY_NAME = "prefect-tune"
_EXHAUSTED = Exhausted("the sampler has proposed every configuration")
_FOREIGN_TRIAL = "a trial of another experiment"
_NO_VALUES: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class OptunaSearch(Search):
    """Proposes configurations with a sampler of Optuna, by default TPE. `RandomSearch` has an example.

    The seed is the experiment's; the sampler's own seed has no effect. The sampler receives each metric of the
    objective. With a single metric, trials that a scheduler stopped count as pruned, and the sampler also receives the
    reports at milestones. A trial counts as failed if its last report lacks a metric of the objective or constraints.
    """

    sampler: BaseSampler | Mapping[str, Mapping[str, object]] | str | None = None
    """A sampler, a name in `optuna.samplers`, or a name with options: `{"TPESampler": {"n_startup_trials": 20}}`."""
    num_samples: int | None = field(default=None, metadata={"example": 40})
    """The number of trials; -1 for no limit. It may be None if the sampler ends by itself (grid, brute force)."""
    points_to_evaluate: Sequence[Mapping[str, object]] = ()
    """Configurations to try first; they count as samples. The sampler draws missing values."""
    constraints: Constraints | None = field(default=None, kw_only=True)
    """Only for TPE, GP, NSGA-II, NSGA-III. A function must be deterministic and return a constant number of values."""

    def __post_init__(self) -> None:
        convert_scalar_fields(self)
        validate_num_samples(self.num_samples)
        object.__setattr__(self, "sampler", convert_to_dicts(self.sampler))
        object.__setattr__(self, "constraints", convert_to_dicts(self.constraints))
        object.__setattr__(self, "points_to_evaluate", validate_initial_points(self.points_to_evaluate))
        make_sampler(self.sampler)

    def begin(self, space: Space, objective: Objective | None, seed: int) -> SearchState:
        if objective is None:
            raise InvalidInput("OptunaSearch: expected a metric, found none: set metric and mode")
        sampler = make_sampler(self.sampler)
        if self.num_samples is None and not is_exhaustive(sampler):
            raise InvalidInput(f"OptunaSearch: expected num_samples, since {type(sampler).__name__} never ends")
        copied = validate_space(space)
        if has_grid(copied):
            raise InvalidInput(
                "OptunaSearch: expected a space without grid_search, which a sampler cannot try completely: use choice "
                "or RandomSearch"
            )
        check_sampler(sampler, dict(iter_domains(copied)), len(objective.metrics))
        return _OptunaSearchState(self, copied, objective, SeededSampler(sampler, seed))

    def trial_count(self, space: Space) -> int | None:
        del space
        return None if self.num_samples == UNLIMITED else self.num_samples


class _OptunaSearchState(SearchState):
    """An Optuna study with the trials of the journal and the sampler's notes on them."""

    def __init__(
        self, search: OptunaSearch, space: Mapping[str, object], objective: Objective, sampler: SeededSampler
    ) -> None:
        self._search = search
        self._space = space
        self._readable_space = mask_undrawable_options(space)
        self._drawn_space = drop_functions(space)
        self._domains = dict(iter_domains(self._drawn_space))
        self._queued_points = [(point, get_fixed_parameters(point, space)) for point in search.points_to_evaluate]
        self._objective = objective
        self._sampler = sampler
        self._has_one_metric = len(objective.metrics) == 1
        for point, fixed in self._queued_points:  # Optuna's grid sampler cannot draw missing values of a point
            if sampler.is_grid and self._domains.keys() - fixed.keys():
                raise InvalidInput(f"points_to_evaluate: expected values for all parameters of a grid, found {point!r}")
        self._study = Study(_STUDY_NAME, objective.modes)
        self._trials = self._study.trial_storage
        self._trials_by_number: dict[int, tuple[int, Mapping[str, object]]] = {}  # Optuna's id and the configuration
        self._tried_keys: set[object] = set()
        self._stopped_numbers: set[int] = set()
        self._is_exhausted = False

    def suggest(self, number: int) -> Suggestion:
        count = self._search.num_samples
        if count is not None and number >= count != UNLIMITED:
            return Exhausted(pluralize(count, "sample", "samples"))
        if self._is_exhausted:
            return _EXHAUSTED
        fixed = self._queued_points[0][1] if self._queued_points else _NO_VALUES
        trial, config = self._propose(number, fixed)
        if not fixed and self._sampler.is_exhaustive and _get_proposal_key(trial) in self._tried_keys:
            self._is_exhausted = True  # no proposal is left; the trial that `ask` has added stays unused in the study
            return _EXHAUSTED
        self._pop_point(config)
        parameters = extract_parameters(self._readable_space, self._domains, config)
        assert parameters is not None, config  # noqa: S101 - drawn from the same space
        self._store_trial(number, config, trial, parameters)
        return Proposed(config)

    def restore_trial(self, number: int, config: Mapping[str, object]) -> None:
        fixed = self._pop_point(config)
        parameters = extract_parameters(self._readable_space, self._domains, config)
        if parameters is None or not (parameters.is_complete or self._sampler.accepts_partial_trials):
            return
        if not self._sampler.needs_replay:
            self._store_trial(number, config, self._trials.add_running_trial(), parameters)
            return
        trial, proposed = self._propose(number, fixed)
        if self._sampler.is_exhaustive and not are_json_equal(proposed, config):
            trial.system_attrs = {}  # another search proposed `config`, so this sampler's proposal is untried
        self._store_trial(number, config, trial, parameters)

    def on_report(self, number: int, report: StepReport) -> None:
        if number in self._trials_by_number and self._has_one_metric:  # Optuna takes no reports of several metrics
            trial_id, _ = self._trials_by_number[number]
            (value,) = get_objective_values(self._objective, report.metrics, f"trial {number}, step {report.step}")
            self._reopen_trial(number)
            self._trials.set_trial_intermediate_value(trial_id, report.step, value)

    def on_trial_stopped(self, number: int) -> None:
        self._stopped_numbers.add(number)

    def on_trial_ended(self, number: int, report: StepReport | None, *, failed: bool) -> None:
        was_stopped = number in self._stopped_numbers
        self._stopped_numbers.discard(number)
        if number not in self._trials_by_number:
            return
        self._reopen_trial(number)
        if failed or report is None:
            self._tell_sampler(number, TrialState.FAIL, None)
            return
        state, values = TrialState.PRUNED, None
        try:
            self.on_report(number, report)
            self._store_metrics(*self._trials_by_number[number], report, f"trial {number}")
            if not (was_stopped and self._has_one_metric):
                values = get_objective_values(self._objective, report.metrics, f"trial {number}, step {report.step}")
                state = TrialState.COMPLETE
        except BadMetric as error:
            _log.warning("the search counts this trial as failed: %s", error)
            state, values = TrialState.FAIL, None
        self._tell_sampler(number, state, values)

    def add_prior_trial(self, config: Mapping[str, object], report: StepReport, *, stopped: bool) -> bool:
        """Add a trial of another experiment. The sampler did not propose it, and has no notes on it."""
        parameters = extract_parameters(self._readable_space, self._domains, config)
        if parameters is None or not (parameters.is_complete or self._sampler.accepts_partial_trials):
            return False
        try:
            values = get_objective_values(self._objective, report.metrics, _FOREIGN_TRIAL)
        except BadMetric:
            return False
        trial_id = self._trials.replace_parameters(self._trials.add_running_trial(), parameters, {})._trial_id  # noqa: SLF001 - no public name
        is_pruned = stopped and self._has_one_metric
        if self._has_one_metric:
            self._trials.set_trial_intermediate_value(trial_id, report.step, values[0])
        with suppress(BadMetric):  # the other experiment may lack the metrics of these constraints
            self._store_metrics(trial_id, config, report, _FOREIGN_TRIAL)
        state = TrialState.PRUNED if is_pruned else TrialState.COMPLETE
        self._trials.set_trial_state_values(trial_id, state, None if is_pruned else values)
        return True

    def _pop_point(self, config: Mapping[str, object]) -> Mapping[str, object]:
        """Remove the queued point that `config` contains, and return the values that the point fixes."""
        matches = (index for index, (point, _) in enumerate(self._queued_points) if includes_json(config, point))
        index = next(matches, None)
        return _NO_VALUES if index is None else self._queued_points.pop(index)[1]

    def _propose(self, number: int, fixed: Mapping[str, object]) -> tuple[FrozenTrial, dict[str, object]]:
        """Seed the sampler for this trial, and return its proposal: a stored trial, and the configuration."""
        drawn = dict(fixed)

        def draw(name: str, domain: Domain) -> float:
            # Suggest fixed values, too, because Optuna needs them before it draws parameters that depend on them.
            stored = trial._suggest(name, make_distribution(domain))  # noqa: SLF001 - like suggest_float and others
            value = drawn.setdefault(name, from_optuna_value(domain, stored))
            assert isinstance(value, int | float), name  # noqa: S101 - fixed values come from the same space
            return value

        self._study.sampler = self._sampler.prepare_proposal_sampler(number)
        with silencing_optuna():
            if fixed:
                domains = self._domains
                point = {name: to_optuna_value(domains[name], it) for name, it in fixed.items() if name in domains}
                self._study.enqueue_trial(point)
            trial = self._study.ask()
            resolve_space(self._drawn_space, draw)
        return self._trials.get_trial(trial._trial_id), resolve_space(self._space, draw, drawn)  # noqa: SLF001 - Optuna's id

    def _store_trial(
        self, number: int, config: Mapping[str, object], trial: FrozenTrial, parameters: TrialParameters
    ) -> None:
        """Store the trial in the study, in the same way for a new proposal and for a trial of the journal."""
        notes = trial.system_attrs if self._sampler.needs_replay else {}
        stored = self._trials.replace_parameters(trial, parameters, notes)
        self._trials_by_number[number] = (stored._trial_id, config)  # noqa: SLF001 - there is no public name
        self._tried_keys.add(_get_proposal_key(stored))

    def _reopen_trial(self, number: int) -> None:
        """Set the trial to running if it had ended and was resumed."""
        if self._trials.reopen_trial(self._trials_by_number[number][0]):
            self._sampler.reset_search_space_cache()

    def _store_metrics(self, trial_id: int, config: Mapping[str, object], last: StepReport, trial_name: str) -> None:
        """Store the trial's metrics, which functions in the sampler may read, and the trial's constraint violations."""
        for name, value in last.metrics.items():
            self._trials.set_trial_user_attr(trial_id, name, value)
        constraints = self._search.constraints
        if constraints is None:
            return
        values: Mapping[str, object] = last.metrics
        names = constraints
        if callable(constraints):
            try:
                values = {str(index): value for index, value in enumerate(constraints(config, last.metrics))}
            except KeyError as error:
                problem = f"there is no {error}; the report has {sorted(last.metrics)}"
                raise BadMetric(f"{trial_name}, step {last.step}: constraints: {problem}") from error
            names = list(values)
        assert not callable(names)  # noqa: S101 - mypy cannot infer it
        objective = Objective(metrics=tuple(names), modes=("min",) * len(names))
        violations = objective.losses(values, f"{trial_name}, step {last.step}: constraints")
        self._trials.set_constraint_violations(trial_id, dict(zip(names, violations, strict=True)))

    def _tell_sampler(self, number: int, state: TrialState, values: Sequence[float] | None) -> None:
        trial = self._trials.get_trial(self._trials_by_number[number][0])
        if self._sampler.is_exhaustive:  # skip `after_trial`, which would only search the grid again
            self._trials.set_trial_state_values(trial._trial_id, state, values)  # noqa: SLF001 - no public name
            return
        self._study.sampler = self._sampler.prepare_result_sampler(number)
        self._study.tell(trial.number, values, state)
        self._is_exhausted = self._study.is_stopped


def _get_proposal_key(trial: FrozenTrial) -> object:
    """Return the key of a proposal; an exhaustive sampler proposes each key once."""
    return trial.system_attrs.get("grid_id", tuple(trial.params.items()))
