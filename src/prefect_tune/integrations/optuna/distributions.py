"""Convert domains to Optuna's distributions, and values between the two.

A parameter has the name that `prefect_tune.core.search.space` gives it: `lr`, `model.depth`, `model?1.depth`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from statistics import NormalDist
from typing import TypeAlias, assert_never

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from prefect_tune.core.search.config_inverse import Found, Misfit, read
from prefect_tune.core.search.domains import Choice, Domain, Grid, SampleFrom
from prefect_tune.core.search.numeric_domains import Float, Integer, Normal
from prefect_tune.core.search.space import below, option

Scalar: TypeAlias = bool | int | float | str | None
_NEVER = "\0"  # no configuration has it


@dataclass(frozen=True, slots=True)
class Parameters:
    """What Optuna knows of a configuration, in the order in which it was asked."""

    values: Mapping[str, Scalar]
    distributions: Mapping[str, BaseDistribution]
    is_whole: bool
    """Whether the space would ask for nothing more."""


def parameters_in(
    space: Mapping[str, object], domains: Mapping[str, Domain], config: Mapping[str, object]
) -> Parameters | None:
    """Return the parameters of `config`, which may be of another space; None if one of them is outside of this space.

    `domains` are those of the space, in the order in which they are asked. What the space has and the configuration
    has not is left out, and what only the configuration has.
    """
    found: dict[str, object] = {}
    is_whole = True
    for reading in read(space, config):
        match reading:
            case Found(name, _, drawn) if name in domains:
                found[name] = drawn
            case Found():
                pass  # a function computes it from the others
            case Misfit(name) if name in domains:
                return None
            case _:
                is_whole = False
    asked = {name: domain for name, domain in domains.items() if name in found}
    values = {name: stored_as(domain, found[name]) for name, domain in asked.items()}
    return Parameters(values, {name: distribution_of(domain) for name, domain in asked.items()}, is_whole)


def named_domains(node: object, name: str = "") -> Iterator[tuple[str, Domain]]:
    """Every domain of a space that can be drawn, with the name of its parameter; those of options included."""
    match node:
        case dict():
            for key, child in node.items():
                yield from named_domains(child, below(name, key))
        case list():
            for index, child in enumerate(node):
                yield from named_domains(child, below(name, index))
        case Choice() | Grid():
            yield name, node
            for index, child in enumerate(node.options):
                yield from named_domains(child, option(name, index))
        case Float() | Integer() | Normal():
            yield name, node
        case _:
            return


def without_functions(space: Mapping[str, object]) -> dict[str, object]:
    """Return what is drawn of a space, in the order of the alphabet: a journal keeps no other."""
    return {
        key: _rebuilt(space[key], lambda node: None if isinstance(node, SampleFrom) else node) for key in sorted(space)
    }


def without_the_undrawn(space: Mapping[str, object]) -> dict[str, object]:
    """Return a space that reads nothing as an option of weight 0."""
    return {key: _rebuilt(node, _undrawn_blanked) for key, node in space.items()}


def _rebuilt(node: object, change: Callable[[object], object]) -> object:
    match node:
        case dict():
            return {key: _rebuilt(node[key], change) for key in sorted(node)}
        case list():
            return [_rebuilt(child, change) for child in node]
        case Choice(options, weights):
            return change(Choice(tuple(_rebuilt(each, change) for each in options), weights))
        case _:
            return change(node)


def _undrawn_blanked(node: object) -> object:
    if not isinstance(node, Choice):
        return node
    drawable = _drawable(node)
    blanked = [each if index in drawable else _NEVER for index, each in enumerate(node.options)]
    return Choice(tuple(blanked), node.weights)


def distribution_of(domain: Domain) -> BaseDistribution:
    """Return Optuna's name for a domain: a normal number is drawn by its quantile, a choice by its options.

    A step on a logarithmic scale is unknown to Optuna: it draws without, and `drawn_from` rounds.
    """
    match domain:
        case Float(low, high, "linear", q) if q is not None:
            return FloatDistribution(_multiple(low, q), _multiple(high, q), step=q)
        case Float(low, high, scale):
            return FloatDistribution(low, high, log=scale == "log")
        case Integer(low, _, "log"):
            return IntDistribution(low, domain.last, log=True)
        case Integer(low):
            return IntDistribution(low, low + (domain.last - low) // domain.step * domain.step, step=domain.step)
        case Normal():
            return FloatDistribution(0.0, 1.0)
        case Choice() | Grid():
            labels = _labels(domain)
            return CategoricalDistribution([labels[index] for index in _drawable(domain)])
        case _:
            assert_never(domain)


def drawn_from(domain: Domain, stored: Scalar) -> float:
    """Return the value, or the index of the option, that a value of Optuna's stands for."""
    match domain:
        case Float(_, high, _, None):
            return min(_number(stored), math.nextafter(high, -math.inf))
        case Float() | Integer():
            return domain.nearest(_number(stored))
        case Normal():
            return domain.at(_number(stored))
        case Choice() | Grid():
            return _labels(domain).index(stored)
        case _:
            assert_never(domain)


def stored_as(domain: Domain, drawn: object) -> Scalar:
    """Return Optuna's value for one of a configuration, or for the index of an option."""
    match domain:
        case Float(_, _, "linear", q) if q is not None:
            return _multiple(_number(drawn), q)
        case Float():
            return _number(drawn)
        case Integer():
            return int(_number(drawn))
        case Normal(mean, sd):
            return NormalDist(mean, sd).cdf(_number(drawn))
        case Choice() | Grid():
            return _labels(domain)[int(_number(drawn))]
        case _:
            assert_never(domain)


def _labels(domain: Choice | Grid) -> list[Scalar]:
    """Return Optuna's choices: the options, or their indexes if Optuna cannot distinguish the options."""
    plain = [each for each in domain.options if each is None or isinstance(each, bool | int | float | str)]
    if len(plain) == len(domain.options) == len(set(plain)):
        return list(plain)
    return list(range(len(domain.options)))


def _drawable(domain: Choice | Grid) -> list[int]:
    """Return the indexes of the options with a weight other than 0. Samplers ignore other weights."""
    weights = domain.weights if isinstance(domain, Choice) else None
    return [index for index in range(len(domain.options)) if weights is None or weights[index] > 0]


def _multiple(value: float, q: float) -> float:
    """Return the multiple of `q` as it is written: Optuna compares 0.1 * 3 and 0.3 by their decimals."""
    step = Decimal(repr(q))
    return float((Decimal(repr(value)) / step).to_integral_value() * step)


def _number(value: object) -> float:
    assert isinstance(value, int | float), value  # noqa: S101 - `read` and Optuna's distributions have made sure
    return value
