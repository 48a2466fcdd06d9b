"""Population based training (Jaderberg et al. 2017)."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, TypeAlias

from prefect_tune.core import seeded_random
from prefect_tune.core.display_text import did_you_mean_or_list
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import (
    convert_scalar_fields,
    is_integer_at_least,
    is_number,
    is_number_at_least,
    to_plain_keys,
    to_plain_scalar,
)
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import (
    Continue,
    Decision,
    Exploit,
    Pause,
    Schedule,
    Scheduler,
    TrialReport,
    compute_loss,
    loss_to_metric,
    make_metric_reason_arguments,
)
from prefect_tune.core.search.domains import (
    Branch,
    Choice,
    Float,
    Integer,
    Normal,
    Range,
    SampleFrom,
    find_domains,
    to_plain_node,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.space import are_json_equal
from prefect_tune.core.values import TrialId

# The explore step of PBT: copy a configuration and perturb or resample some of its values.

Mutations: TypeAlias = "Mapping[str, Range | Choice | SampleFrom | Mutations]"
"""How each value may change, nested like the configuration."""
Config: TypeAlias = Mapping[str, object]

_MAX_QUANTILE = math.nextafter(1, 0)
_NO_CHANGE = "this mutation changes nothing. Remove it, and set the value in the space"


@dataclass(frozen=True, slots=True)
class Explorer:
    """Changes a configuration: each value is either resampled (with `resample_probability`) or multiplied by a factor.

    An option is not multiplied, but replaced by the next or previous one; at an end of the list, it may stay. A value
    outside of its domain is moved to the nearest end. An integer, or a number with a step `q`, changes by at least one
    step, except at an end of its domain. Real domains give floats; only `randint` and its variants give integers. A
    real 0 without a step is resampled, since no factor changes it. Functions are called last, with the changed values.
    """

    mutations: Mutations
    resample_probability: float
    factors: Sequence[float]
    seed: int

    def explore(self, config: Config, *purpose: str | int) -> Config:
        """Return a changed copy of `config`. Equal seeds and equal `purpose` arguments give equal random numbers."""
        mutated = self._mutate_config(config, self.mutations, *purpose)
        return _apply_mutation_functions(mutated, self.mutations, mutated)

    def _mutate_config(self, config: Config, mutations: Mutations, *purpose: str | int) -> Config:
        changed = dict(config)
        for name, mutation in mutations.items():
            value = config.get(name)
            if isinstance(mutation, Mapping):
                changed[name] = self._mutate_config(_as_config(value), mutation, *purpose, name)
            elif not isinstance(mutation, SampleFrom):
                changed[name] = self._mutate_value(value, mutation, *purpose, name)
        return changed

    def _mutate_value(self, value: object, domain: Range | Choice, *purpose: str | int) -> object:
        is_resampled = seeded_random.draw_uniform(self.seed, *purpose, "again") < self.resample_probability
        factor = self.factors[seeded_random.draw_integer(len(self.factors), self.seed, *purpose, "factor")]
        drawn = domain.draw_at(seeded_random.draw_uniform(self.seed, *purpose, "value"))
        if isinstance(domain, Choice):  # a factor above 1 selects the next option, any other factor the previous one
            indexes = (index for index, option in enumerate(domain.options) if are_json_equal(option, value))
            if is_resampled or (index := next(indexes, None)) is None:
                return domain.options[int(drawn)]
            neighbor = index + (1 if factor > 1 else -1)
            return domain.options[min(max(neighbor, 0), len(domain.options) - 1)]
        step = domain.step if isinstance(domain, Integer) else domain.q
        if is_resampled or not is_number(value) or not (value or step):
            return drawn
        moved = domain.nearest_value(value * factor)
        if step is not None and moved == value:
            return domain.nearest_value(value + math.copysign(step, factor - 1))
        return moved


def parse_mutations(mutations: Mapping[str, object], where: str) -> Mutations:
    """Parse the user's `hyperparam_mutations`; raise `InvalidInput` if there are none, or if one is not valid."""
    if not mutations:
        raise InvalidInput(f"{where}: expected at least one value that may change, found none")
    by_name = to_plain_keys(mutations, where)
    return {name: _parse_mutation(mutation, f"{where}[{name!r}]") for name, mutation in by_name.items()}


def _require_known_parameters(nodes: Sequence[object], mutations: Mutations, where: str) -> None:
    """Raise if a mutation names a parameter that no space in `nodes` has, since no trainable would read it."""
    possible_nodes = list(chain.from_iterable(map(_iter_possible_nodes, nodes)))
    if any(isinstance(node, SampleFrom) for node in possible_nodes):
        return  # a computed value can contain parameters of any name
    spaces = [node for node in possible_nodes if isinstance(node, Mapping)]
    names = {name for space in spaces for name in space}
    for name, mutation in mutations.items():
        if name not in names:
            hint = did_you_mean_or_list(name, sorted(names))
            raise InvalidInput(f"{where}[{name!r}]: expected a parameter of the space at this place; {hint}")
        if isinstance(mutation, Mapping):
            children = [space[name] for space in spaces if name in space]
            _require_known_parameters(children, mutation, f"{where}[{name!r}]")


def _iter_possible_nodes(node: object) -> Iterator[object]:
    """Yield the nodes that a node may resolve to: itself, or each option of a choice or grid."""
    if isinstance(node, Branch):
        for option in node.options:
            yield from _iter_possible_nodes(option)
    else:
        yield node


def _parse_mutation(mutation: object, where: str) -> Range | Choice | SampleFrom | Mutations:
    if isinstance(mutation, Mapping):
        return parse_mutations(mutation, where)
    if isinstance(mutation, Float | Integer | Normal | SampleFrom):
        if not isinstance(mutation, Normal | SampleFrom) and mutation.draw_at(0) == mutation.draw_at(_MAX_QUANTILE):
            raise InvalidInput(f"{where}: expected a domain of at least two values, found {mutation!r}; {_NO_CHANGE}")
        return mutation
    if isinstance(mutation, Choice | list | tuple):
        choice = mutation if isinstance(mutation, Choice) else Choice(tuple(mutation))
        if any(any(find_domains(option)) for option in choice.options):
            raise InvalidInput(f"{where}: expected options that are plain values, found {choice!r}")
        if all(are_json_equal(option, choice.options[0]) for option in choice.options):
            raise InvalidInput(f"{where}: expected at least two different options, found {choice!r}; {_NO_CHANGE}")
        return choice
    if callable(mutation):
        try:
            inspect.signature(mutation).bind({})
        except TypeError as error:  # such as Ray's functions without parameters, whose numbers are not reproducible
            raise InvalidInput(
                f"{where}: expected a function of the configuration, found one that does not take it as the only "
                f"argument ({error}). For random values, use a domain such as pt.uniform(...) or pt.choice(...)"
            ) from error
        return SampleFrom(mutation)
    raise InvalidInput(
        f"{where}: expected a domain (pt.uniform(...)), a list of options, a function of the configuration, or a "
        f"dict of these, found {mutation!r}"
    )


def _as_config(value: object) -> Config:
    return value if isinstance(value, Mapping) else {}


def _apply_mutation_functions(config: Config, mutations: Mutations, whole: Config, where: str = "config") -> Config:
    """Return `config` with the values that functions compute from the `whole` configuration."""
    changed = dict(config)
    for name, mutation in mutations.items():
        if isinstance(mutation, Mapping):
            changed[name] = _apply_mutation_functions(_as_config(config.get(name)), mutation, whole, f"{where}.{name}")
        elif isinstance(mutation, SampleFrom):
            changed[name] = to_plain_node(mutation.function(whole), f"{where}.{name}")
    return changed


Mutation: TypeAlias = (
    Range | Choice | SampleFrom | Sequence[object] | Callable[[Mapping[str, Any]], object] | Mapping[str, Any]
)
"""The new values of a parameter: a domain, options, a function of the configuration, or a mapping of these."""


@dataclass(frozen=True, slots=True)
class PBT(Scheduler):
    """Train a population in parallel; bad trials continue from clones of good trials, with changed configurations.

    A trial is compared `perturbation_interval` steps after its last comparison, and not before `burn_in_period`. It
    commits a checkpoint, and its result is compared with the last results of all other trials that have not ended. If
    the trial is among the worst `quantile_fraction`, it exploits one of the best `quantile_fraction`: it takes over
    that trial's checkpoint, configuration, and step of the last comparison. Then each value named in
    `hyperparam_mutations` is either resampled (with `resample_probability`) or multiplied by one of the
    `perturbation_factors`. After an exploit, the trial's old result still counts in comparisons, as in Ray, until the
    trial reports a new result; until then, no other trial exploits it.

    `hyperparam_mutations` has the shape of the configuration: domains (`pt.uniform(...)`), lists of options, or
    functions of the configuration, nested in the same way. A value stays in its domain, and has the domain's type:
    `uniform` gives floats, even if the present value is a whole number; `randint` gives integers. A 0 in a real domain
    without a step is resampled, since no factor changes it. The search, not PBT, proposes the initial configurations.

    PBT is asynchronous: no trial waits for a comparison. If there are more trials than slots, trials take turns of one
    interval, the trial with the fewest steps first; paused trials are compared, too. A trial that ends (by a stopper
    such as `stop={"step": 100}`) leaves the population.

    ```python
    scheduler = pt.PBT(perturbation_interval=5, hyperparam_mutations={"lr": pt.loguniform(1e-4, 0.1)})
    ```

    Args:
        perturbation_interval: the number of steps between two comparisons of a trial.
        hyperparam_mutations: the parameters that change, and their possible values.
        quantile_fraction: the share of the worst trials, which exploit, and of the best trials, which are exploited.
        resample_probability: the probability that a value is resampled instead of multiplied.
        perturbation_factors: the factors; one of them is drawn for each multiplied value.
        burn_in_period: the step before which no trial is compared.
    """

    perturbation_interval: int = field(metadata={"example": 5})
    hyperparam_mutations: Mapping[str, Mutation] = field(
        metadata={"example": {"lr": {"loguniform": [1e-4, 0.1]}}, "json": "space"}
    )
    quantile_fraction: float = 0.25
    resample_probability: float = 0.25
    perturbation_factors: tuple[float, ...] = (1.2, 0.8)
    burn_in_period: int = 0

    def __post_init__(self) -> None:
        convert_scalar_fields(self)
        if not (is_integer_at_least(self.perturbation_interval, 1) and is_integer_at_least(self.burn_in_period, 0)):
            raise InvalidInput(f"{self}: expected whole steps: perturbation_interval >= 1, burn_in_period >= 0")
        shares = is_number_at_least(self.quantile_fraction, 0) and is_number_at_least(self.resample_probability, 0)
        if not (shares and self.quantile_fraction <= 0.5 and self.resample_probability <= 1):
            raise InvalidInput(f"{self}: expected quantile_fraction from 0 to 0.5, resample_probability from 0 to 1")
        factors = tuple(map(to_plain_scalar, self.perturbation_factors))
        object.__setattr__(self, "perturbation_factors", factors)
        if not (factors and all(is_number_at_least(factor, 0) for factor in factors)):
            raise InvalidInput(f"{self}: expected perturbation_factors >= 0, at least one")
        if set(factors) == {1} and not self.resample_probability:
            raise InvalidInput(f"{self}: expected a factor other than 1, or resample_probability > 0, to change values")
        parse_mutations(self.hyperparam_mutations, "PBT: hyperparam_mutations")

    def begin(self, objective: Objective, seed: int) -> Schedule:
        mutations = parse_mutations(self.hyperparam_mutations, "PBT: hyperparam_mutations")
        explorer = Explorer(mutations, self.resample_probability, self.perturbation_factors, seed)
        return _PbtSchedule(self, explorer, objective)

    def require_supported_space(self, space: Mapping[str, object]) -> None:
        """Raise if a mutation names no parameter of `space`. Accept an empty space: the search then has its own."""
        if space:
            where = "PBT: hyperparam_mutations"
            _require_known_parameters([space], parse_mutations(self.hyperparam_mutations, where), where)


@dataclass(slots=True)
class _Member:
    """A trial of the population."""

    number: int
    config: Mapping[str, object]
    last_decision_step: int = 0
    """The step of the last decision; after an exploit, the step of the last decision on the source."""
    exploit_count: int = 0
    has_just_exploited: bool = False
    """Whether the trial has exploited another trial since it got its slot."""
    loss: float | None = None
    """The last loss; None before the first loss, and after the trial left the population."""
    is_evaluated: bool = False
    """Whether `loss` belongs to the present weights; if not, no other trial may exploit this trial."""
    paused_at_step: int | None = None


class _PbtSchedule(Schedule):
    """The population, ranked by each trial's last loss."""

    saves_first: ClassVar[bool] = True

    def __init__(self, rule: PBT, explorer: Explorer, objective: Objective) -> None:
        self._rule = rule
        self._explorer = explorer
        self._objective = objective
        self._members: dict[TrialId, _Member] = {}
        self._ranking: list[tuple[float, int, TrialId]] = []
        self._paused: list[tuple[int, int, TrialId]] = []
        self._lacks_new_trials = False

    def on_trial_added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        self._lacks_new_trials = False
        if trial not in self._members:
            self._members[trial] = _Member(len(self._members), config)

    def next_milestone(self, trial: TrialId, step: int) -> int | None:
        next_step = self._members[trial].last_decision_step + self._rule.perturbation_interval
        return max(next_step, self._rule.burn_in_period, step + 1)

    def decide(self, report: TrialReport) -> Decision:
        loss, step = compute_loss(report, self._objective), report.report.step
        member = self._members[report.trial]
        member.config = member.config if report.config is None else report.config
        if step <= member.last_decision_step:
            return Continue() if member.paused_at_step is None else self._pause_trial(report.trial, member)
        self._unpause_trial(report.trial, member)  # a trial that reports is no longer paused
        member.last_decision_step = step
        self._remove_from_ranking(report.trial, member)
        member.loss, member.is_evaluated = loss, True
        insort(self._ranking, (loss, member.number, report.trial))
        if (ranked_source := self._select_source(report.trial, member, loss)) is None:
            return self._pause_trial(report.trial, member)
        source_loss, source_id = ranked_source
        source = self._members[source_id]
        reason = make_reason(
            "exploit",
            **make_metric_reason_arguments(loss, self._objective),
            step=step,
            source_value=loss_to_metric(source_loss, self._objective),
            source_step=source.last_decision_step,
        )
        member.config = self._explorer.explore(source.config, "pbt", member.number, member.exploit_count)
        member.exploit_count, member.last_decision_step = member.exploit_count + 1, source.last_decision_step
        member.has_just_exploited = True
        member.is_evaluated = False  # the trial keeps its rank until its new weights are evaluated
        return Exploit(source=source_id, config=member.config, reason=reason)

    def next_trial_to_resume(self) -> TrialId | None:
        return self._paused[0][2] if self._lacks_new_trials and self._paused else None

    def on_trial_resumed(self, trial: TrialId) -> None:
        member = self._members[trial]
        if member.paused_at_step is not None:  # else the trial has exploited another, and keeps its slot
            member.has_just_exploited = False
        self._unpause_trial(trial, member)

    def on_no_new_trial(self) -> None:
        self._lacks_new_trials = True

    def on_trial_ended(self, trial: TrialId) -> None:
        member = self._members[trial]
        self._unpause_trial(trial, member)
        self._remove_from_ranking(trial, member)

    def _remove_from_ranking(self, trial: TrialId, member: _Member) -> None:
        if member.loss is not None:
            del self._ranking[bisect_left(self._ranking, (member.loss, member.number, trial))]
            member.loss = None

    def _select_source(self, trial: TrialId, member: _Member, loss: float) -> tuple[float, TrialId] | None:
        """Return the loss and the id of the trial that `trial` exploits; None if `trial` does not exploit another."""
        if member.has_just_exploited and self._paused:
            return None
        size = len(self._ranking)
        quantile = min(math.ceil(size * self._rule.quantile_fraction), size // 2)
        if bisect_left(self._ranking, (loss, member.number, trial)) < size - quantile:
            return None
        sources = [entry for entry in self._ranking[:quantile] if self._members[entry[2]].is_evaluated]
        if not sources:
            return None
        purpose = ("pbt-source", member.number, member.exploit_count)
        source_loss, _, source = sources[seeded_random.draw_integer(len(sources), self._explorer.seed, *purpose)]
        return source_loss, source

    def _pause_trial(self, trial: TrialId, member: _Member) -> Pause:
        if member.paused_at_step is None:
            member.paused_at_step = member.last_decision_step
            insort(self._paused, (member.paused_at_step, member.number, trial))
        return Pause(reason=make_reason("turn-over", step=member.paused_at_step))

    def _unpause_trial(self, trial: TrialId, member: _Member) -> None:
        if member.paused_at_step is not None:
            del self._paused[bisect_left(self._paused, (member.paused_at_step, member.number, trial))]
            member.paused_at_step = None
