from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import given

from prefect_tune.core.errors import InvalidInput, UnsafePayload
from prefect_tune.core.search.domains import (
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
from prefect_tune.core.search.space import valid_space
from prefect_tune.core.search.space_json import Function, space_from_json, space_to_json
from tests.fakes.searches.spaces import spaces


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
    ("node", "means"),
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
def test_an_object_is_a_domain_or_a_space_of_its_own(node: object, means: object) -> None:
    assert space_from_json({"x": node}) == {"x": means}


def test_the_outermost_object_is_always_one_of_parameters() -> None:
    assert space_from_json({"choice": [1, 2]}) == {"choice": [1, 2]}
    assert space_to_json({"choice": [1, 2]}) == {"choice": [1, 2]}


@given(spaces())
def test_every_space_survives_json(space: dict[str, object]) -> None:
    document = json.loads(json.dumps(space_to_json(space), sort_keys=True, allow_nan=False))
    assert space_from_json(document) == valid_space(space)
    assert json.dumps(space_to_json(space_from_json(document))) == json.dumps(document)


def test_a_function_is_written_by_its_name_and_found_by_who_allows_it() -> None:
    asked: list[str] = []
    path = f"{__name__}:width"

    def load(name: str) -> Function:
        asked.append(name)
        return width

    assert space_to_json({"w": sample_from(width)}) == {"w": {"sample_from": path}}
    space: dict[str, Any] = space_from_json({"w": {"sample_from": path}}, load)
    assert asked == [path]
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
    ("document", "said"),
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
        ({3: [1]}, "^space: expected text for a key, as JSON has it, found 3"),
        ({"a": {3: [1]}}, "^space.a: expected text for a key"),
    ],
)
def test_a_document_that_is_no_space_is_refused_with_where_and_what_is_expected(document: object, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        space_from_json(document)
