"""What each domain draws or refuses, and the table of the page on search spaces."""

from __future__ import annotations

import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import PurePath
from statistics import NormalDist, fmean, pstdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import prefect_tune as pt
from prefect_tune.core import seeded_random
from prefect_tune.core.errors import BadMetric, InvalidInput, UnsafePayload
from prefect_tune.core.metrics import to_plain_metrics
from prefect_tune.core.search import domains
from prefect_tune.core.search.domains import (
    Float,
    Integer,
    Normal,
    Range,
    choice,
    grid_search,
    lograndint,
    loguniform,
    qlograndint,
    qloguniform,
    qrandint,
    qrandn,
    quniform,
    randint,
    randn,
    sample_from,
    uniform,
)
from prefect_tune.core.search.space import resolve_space, validate_space
from prefect_tune.core.search.space_json import Function, space_from_json, space_to_json
from tests.fakes.pages import ROOT
from tests.fakes.searches.spaces import QUANTILES, floats, integers, normals, ranges, spaces

ALMOST_ONE = 1 - 2**-53
COUNT = 2000


def draw_many(domain: Range) -> list[float]:
    return [domain.draw_at(seeded_random.draw_uniform(7, "a test", number)) for number in range(COUNT)]


def kolmogorov_smirnov(distribution: Callable[[float], float], values: list[float]) -> float:
    """Return the distance times the root of the count: above 1.95 once in a thousand runs."""
    ranked = enumerate(sorted(values))
    gaps = [max((rank + 1) / COUNT - distribution(value), distribution(value) - rank / COUNT) for rank, value in ranked]
    return max(gaps) * math.sqrt(COUNT)


@pytest.mark.parametrize(
    ("domain", "distribution"),
    [
        (uniform(-2, 6), lambda value: (value + 2) / 8),
        (loguniform(1e-5, 1e-1), lambda value: math.log(value / 1e-5) / math.log(1e4)),
        (randn(3, 2), NormalDist(3, 2).cdf),
        (randint(0, 10**9), lambda value: value / 10**9),
        (lograndint(1000, 10**9), lambda value: math.log(value / 1000) / math.log(10**6)),
    ],
    ids=lambda value: repr(value) if isinstance(value, Range) else "",
)
def test_draws_have_the_distribution_that_the_name_says(domain: Range, distribution: Callable[[float], float]) -> None:
    assert kolmogorov_smirnov(distribution, draw_many(domain)) < 1.95


@pytest.mark.parametrize(
    ("domain", "values"),
    [
        (quniform(0, 1, 0.25), [0.0, 0.25, 0.5, 0.75, 1.0]),
        (randint(-1, 3), [-1, 0, 1, 2]),
        (qrandint(5, 20, 5), [5, 10, 15, 20]),
    ],
    ids=repr,
)
def test_every_value_is_as_likely_as_the_others_the_ends_too(domain: Range, values: list[float]) -> None:
    counts = Counter(draw_many(domain))
    assert sorted(counts) == values
    expected = COUNT / len(values)
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 18  # chi squared: p > 0.001


@pytest.mark.parametrize("domain", [qloguniform(2, 16, 2), qlograndint(2, 16, 2)], ids=repr)
def test_a_rounded_log_draw_is_as_likely_as_the_numbers_that_round_to_it(domain: Range) -> None:
    counts = Counter(draw_many(domain))
    assert sorted(counts) == [2, 4, 6, 8, 10, 12, 14, 16]
    for value, count in counts.items():
        share = math.log((value + 1) / (value - 1)) / math.log(17)
        assert abs(count / COUNT - share) < 3.3 * math.sqrt(share * (1 - share) / COUNT)


def test_a_rounded_normal_draw_is_centred_and_spread_as_the_normal_one() -> None:
    values = draw_many(qrandn(10, 2, 0.5))
    assert {value % 0.5 for value in values} == {0.0}
    assert abs(fmean(values) - 10) < 0.15
    assert abs(pstdev(values) - 2) < 0.1


@pytest.mark.parametrize(
    ("domain", "first", "last"),
    [
        (uniform(0, 1), 0.0, math.nextafter(1, 0)),
        (uniform(1, math.nextafter(1, 2)), 1.0, 1.0),
        (uniform(-1e308, 1e308), -1e308, math.nextafter(1e308, 0)),
        (loguniform(1, 10), 1.0, math.nextafter(10, 0)),
        (quniform(0, 0.3, 0.1), 0.0, 0.3),
        (quniform(0.1, 0.1 * 3, 0.1), 0.1, 0.3),
        (qloguniform(1, 4, 1), 1.0, 4.0),
        (randint(0, 3), 0, 2),
        (randint(-(2**64), 2**64), -(2**64), 2**64 - 2**12),
        (qrandint(0, 3), 0, 3),
        (lograndint(1, 8), 1, 7),
        (lograndint(3, 4), 3, 3),
        (qlograndint(4, 12, 4), 4, 12),
        (randn(), NormalDist().inv_cdf(2**-54), NormalDist().inv_cdf(ALMOST_ONE)),
    ],
    ids=repr,
)
def test_the_ends_are_inclusive_where_the_name_says_so(domain: Range, first: float, last: float) -> None:
    assert domain.draw_at(0.0) == first
    assert last * (1 - 1e-15) <= domain.draw_at(ALMOST_ONE) <= last


@given(floats() | integers(), QUANTILES)
def test_a_draw_never_leaves_its_bounds(domain: Float | Integer, quantile: float) -> None:
    value = domain.draw_at(quantile)
    assert domain.low <= value <= domain.high
    assert domain.q is not None or value < domain.high
    assert isinstance(value, int if isinstance(domain, Integer) else float)


@given(ranges(), QUANTILES)
def test_what_is_drawn_belongs_to_the_domain_and_rounds_to_itself(domain: Range, quantile: float) -> None:
    value = domain.draw_at(quantile)
    assert domain.contains(value)
    assert domain.nearest_value(value) == value


@given(ranges(), QUANTILES, QUANTILES)
def test_a_higher_quantile_never_gives_a_lower_value(domain: Range, one: float, other: float) -> None:
    assert domain.draw_at(min(one, other)) <= domain.draw_at(max(one, other))


@given(integers(), QUANTILES)
def test_a_whole_number_with_a_step_is_a_multiple_of_it(domain: Integer, quantile: float) -> None:
    assert domain.draw_at(quantile) % domain.step == 0


@given(normals(), QUANTILES)
def test_a_normal_draw_is_a_number_and_at_the_middle_the_mean(domain: Normal, quantile: float) -> None:
    assert math.isfinite(domain.draw_at(quantile))
    assert math.isclose(domain.draw_at(0.5), domain.nearest_value(domain.mean), abs_tol=domain.q or 1e-9 * domain.sd)


@pytest.mark.parametrize(
    ("domain", "value", "nearest"),
    [
        (uniform(0, 1), 7, 1.0),
        (uniform(0, 1), -7, 0.0),
        (uniform(0, 1), 0.4, 0.4),
        (quniform(0, 1, 0.1), 0.34, 0.3),
        (randint(0, 10), 10, 9),
        (randint(0, 10), 3.6, 4),
        (qrandint(0, 8, 4), 1.9, 0),
        (qrandint(0, 8, 4), 2.1, 4),
        (qrandn(0, 1, 0.5), 1.3, 1.5),
        (randn(), 1.3, 1.3),
    ],
    ids=lambda value: repr(value) if isinstance(value, Range) else "",
)
def test_the_nearest_value_is_within_the_ends_and_on_a_step(domain: Range, value: float, nearest: float) -> None:
    assert domain.nearest_value(value) == nearest


@pytest.mark.parametrize(
    ("domain", "inside", "outside"),
    [
        (uniform(0, 1), [0, 0.5, 1.0], [-1e-9, 1.1, "0.5", True, None, math.nan]),
        (quniform(0, 1, 0.1), [0.1 * 3, 0, 1], [0.35, 1.1]),
        (randint(0, 3), [0, 2, 2.0], [3, 1.5, False, "1", math.inf]),
        (qrandint(0, 4, 2), [4], [1, 6]),
        (randn(), [1e300], [math.inf, True, "1"]),
        (qrandn(0, 1, 0.5), [1e300, 0.5], [0.3, "1"]),
    ],
)
def test_a_domain_knows_what_a_configuration_may_have(domain: Range, inside: list[Any], outside: list[Any]) -> None:
    assert [value for value in inside if not domain.contains(value)] == []
    assert [value for value in outside if domain.contains(value)] == []


def test_steps_are_as_they_are_written_and_not_sums_of_rounded_ones() -> None:
    domain = quniform(0, 1, 0.1)
    assert sorted({domain.draw_at(number / 100) for number in range(100)}) == [number / 10 for number in range(11)]


def test_numbers_of_numpy_become_plain_ones() -> None:
    assert uniform(np.float32(0.5), np.int64(2)) == uniform(0.5, 2.0)
    assert type(randint(np.int64(1), np.int64(3)).low) is int
    assert type(uniform(0, 1).high) is float


@pytest.mark.parametrize(
    "domain",
    [
        uniform(0, 1),
        quniform(0, 1, 0.5),
        loguniform(0.5, 1),
        qloguniform(1, 2, 0.5),
        randint(0, 2),
        qrandint(0, 4, 2),
        lograndint(1, 3),
        qlograndint(2, 4, 2),
        randn(),
        qrandn(0, 1, 0.5),
    ],
    ids=repr,
)
def test_a_domain_shows_the_call_that_makes_it(domain: Range) -> None:
    name, arguments = domains.get_constructor_call(domain)
    assert repr(domain) == f"{name}({', '.join(map(repr, arguments))})"
    assert eval(repr(domain)) == domain


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: uniform(1, 1), r"uniform\(1.0, 1.0\): expected low < high, since high is exclusive"),
        (
            lambda: uniform(2, 1),
            r"uniform\(2.0, 1.0\): expected low < high, found low=2.0 and high=1.0; did you mean uniform",
        ),
        (lambda: loguniform(0.1, 1e-4), r"did you mean loguniform\(0.0001, 0.1\)\?$"),
        (lambda: quniform(2, 1, 0.5), r"found low=2.0 and high=1.0; did you mean quniform\(1.0, 2.0, 0.5\)\?$"),
        (lambda: uniform("1e-4", 1), "expected a finite number for low, found '1e-4'; YAML reads 1e-4 as text"),
        (lambda: loguniform(0, 1), "expected low > 0, since its logarithm is drawn, found 0.0"),
        (lambda: lograndint(0, 5), "expected low > 0"),
        (lambda: quniform(0, 1, 0.3), "expected multiples of q=0.3 for low and high"),
        (lambda: quniform(0.2, 0.9, 0.3), "expected multiples of q=0.3"),
        (lambda: quniform(0, 1, 0), "expected q > 0, found 0.0"),
        (lambda: quniform(0, 1, -1), "expected q > 0"),
        (lambda: quniform(0, 1, 1e-17), r"expected at most 2\^53 steps"),
        (lambda: quniform(0, 1, None), "quniform: expected a step q > 0, found None"),
        (lambda: randint(3, 3), "expected low < high"),
        (lambda: randint(0, 2**64 + 1), r"expected at most 2\^64 for high"),
        (lambda: qrandint(0, 5, 2), "expected multiples of q=2"),
        (lambda: qrandint(1, 4, 2), "expected multiples of q=2"),
        (lambda: qrandint(0, 4, 0), "expected q > 0"),
        (lambda: randn(0, 0), "expected sd > 0, found 0.0"),
        (lambda: randn(0, 1e308), "found some beyond 1e308"),
        (lambda: qrandn(0, 1, 0), "expected q > 0"),
        (lambda: qrandn(0, 1, 1e-17), r"expected at most 2\^53 steps"),
    ],
)
def test_a_domain_that_cannot_be_is_refused_with_what_is_wrong(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


# What each call draws here and in Ray Tune: the table of the page on search spaces.

BY_RAY = {
    "uniform(0, 1)": "from 0 to 1",
    "uniform(1, 1)": "1.0",
    "uniform(1, 0)": "from 0 to 1",
    "loguniform(1, 10)": "from 1 to 10",
    "loguniform(0, 1)": "refused",
    "quniform(0, 1, 0.25)": "0.0, 0.25, 0.5, 0.75, 1.0",
    "quniform(0, 1, 0.3)": "refused",
    "randint(0, 3)": "0, 1, 2",
    "randint(0.0, 3.0)": "0, 1, 2",
    "randint(3, 3)": "fails at the first draw",
    "qrandint(1, 5)": "1, 2, 3, 4",
    "qrandint(2, 10, 4)": "4, 8",
    "qrandint(1, 10, 3)": "3, 6, 9",
    "lograndint(1, 4)": "1, 2, 3",
    "qlograndint(1, 3)": "refused: `q` is missing",
    "randn(0, 0)": "refused",
    "choice([1, 2])": "1, 2",
    "choice([])": "fails at the first draw",
    "choice('abc')": "a, b, c",
    "choice({1, 2})": "1, 2",
    "choice([len])": "the function",
    "grid_search([1, 2])": "1, 2",
    "grid_search([])": "no trial at all",
    "grid_search('ab')": "a, b",
    "sample_from(lambda config: 3)": "3",
    "sample_from(lambda: 3)": "3",
}
"""Each call, and what Ray Tune 2.60 drew for it: `generate_variants` of 600 seeds was run once for each."""


def describe_draws(call: str) -> str:
    """Return what `call` of `pt` draws at evenly spaced quantiles, or what its error expects."""
    try:
        node = eval(call, dict(vars(domains)))
    except InvalidInput as error:
        return f"refused: {re.findall('expected [^,;:]+', str(error))[0]}"
    space = validate_space({"x": node})
    count = len(node.options) if isinstance(node, domains.Grid) else 1000
    quantiles = [index / count for index in range(count)] + [ALMOST_ONE]
    values = [resolve_space(space, lambda _, domain, at=at: domain.draw_at(at))["x"] for at in quantiles]  # type: ignore[misc]  # of a loop
    distinct = list(dict.fromkeys(values))
    return ", ".join(map(str, distinct)) if len(distinct) <= 10 else f"from {values[0]:g} to {values[-1]:g}"


def test_the_page_on_search_spaces_says_what_each_call_draws_or_that_it_is_refused() -> None:
    rows = [f"| `{call}` | {describe_draws(call)} | {by_ray} |" for call, by_ray in BY_RAY.items()]
    table = "\n".join(["| call | here | Ray Tune 2.60 |", "|---|---|---|", *rows])
    assert table in (ROOT / "docs" / "search-spaces.md").read_text()


def test_what_the_page_says_below_the_table_is_refused_too() -> None:
    with pytest.raises(InvalidInput, match="expected a parameter of the space at this place"):
        pt.PBT(perturbation_interval=2, hyperparam_mutations={"lr": pt.uniform(0, 1)}).require_supported_space({"x": 1})
    with pytest.raises(BadMetric, match=r"expected a dict of metrics, like {'loss': value}, found float"):
        to_plain_metrics(0.5, "step 1")  # type: ignore[arg-type]  # that is the fault


# The JSON form of a search space.


def width(config: Mapping[str, object]) -> object:
    return config["depth"]


DOMAINS = {
    "uniform": ([0, 1], uniform(0, 1)),
    "quniform": ([0, 1, 0.25], quniform(0, 1, 0.25)),
    "loguniform": ([1e-4, 1], loguniform(1e-4, 1)),
    "qloguniform": ([0.5, 1, 0.5], qloguniform(0.5, 1, 0.5)),
    "randint": ([0, 5], randint(0, 5)),
    "qrandint": ([0, 4, 2], qrandint(0, 4, 2)),
    "lograndint": ([1, 5], lograndint(1, 5)),
    "qlograndint": ([2, 4, 2], qlograndint(2, 4, 2)),
    "randn": ([0, 2], randn(0, 2)),
    "qrandn": ([0, 2, 0.5], qrandn(0, 2, 0.5)),
    "choice": ([1, {"a": {"uniform": [0, 1]}}], choice([1, {"a": uniform(0, 1)}])),
    "grid_search": ([1, {"a": {"grid_search": [2]}}], grid_search([1, {"a": grid_search([2])}])),
}


@pytest.mark.parametrize("name", DOMAINS)
def test_each_domain_is_an_object_with_its_name_for_the_only_key(name: str) -> None:
    argument, domain = DOMAINS[name]
    assert space_from_json({"x": {name: argument}}) == {"x": domain}
    assert space_to_json({"x": domain}) == {"x": {name: argument}}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"uniform": {"low": 0, "high": 1}}, uniform(0, 1)),
        ({"randn": []}, randn()),
        ({"qrandint": [0, 4]}, qrandint(0, 4)),
        ({"choice": {"options": [1, {"uniform": [0, 1]}], "weights": [1, 3]}}, choice([1, uniform(0, 1)], [1, 3])),
        ({"low": 0, "high": 1}, {"low": 0, "high": 1}),
        ({"uniform": [0, 1], "note": "two keys"}, {"uniform": [0, 1], "note": "two keys"}),
        ({"depth": {"randint": [0, 5]}}, {"depth": randint(0, 5)}),
        ([1, {"randint": [0, 5]}, None], [1, randint(0, 5), None]),
        ({"constant": {"uniform": [0, 1]}}, {"uniform": [0, 1]}),
        ({"constant": [{"choice": [1]}]}, [{"choice": [1]}]),
        ({"space": {"choice": {"uniform": [0, 1]}}}, {"choice": uniform(0, 1)}),
        ({"space": {"uniformm": [0, 1]}}, {"uniformm": [0, 1]}),
        ({"random": 3}, {"random": 3}),
        (randint(0, 5), randint(0, 5)),
    ],
    ids=repr,
)
def test_an_object_is_a_domain_or_a_space_of_its_own(node: object, expected: object) -> None:
    assert space_from_json({"x": node}) == {"x": expected}


def test_the_outermost_object_is_always_one_of_parameters() -> None:
    assert space_from_json({"choice": [1, 2]}) == {"choice": [1, 2]}
    assert space_to_json({"choice": [1, 2]}) == {"choice": [1, 2]}


@given(spaces())
def test_every_space_survives_json(space: dict[str, object]) -> None:
    document = json.loads(json.dumps(space_to_json(space), sort_keys=True, allow_nan=False))
    assert space_from_json(document) == validate_space(space)
    assert json.dumps(space_to_json(space_from_json(document))) == json.dumps(document)


def test_a_function_is_written_by_its_name_and_found_by_who_allows_it() -> None:
    loaded: list[str] = []
    path = f"{__name__}:width"

    def load(name: str) -> Function:
        loaded.append(name)
        return width

    assert space_to_json({"w": sample_from(width)}) == {"w": {"sample_from": path}}
    space: dict[str, Any] = space_from_json({"w": {"sample_from": path}}, load)
    assert loaded == [path]
    assert space["w"].function is width
    assert repr(space["w"]) == f"sample_from({path})"
    assert space_to_json(space) == {"w": {"sample_from": path}}


def test_a_function_is_not_looked_for_unless_it_is_allowed() -> None:
    with pytest.raises(UnsafePayload, match=r"^model.w: sample_from 'os:system': importing a function by its name"):
        space_from_json({"model": {"w": {"sample_from": "os:system"}}})


@pytest.mark.parametrize(
    "function",
    [
        lambda config: config["a"],
        operator.itemgetter("a"),
        type("Local", (), {"__qualname__": "test.<locals>.Local", "__call__": len})(),
        type("InMain", (PurePath,), {"__module__": "__main__", "__qualname__": "InMain"}),
    ],
)
def test_a_function_without_a_name_to_find_it_by_cannot_be_written(function: object) -> None:
    with pytest.raises(InvalidInput, match=r"^model.w: sample_from\(.*\) cannot be imported by name: move the"):
        space_to_json({"model": {"w": sample_from(function)}})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1], r'space: expected an object such as \{"lr": \{"uniform": \[0, 1\]\}\}, found \[1\]'),
        (
            {"lr": {"loguniforn": [1, 2]}},
            r"^lr: unknown distribution 'loguniforn'; did you mean 'loguniform'\? Expected .*, found {'loguniforn'",
        ),
        ({"a": [{"uniform": [1]}]}, r'^a\[0\]: expected \{"uniform": \[low, high\]\}, found'),
        ({"a": {"uniform": {"low": 0, "hig": 1}}}, r"found \{'uniform': \{'low': 0, 'hig': 1\}\}"),
        ({"a": {"uniform": {1: 0}}}, "^a: expected"),
        ({"a": {"uniform": 3}}, r"found \{'uniform': 3\}; if 'uniform' is a name in your configuration"),
        ({"a": {"choice": {"options": [1]}}}, r'expected \{"choice": \[option, ...\]\} or \{"choice": \{"options"'),
        ({"a": {"grid_search": 3}}, r'expected \{"grid_search": \[value, ...\]\}'),
        ({"a": {"sample_from": 3}}, r'expected \{"sample_from": "package.module:name"\}'),
        ({"a": {"sample_from": "os.system"}}, "^a: sample_from: expected 'package.module:name', found 'os.system'"),
        ({"a": {"space": 3}}, r'expected \{"space": \{...\}\}, found \{\'space\': 3\}'),
        ({"m": {"choice": [1, {"b": {"uniform": [2, 1]}}]}}, r"^m\?1.b: uniform\(2.0, 1.0\): expected low < high"),
        ({"m": {"grid_search": [{"b": {"uniform": [2, 1]}}]}}, r"^m\?0.b: uniform"),
        ({"m": {"choice": {"options": [{"uniform": [2, 1]}], "weights": [1]}}}, r"^m\?0: uniform"),
        ({"a": {"choice": []}}, "^a: choice.*expected at least one option"),
        ({"a": {"constant": float("nan")}}, "^a: expected a value or a domain, found nan"),
        ({"a": b"x"}, "^a: expected a value or a domain, found b'x'"),
        ({3: [1]}, "^space: expected text for a key, as in JSON, found 3"),
        ({"a": {3: [1]}}, "^space.a: expected text for a key"),
    ],
)
def test_a_document_that_is_no_space_is_refused_with_where_and_what_is_expected(document: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        space_from_json(document)
