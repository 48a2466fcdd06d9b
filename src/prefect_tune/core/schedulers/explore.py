"""How PBT explores: a configuration like another one, with some of its values perturbed or drawn anew."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from prefect_tune.core import draws
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.hints import did_you_mean_or_has
from prefect_tune.core.numbers import is_number
from prefect_tune.core.search.domains import Branch, Choice, Grid, SampleFrom, frozen
from prefect_tune.core.search.ranges import Float, Integer, Normal, Range

__all__ = ["Explorer", "Mutations", "as_mutations", "require_names_of"]

Mutations: TypeAlias = "Mapping[str, Range | Choice | SampleFrom | Mutations]"
"""What may change, by its place in the configuration."""
Config: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Explorer:
    """Perturbs a value by one of `factors`, or draws it anew with `resample_probability`.

    Of a list of options the next or the one before it is taken; at an end that can be the same. What lands outside
    of its domain is brought to its end; a whole number, or one with a step `q`, moves by a step at least.
    Functions are computed last, from the configuration as it is then.
    """

    mutations: Mutations
    resample_probability: float
    factors: Sequence[float]
    seed: int

    def explored(self, config: Config, *purpose: str | int) -> Config:
        """Return a configuration near `config`: the same for the same `purpose`."""
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
        again = draws.uniform(self.seed, *purpose, "again") < self.resample_probability
        factor = self.factors[draws.integer(len(self.factors), self.seed, *purpose, "factor")]
        if not again and isinstance(domain, Choice) and value in domain.options:
            return _neighbour(value, domain, factor)
        if not again and not isinstance(domain, Choice) and is_number(value):
            return _perturbed(value, domain, factor)
        return _drawn(domain, draws.uniform(self.seed, *purpose, "value"))


def as_mutations(mutations: Mapping[str, object], where: str) -> Mutations:
    """Return what a user wrote for `hyperparam_mutations`: domains, lists of options, functions, or more of the same.

    Raises:
        InvalidInput: it is empty, or holds something else.
    """
    if not mutations:
        raise InvalidInput(f"{where}: expected at least one value that may change, found none")
    return {name: _as_mutation(mutation, f"{where}[{name!r}]") for name, mutation in mutations.items()}


def require_names_of(space: Mapping[str, object], mutations: Mutations, where: str) -> None:
    """Return if all that mutates has its place in `space`; else a trial that goes on has a value that nobody reads.

    Raises:
        InvalidInput: something has none.
    """
    _require_below([space], mutations, where)


def _require_below(nodes: Sequence[object], mutations: Mutations, where: str) -> None:
    there = list(chain.from_iterable(map(_spaces_in, nodes)))
    if any(isinstance(each, SampleFrom) for each in there):
        return  # what it computes is known by then only
    spaces = [each for each in there if isinstance(each, Mapping)]
    known = {name for each in spaces for name in each}
    for name, mutation in mutations.items():
        if name not in known:
            hint = did_you_mean_or_has(name, sorted(known))
            raise InvalidInput(f"{where}[{name!r}]: expected what the space has at this place; {hint}")
        if isinstance(mutation, Mapping):
            below = [each[name] for each in spaces if name in each]
            _require_below(below, mutation, f"{where}[{name!r}]")


def _spaces_in(node: object) -> Iterator[object]:
    """Yield what may stand here: the node, or each option of a choice."""
    if isinstance(node, Branch):
        for each in node.options:
            yield from _spaces_in(each)
    else:
        yield node


def _as_mutation(mutation: object, where: str) -> Range | Choice | SampleFrom | Mutations:
    if isinstance(mutation, Mapping):
        return as_mutations(mutation, where)
    if isinstance(mutation, Float | Integer | Normal | SampleFrom):
        return mutation
    if isinstance(mutation, Choice | list | tuple):
        return _as_choice(mutation if isinstance(mutation, Choice) else Choice(tuple(mutation)), where)
    if callable(mutation):
        return _as_function(mutation, where)
    raise InvalidInput(
        f"{where}: expected a domain (pt.uniform(...)), a list of options, a function of the configuration, or a "
        f"dict of these, found {mutation!r}"
    )


def _as_choice(choice: Choice, where: str) -> Choice:
    if any(map(_holds_a_domain, choice.options)):
        raise InvalidInput(f"{where}: expected plain options, which have neighbours, found {choice!r}")
    return choice


def _holds_a_domain(option: object) -> bool:
    if isinstance(option, Mapping):
        return any(map(_holds_a_domain, option.values()))
    if isinstance(option, list):
        return any(map(_holds_a_domain, option))
    return isinstance(option, Range | Choice | Grid | SampleFrom)


def _as_function(function: Callable[..., object], where: str) -> SampleFrom:
    """A function that takes nothing, as Ray's do, can only be drawing by itself, and a resume would draw another."""
    try:
        inspect.signature(function).bind({})
    except TypeError as unfit:
        raise InvalidInput(
            f"{where}: expected a function of the configuration, found one that cannot be called with it ({unfit}). "
            "What is random belongs into a domain: pt.uniform(...), pt.choice(...)"
        ) from unfit
    return SampleFrom(function)


def _inner(value: object) -> Config:
    return value if isinstance(value, Mapping) else {}


def _drawn(domain: Range | Choice, quantile: float) -> object:
    drawn = domain.at(quantile)
    return domain.options[int(drawn)] if isinstance(domain, Choice) else drawn


def _neighbour(value: object, domain: Choice, factor: float) -> object:
    """The options are taken to have an order: a factor above 1 is the next one."""
    index = domain.options.index(value) + (1 if factor > 1 else -1)
    return domain.options[min(max(index, 0), len(domain.options) - 1)]


def _perturbed(value: float, domain: Range, factor: float) -> float:
    moved = domain.nearest(value * factor)
    step = domain.step if isinstance(domain, Integer) else domain.q
    if step is None or moved != value:
        return moved
    return domain.nearest(value + math.copysign(step, factor - 1))


def _with_computed(config: Config, mutations: Mutations, whole: Config, where: str = "config") -> Config:
    """Fill in what functions compute from the whole configuration."""
    changed = dict(config)
    for name, mutation in mutations.items():
        if isinstance(mutation, Mapping):
            changed[name] = _with_computed(_inner(config.get(name)), mutation, whole, f"{where}.{name}")
        elif isinstance(mutation, SampleFrom):
            changed[name] = frozen(mutation.function(whole), f"{where}.{name}")
    return changed
