"""Optuna's side of a search: distributions, samplers, and a study in memory that a resume rebuilds from the journal."""

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

from prefect_tune.core.display_text import did_you_mean
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.search.domains import Choice, Domain, Float, Grid, Integer, Normal, SampleFrom
from prefect_tune.core.search.objective import Mode, Objective
from prefect_tune.core.search.space import ParameterMatch, ParameterMismatch, child_path, interpret_config, option_path
from prefect_tune.core.seeded_random import draw_integer
from prefect_tune.core.values import Metrics

# Convert domains to Optuna's distributions, and values to Optuna's values and back.
# A parameter has the name that `prefect_tune.core.search.space` gives it: `lr`, `model.depth`, `model?1.depth`.

Scalar: TypeAlias = bool | int | float | str | None
_UNMATCHABLE = "\0"  # a value that no configuration contains


@dataclass(frozen=True, slots=True)
class TrialParameters:
    """A configuration's parameters as Optuna stores them, in the order in which they are suggested."""

    values: Mapping[str, Scalar]
    distributions: Mapping[str, BaseDistribution]
    is_complete: bool
    """Whether the configuration matches the whole space, and omits no parameter."""


def extract_parameters(
    space: Mapping[str, object], domains: Mapping[str, Domain], config: Mapping[str, object]
) -> TrialParameters | None:
    """Return the parameters of `config`; None if a value is outside of the space.

    `domains` are the domains of the space, in the order in which they are suggested. `config` may be of another space;
    the result has only the parameters that `config` and the space have in common.
    """
    drawn: dict[str, object] = {}
    is_complete = True
    for reading in interpret_config(space, config):
        match reading:
            case ParameterMatch(name, _, value) if name in domains:
                drawn[name] = value
            case ParameterMatch():
                pass  # a function computes the value from other parameters
            case ParameterMismatch(name) if name in domains:
                return None
            case _:
                is_complete = False
    present = {name: domain for name, domain in domains.items() if name in drawn}
    values = {name: to_optuna_value(domain, drawn[name]) for name, domain in present.items()}
    return TrialParameters(values, {name: make_distribution(domain) for name, domain in present.items()}, is_complete)


def iter_domains(value: object, name: str = "") -> Iterator[tuple[str, Domain]]:
    """Yield the name and the domain of each parameter that can be drawn, including the parameters of options."""
    match value:
        case dict():
            for key, child in value.items():
                yield from iter_domains(child, child_path(name, key))
        case list():
            for index, child in enumerate(value):
                yield from iter_domains(child, child_path(name, index))
        case Choice() | Grid():
            yield name, value
            for index, child in enumerate(value.options):
                yield from iter_domains(child, option_path(name, index))
        case Float() | Integer() | Normal():
            yield name, value
        case _:
            return


def drop_functions(space: Mapping[str, object]) -> dict[str, object]:
    """Return a space without its functions, and with its keys sorted, because a journal has sorted keys, too."""
    return {key: _map_space(space[key], lambda it: None if isinstance(it, SampleFrom) else it) for key in sorted(space)}


def mask_undrawable_options(space: Mapping[str, object]) -> dict[str, object]:
    """Return a space in which each option with the weight 0 is replaced by a value that no configuration contains."""

    def mask_options(domain: object) -> object:
        if not isinstance(domain, Choice):
            return domain
        drawable = _find_drawable_indexes(domain)
        options = tuple(value if index in drawable else _UNMATCHABLE for index, value in enumerate(domain.options))
        return Choice(options, domain.weights)

    return {key: _map_space(value, mask_options) for key, value in space.items()}


def _map_space(value: object, change: Callable[[object], object]) -> object:
    match value:
        case dict():
            return {key: _map_space(value[key], change) for key in sorted(value)}
        case list():
            return [_map_space(child, change) for child in value]
        case Choice(options, weights):
            return change(Choice(tuple(_map_space(option, change) for option in options), weights))
        case _:
            return change(value)


def make_distribution(domain: Domain) -> BaseDistribution:
    """Return Optuna's distribution for a domain. For a `Normal`, Optuna draws a quantile; for a choice, an option.

    Optuna has no steps on a logarithmic scale, so it draws without steps, and `from_optuna_value` rounds the result.
    """
    match domain:
        case Float(low, high, "linear", q) if q is not None:
            return FloatDistribution(_round_to_multiple(low, q), _round_to_multiple(high, q), step=q)
        case Float(low, high, scale):
            return FloatDistribution(low, high, log=scale == "log")
        case Integer(low, _, "log"):
            return IntDistribution(low, domain.max_value, log=True)
        case Integer(low):
            return IntDistribution(low, low + (domain.max_value - low) // domain.step * domain.step, step=domain.step)
        case Normal():
            return FloatDistribution(0.0, 1.0)
        case Choice() | Grid():
            labels = _make_optuna_choices(domain)
            return CategoricalDistribution([labels[index] for index in _find_drawable_indexes(domain)])
        case _:
            assert_never(domain)


def from_optuna_value(domain: Domain, stored: Scalar) -> float:
    """Return the value, or the index of the option, that a value of Optuna represents."""
    match domain:
        case Float(_, high, _, None):
            return min(_require_number(stored), math.nextafter(high, -math.inf))
        case Float() | Integer():
            return domain.nearest_value(_require_number(stored))
        case Normal():
            return domain.draw_at(_require_number(stored))
        case Choice() | Grid():
            return _make_optuna_choices(domain).index(stored)
        case _:
            assert_never(domain)


def to_optuna_value(domain: Domain, drawn: object) -> Scalar:
    """Return Optuna's value for a drawn value, or for the index of the drawn option."""
    match domain:
        case Float(_, _, "linear", q) if q is not None:
            return _round_to_multiple(_require_number(drawn), q)
        case Float():
            return _require_number(drawn)
        case Integer():
            return int(_require_number(drawn))
        case Normal(mean, sd):
            return NormalDist(mean, sd).cdf(_require_number(drawn))
        case Choice() | Grid():
            return _make_optuna_choices(domain)[int(_require_number(drawn))]
        case _:
            assert_never(domain)


def _make_optuna_choices(domain: Choice | Grid) -> list[Scalar]:
    """Return Optuna's choices: the options, or their indexes if Optuna cannot distinguish the options."""
    plain = [value for value in domain.options if value is None or isinstance(value, bool | int | float | str)]
    if len(plain) == len(domain.options) == len(set(plain)):
        return list(plain)
    return list(range(len(domain.options)))


def _find_drawable_indexes(domain: Choice | Grid) -> list[int]:
    """Return the indexes of options with a nonzero weight. Optuna has no weights, so it treats these options alike."""
    weights = domain.weights if isinstance(domain, Choice) else None
    return [index for index in range(len(domain.options)) if weights is None or weights[index] > 0]


def _round_to_multiple(value: float, q: float) -> float:
    """Round to a multiple of `q` in decimal notation, because Optuna compares decimals, and 0.1 * 3 is not 0.3."""
    step = Decimal(repr(q))
    return float((Decimal(repr(value)) / step).to_integral_value() * step)


def _require_number(value: object) -> float:
    assert isinstance(value, int | float), value  # noqa: S101 - `interpret_config` and Optuna's distributions ensure it
    return value


class StudyStorage(InMemoryStorage):
    """Optuna's in-memory storage with one study, extended by methods that change its trials."""

    def __init__(self, name: str, modes: Sequence[Mode]) -> None:
        super().__init__()
        directions = [StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE for mode in modes]
        with silencing_optuna():
            self._only_study = self.create_new_study(directions, name)

    def add_running_trial(self) -> FrozenTrial:
        """Add a running trial without parameters, and return it."""
        return self.get_trial(self.create_new_trial(self._only_study))

    def replace_parameters(
        self, trial: FrozenTrial, parameters: TrialParameters, notes: Mapping[str, Any]
    ) -> FrozenTrial:
        """Replace the parameters of a trial and the sampler's notes on it; return the new trial."""
        new_trial = copy.copy(trial)
        new_trial.params = dict(parameters.values)
        new_trial.distributions = dict(parameters.distributions)
        new_trial.system_attrs = dict(notes)
        self._set_trial(trial._trial_id, new_trial)  # noqa: SLF001 - there is no public name
        return new_trial

    def set_constraint_violations(self, trial_id: int, values: Mapping[str, float]) -> None:
        """Store the trial's value of each constraint. The trial meets a constraint if the value is at most 0."""
        attributes = create_trial(state=TrialState.RUNNING, constraints=dict(values)).system_attrs
        for key, value in attributes.items():
            self.set_trial_system_attr(trial_id, key, value)

    def reopen_trial(self, trial_id: int) -> bool:
        """Set an ended trial to running. Return False if the trial was running already."""
        trial = copy.copy(self.get_trial(trial_id))
        if not trial.state.is_finished():
            return False
        trial.state, trial.values, trial.datetime_complete = TrialState.RUNNING, None, None
        self._set_trial(trial_id, trial)
        return True


class Study(optuna.Study):
    """A study with a `StudyStorage`, driven by ask and tell; its sampler is replaced before each use."""

    def __init__(self, name: str, modes: Sequence[Mode]) -> None:
        self.trial_storage = StudyStorage(name, modes)
        super().__init__(name, self.trial_storage, RandomSampler(seed=0), NopPruner())
        self.is_stopped = False

    def stop(self) -> None:
        """Record that nothing is left to try. Optuna's own method raises an error outside of `optimize`."""
        self.is_stopped = True


def get_objective_values(objective: Objective, metrics: Metrics, where: str) -> tuple[float, ...]:
    """Return the objective's metrics as reported, not as losses, because a sampler may depend on the signs.

    Raises:
        BadMetric: like `Objective.losses`.
    """
    losses = objective.losses(metrics, where)
    return tuple(loss if mode == "min" else -loss for loss, mode in zip(losses, objective.modes, strict=True))


@contextmanager
def silencing_optuna() -> Iterator[None]:
    """Limit Optuna's log to errors during the block."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.ERROR))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


# Optuna's samplers: their requirements, deterministic seeds and replay.

_Generator: TypeAlias = LazyRandomState | np.random.RandomState | np.random.Generator | random.Random

_REQUIRED_PACKAGES: Mapping[type[BaseSampler], Sequence[str]] = {
    samplers.CmaEsSampler: ("cmaes",),
    samplers.GPSampler: ("torch", "scipy"),
    samplers.QMCSampler: ("scipy",),
}
_SINGLE_OBJECTIVE_SAMPLERS = (samplers.CmaEsSampler,)
_STATELESS_SAMPLERS = (samplers.BruteForceSampler, samplers.GPSampler, samplers.RandomSampler, samplers.TPESampler)
"""Samplers whose proposals depend only on the parameters, values and states of earlier trials.

All other samplers store notes in the study or trials (a generation, an optimizer's state, a position in a sequence).
"""
_PARTIAL_TRIAL_SAMPLERS = (samplers.RandomSampler, samplers.TPESampler)
"""Samplers that support trials with missing parameters; after such a trial, others draw these parameters at random."""
_EXHAUSTIVE_SAMPLERS = (samplers.BruteForceSampler, samplers.GridSampler)
_SHARED_TYPES = (FrozenTrial, BaseDistribution, IntersectionSearchSpace)
"""Types whose objects are not copied: trials and distributions, which are constant, and Optuna's cache of the space."""
_OPAQUE_TYPES = (type, FunctionType, ModuleType, np.ndarray, str, bytes, *_SHARED_TYPES, *get_args(_Generator))
_SEED_BITS = 128


class SeededSampler:
    """A sampler that is copied and seeded for each proposal.

    The seeds that the user gave the sampler are ignored: draws depend on the experiment's seed and the trial's number.
    """

    def __init__(self, sampler: BaseSampler, seed: int) -> None:
        self._original_sampler = copy.deepcopy(sampler)
        self._seed = seed
        parts = list(_iter_parts(self._original_sampler, set()))
        for part in parts:
            if isinstance(part, samplers.QMCSampler):  # replace its seed, which may be random
                part._seed = draw_integer(1 << 32, seed, "optuna", "sequence")  # noqa: SLF001 - there is no public name
            elif isinstance(part, samplers.BruteForceSampler):
                # Only several processes need this option: in one process, each running trial has all its parameters.
                part._avoid_premature_stop = False  # noqa: SLF001 - else the same configuration is proposed again
        self._generators = [part for part in parts if isinstance(part, _Generator)]
        # Generators need no copies, because they are reseeded before each use.
        self._shared: dict[int, object] = {id(it): it for it in parts if isinstance(it, (*_SHARED_TYPES, _Generator))}
        if isinstance(core := unwrap_sampler(self._original_sampler), samplers.GridSampler):
            self._shared |= {id(part): part for part in (core._all_grids, core._search_space)}  # noqa: SLF001 - constant
        kinds = {type(part) for part in parts if isinstance(part, BaseSampler)} - {samplers.PartialFixedSampler}
        self.needs_replay = not kinds <= {*_STATELESS_SAMPLERS}
        self.accepts_partial_trials = isinstance(unwrap_sampler(sampler), _PARTIAL_TRIAL_SAMPLERS)
        self.is_exhaustive = is_exhaustive(sampler)
        self.is_grid = isinstance(unwrap_sampler(sampler), samplers.GridSampler)
        self.reset_search_space_cache()  # the user may have used the sampler before, in another study

    def prepare_proposal_sampler(self, number: int) -> BaseSampler:
        """Return a sampler for the proposal of trial `number`. The proposal does not depend on earlier calls."""
        self._seed_generators("propose", number)
        return copy.deepcopy(self._original_sampler, dict(self._shared))

    def prepare_result_sampler(self, number: int) -> BaseSampler:
        """Return the sampler that receives the end of trial `number`; later copies of it contain its notes."""
        self._seed_generators("ended", number)
        return self._original_sampler

    def reset_search_space_cache(self) -> None:
        """Reset the caches that are derived from the trials, because an ended trial is running again."""
        for part in self._shared.values():
            if isinstance(part, IntersectionSearchSpace):
                vars(part).update(vars(IntersectionSearchSpace(part._include_pruned)))  # noqa: SLF001 - its initial state

    def _seed_generators(self, purpose: str, number: int) -> None:
        for index, generator in enumerate(self._generators):
            seed = draw_integer(1 << _SEED_BITS, self._seed, "optuna", purpose, number, index)
            words = [seed >> shift & 0xFFFFFFFF for shift in range(0, _SEED_BITS, 32)]
            if isinstance(generator, LazyRandomState):
                generator.rng.seed(words)
            elif isinstance(generator, np.random.RandomState):
                generator.seed(words)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            elif isinstance(generator, random.Random):
                generator.seed(seed)


def make_sampler(value: object) -> BaseSampler:
    """Return a sampler for `value`: a sampler, "TPESampler", {"TPESampler": {"n_startup_trials": 20}}, or None (TPE).

    Raises:
        InvalidInput: there is no such sampler, or the sampler does not have these options.
    """
    if value is None or isinstance(value, BaseSampler):
        return samplers.TPESampler() if value is None else value
    name, options = next(iter(value.items())) if isinstance(value, Mapping) and len(value) == 1 else (value, {})
    kind = getattr(samplers, name) if isinstance(name, str) and name in samplers.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, BaseSampler) and isinstance(options, Mapping)):
        raise InvalidInput(
            "OptunaSearch: sampler: expected a sampler of Optuna, its name such as 'TPESampler', or its name with "
            f"options, found {value!r}{did_you_mean(str(name), samplers.__all__)}"
        )
    try:
        return kind(**options)
    except (ImportError, TypeError, ValueError) as error:
        raise InvalidInput(f"OptunaSearch: sampler: {name}: {error}") from error


def unwrap_sampler(sampler: BaseSampler) -> BaseSampler:
    """Return the sampler inside of wrappers that fix some parameters, or `sampler` if there is no wrapper."""
    while isinstance(sampler, samplers.PartialFixedSampler):
        sampler = sampler._base_sampler  # noqa: SLF001 - there is no public name
    return sampler


def is_exhaustive(sampler: BaseSampler) -> bool:
    """Return whether the sampler proposes each configuration once, and then ends."""
    return isinstance(unwrap_sampler(sampler), _EXHAUSTIVE_SAMPLERS)


def check_sampler(sampler: BaseSampler, names: Collection[str], objective_count: int) -> None:
    """Check for errors that Optuna would raise only in the middle of the experiment.

    Raises:
        InvalidInput: a package is missing, or the sampler does not match the objective or the names of the space.
    """
    core, name = unwrap_sampler(sampler), type(unwrap_sampler(sampler)).__name__
    needed = [package for kind, needs in _REQUIRED_PACKAGES.items() if isinstance(core, kind) for package in needs]
    if missing := [package for package in needed if find_spec(package) is None]:
        raise InvalidInput(f"{name}: it needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if objective_count > 1 and isinstance(core, _SINGLE_OBJECTIVE_SAMPLERS):
        raise InvalidInput(f"{name}: expected one metric, found {objective_count}: use NSGAIISampler or TPESampler")
    if isinstance(core, samplers.GridSampler) and set(core._search_space) != set(names):  # noqa: SLF001 - as above
        raise InvalidInput(f"{name}: expected values for each parameter of the space: {sorted(names)}")
    while isinstance(sampler, samplers.PartialFixedSampler):
        if unknown := sampler._fixed_params.keys() - set(names):  # noqa: SLF001 - there is no public name
            problem = f"unknown parameters {sorted(unknown)}"
            raise InvalidInput(f"PartialFixedSampler: {problem}; the space has {sorted(names)}")
        sampler = sampler._base_sampler  # noqa: SLF001 - as above


def _iter_parts(value: object, seen: set[int]) -> Iterator[object]:
    """Yield each object in a sampler once, in a fixed order."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    children: Sequence[object]
    match value:
        case samplers.GridSampler():
            children = [value._rng]  # noqa: SLF001 - not the points of its grid
        case Mapping():
            children = list(value.values())
        case list() | tuple():
            children = value
        case _:
            children = [] if isinstance(value, _OPAQUE_TYPES) else list(getattr(value, "__dict__", {}).values())
    for part in children:
        yield from _iter_parts(part, seen)
