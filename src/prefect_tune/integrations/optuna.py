"""Every sampler and every pruner of Optuna as a search and a scheduler that a resume continues exactly.

In Optuna one random generator serves all trials, and a sampler keeps its notes on trials in Optuna's storage. Here a
fresh copy of the sampler draws each proposal, seeded by the experiment's seed and the number of the trial. A resume
rebuilds the notes: it replays the trials in their order. So proposals depend only on the journal.
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
    import optuna as _optuna  # noqa: F401 - only to say what to install where it is missing
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

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.metrics import convert_fields
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import Continue, Decision, Schedule, Scheduler, Stop, TrialReport
from prefect_tune.core.search.base import Exhausted, Proposals, Proposed, Search, Space, Suggestion
from prefect_tune.core.search.domains import Domain, as_dicts, has_grid
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import ENDLESS, require_samples
from prefect_tune.core.search.space import fixed_by, holds, is_same, resolve, valid_points, valid_space
from prefect_tune.core.shown_text import plural
from prefect_tune.core.values import StepReport, TrialId
from prefect_tune.integrations.optuna_study import (
    Parameters,
    SeededSampler,
    Study,
    check_sampler,
    distribution_of,
    drawn_from,
    ends_by_itself,
    named_domains,
    parameters_in,
    quiet,
    sampler_from,
    stored_as,
    values_of,
    without_functions,
    without_the_undrawn,
)

__all__ = ["Constraints", "OptunaPruner", "OptunaSearch"]

# A scheduler that stops trials by any of Optuna's pruners.


@dataclass(frozen=True, slots=True)
class OptunaPruner(Scheduler):
    """Stops a trial where a pruner of Optuna would prune it, by the first metric of the objective.

    Successive halving, Hyperband and thresholds are called at the steps that they compare, other pruners at every step.
    """

    pruner: BasePruner

    def __post_init__(self) -> None:
        given: object = self.pruner
        if not isinstance(given, BasePruner):
            found = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
            example = "pt.OptunaPruner(optuna.pruners.MedianPruner())"
            raise InvalidInput(f"OptunaPruner: expected a pruner of Optuna, as in {example}, found {found}")

    def begin(self, objective: Objective, seed: int) -> Schedule:
        if isinstance(self.pruner, WilcoxonPruner) and find_spec("scipy") is None:
            raise InvalidInput("WilcoxonPruner: it needs scipy: pip install scipy")
        return _OptunaSchedule(copy.deepcopy(self.pruner), objective, seed)


class _OptunaSchedule(Schedule):
    """An Optuna study with the reports of all trials. Pruners draw no random numbers."""

    def __init__(self, pruner: BasePruner, objective: Objective, seed: int) -> None:
        self._pruner = pruner
        self._objective = Objective(metrics=objective.metrics[:1], modes=objective.modes[:1])
        # By the name of its study and its number, Hyperband deals a trial to a bracket.
        self._study = Study(f"prefect-tune-{seed}", self._objective.modes)
        self._study.pruner = pruner
        self._trials = self._study.trials_stored
        self._ids: dict[TrialId, int] = {}
        self._stops: dict[TrialId, Stop] = {}

    def added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        del config
        if trial in self._ids:
            self._trials.reopen(self._ids[trial])
            self._stops.pop(trial, None)
        else:
            self._ids[trial] = self._trials.begin()._trial_id  # noqa: SLF001 - its one name in a storage

    def milestone(self, trial: TrialId, step: int) -> int | None:
        del trial
        match self._pruner:
            case NopPruner():
                return None
            case SuccessiveHalvingPruner(
                _min_resource=int(first), _reduction_factor=factor, _min_early_stopping_rate=rate
            ):
                return _next_rung(first * factor**rate, factor, step)
            case HyperbandPruner(_min_resource=first, _max_resource=int(), _reduction_factor=factor):
                return _next_rung(first, factor, step)  # of its brackets, taken together
            case ThresholdPruner(_n_warmup_steps=first, _interval_steps=interval):
                return max(first, first + ((step - first) // interval + 1) * interval)
            case _:  # it looks at each value
                return step + 1

    def decide(self, report: TrialReport) -> Decision:
        trial_id, step = self._ids[report.trial], report.report.step
        last_step = self._trials.get_trial(trial_id).last_step
        if last_step is None or step > last_step:
            (value,) = values_of(self._objective, report.report.metrics, f"trial {report.trial!r}, step {step}")
            self._trials.set_trial_intermediate_value(trial_id, step, value)
            with quiet():
                is_pruned = self._pruner.prune(self._study, self._trials.get_trial(trial_id))
            if is_pruned:
                result = {"metric": self._objective.metrics[0], "value": float(value)}
                reason = make_reason("pruner", name=type(self._pruner).__name__, **result)
                self._stops[report.trial] = Stop(reason=reason)
        return self._stops.get(report.trial) or Continue()

    def ended(self, trial: TrialId) -> None:
        frozen = self._trials.get_trial(self._ids[trial])
        if frozen.last_step is None:
            self._trials.set_trial_state_values(self._ids[trial], TrialState.FAIL)
            return
        state = TrialState.PRUNED if trial in self._stops else TrialState.COMPLETE
        self._trials.set_trial_state_values(self._ids[trial], state, [frozen.intermediate_values[frozen.last_step]])


def _next_rung(first: int, factor: int, step: int) -> int:
    rung = first
    while rung <= step:
        rung *= factor
    return rung


Constraints: TypeAlias = Sequence[str] | Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[float]]
"""Names of metrics, or a function of (config, metrics): a trial is feasible where each number is at most 0."""

_log = logging.getLogger("prefect_tune")
_NAME = "prefect-tune"
_OVER = Exhausted("the sampler has proposed every configuration")
_FOREIGN = "a trial of another experiment"
_NOTHING: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class OptunaSearch(Search):
    """Proposes what a sampler of Optuna proposes, by default its TPE.

    The seed is that of the experiment; the sampler's own seed has no effect. The sampler sees each metric of the
    objective. With a single metric it also sees the reports at milestones, and trials that a scheduler stopped as
    pruned ones. A trial whose last report lacks a metric of the objective, or one that a constraint needs, is a failed
    trial to the sampler.
    """

    sampler: BaseSampler | Mapping[str, Mapping[str, object]] | str | None = None
    """Also by its name in `optuna.samplers`, with its options: `{"TPESampler": {"n_startup_trials": 20}}`."""
    num_samples: int | None = field(default=None, metadata={"example": 40})
    """How many trials there are; -1 for no limit. None only where the sampler ends by itself (grid, brute force)."""
    points_to_evaluate: Sequence[Mapping[str, object]] = ()
    """Configurations that come first, and count as samples. What one leaves out is sampled."""
    constraints: Constraints | None = field(default=None, kw_only=True)
    """For TPE, GP, NSGA-II and NSGA-III. A function must be deterministic, and always return as many numbers."""

    def __post_init__(self) -> None:
        convert_fields(self)
        require_samples(self.num_samples)
        object.__setattr__(self, "sampler", as_dicts(self.sampler))
        object.__setattr__(self, "constraints", as_dicts(self.constraints))
        object.__setattr__(self, "points_to_evaluate", valid_points(self.points_to_evaluate))
        sampler_from(self.sampler)

    def begin(self, space: Space, objective: Objective | None, seed: int) -> Proposals:
        if objective is None:
            raise InvalidInput("OptunaSearch: expected a metric to search by, found none: set metric and mode")
        sampler = sampler_from(self.sampler)
        if self.num_samples is None and not ends_by_itself(sampler):
            raise InvalidInput(f"OptunaSearch: expected num_samples, since {type(sampler).__name__} never ends")
        copied = valid_space(space)
        if has_grid(copied):
            raise InvalidInput(
                "OptunaSearch: expected a space without grid_search, which a sampler cannot try whole: take choice, "
                "or RandomSearch"
            )
        check_sampler(sampler, dict(named_domains(copied)), len(objective.metrics))
        return _OptunaProposals(self, copied, objective, SeededSampler(sampler, seed))

    def trial_count(self, space: Space) -> int | None:
        del space
        return None if self.num_samples == ENDLESS else self.num_samples


class _OptunaProposals(Proposals):
    """An Optuna study with the trials of the journal, and with the sampler's notes on them."""

    def __init__(
        self, search: OptunaSearch, space: Mapping[str, object], objective: Objective, sampler: SeededSampler
    ) -> None:
        self._search = search
        self._space = space
        self._readable = without_the_undrawn(space)
        self._functionless = without_functions(space)
        self._domains = dict(named_domains(self._functionless))
        self._waiting = [(point, fixed_by(point, space)) for point in search.points_to_evaluate]
        self._objective = objective
        self._sampler = sampler
        self._has_one_metric = len(objective.metrics) == 1
        for point, fixed in self._waiting:  # Optuna's grid sampler cannot draw the missing values of a point
            if sampler.draws_nothing and self._domains.keys() - fixed.keys():
                raise InvalidInput(f"points_to_evaluate: expected values for all parameters of a grid, found {point!r}")
        self._study = Study(_NAME, objective.modes)
        self._trials = self._study.trials_stored
        self._seen: dict[int, tuple[int, Mapping[str, object]]] = {}  # by number: Optuna's id, and the configuration
        self._tried: set[object] = set()
        self._stopped: set[int] = set()
        self._is_over = False

    def suggest(self, number: int) -> Suggestion:
        count = self._search.num_samples
        if count is not None and number >= count != ENDLESS:
            return Exhausted(plural(count, "sample", "samples"))
        if self._is_over:
            return _OVER
        fixed = self._waiting[0][1] if self._waiting else _NOTHING
        trial, config = self._ask(number, fixed)
        if not fixed and self._sampler.ends_by_itself and _identity(trial) in self._tried:
            self._is_over = True  # Optuna keeps the unused trial; the sampler is not asked again
            return _OVER
        self._take(config)
        known = parameters_in(self._readable, self._domains, config)
        assert known is not None, config  # noqa: S101 - drawn from this very space
        self._keep(number, config, trial, known)
        return Proposed(config)

    def recall(self, number: int, config: Mapping[str, object]) -> None:
        fixed = self._take(config)
        known = parameters_in(self._readable, self._domains, config)
        if known is None or not (known.is_whole or self._sampler.sees_parts):
            return
        if not self._sampler.is_replayed_by_asking:
            self._keep(number, config, self._trials.begin(), known)
            return
        trial, proposed = self._ask(number, fixed)
        if self._sampler.ends_by_itself and not is_same(proposed, config):
            trial.system_attrs = {}  # another search proposed it: the queued point is still to be tried
        self._keep(number, config, trial, known)

    def reported(self, number: int, report: StepReport) -> None:
        if number in self._seen and self._has_one_metric:  # Optuna has no values on the way for several
            trial_id, _ = self._seen[number]
            (value,) = values_of(self._objective, report.metrics, f"trial {number}, step {report.step}")
            self._reopen(number)
            self._trials.set_trial_intermediate_value(trial_id, report.step, value)

    def stopped(self, number: int) -> None:
        self._stopped.add(number)

    def ended(self, number: int, last: StepReport | None, *, failed: bool) -> None:
        was_stopped = number in self._stopped
        self._stopped.discard(number)
        if number not in self._seen:
            return
        self._reopen(number)
        if failed or last is None:
            self._tell(number, TrialState.FAIL, None)
            return
        state, values = TrialState.PRUNED, None
        try:
            self.reported(number, last)
            self._describe(*self._seen[number], last, f"trial {number}")
            if not (was_stopped and self._has_one_metric):
                values = values_of(self._objective, last.metrics, f"trial {number}, step {last.step}")
                state = TrialState.COMPLETE
        except BadMetric as missing:
            _log.warning("the search counts this trial as failed: %s", missing)
            state, values = TrialState.FAIL, None
        self._tell(number, state, values)

    def learn(self, config: Mapping[str, object], last: StepReport, *, stopped: bool) -> bool:
        """Add a trial of another experiment; the sampler, which did not propose it, has no notes on it."""
        known = parameters_in(self._readable, self._domains, config)
        if known is None or not (known.is_whole or self._sampler.sees_parts):
            return False
        try:
            values = values_of(self._objective, last.metrics, _FOREIGN)
        except BadMetric:
            return False
        trial_id = self._trials.correct(self._trials.begin(), known, {})._trial_id  # noqa: SLF001 - its one name
        pruned = stopped and self._has_one_metric
        if self._has_one_metric:
            self._trials.set_trial_intermediate_value(trial_id, last.step, values[0])
        with suppress(BadMetric):  # the other experiment may lack the metrics of these constraints
            self._describe(trial_id, config, last, _FOREIGN)
        state = TrialState.PRUNED if pruned else TrialState.COMPLETE
        self._trials.set_trial_state_values(trial_id, state, None if pruned else values)
        return True

    def _take(self, config: Mapping[str, object]) -> Mapping[str, object]:
        """Return the values that the point of `config` fixes, and remove that point from the waiting ones."""
        given = (index for index, (point, _) in enumerate(self._waiting) if holds(config, point))
        index = next(given, None)
        return _NOTHING if index is None else self._waiting.pop(index)[1]

    def _ask(self, number: int, fixed: Mapping[str, object]) -> tuple[FrozenTrial, dict[str, object]]:
        """Let the sampler, seeded for this number, propose the parameters in the order of the space."""
        drawn = dict(fixed)

        def draw(name: str, domain: Domain) -> float:
            # Also for fixed values: Optuna must know them before it draws parameters that depend on them.
            stored = trial._suggest(name, distribution_of(domain))  # noqa: SLF001 - as suggest_float and the others do
            value = drawn.setdefault(name, drawn_from(domain, stored))
            assert isinstance(value, int | float), name  # noqa: S101 - what is fixed was read from the same space
            return value

        self._study.sampler = self._sampler.proposing(number)
        with quiet():
            if fixed:
                domains = self._domains
                stored = {name: stored_as(domains[name], value) for name, value in fixed.items() if name in domains}
                self._study.enqueue_trial(stored)
            trial = self._study.ask()
            resolve(self._functionless, draw)
        return self._trials.get_trial(trial._trial_id), resolve(self._space, draw, drawn)  # noqa: SLF001 - Optuna's id

    def _keep(self, number: int, config: Mapping[str, object], trial: FrozenTrial, known: Parameters) -> None:
        """Store the trial in the study as a resume would, whether it was proposed now or read from the journal."""
        notes = trial.system_attrs if self._sampler.is_replayed_by_asking else {}
        corrected = self._trials.correct(trial, known, notes)
        self._seen[number] = (corrected._trial_id, config)  # noqa: SLF001 - its one name in a storage
        self._tried.add(_identity(corrected))

    def _reopen(self, number: int) -> None:
        """Set an ended trial to running again: it was resumed."""
        if self._trials.reopen(self._seen[number][0]):
            self._sampler.forget()

    def _describe(self, trial_id: int, config: Mapping[str, object], last: StepReport, whose: str) -> None:
        """Store in the trial its metrics, which the sampler's own functions read, and its constraint violations."""
        for name, value in last.metrics.items():
            self._trials.set_trial_user_attr(trial_id, name, value)
        constraints = self._search.constraints
        if constraints is None:
            return
        given: Mapping[str, object] = last.metrics
        names = constraints
        if callable(constraints):
            try:
                given = {str(index): value for index, value in enumerate(constraints(config, last.metrics))}
            except KeyError as missing:
                said = f"there is no {missing}; the report has {sorted(last.metrics)}"
                raise BadMetric(f"{whose}, step {last.step}: constraints: {said}") from missing
            names = list(given)
        assert not callable(names)  # noqa: S101 - which mypy cannot see
        violations = Objective(metrics=tuple(names), modes=("min",) * len(names)).losses(
            given, f"{whose}, step {last.step}: constraints"
        )
        self._trials.constrain(trial_id, dict(zip(names, violations, strict=True)))

    def _tell(self, number: int, state: TrialState, values: Sequence[float] | None) -> None:
        trial = self._trials.get_trial(self._seen[number][0])
        if self._sampler.ends_by_itself:  # its `after_trial` would only search the grid once more for what is left
            self._trials.set_trial_state_values(trial._trial_id, state, values)  # noqa: SLF001 - its one name
            return
        self._study.sampler = self._sampler.hearing(number)
        self._study.tell(trial.number, values, state)
        self._is_over = self._study.is_stopped


def _identity(trial: FrozenTrial) -> object:
    """What a sampler that ends by itself proposes once."""
    return trial.system_attrs.get("grid_id", tuple(trial.params.items()))
