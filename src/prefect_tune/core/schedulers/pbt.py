"""Population based training (Jaderberg et al. 2017)."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import ceil
from typing import Any, ClassVar, TypeAlias

from prefect_tune.core import seeded_random
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.metrics import convert_fields, is_at_least, is_count, is_number, plain_keys, plain_scalar
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.base import (
    Continue,
    Decision,
    Exploit,
    Pause,
    Schedule,
    Scheduler,
    TrialReport,
    loss_of,
    metric_arguments,
    reported_value,
)
from prefect_tune.core.search.domains import (
    Branch,
    Choice,
    Float,
    Integer,
    Normal,
    Range,
    SampleFrom,
    domains_in,
    frozen,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.space import is_same
from prefect_tune.core.shown_text import did_you_mean_or_has
from prefect_tune.core.values import TrialId

# PBT's explore step: copy a configuration and perturb or resample some of its values.

Mutations: TypeAlias = "Mapping[str, Range | Choice | SampleFrom | Mutations]"
"""The values that may change, nested as in the configuration."""
Config: TypeAlias = Mapping[str, object]

_LAST_QUANTILE = math.nextafter(1, 0)
_CONSTANT = "a mutation of it changes nothing. Leave it out here, and set the value in the space"


@dataclass(frozen=True, slots=True)
class Explorer:
    """Multiplies a value by one of `factors`, or resamples it with `resample_probability`.

    For a list of options, the next or the previous option is taken; at an end it may stay the same. A value outside
    of its domain is clipped to the domain's end; an integer, or a number with a step `q`, moves by at least one step.
    The domain decides on the type, not the present value: real numbers become floats, only `randint` and its like give
    integers. A real 0, which no factor changes, is drawn anew. Functions are computed last, from the changed
    configuration.
    """

    mutations: Mutations
    resample_probability: float
    factors: Sequence[float]
    seed: int

    def explored(self, config: Config, *purpose: str | int) -> Config:
        """Return a configuration near `config`; deterministic for the same `purpose`."""
        drawn = self._with_draws(config, self.mutations, *purpose)
        return _with_computed(drawn, self.mutations, drawn)

    def _with_draws(self, config: Config, mutations: Mutations, *purpose: str | int) -> Config:
        changed = dict(config)
        for name, mutation in mutations.items():
            value = config.get(name)
            if isinstance(mutation, Mapping):
                changed[name] = self._with_draws(_inner(value), mutation, *purpose, name)
            elif not isinstance(mutation, SampleFrom):
                changed[name] = self._changed(value, mutation, *purpose, name)
        return changed

    def _changed(self, value: object, domain: Range | Choice, *purpose: str | int) -> object:
        again = seeded_random.uniform(self.seed, *purpose, "again") < self.resample_probability
        factor = self.factors[seeded_random.integer(len(self.factors), self.seed, *purpose, "factor")]
        drawn = domain.at(seeded_random.uniform(self.seed, *purpose, "value"))
        if isinstance(domain, Choice):  # its options are taken as ordered
            places = (index for index, option in enumerate(domain.options) if is_same(option, value))
            if again or (place := next(places, None)) is None:
                return domain.options[int(drawn)]
            neighbor = place + (1 if factor > 1 else -1)
            return domain.options[min(max(neighbor, 0), len(domain.options) - 1)]
        step = domain.step if isinstance(domain, Integer) else domain.q
        if again or not is_number(value) or not (value or step):
            return drawn
        moved = domain.nearest(value * factor)
        if step is not None and moved == value:
            return domain.nearest(value + math.copysign(step, factor - 1))
        return moved


def as_mutations(mutations: Mapping[str, object], where: str) -> Mutations:
    """Return the user's `hyperparam_mutations`, validated: domains, lists of options, functions, or nested mappings.

    Raises:
        InvalidInput: it is empty, or holds another kind of value.
    """
    if not mutations:
        raise InvalidInput(f"{where}: expected at least one value that may change, found none")
    named = plain_keys(mutations, where)
    return {name: _as_mutation(mutation, f"{where}[{name!r}]") for name, mutation in named.items()}


def require_names_of(nodes: Sequence[object], mutations: Mutations, where: str) -> None:
    """Require that every mutation names a parameter of a space in `nodes`: the trainable would read no other value.

    Raises:
        InvalidInput: a mutation does not.
    """
    there = list(chain.from_iterable(map(_spaces_in, nodes)))
    if any(isinstance(each, SampleFrom) for each in there):
        return  # its value is only known when it is computed
    spaces = [each for each in there if isinstance(each, Mapping)]
    known = {name for each in spaces for name in each}
    for name, mutation in mutations.items():
        if name not in known:
            hint = did_you_mean_or_has(name, sorted(known))
            raise InvalidInput(f"{where}[{name!r}]: expected a parameter of the space at this place; {hint}")
        if isinstance(mutation, Mapping):
            below = [each[name] for each in spaces if name in each]
            require_names_of(below, mutation, f"{where}[{name!r}]")


def _spaces_in(node: object) -> Iterator[object]:
    """Yield the possible nodes at this place: the node, or each option of a choice or grid."""
    if isinstance(node, Branch):
        for each in node.options:
            yield from _spaces_in(each)
    else:
        yield node


def _as_mutation(mutation: object, where: str) -> Range | Choice | SampleFrom | Mutations:
    if isinstance(mutation, Mapping):
        return as_mutations(mutation, where)
    if isinstance(mutation, Float | Integer | Normal | SampleFrom):
        if not isinstance(mutation, Normal | SampleFrom) and mutation.at(0) == mutation.at(_LAST_QUANTILE):
            raise InvalidInput(f"{where}: expected a domain of at least two values, found {mutation!r}: {_CONSTANT}")
        return mutation
    if isinstance(mutation, Choice | list | tuple):
        choice = mutation if isinstance(mutation, Choice) else Choice(tuple(mutation))
        if any(any(domains_in(option)) for option in choice.options):
            raise InvalidInput(f"{where}: expected options that are plain values, found {choice!r}")
        if all(is_same(option, choice.options[0]) for option in choice.options):
            raise InvalidInput(f"{where}: expected at least two different options, found {choice!r}: {_CONSTANT}")
        return choice
    if callable(mutation):
        try:
            inspect.signature(mutation).bind({})
        except TypeError as unfit:  # also one without a parameter, as in Ray: it can only draw, and not the same twice
            raise InvalidInput(
                f"{where}: expected a function of the configuration, found one that cannot be called with it "
                f"({unfit}). For random values use a domain: pt.uniform(...), pt.choice(...)"
            ) from unfit
        return SampleFrom(mutation)
    raise InvalidInput(
        f"{where}: expected a domain (pt.uniform(...)), a list of options, a function of the configuration, or a "
        f"dict of these, found {mutation!r}"
    )


def _inner(value: object) -> Config:
    return value if isinstance(value, Mapping) else {}


def _with_computed(config: Config, mutations: Mutations, whole: Config, where: str = "config") -> Config:
    """Return `config` with the values that functions compute from the whole configuration."""
    changed = dict(config)
    for name, mutation in mutations.items():
        if isinstance(mutation, Mapping):
            changed[name] = _with_computed(_inner(config.get(name)), mutation, whole, f"{where}.{name}")
        elif isinstance(mutation, SampleFrom):
            changed[name] = frozen(mutation.function(whole), f"{where}.{name}")
    return changed


Mutation: TypeAlias = (
    Range | Choice | SampleFrom | Sequence[object] | Callable[[Mapping[str, Any]], object] | Mapping[str, Any]
)
"""What a value may become: a domain, options, a function of the configuration; or a nested mapping of these."""


@dataclass(frozen=True, slots=True)
class PBT(Scheduler):
    """Train a population in parallel; bad trials continue from clones of good ones, with a perturbed configuration.

    `perturbation_interval` steps after its last comparison, and not before `burn_in_period`, a trial commits a
    checkpoint and is compared with the last results of the others that have not ended. If it is among the worst
    `quantile_fraction`, it takes over the checkpoint and the configuration of one of the best `quantile_fraction`, and
    the step of that one's last comparison. The values of that configuration named in `hyperparam_mutations` change:
    they are resampled with `resample_probability`, and otherwise multiplied by one of the `perturbation_factors`. Its
    last result counts until the next one, as in Ray, but nothing is taken over from it.

    `hyperparam_mutations` has the shape of the configuration: domains (`pt.uniform(...)`), lists of options, or
    functions of the configuration, nested as it is. A value never leaves its domain, and has its type: `uniform` gives
    floats, also where the present value is a whole number; `randint` gives integers. A value of 0 in a domain of real
    numbers, which no factor changes, is drawn anew. The initial configurations come from the search, not from here.

    It is asynchronous: no trial waits for a comparison. A population larger than its slots takes turns of one interval,
    the trial with the fewest steps first; paused trials are compared, too. A trial that ends (a stopper:
    `stop={"step": 100}`) leaves the population.

    Args:
        perturbation_interval: steps between two comparisons of a trial.
        hyperparam_mutations: the parameters that change, and what they may become.
        quantile_fraction: the share of the population that takes over, and the share that it takes over from.
        resample_probability: how often a value is drawn anew, and not multiplied.
        perturbation_factors: one of them is drawn for each value that is multiplied.
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
        convert_fields(self)
        if not (is_count(self.perturbation_interval, 1) and is_count(self.burn_in_period, 0)):
            raise InvalidInput(
                f"{self}: expected perturbation_interval >= 1 and burn_in_period >= 0, both in whole steps"
            )
        shares = is_at_least(self.quantile_fraction, 0) and is_at_least(self.resample_probability, 0)
        if not (shares and self.quantile_fraction <= 0.5 and self.resample_probability <= 1):
            raise InvalidInput(f"{self}: expected quantile_fraction from 0 to 0.5, resample_probability from 0 to 1")
        factors = tuple(map(plain_scalar, self.perturbation_factors))
        object.__setattr__(self, "perturbation_factors", factors)
        if not (factors and all(is_at_least(each, 0) for each in factors)):
            raise InvalidInput(f"{self}: expected perturbation_factors >= 0, at least one")
        if set(factors) == {1} and not self.resample_probability:
            raise InvalidInput(
                f"{self}: expected a factor other than 1, or a resample_probability above 0: these change no value"
            )
        as_mutations(self.hyperparam_mutations, "PBT: hyperparam_mutations")

    def begin(self, objective: Objective, seed: int) -> Schedule:
        mutations = as_mutations(self.hyperparam_mutations, "PBT: hyperparam_mutations")
        return _PbtSchedule(
            self, Explorer(mutations, self.resample_probability, self.perturbation_factors, seed), objective
        )

    def require_serves(self, space: Mapping[str, object]) -> None:
        """Return if every mutation is in `space`, or `space` is empty: then the search has its own."""
        if space:
            where = "PBT: hyperparam_mutations"
            require_names_of([space], as_mutations(self.hyperparam_mutations, where), where)


@dataclass(slots=True)
class _Member:
    """A trial of the population."""

    number: int
    config: Mapping[str, object]
    decided: int = 0
    """The step of the last decision in the history of its present weights: after an exploit, of that of its source."""
    exploits: int = 0
    has_just_exploited: bool = False
    """Whether it has exploited another trial since it got its slot."""
    loss: float | None = None
    """Its last loss; None before the first one, and while it is not in the population."""
    is_evaluated: bool = False
    """Whether `loss` is of its present weights, so that others may exploit it."""
    paused_at: int | None = None


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
        self._no_more = False

    def added(self, trial: TrialId, config: Mapping[str, object]) -> None:
        self._no_more = False
        if trial not in self._members:
            self._members[trial] = _Member(len(self._members), config)

    def milestone(self, trial: TrialId, step: int) -> int | None:
        due = self._members[trial].decided + self._rule.perturbation_interval
        return max(due, self._rule.burn_in_period, step + 1)

    def decide(self, report: TrialReport) -> Decision:
        loss, step = loss_of(report, self._objective), report.report.step
        member = self._members[report.trial]
        member.config = member.config if report.config is None else report.config
        if step <= member.decided:
            return Continue() if member.paused_at is None else self._pause(report.trial, member)
        self._release(report.trial, member)  # it reports, so it was not paused, even if the last answer was a pause
        member.decided = step
        self._rank(report.trial, member, loss)
        better = self._better(report.trial, member, loss)
        return self._exploit(member, loss, better) if better else self._pause(report.trial, member)

    def resume_next(self) -> TrialId | None:
        return self._paused[0][2] if self._no_more and self._paused else None

    def resumed(self, trial: TrialId) -> None:
        member = self._members[trial]
        if member.paused_at is not None:  # else it continues after an exploit, in the same slot
            member.has_just_exploited = False
        self._release(trial, member)

    def exhausted(self) -> None:
        self._no_more = True

    def ended(self, trial: TrialId) -> None:
        member = self._members[trial]
        self._release(trial, member)
        self._unrank(trial, member)

    def _rank(self, trial: TrialId, member: _Member, loss: float) -> None:
        self._unrank(trial, member)
        member.loss, member.is_evaluated = loss, True
        insort(self._ranking, (loss, member.number, trial))

    def _unrank(self, trial: TrialId, member: _Member) -> None:
        if member.loss is not None:
            del self._ranking[bisect_left(self._ranking, (member.loss, member.number, trial))]
            member.loss = None

    def _better(self, trial: TrialId, member: _Member, loss: float) -> tuple[float, TrialId] | None:
        """Return loss and id of the trial to clone; None if this one is good enough, or another's turn is due."""
        if member.has_just_exploited and self._paused:
            return None
        size = len(self._ranking)
        quantile = min(ceil(size * self._rule.quantile_fraction), size // 2)
        if bisect_left(self._ranking, (loss, member.number, trial)) < size - quantile:
            return None
        sources = [each for each in self._ranking[:quantile] if self._members[each[2]].is_evaluated]
        if not sources:
            return None
        drawn = seeded_random.integer(len(sources), self._explorer.seed, "pbt-source", member.number, member.exploits)
        best, _, source = sources[drawn]
        return best, source

    def _exploit(self, member: _Member, loss: float, better: tuple[float, TrialId]) -> Exploit:
        """Let the trial continue from another. It keeps its rank until its new weights are evaluated."""
        best, source = better
        reason = make_reason(
            "exploit",
            **metric_arguments(loss, self._objective),
            step=member.decided,
            source_value=reported_value(best, self._objective),
            source_step=self._members[source].decided,
        )
        member.config = self._explorer.explored(self._members[source].config, "pbt", member.number, member.exploits)
        member.exploits += 1
        member.decided = self._members[source].decided
        member.has_just_exploited = True
        member.is_evaluated = False
        return Exploit(source=source, config=member.config, reason=reason)

    def _pause(self, trial: TrialId, member: _Member) -> Pause:
        if member.paused_at is None:
            member.paused_at = member.decided
            insort(self._paused, (member.paused_at, member.number, trial))
        return Pause(reason=make_reason("turn-over", step=member.paused_at))

    def _release(self, trial: TrialId, member: _Member) -> None:
        if member.paused_at is not None:
            del self._paused[bisect_left(self._paused, (member.paused_at, member.number, trial))]
            member.paused_at = None
