"""One rule for values from outside, in each place: they are taken by value as plain JSON, or refused."""

from __future__ import annotations

from collections import OrderedDict, UserList, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, IntFlag, StrEnum
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import prefect_tune as pt
from prefect_tune.core.checkpoints.manifest import normalize_metadata
from prefect_tune.core.experiment.stoppers import (
    collect_metric_limits,
    extract_experiment_stoppers,
    extract_trial_stopper,
)
from prefect_tune.core.metrics import is_number, to_plain_metrics, to_plain_scalar
from prefect_tune.core.schedulers.pbt import parse_mutations
from prefect_tune.core.search.space import resolve_space, validate_space
from prefect_tune.core.values import canonical_json
from prefect_tune.parameters.argument_checks import (
    component_to_json,
    config_to_json,
    make_stopper,
    parse_scheduler,
    parse_search,
    stop_to_json,
)
from prefect_tune.parameters.search_plan import SearchPlan, plan_from_settings


class Kind(str, Enum):  # noqa: UP042 - the kind that is formatted as Kind.LINEAR
    LINEAR = "linear"


class Word(StrEnum):
    LOSS = "loss"


class Width(IntEnum):
    NARROW = 3


class Bits(IntFlag):
    A = 1
    B = 2


class Rate(float, Enum):
    SLOW = 0.5


class Plain(Enum):
    A = "a"


class Loud(str):  # noqa: SLOT000 - a user has none
    def __str__(self) -> str:
        return "LOUD"

    __repr__ = __str__


class Odd(int):
    def __int__(self) -> int:
        return 99


class Bent(float):
    def __float__(self) -> float:
        return 99.0


class Rows(list[Any]):
    pass


Pair = namedtuple("Pair", "first second")  # noqa: PYI024 - the kind that users write

BY_VALUE: list[tuple[object, object]] = [
    (Kind.LINEAR, "linear"),
    (Word.LOSS, "loss"),
    (Loud("quiet"), "quiet"),
    (np.str_("x"), "x"),
    (np.array("x"), "x"),
    (Width.NARROW, 3),
    (Bits.A | Bits.B, 3),
    (Odd(3), 3),
    (np.int64(3), 3),
    (np.uint8(3), 3),
    (np.array(3), 3),
    (Rate.SLOW, 0.5),
    (Bent(0.5), 0.5),
    (np.float16(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.float64(0.5), 0.5),
    (np.longdouble("0.5"), 0.5),
    (np.array(0.5, dtype=np.float32), 0.5),
    (Fraction(1, 2), 0.5),
    (np.True_, True),
    (np.array(False), False),
    (None, None),
    (Pair(Width.NARROW, Kind.LINEAR), [3, "linear"]),
    (Rows([Rate.SLOW]), [0.5]),
    (UserList([np.int8(1)]), [1]),
    (deque([1]), [1]),
    (OrderedDict({Kind.LINEAR: Width.NARROW}), {"linear": 3}),
    (MappingProxyType({Loud("a"): np.int8(1)}), {"a": 1}),
    ({np.str_("a"): {Word.LOSS: (Kind.LINEAR,)}}, {"a": {"loss": ["linear"]}}),
]
"""What is taken, and the plain value that it is taken for."""

REFUSED: list[object] = [
    *(Plain.A, Path("a"), date(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC), timedelta(1), Decimal("0.1"), b"a", 1j),
    *(np.array([1, 2]), np.datetime64(5, "ns"), np.timedelta64(5, "ns"), np.datetime64("2026-01-01"), np.complex64(1)),
    *(float("nan"), float("inf"), np.float32("nan"), np.array(np.inf), {1}, object(), len, Kind, bytearray(b"a")),
    *(np.ma.masked, np.ma.masked_invalid([np.nan]).mean(), np.ma.array(3, mask=True), np.ma.array([3], mask=True)),
    *({3: 1}, {None: 1}, {Width.NARROW: 1}, {Plain.A: 1}, {Path("a"): 1}),
]
"""What no place takes."""


def get_field(holder: object, name: str) -> Any:
    return getattr(holder, name)


def resolve_constant(value: object) -> object:
    return resolve_space(validate_space({"x": value}), lambda _, domain: domain.draw_at(0))["x"]


ENTRY_POINTS: dict[str, Callable[[Any], object]] = {
    "constant": resolve_constant,
    "option": lambda value: resolve_constant(pt.choice([value])),
    "grid": lambda value: resolve_constant(pt.grid_search([value])),
    "computed": lambda value: resolve_constant(pt.sample_from(lambda _: value)),
    "JSON": lambda value: pt.space_from_json({"x": {"constant": value}})["x"],
    "plan": lambda value: dict(make_plan(space={"x": value}).space or {})["x"],
    "config": lambda value: config_to_json({"x": value})["x"],
    "metric": lambda value: to_plain_metrics({"x": value}, "step 1")["x"],
    "point": lambda value: pt.RandomSearch(points_to_evaluate=[{"x": value}]).points_to_evaluate[0]["x"],
    "mutation": lambda value: get_field(parse_mutations({"x": [value, "other"]}, "here")["x"], "options")[0],
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_value_is_taken_as_the_plain_value_that_it_equals_in_each_place(entry_point: str) -> None:
    for value, plain in BY_VALUE:
        plain_value = ENTRY_POINTS[entry_point](value)
        assert (plain_value, canonical_json(plain_value)) == (plain, canonical_json(plain)), type(value)
        assert collect_types(plain_value) == collect_types(plain), type(value)


def collect_types(value: object) -> set[type]:
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return {type(value)}.union(*map(collect_types, inner))


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_value_that_no_json_equals_is_refused_in_each_place(entry_point: str) -> None:
    assert [value for value in REFUSED if not is_refused(ENTRY_POINTS[entry_point], value)] == []


def is_refused(use: Callable[[Any], object], value: object) -> bool:
    """Whether the value is refused with one clear error, which is InvalidInput or pydantic's."""
    try:
        use(value)
    except ValueError as error:
        return any(word in str(error) for word in ("expected", "found", "Input should be"))
    return False


@pytest.mark.parametrize("entry_point", sorted(ENTRY_POINTS.keys() - {"metric"}))
def test_an_array_with_dimensions_is_no_number_even_if_it_has_one_element(entry_point: str) -> None:
    with pytest.raises(pt.InvalidInput, match=r"array\.tolist\(\)"):
        ENTRY_POINTS[entry_point](np.array([3]))


class Same(str):  # noqa: SLOT000 - a user has none
    """Equal as text to another, and not in a dict."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_two_keys_that_are_equal_as_text_are_refused_since_one_value_would_be_lost(entry_point: str) -> None:
    with pytest.raises(pt.InvalidInput, match="expected unique keys"):
        ENTRY_POINTS[entry_point]({Same("a"): 1, "a": 2})


@dataclass
class Options:
    kind: Kind
    pair: Any


def test_a_dataclass_is_the_dict_of_its_fields_and_an_option_object_of_this_package_is_no_value() -> None:
    assert config_to_json(Options(Kind.LINEAR, Pair(1, np.int8(2)))) == {"kind": "linear", "pair": [1, 2]}
    assert pt.space_from_json({"x": {"y": [1]}}) == {"x": {"y": [1]}}
    for value in (pt.ASHA(max_t=9), pt.MaxSteps(3), pt.RandomSearch(), pt.Retention(last=1)):
        for read in (resolve_constant, lambda value: config_to_json({"x": value})):
            with pytest.raises(pt.InvalidInput, match="expected a value or a domain"):
                read(value)


def test_a_config_holds_no_distribution() -> None:
    with pytest.raises(pt.InvalidInput, match=r"config: expected values, found uniform\(0\.0, 1\.0\).*pt\.tune"):
        config_to_json({"a": [{"b": pt.uniform(0, 1)}]})
    with pytest.raises(pt.InvalidInput, match="config: expected a dict or a dataclass, found 3"):
        config_to_json(3)


def test_metadata_is_taken_by_value_too() -> None:
    assert normalize_metadata({Kind.LINEAR: np.int64(3), "pair": Pair(1, 2)}) == {"linear": 3, "pair": [1, 2]}
    with pytest.raises(pt.InvalidInput, match="metadata"):
        normalize_metadata({"a": Path("a")})


def test_an_array_that_holds_objects_gives_its_only_element() -> None:
    assert to_plain_metrics({"x": np.array({"a": Kind.LINEAR}, dtype=object)}, "step 1") == {"x": {"a": "linear"}}
    assert to_plain_scalar(np.float64) is np.float64
    assert is_number(np.array(3))


# ------------------------------------------------------------------------------------------------------- numbers

WHOLE: list[object] = [np.int64(3), np.uint16(3), np.array(3), Width.NARROW, Odd(3), Bits.A | Bits.B]
REAL: list[object] = [np.float32(2.5), np.float64(2.5), np.array(2.5), Fraction(5, 2), Bent(2.5)]
NO_NUMBER: list[object] = [
    *(True, np.True_, "three", Kind.LINEAR, Decimal(3), float("nan"), float("inf"), -float("inf"), np.float32("nan")),
    *(np.timedelta64(3, "ns"), np.array([3]), [3], Plain.A, date(2026, 1, 1)),
]


def make_plan(**options: Any) -> SearchPlan:
    return SearchPlan(trainable="prefect_tune.demo:train", target="/a", experiment="a", **options)


def read_plan_value(name: str, value: object) -> object:
    return getattr(make_plan(**{name: value}), name)


WHOLE_OPTIONS: dict[str, Callable[[Any], object]] = {
    "MaxSteps": lambda value: pt.MaxSteps(value).steps,
    "MaxFailures": lambda value: pt.MaxFailures(value).failures,
    "TrialBudget": lambda value: pt.TrialBudget(value).trials,
    "Plateau.reports": lambda value: pt.Plateau("loss", reports=value).reports,
    "Plateau.grace": lambda value: pt.Plateau("loss", grace=value).grace,
    "ExperimentPlateau.top": lambda value: pt.ExperimentPlateau(top=value).top,
    "ExperimentPlateau.patience": lambda value: pt.ExperimentPlateau(patience=value).patience,
    "ASHA.max_t": lambda value: pt.ASHA(max_t=value).max_t,
    "ASHA.grace_period": lambda value: pt.ASHA(max_t=9, grace_period=value).grace_period,
    "ASHA.brackets": lambda value: pt.ASHA(max_t=81, brackets=value).brackets,
    "Hyperband.max_t": lambda value: pt.Hyperband(max_t=value).max_t,
    "MedianStopping.interval": lambda value: pt.MedianStopping(interval=value).interval,
    "MedianStopping.min_time_slice": lambda value: pt.MedianStopping(min_time_slice=value).min_time_slice,
    "PBT.perturbation_interval": lambda value: pt.PBT(value, {"x": [1, 2]}).perturbation_interval,
    "PBT.burn_in_period": lambda value: pt.PBT(1, {"x": [1, 2]}, burn_in_period=value).burn_in_period,
    "RandomSearch.num_samples": lambda value: pt.RandomSearch(value).num_samples,
    "OptunaSearch.num_samples": lambda value: pt.OptunaSearch(num_samples=value).num_samples,
    "Repeated.times": lambda value: pt.Repeated(pt.RandomSearch(), value).times,
    "randint": lambda value: pt.randint(0, value).high,
    "qrandint.q": lambda value: pt.qrandint(0, 9, value).q,
    "Cadence.every_steps": lambda value: pt.Cadence(every_steps=value).every_steps,
    "Retention.last": lambda value: pt.Retention(last=value).last,
    "FailurePolicy.max_failures": lambda value: pt.FailurePolicy(max_failures=value).max_failures,
    "SyncConfig.verify_reused_every": lambda value: pt.SyncConfig(verify_reused_every=value).verify_reused_every,
    **{
        name: partial(read_plan_value, name)
        for name in ("num_samples", "samples_per_run", "max_concurrent_trials", "seed", "processes_per_trial")
    },
    "nodes_per_trial": lambda value: make_plan(nodes_per_trial=value).nodes_per_trial,
    "processes_per_trial[0]": lambda value: get_field(make_plan(processes_per_trial=(value, 8)), "processes_per_trial")[
        0
    ],
}
REAL_OPTIONS: dict[str, Callable[[Any], object]] = {
    "MaxTime": lambda value: pt.MaxTime(value).time.total_seconds(),
    "TimeBudget": lambda value: pt.TimeBudget(value).time.total_seconds(),
    "Plateau.std": lambda value: pt.Plateau("loss", std=value).std,
    "ExperimentPlateau.std": lambda value: pt.ExperimentPlateau(std=value).std,
    "ASHA.reduction_factor": lambda value: pt.ASHA(max_t=9, reduction_factor=value).reduction_factor,
    "Hyperband.reduction_factor": lambda value: pt.Hyperband(max_t=9, reduction_factor=value).reduction_factor,
    "PBT.perturbation_factors": lambda value: pt.PBT(
        1, {"x": [1, 2]}, perturbation_factors=[value]
    ).perturbation_factors[0],
    "uniform": lambda value: pt.uniform(0, value).high,
    "randn": lambda value: pt.randn(0, value).sd,
    "weights": lambda value: get_field(pt.choice([1, 2], weights=[1, value]), "weights")[1],
    "Cadence.every_seconds": lambda value: pt.Cadence(every_seconds=value).every_seconds,
    "SyncConfig.live_period_seconds": lambda value: pt.SyncConfig(live_period_seconds=value).live_period_seconds,
    "S3Target.request_timeout_seconds": lambda value: (
        pt.S3Target(bucket="abc", request_timeout_seconds=value).request_timeout_seconds
    ),
    "stop": lambda value: collect_metric_limits(make_stopper({"loss": value}))["loss"],
    **{
        name: partial(read_plan_value, name)
        for name in ("time_budget_seconds", "grace_period_seconds", "silence_timeout_seconds")
    },
}


@pytest.mark.parametrize("option", WHOLE_OPTIONS)
def test_a_whole_number_of_any_kind_is_taken_by_value_and_nothing_else_is(option: str) -> None:
    plain_values = [WHOLE_OPTIONS[option](value) for value in WHOLE]
    assert {(type(value), value) for value in plain_values} == {(int, 3)}
    wrong = [*NO_NUMBER, 3.0, 2.5, np.float64(3)]
    accepted = [value for value in wrong if not is_refused(WHOLE_OPTIONS[option], value)]
    assert accepted == ([[3]] if option == "processes_per_trial" else [])


@pytest.mark.parametrize("option", REAL_OPTIONS)
def test_a_number_of_any_kind_is_taken_by_value_and_one_that_is_not_finite_is_refused(option: str) -> None:
    plain_values = [REAL_OPTIONS[option](value) for value in REAL]
    assert {(type(value), value) for value in plain_values} == {(float, 2.5)}
    assert [value for value in NO_NUMBER if not is_refused(REAL_OPTIONS[option], value)] == []


@pytest.mark.parametrize(
    "stop",
    [
        pt.MaxSteps(np.int64(3)),
        pt.MaxFailures(np.uint8(3)) | pt.Plateau(Word.LOSS, std=np.float32(0.5)),
        pt.MaxTime(np.float32(2.5)) | {"step": np.int64(3)},
        {"step": np.int64(2), Word.LOSS: Rate.SLOW},
        [{Kind.LINEAR: np.float16(0.5)}, pt.TimeBudget(np.int64(60))],
        {"MaxSteps": {"steps": np.int64(3)}},
    ],
    ids=str,
)
def test_a_stop_criterion_with_numbers_of_numpy_is_stored_and_a_resume_reads_the_same(stop: object) -> None:
    plan = make_plan(stop=stop)
    settings = plan.settings
    assert "only_in_code" not in settings
    assert canonical_json(settings["stop"])
    resumed = plan_from_settings(settings, {"target": "/a", "experiment": "a"}, {})
    read = make_stopper(stop_to_json(plan.stop))
    assert describe_stopper(resumed.stopper) == describe_stopper(read) == describe_stopper(plan.stopper)


def describe_stopper(stopper: pt.Stopper) -> tuple[str, str]:
    return repr(extract_trial_stopper(stopper)), repr(extract_experiment_stoppers(stopper))


@pytest.mark.parametrize(
    "configured",
    [
        pt.ASHA(max_t=np.int64(9), reduction_factor=np.float32(2.5)),
        pt.PBT(np.int64(2), {Word.LOSS: pt.uniform(0, np.float32(1))}, perturbation_factors=[np.float32(1.5), 0.5]),
        pt.RandomSearch(np.int64(4), [{"a": np.float32(0.5), Kind.LINEAR: Width.NARROW}]),
        pt.OptunaSearch({"TPESampler": {"n_startup_trials": np.int64(5)}}, np.int64(4), constraints=[Word.LOSS]),
    ],
    ids=lambda configured: type(configured).__name__,
)
def test_a_scheduler_and_a_search_with_numbers_of_numpy_are_stored(configured: Any) -> None:
    document = component_to_json(configured)
    assert document
    read = parse_scheduler if isinstance(configured, pt.Scheduler) else parse_search
    assert component_to_json(read(document)) == document


def test_names_are_texts_by_value_too() -> None:
    plan = SearchPlan(
        trainable="prefect_tune.demo:train",
        target="/a",
        experiment=Kind.LINEAR,
        metric=Word.LOSS,
        trial_tags=[Kind.LINEAR],
        retention=pt.Retention(best=1, metric=Word.LOSS),
    )
    assert (plan.experiment, plan.metric, plan.trial_tags) == ("linear", "loss", ["linear"])
    assert f"{plan.experiment} {plan.objective.metrics[0]} {plan.retention.metric}" == "linear loss loss"
    assert f"{pt.Plateau(Word.LOSS).metric}" == "loss"
