"""Optuna's samplers: their requirements, and how they are seeded and replayed deterministically."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import TypeAlias, get_args

import numpy as np
from optuna import samplers
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.search_space import IntersectionSearchSpace
from optuna.trial import FrozenTrial

from prefect_tune.core.did_you_mean import did_you_mean
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.seeded_random import integer

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
        self._shared |= _grids_of(self._pristine)
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
    _check_fixed(sampler, names)


def _check_fixed(sampler: BaseSampler, names: Collection[str]) -> None:
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
    if not isinstance(value, _CLOSED):
        for part in _held_by(value):
            yield from _parts_of(part, seen)


def _held_by(value: object) -> Sequence[object]:
    if isinstance(value, samplers.GridSampler):
        return [value._rng]  # noqa: SLF001 - and not each of its points
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return value
    return list(getattr(value, "__dict__", {}).values())


def _grids_of(sampler: BaseSampler) -> dict[int, object]:
    core = core_of(sampler)
    if not isinstance(core, samplers.GridSampler):
        return {}
    return {id(part): part for part in (core._all_grids, core._search_space)}  # noqa: SLF001 - never changed


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
