"""PBT's explore step: copy a configuration and perturb or resample some of its values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from prefect_tune.core import seeded_random
from prefect_tune.core.did_you_mean import did_you_mean_or_has
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.numbers import is_number
from prefect_tune.core.search.domains import Branch, Choice, Grid, SampleFrom, frozen
from prefect_tune.core.search.numeric_domains import Float, Integer, Normal, Range

__all__ = ["Explorer", "Mutations", "as_mutations", "require_names_of"]

Mutations: TypeAlias = "Mapping[str, Range | Choice | SampleFrom | Mutations]"
"""The values that may change, nested as in the configuration."""
Config: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Explorer:
    """Multiplies a value by one of `factors`, or resamples it with `resample_probability`.

    For a list of options, the next or the previous option is taken; at an end it may stay the same. A value outside
    of its domain is clipped to the domain's end; an integer, or a number with a step `q`, moves by at least one step.
    An integer stays one in a domain of real numbers too, as in Ray, if the domain has any.
    Functions are computed last, from the changed configuration.
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
        if not again and isinstance(domain, Choice) and value in domain.options:
            return _neighbor(value, domain, factor)
        if not again and not isinstance(domain, Choice) and is_number(value):
            return _perturbed(value, domain, factor)
        drawn = domain.at(seeded_random.uniform(self.seed, *purpose, "value"))
        return domain.options[int(drawn)] if isinstance(domain, Choice) else _as_whole_as(value, drawn, domain)


def as_mutations(mutations: Mapping[str, object], where: str) -> Mutations:
    """Return the user's `hyperparam_mutations`, validated: domains, lists of options, functions, or nested mappings.

    Raises:
        InvalidInput: it is empty, or holds another kind of value.
    """
    if not mutations:
        raise InvalidInput(f"{where}: expected at least one value that may change, found none")
    return {name: _as_mutation(mutation, f"{where}[{name!r}]") for name, mutation in mutations.items()}


def require_names_of(space: Mapping[str, object], mutations: Mutations, where: str) -> None:
    """Return if every mutation names a parameter of `space`: the trainable would not read any other value.

    Raises:
        InvalidInput: a mutation does not.
    """
    _require_below([space], mutations, where)


def _require_below(nodes: Sequence[object], mutations: Mutations, where: str) -> None:
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
            _require_below(below, mutation, f"{where}[{name!r}]")


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
        raise InvalidInput(f"{where}: expected options that are plain values, found {choice!r}")
    return choice


def _holds_a_domain(option: object) -> bool:
    if isinstance(option, Mapping):
        return any(map(_holds_a_domain, option.values()))
    if isinstance(option, list):
        return any(map(_holds_a_domain, option))
    return isinstance(option, Range | Choice | Grid | SampleFrom)


def _as_function(function: Callable[..., object], where: str) -> SampleFrom:
    """Return the function; refuse one without a parameter, as in Ray: it can only draw, and differently on a resume."""
    try:
        inspect.signature(function).bind({})
    except TypeError as unfit:
        raise InvalidInput(
            f"{where}: expected a function of the configuration, found one that cannot be called with it ({unfit}). "
            "For random values use a domain: pt.uniform(...), pt.choice(...)"
        ) from unfit
    return SampleFrom(function)


def _inner(value: object) -> Config:
    return value if isinstance(value, Mapping) else {}


def _neighbor(value: object, domain: Choice, factor: float) -> object:
    """Return the next option for a factor above 1, else the previous one: the options are taken as ordered."""
    index = domain.options.index(value) + (1 if factor > 1 else -1)
    return domain.options[min(max(index, 0), len(domain.options) - 1)]


def _perturbed(value: float, domain: Range, factor: float) -> float:
    moved = _as_whole_as(value, domain.nearest(value * factor), domain)
    step = domain.step if isinstance(domain, Integer) else domain.q
    if isinstance(value, int):
        step = max(step or 1, 1)
    if step is None or moved != value:
        return moved
    return _as_whole_as(value, domain.nearest(value + math.copysign(step, factor - 1)), domain)


def _as_whole_as(value: object, moved: float, domain: Range) -> float:
    """Return a whole number of the domain next to `moved`, if `value` is one and the domain has one there."""
    if not isinstance(value, int) or isinstance(value, bool):
        return moved
    return next(
        (whole for whole in (round(moved), math.ceil(moved), math.floor(moved)) if domain.contains(whole)), moved
    )


def _with_computed(config: Config, mutations: Mutations, whole: Config, where: str = "config") -> Config:
    """Return `config` with the values that functions compute from the whole configuration."""
    changed = dict(config)
    for name, mutation in mutations.items():
        if isinstance(mutation, Mapping):
            changed[name] = _with_computed(_inner(config.get(name)), mutation, whole, f"{where}.{name}")
        elif isinstance(mutation, SampleFrom):
            changed[name] = frozen(mutation.function(whole), f"{where}.{name}")
    return changed
