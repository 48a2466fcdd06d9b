"""Optuna's side of a search: distributions, samplers and a study in memory, rebuilt from the journal at a resume."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from statistics import NormalDist
from types import FunctionType, ModuleType
from typing import Any, TypeAlias, assert_never, get_args

import numpy as np
import optuna
from optuna import samplers
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler, RandomSampler
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.search_space import IntersectionSearchSpace
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.search.domains import Choice, Domain, Float, Grid, Integer, Normal, SampleFrom
from prefect_tune.core.search.objective import Mode, Objective
from prefect_tune.core.search.space import Found, Misfit, below, option, read
from prefect_tune.core.seeded_random import integer
from prefect_tune.core.shown_text import did_you_mean
from prefect_tune.core.values import Metrics

# Convert domains to Optuna's distributions, and values between the two.
#
# A parameter has the name that `prefect_tune.core.search.space` gives it: `lr`, `model.depth`, `model?1.depth`.

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

    def blanked(node: object) -> object:
        if not isinstance(node, Choice):
            return node
        drawable = _drawable(node)
        options = tuple(each if index in drawable else _NEVER for index, each in enumerate(node.options))
        return Choice(options, node.weights)

    return {key: _rebuilt(node, blanked) for key, node in space.items()}


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


class StudyStorage(InMemoryStorage):
    """Optuna's storage in memory, whose trials can also be corrected."""

    def begin_study(self, name: str, modes: Sequence[Mode]) -> None:
        """Begin the one study there is."""
        directions = [StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE for mode in modes]
        with quiet():
            self._only_study = self.create_new_study(directions, name)

    def begin(self) -> FrozenTrial:
        """Add a running trial that knows nothing yet."""
        return self.get_trial(self.create_new_trial(self._only_study))

    def correct(self, trial: FrozenTrial, known: Parameters, notes: Mapping[str, Any]) -> FrozenTrial:
        """Have a trial know these parameters and the sampler's notes, and nothing else; return it."""
        corrected = copy.copy(trial)
        corrected.params = dict(known.values)
        corrected.distributions = dict(known.distributions)
        corrected.system_attrs = dict(notes)
        self._set_trial(trial._trial_id, corrected)  # noqa: SLF001 - its one name here
        return corrected

    def constrain(self, trial_id: int, values: Mapping[str, float]) -> None:
        """Have the trial know how far each constraint is from being met: met is 0 or less."""
        noted = create_trial(state=TrialState.RUNNING, constraints=dict(values)).system_attrs
        for key, value in noted.items():
            self.set_trial_system_attr(trial_id, key, value)

    def reopen(self, trial_id: int) -> bool:
        """Have a trial run that had ended; return whether it had."""
        trial = copy.copy(self.get_trial(trial_id))
        if not trial.state.is_finished():
            return False
        trial.state, trial.values, trial.datetime_complete = TrialState.RUNNING, None, None
        self._set_trial(trial_id, trial)
        return True


class Study(optuna.Study):
    """A study over `StudyStorage`, driven by asking and telling; its sampler is replaced before each use."""

    def __init__(self, name: str, modes: Sequence[Mode]) -> None:
        self.trials_stored = StudyStorage()
        self.trials_stored.begin_study(name, modes)
        super().__init__(name, self.trials_stored, RandomSampler(seed=0), NopPruner())
        self.is_stopped = False

    def stop(self) -> None:
        """Remember that there is nothing more to try. Optuna's own refuses outside of `optimize`."""
        self.is_stopped = True


def values_of(objective: Objective, metrics: Metrics, where: str) -> tuple[float, ...]:
    """Return the objective's metrics as reported, without turning them into losses, since a sampler may expect them so.

    Raises:
        BadMetric: as `Objective.losses` does.
    """
    losses = objective.losses(metrics, where)
    return tuple(loss if mode == "min" else -loss for loss, mode in zip(losses, objective.modes, strict=True))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna from logging what is no news here, and leave its verbosity as it was."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.ERROR))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


# Optuna's samplers: their requirements, and how they are seeded and replayed deterministically.

_Chance: TypeAlias = LazyRandomState | np.random.RandomState | np.random.Generator | random.Random

_NEEDS: Mapping[type[BaseSampler], Sequence[str]] = {
    samplers.CmaEsSampler: ("cmaes",),
    samplers.GPSampler: ("torch", "scipy"),
    samplers.QMCSampler: ("scipy",),
}
_ONE_OBJECTIVE = (samplers.CmaEsSampler,)
_SEES_ONLY_TRIALS = (
    samplers.BruteForceSampler,
    samplers.GPSampler,
    samplers.RandomSampler,
    samplers.TPESampler,
)
"""What they propose follows from parameters, values and states of the trials before, and from nothing else that lasts.

The others leave notes at the study or its trials (a generation, the state of an optimizer, the place in a sequence).
"""
_SEES_PARTS = (samplers.RandomSampler, samplers.TPESampler)
"""Of the others each leaves a parameter to chance for good once a trial lacks it."""
_ENDS_BY_ITSELF = (samplers.BruteForceSampler, samplers.GridSampler)
_SHARED = (FrozenTrial, BaseDistribution, IntersectionSearchSpace)
"""Not copied: thousands that never change, and a cache of what follows from the trials."""
_CLOSED = (type, FunctionType, ModuleType, np.ndarray, str, bytes, *_SHARED, *get_args(_Chance))
_SEED_BITS = 128


class SeededSampler:
    """A sampler of which each proposal gets a copy that has proposed nothing yet, with chance of its own.

    Its own seeds count for nothing: what is drawn follows from the seed of the experiment and the number of the trial.
    """

    def __init__(self, sampler: BaseSampler, seed: int) -> None:
        self._pristine = copy.deepcopy(sampler)
        self._seed = seed
        parts = list(_parts_of(self._pristine, set()))
        for part in parts:
            _settle(part, seed)
        self._chances = [part for part in parts if isinstance(part, _Chance)]
        # Seeded anew before each use, a generator need not be copied.
        self._shared: dict[int, object] = {id(part): part for part in parts if isinstance(part, (*_SHARED, _Chance))}
        if isinstance(core := core_of(self._pristine), samplers.GridSampler):
            self._shared |= {id(part): part for part in (core._all_grids, core._search_space)}  # noqa: SLF001 - never changed
        kinds = {type(part) for part in parts if isinstance(part, BaseSampler)} - {samplers.PartialFixedSampler}
        self.is_replayed_by_asking = not kinds <= {*_SEES_ONLY_TRIALS}
        self.sees_parts = isinstance(core_of(sampler), _SEES_PARTS)
        self.ends_by_itself = ends_by_itself(sampler)
        self.draws_nothing = isinstance(core_of(sampler), samplers.GridSampler)
        self.forget()  # a sampler may have been used before

    def proposing(self, number: int) -> BaseSampler:
        """Return the sampler for the proposal of one trial: the same for the same number, whatever happened before."""
        self._seed_all("propose", number)
        return copy.deepcopy(self._pristine, dict(self._shared))

    def hearing(self, number: int) -> BaseSampler:
        """Return the sampler for the end of one trial: what it stores then, all later copies have."""
        self._seed_all("ended", number)
        return self._pristine

    def forget(self) -> None:
        """Forget what was found out about the trials until now: one of them runs again."""
        for part in self._shared.values():
            if isinstance(part, IntersectionSearchSpace):
                vars(part).update(vars(IntersectionSearchSpace(part._include_pruned)))  # noqa: SLF001 - as it began

    def _seed_all(self, purpose: str, number: int) -> None:
        for place, chance in enumerate(self._chances):
            _seed(chance, integer(1 << _SEED_BITS, self._seed, "optuna", purpose, number, place))


def sampler_from(given: object) -> BaseSampler:
    """Return the sampler that `given` is, or names: `"TPESampler"`, `{"TPESampler": {"n_startup_trials": 20}}`.

    Raises:
        InvalidInput: it is none, or not with these options.
    """
    if given is None or isinstance(given, BaseSampler):
        return samplers.TPESampler() if given is None else given
    name, options = next(iter(given.items())) if isinstance(given, Mapping) and len(given) == 1 else (given, {})
    kind = getattr(samplers, name) if isinstance(name, str) and name in samplers.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, BaseSampler) and isinstance(options, Mapping)):
        raise InvalidInput(
            "OptunaSearch: sampler: expected one of Optuna's, its name such as 'TPESampler', or its name with options, "
            f"found {given!r}{did_you_mean(str(name), samplers.__all__)}"
        )
    try:
        return kind(**options)
    except (ImportError, TypeError, ValueError) as error:
        raise InvalidInput(f"OptunaSearch: sampler: {name}: {error}") from error


def core_of(sampler: BaseSampler) -> BaseSampler:
    """Return the sampler itself, or the one that it wraps to fix some parameters."""
    while isinstance(sampler, samplers.PartialFixedSampler):
        sampler = sampler._base_sampler  # noqa: SLF001 - there is no public way to ask for it
    return sampler


def ends_by_itself(sampler: BaseSampler) -> bool:
    """Whether it tries each configuration once, and then has no more."""
    return isinstance(core_of(sampler), _ENDS_BY_ITSELF)


def check_sampler(sampler: BaseSampler, names: Collection[str], objective_count: int) -> None:
    """Check what Optuna would find out in the middle of the experiment.

    Raises:
        InvalidInput: a package is missing, or the sampler does not fit the objective or the names of the space.
    """
    core, name = core_of(sampler), type(core_of(sampler)).__name__
    needed = [package for kind, needs in _NEEDS.items() if isinstance(core, kind) for package in needs]
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise InvalidInput(f"{name}: it needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if objective_count > 1 and isinstance(core, _ONE_OBJECTIVE):
        raise InvalidInput(f"{name}: it serves one metric, found {objective_count}: take NSGAIISampler or TPESampler")
    if isinstance(core, samplers.GridSampler) and set(core._search_space) != set(names):  # noqa: SLF001 - as above
        raise InvalidInput(f"{name}: expected values for each parameter of the space, {sorted(names)}")
    while isinstance(sampler, samplers.PartialFixedSampler):
        unknown = sampler._fixed_params.keys() - set(names)  # noqa: SLF001 - there is no public way to ask for it
        if unknown:
            raise InvalidInput(
                f"PartialFixedSampler: there is no parameter {sorted(unknown)}, the space has {sorted(names)}"
            )
        sampler = sampler._base_sampler  # noqa: SLF001 - as above


def _parts_of(value: object, seen: set[int]) -> Iterator[object]:
    """Yield all objects that a sampler consists of, each once, in a fixed order."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    held: Sequence[object]
    match value:
        case samplers.GridSampler():
            held = [value._rng]  # noqa: SLF001 - and not each of its points
        case Mapping():
            held = list(value.values())
        case list() | tuple():
            held = value
        case _:
            held = [] if isinstance(value, _CLOSED) else list(getattr(value, "__dict__", {}).values())
    for part in held:
        yield from _parts_of(part, seen)


def _settle(part: object, seed: int) -> None:
    """Replace what a constructor drew by itself, and what makes a difference only with several processes."""
    if isinstance(part, samplers.QMCSampler):
        part._seed = integer(1 << 32, seed, "optuna", "sequence")  # noqa: SLF001 - drawn where it was not given
    elif isinstance(part, samplers.BruteForceSampler):
        # A running trial has all its parameters here, so that none of them hides a part of the space.
        part._avoid_premature_stop = False  # noqa: SLF001 - else the same configuration is proposed again


def _seed(chance: object, seed: int) -> None:
    words = [seed >> shift & 0xFFFFFFFF for shift in range(0, _SEED_BITS, 32)]
    if isinstance(chance, LazyRandomState):
        chance.rng.seed(words)
    elif isinstance(chance, np.random.RandomState):
        chance.seed(words)
    elif isinstance(chance, np.random.Generator):
        chance.bit_generator.state = type(chance.bit_generator)(seed).state
    elif isinstance(chance, random.Random):
        chance.seed(seed)
