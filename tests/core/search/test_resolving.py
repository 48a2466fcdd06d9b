from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_tune.core import seeded_random
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.search.domains import (
    Choice,
    Domain,
    choice,
    find_domains,
    grid_search,
    has_grid,
    qrandint,
    randint,
    randn,
    sample_from,
    to_plain_node,
    uniform,
)
from prefect_tune.core.search.space import (
    Draw,
    ParameterMatch,
    ParameterMismatch,
    ParameterOmission,
    ParameterReading,
    accepts_value,
    are_json_equal,
    check_sample_functions,
    includes_json,
    interpret_config,
    resolve_space,
    validate_space,
)
from prefect_tune.core.values import canonical_json
from tests.fakes.searches.spaces import QUANTILES, spaces


def draw_by_seed(seed: int) -> Draw:
    return lambda name, domain: domain.draw_at(seeded_random.draw_uniform(seed, name))


def make_recorder(names: list[str], value: object) -> Callable[..., Any]:
    """Return a function that returns `value` and records its first argument."""

    def record(name: object, *_: object) -> object:
        names.append(str(name))
        return value

    return record


def resolve(space: Mapping[str, object], **draws: float) -> dict[str, object]:
    """Resolve with these draws; any other draw is an error."""
    return resolve_space(validate_space(space), lambda name, _: draws[name])


# Choices.


@pytest.mark.parametrize(
    ("domain", "shares"),
    [
        (choice(["a", "b", "c"]), [1 / 3, 1 / 3, 1 / 3]),
        (choice(["a", "b", "c"], [1, 0, 3]), [0.25, 0, 0.75]),
        (grid_search([1, 2]), [0.5, 0.5]),
    ],
    ids=repr,
)
def test_options_are_drawn_alike_or_by_their_weights(domain: Choice, shares: list[float]) -> None:
    counts = Counter(domain.draw_at(seeded_random.draw_uniform(1, "options", number)) for number in range(2000))
    assert [abs(counts[index] / 2000 - share) < 0.035 for index, share in enumerate(shares)] == [True] * len(shares)
    assert [counts[index] > 0 for index in range(len(shares))] == [share > 0 for share in shares]


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=5).filter(any), QUANTILES)
def test_an_option_without_weight_is_never_drawn(weights: list[float], quantile: float) -> None:
    assert weights[choice(range(len(weights)), weights).draw_at(quantile)] > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: choice([]), r"choice\(\[\]\): expected at least one option"),
        (lambda: grid_search([]), r"grid_search\(\[\]\): expected at least one option"),
        (lambda: choice("abc"), "choice: expected a list, found 'abc'; a text is one value"),
        (lambda: choice({1, 2}), "expected a list, found {1, 2}; .* a set has no order"),
        (lambda: choice(3), "expected a list, found 3"),
        (lambda: choice([1, len]), r"choice: option 1: expected a value or a domain, found <built-in function len>"),
        (lambda: choice([{"a": [float("nan")]}]), r"choice: option 0.a\[0\]: expected a value"),
        (lambda: choice([{3: 4}]), "choice: option 0: expected text for a key, as in JSON, found 3"),
        (lambda: choice([1, 2], [1]), "expected a weight >= 0 for each of 2 options"),
        (lambda: choice([1, 2], [1, -1]), "expected a weight >= 0 for each"),
        (lambda: choice([1, 2], [1, float("nan")]), "expected a weight >= 0 for each"),
        (lambda: choice([1, 2], 5), "weights: expected a list"),
        (lambda: choice([1, 2], [0, 0]), "expected weights with a finite sum above 0"),
        (lambda: choice([1, 2], [1e308, 1e308]), "expected weights with a finite sum above 0"),
        (lambda: choice([{"a": grid_search([1])}]), "expected options without grid_search"),
        (lambda: choice([[choice([1])], [[grid_search([1])]]]), "expected options without grid_search"),
        (lambda: sample_from("lambda: 3"), "sample_from: expected a function of the configuration, found 'lambda: 3'"),
        (lambda: sample_from(lambda: 3), r"sample_from: expected a function of one argument, .* found .*<lambda>\(\)"),
        (lambda: sample_from(lambda _a, _b: 3), r"found .*<lambda>\(_a, _b\)"),
        (lambda: validate_space([1]), "space: expected an object of parameters"),
        (lambda: validate_space(uniform(0, 1)), "space: expected an object of parameters"),
        (lambda: validate_space({"a": len}), r"To compute the value of each trial: pt.sample_from\(lambda config"),
        (lambda: validate_space({"a": b"x"}), r"space.a: expected a value or a domain, found b'x' \(bytes\)"),
    ],
)
def test_what_no_configuration_can_hold_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


def test_a_domain_shows_the_call_that_makes_it() -> None:
    domain = choice([1, {"a": uniform(0, 1)}], [1, 2])
    assert repr(domain) == "choice([1, {'a': uniform(0.0, 1.0)}], weights=[1.0, 2.0])"
    assert repr(grid_search((1, None))) == "grid_search([1, None])"
    assert repr(sample_from(draw_by_seed)) == "sample_from(draw_by_seed)"


def test_a_domain_does_not_change_with_the_list_it_was_made_of() -> None:
    options = [{"a": [1]}]
    domain = choice(options)
    options[0]["a"].append(2)
    assert domain == choice([{"a": [1]}])


@pytest.mark.parametrize("domain", [uniform(0, 1), randint(0, 2), randn(), choice([1]), grid_search([1])], ids=repr)
def test_a_domain_is_a_value_that_never_changes_and_equals_its_like(domain: Domain) -> None:
    field = fields(domain)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(domain, field, 7)
    assert domain == replace(domain)


def test_everything_but_domains_becomes_plain_json() -> None:
    node = to_plain_node({"t": (1, np.int64(2)), "f": np.float32(0.5), "b": True, "n": None, "s": np.str_("x")}, "here")
    assert canonical_json(node) == b'{"b":true,"f":0.5,"n":null,"s":"x","t":[1,2]}'


def test_every_domain_is_found_wherever_it_stands() -> None:
    inner, function = uniform(0, 1), sample_from(len)
    outer = choice([1, {"a": [inner]}])
    grid = grid_search([function])
    assert list(find_domains({"x": [outer, 3], "y": {"z": grid}})) == [outer, inner, grid, function]
    assert has_grid([{"y": grid}])
    assert not has_grid([outer])


# Resolving.


def test_constants_lists_and_objects_stay_and_domains_are_drawn_by_name() -> None:
    space = {
        "lr": uniform(0, 1),
        "fixed": "text",
        "layers": [{"units": randint(1, 9)}, 3],
        "odd key": {'"': uniform(0, 1)},
    }
    config = resolve(space, **{"lr": 0.5, "layers[0].units": 4, '"odd key"."\\""': 0.25})
    assert config == {"lr": 0.5, "fixed": "text", "layers": [{"units": 4}, 3], "odd key": {'"': 0.25}}


def test_names_tell_apart_what_looks_alike() -> None:
    names: list[str] = []
    space = {"a.b": uniform(0, 1), "a": {"b": uniform(0, 1)}, "c": [uniform(0, 1)], "c[0]": uniform(0, 1)}
    resolve_space(validate_space(space), make_recorder(names, 0.5))
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    ("draws", "config"),
    [
        ({"model": 0, "model?0.depth": 3}, {"kind": "mlp", "depth": 3}),
        ({"model": 1, "model?1": 0, "model?1?0.width": 8}, {"kind": "cnn", "width": 8}),
        ({"model": 1, "model?1": 1}, "none"),
        ({"model": 2, "model?2": 0.5}, 0.5),
    ],
)
def test_only_what_the_chosen_option_needs_is_drawn(draws: dict[str, float], config: object) -> None:
    inner = choice([{"kind": "cnn", "width": qrandint(8, 16, 8)}, "none"])
    space = {"model": choice([{"kind": "mlp", "depth": randint(1, 5)}, inner, uniform(0, 1)])}
    assert resolve(space, **draws) == {"model": config}


def test_what_is_fixed_is_not_drawn() -> None:
    space = validate_space({"a": choice([1, uniform(0, 1)]), "b": sample_from(lambda config: config["a"] + 1)})
    assert resolve_space(space, lambda name, _: {"a?1": 0.25}[name], {"a": 1}) == {"a": 0.25, "b": 1.25}
    assert resolve_space(space, lambda name, _: {"a": 0}[name], {"b": 7}) == {"a": 1, "b": 7}


# Functions of other parameters.


def test_a_function_reads_what_is_resolved_wherever_it_stands() -> None:
    space = {
        "a": sample_from(lambda config: config["b"] * 2),
        "b": sample_from(lambda config: config["model"]["depth"] + config["list"][1]),
        "model": choice([{"depth": randint(1, 5)}]),
        "list": [uniform(0, 1), 10],
        "copy": sample_from(lambda config: {**config["model"], "twice": [config["a"]] * 2}),
    }
    config = resolve(space, **{"model": 0, "model?0.depth": 3, "list[0]": 0.5})
    assert config["a"] == 26
    assert config["copy"] == {"depth": 3, "twice": [26, 26]}


def test_a_function_is_called_once_per_configuration_and_what_it_reads_is_drawn_once() -> None:
    calls: list[str] = []
    space = {
        "a": sample_from(lambda config: config["b"] + config["b"]),
        "b": sample_from(lambda config: make_recorder(calls, config["c"])("b")),
        "c": uniform(0, 1),
    }
    assert resolve_space(validate_space(space), make_recorder(calls, 0.5)) == {"a": 1.0, "b": 0.5, "c": 0.5}
    assert calls == ["c", "b"]


def test_a_function_asks_for_what_only_some_options_have() -> None:
    space = {
        "model": choice([{"depth": 2}, {"width": 3}]),
        "size": sample_from(lambda config: (config["model"].get("depth", 0), config["model"].get("nothing"))),
        "has": sample_from(lambda config: ["depth" in config["model"], sorted(config["model"]), len(config)]),
    }
    assert resolve(space, model=0) == {"model": {"depth": 2}, "size": [2, None], "has": [True, ["depth"], 3]}
    assert resolve(space, model=1) == {"model": {"width": 3}, "size": [0, None], "has": [False, ["width"], 3]}


def test_a_function_cannot_change_what_others_get() -> None:
    def append_to_list(config: Mapping[str, Any]) -> object:
        config["list"].append(2)
        return config["list"]

    assert resolve({"list": [1], "a": sample_from(append_to_list)}) == {"list": [1], "a": [1]}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            {"a": sample_from(lambda config: config["b"]), "b": sample_from(lambda config: config["a"])},
            "sample_from at a: the value depends on itself, a -> b -> a",
        ),
        (
            {"c": sample_from(lambda config: config["a"]), "a": sample_from(lambda config: config["a"])},
            "sample_from at a: the value depends on itself, a -> a; ",
        ),
        ({"a": sample_from(lambda config: config["lr"])}, r"sample_from at a: there is no lr, only \['a'\]"),
        (
            {"a": {"b": sample_from(lambda config: config["a"]["x"])}},
            r"sample_from at a.b: there is no a.x, only \['b'\]",
        ),
        ({"a": sample_from(lambda _: len)}, "sample_from at a: expected a value or a domain, found <built-in"),
        ({"a": sample_from(lambda _: [uniform(0, 1)])}, r"sample_from at a: expected a value, found \[uniform"),
    ],
)
def test_a_function_that_cannot_be_answered_says_which_and_why(space: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        resolve(space)


def test_an_error_of_the_function_says_whose_it_is_and_where() -> None:
    message = r"sample_from at a.b: its function raised ZeroDivisionError: .* \(.*test_resolving.py, line \d+\)$"
    with pytest.raises(InvalidInput, match=message) as raised:
        resolve({"a": {"b": sample_from(lambda _: 1 / 0)}})
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"a": sample_from(lambda config: 1 / config["x"]), "x": choice([0])}, "sample_from at a: its function raised"),
        # Only one option in a thousand has what fails, or lacks what is read.
        (
            {"model": choice([*range(999), {"a": sample_from(lambda _: 1 / 0)}])},
            r"sample_from at model\?999.a: its function raised ZeroDivisionError",
        ),
        (
            {
                "model": choice([{"depth": 1}, {"width": 2}], weights=[1e9, 1]),
                "a": sample_from(lambda config: config["model"]["depth"]),
            },
            r"sample_from at a: there is no model\?1.depth, only \['width'\]",
        ),
        (
            {"deep": [grid_search([{"er": choice([[sample_from(lambda _: 1 / 0)], 2], weights=[1, 1e9])}])]},
            r"sample_from at deep\[0\]\?0.er\?0\[0\]: its function raised ZeroDivisionError",
        ),
    ],
)
def test_each_function_is_tried_once_also_that_of_a_rare_option(space: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        check_sample_functions(validate_space(space), seed=1)


def test_a_function_of_an_option_that_is_never_drawn_is_not_tried_and_others_a_hundred_times_at_most() -> None:
    calls: list[str] = []
    never = choice([1, {"a": sample_from(lambda _: 1 / 0)}], weights=[1, 0])
    many = grid_search([{"x": index} for index in range(1000)])
    read = sample_from(lambda config: make_recorder(calls, config["never"])(config["many"]["x"]))
    check_sample_functions(validate_space({"never": never, "many": many, "read": read}), seed=1)
    assert len(calls) == 100


def test_a_function_that_failed_can_be_asked_again() -> None:
    answers = iter([ZeroDivisionError, 2])

    def fails_once(_: Mapping[str, object]) -> object:
        if (answer := next(answers)) is ZeroDivisionError:
            raise ZeroDivisionError
        return answer

    def reads_twice(config: Mapping[str, object]) -> object:
        with pytest.raises(ZeroDivisionError):
            config["b"]
        return config["b"]

    assert resolve({"a": sample_from(reads_twice), "b": sample_from(fails_once)}) == {"a": 2, "b": 2}


# Reading.


@given(spaces(), st.integers(0, 3))
def test_what_was_drawn_is_read_back_from_the_configuration(space: dict[str, object], seed: int) -> None:
    whole = validate_space(space)
    config = resolve_space(whole, draw_by_seed(seed))
    readings = list(interpret_config(whole, config))
    assert all(isinstance(reading, ParameterMatch) for reading in readings)
    values = {reading.name: reading.value for reading in readings}
    assert are_json_equal(resolve_space(whole, lambda *drawn: pytest.fail(f"drawn: {drawn}"), values), config)


MODELS = choice([{"kind": "mlp", "depth": randint(1, 5)}, {"kind": "cnn"}, {"kind": "cnn", "width": randint(1, 9)}])


@pytest.mark.parametrize(
    ("node", "value", "readings"),
    [
        (uniform(0, 1), 1, [ParameterMatch("p", uniform(0, 1), 1.0)]),
        (uniform(0, 1), 2, [ParameterMismatch("p", "uniform(0.0, 1.0)", 2)]),
        (randint(0, 5), 3.0, [ParameterMatch("p", randint(0, 5), 3)]),
        (randint(0, 5), "3", [ParameterMismatch("p", "randint(0, 5)", "3")]),
        ("a", "a", []),
        ("a", "b", [ParameterMismatch("p", "'a'", "b")]),
        (1, True, [ParameterMismatch("p", "1", True)]),
        (
            {"a": 1, "b": 2},
            {"a": 1, "c": 3},
            [ParameterOmission("p.b"), ParameterMismatch("p.c", "one of ['a', 'b']", 3)],
        ),
        ({"a": 1}, [1], [ParameterMismatch("p", "{'a': 1}", [1])]),
        ([1, uniform(0, 1)], [1, 0.5], [ParameterMatch("p[1]", uniform(0, 1), 0.5)]),
        ([1, uniform(0, 1)], [1], [ParameterMismatch("p", "[1, uniform(0.0, 1.0)]", [1])]),
        (choice([1, 2]), 2, [ParameterMatch("p", choice([1, 2]), 1)]),
        (choice([1, 2]), 3, [ParameterMismatch("p", "choice([1, 2])", 3)]),
        (grid_search([1, 2]), 2, [ParameterMatch("p", grid_search([1, 2]), 1)]),
    ],
    ids=repr,
)
def test_what_does_not_fit_or_is_left_out_is_told_by_name(
    node: object, value: object, readings: list[ParameterReading]
) -> None:
    assert list(interpret_config({"p": node}, {"p": value})) == readings
    assert accepts_value(node, value) is not any(isinstance(reading, ParameterMismatch) for reading in readings)


@pytest.mark.parametrize(
    ("value", "index"),
    [({"kind": "cnn"}, 1), ({"kind": "cnn", "width": 3}, 2), ({"depth": 2}, 0), ({"width": 3}, 2), ({}, 0)],
)
def test_the_option_is_taken_that_gives_exactly_this_or_else_the_first_that_can(value: object, index: int) -> None:
    first = next(interpret_config({"model": MODELS}, {"model": value}))
    assert first == ParameterMatch("model", MODELS, index)


def test_an_option_without_anything_to_draw_can_give_exactly_this() -> None:
    domain = choice([{"a": uniform(0, 1)}, {}])
    assert list(interpret_config({"p": domain}, {"p": {}})) == [ParameterMatch("p", domain, 1)]


def test_an_option_does_not_fit_if_only_part_of_it_does() -> None:
    domain = choice([{"a": uniform(0, 1), "b": 1}, {"a": uniform(0, 9), "c": 1}])
    readings = list(interpret_config({"p": domain}, {"p": {"a": 0.5, "b": 2}}))
    assert readings == [ParameterMismatch("p", repr(domain), {"a": 0.5, "b": 2})]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        (True, True, True),
        ([1, {"a": 2}], (1, {"a": 2.0}), True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1}, [1], False),
        ([True], [1], False),
        ("a", "a", True),
        (None, False, False),
    ],
)
def test_two_values_are_the_same_when_json_says_so(one: object, other: object, same: bool) -> None:
    assert are_json_equal(one, other) is same
    assert are_json_equal(other, one) is same


def test_a_configuration_holds_what_a_part_of_it_says() -> None:
    whole = {"a": 1, "b": {"c": [{"d": 1, "e": 2}], "f": 3}}
    assert includes_json(whole, {})
    assert includes_json(whole, {"b": {"c": [{"e": 2}]}})
    assert not includes_json(whole, {"b": {"c": [{"e": 3}]}})
    assert not includes_json(whole, {"b": {"c": []}})
    assert not includes_json(whole, {"a": 1, "x": None})
    assert not includes_json(whole, {"a": {}})
    assert not includes_json({"a": "x"}, {"a": ["x"]})
    assert not includes_json({"a": ["x"]}, {"a": "x"})
