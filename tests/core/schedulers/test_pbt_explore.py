"""How PBT perturbs a configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.schedulers.pbt import PBT, Explorer, as_mutations
from prefect_tune.core.search import domains as pt


def explored(
    mutations: Mapping[str, object], config: Mapping[str, object], *, again: float = 0.0, times: int = 200
) -> list[Mapping[str, Any]]:
    """Explore from one configuration many times."""
    explorer = Explorer(as_mutations(mutations, "here"), again, (1.2, 0.8), seed=7)
    return [explorer.explored(config, "test", number) for number in range(times)]


def values(mutation: object, value: object, *, again: float = 0.0, times: int = 200) -> Counter[Any]:
    return Counter(each["x"] for each in explored({"x": mutation}, {"x": value}, again=again, times=times))


def test_a_number_is_multiplied_by_one_of_the_factors() -> None:
    found = values(pt.uniform(0, 10), 1.0)
    assert set(found) == {1.2, 0.8}
    assert min(found.values()) > 60


def test_a_number_never_leaves_its_domain() -> None:
    assert set(values(pt.uniform(0.9, 1.1), 1.0)) == {0.9, 1.1}
    assert sorted(set(values(pt.loguniform(1e-4, 1e-1), 1e-1))) == [pytest.approx(0.08), 0.1]


def test_a_whole_number_stays_one_and_moves_by_a_step_at_least() -> None:
    assert set(values(pt.randint(1, 100), 10)) == {8, 12}
    assert set(values(pt.randint(1, 100), 2)) == {1, 3}
    assert set(values(pt.randint(1, 100), 1)) == {1, 2}  # not 0
    assert set(values(pt.qrandint(0, 64, 8), 16)) == {8, 24}
    assert all(type(each) is int for each in values(pt.randint(1, 100), 10))


@pytest.mark.parametrize(
    ("domain", "value", "expected"),
    [
        (pt.uniform(0.5, 1.5), 1, {0.8, 1.2}),
        (pt.uniform(8, 256), 32, {25.6, 38.4}),
        (pt.loguniform(0.5, 8.7), 8, {6.4, 8.7}),
        (pt.uniform(0.2, 0.9), 1, {0.8, 0.9}),
        (pt.quniform(0, 64, 8), 32, {24.0, 40.0}),
        (pt.quniform(0, 9, 0.5), 2, {1.5, 2.5}),
        (pt.quniform(0, 1, 0.5), 0, {0.0, 0.5}),
        (pt.randn(0, 9), 10, {8.0, 12.0}),
        (pt.qrandn(0, 9, 2), 4, {2.0, 6.0}),
    ],
)
def test_a_domain_of_real_numbers_gives_floats_also_where_the_present_value_is_a_whole_number(
    domain: object, value: int, expected: set[float]
) -> None:
    for present in (value, float(value)):
        found = values(domain, present)
        assert {round(each, 9) for each in found} == expected
        assert {type(each) for each in found} == {float}
        assert all(type(each) is float for each in values(domain, present, again=1.0))


@pytest.mark.parametrize("domain", [pt.randint(1, 100), pt.lograndint(1, 100), pt.qrandint(0, 64, 8)])
@pytest.mark.parametrize("value", [16, 16.0])
def test_a_domain_of_integers_gives_integers_also_where_the_present_value_is_a_float(
    domain: object, value: float
) -> None:
    assert {type(each) for again in (0.0, 1.0) for each in values(domain, value, again=again)} == {int}


def test_the_factors_may_be_whole_numbers() -> None:
    explorer = Explorer(as_mutations({"x": pt.uniform(0, 10)}, "here"), 0.0, (2,), seed=7)
    assert repr(explorer.explored({"x": 1}, "test")) == "{'x': 2.0}"


@pytest.mark.parametrize("domain", [pt.uniform(0, 0.5), pt.uniform(-1, 1), pt.randn(0, 1)])
@pytest.mark.parametrize("zero", [0, 0.0])
def test_a_real_zero_that_no_factor_changes_is_drawn_anew(domain: object, zero: float) -> None:
    found = values(domain, zero)
    assert len(found) == 200
    assert {type(each) for each in found} == {float}


@pytest.mark.parametrize(
    "mutation", [[0.1], [1, 1.0], pt.choice(["a", "a"]), pt.randint(3, 4), pt.quniform(1, 1, 1), pt.qrandint(8, 8, 8)]
)
def test_a_mutation_that_can_change_nothing_is_refused(mutation: object) -> None:
    with pytest.raises(InvalidInput, match=r"here\['a'\]\['b'\]: expected .* two .*a mutation of it changes nothing"):
        as_mutations({"a": {"b": mutation}}, "here")


def test_factors_that_can_change_nothing_are_refused() -> None:
    mutations = {"x": pt.uniform(0, 1)}
    with pytest.raises(InvalidInput, match="expected a factor other than 1"):
        PBT(2, mutations, resample_probability=0, perturbation_factors=(1.0, 1))
    PBT(2, mutations, resample_probability=0.5, perturbation_factors=(1.0,))


def test_an_option_is_recognized_by_its_value_and_its_type_in_json() -> None:
    assert set(values([0, False, 1], False)) == {0, 1}
    assert {(type(each), each) for each in values([0.5, 1.0, 2.0], 1)} == {(float, 0.5), (float, 2.0)}


def test_a_number_with_a_step_stays_a_multiple_and_moves_by_a_step_at_least() -> None:
    assert set(values(pt.quniform(0, 1, 0.25), 0.5)) == {0.25, 0.75}
    assert set(values(pt.qrandn(0, 1, 0.5), 0.5)) == {0.0, 1.0}
    assert set(values(pt.randn(0, 1), -1.0)) == {-1.2, -0.8}


def test_an_option_becomes_one_of_its_neighbours() -> None:
    assert set(values([16, 32, 64, 128], 32)) == {16, 64}
    assert set(values([16, 32, 64, 128], 128)) == {64, 128}
    assert set(values(pt.choice(["relu", "tanh", "gelu"]), "relu")) == {"relu", "tanh"}
    assert set(values((False, True), False)) == {False, True}


def test_a_value_is_drawn_anew_with_the_probability_that_was_asked_for() -> None:
    found = values(pt.uniform(0, 10), 1.0, again=0.25, times=2_000)
    assert found[1.2] + found[0.8] == pytest.approx(1_500, rel=0.05)
    assert len(found) > 400
    assert set(values([1, 2, 3, 4], 1, again=1.0)) == {1, 2, 3, 4}


def test_a_weighted_choice_is_drawn_by_its_weights() -> None:
    found = values(pt.choice(["a", "b"], weights=[3, 1]), "a", again=1.0, times=1_000)
    assert found["a"] == pytest.approx(750, rel=0.1)


@pytest.mark.parametrize("value", ["none", None, True, float("nan")])
def test_what_is_no_value_of_the_domain_is_drawn_anew(value: object) -> None:
    assert all(0 <= each < 10 for each in values(pt.uniform(0, 10), value))
    assert set(values([1, 2], value if value is not True else 3)) == {1, 2}


def test_what_the_configuration_lacks_is_drawn() -> None:
    (found,) = explored({"a": {"b": pt.uniform(0, 1)}, "c": [1, 2]}, {"a": "text"}, times=1)
    assert 0 <= found["a"]["b"] < 1
    assert found["c"] in {1, 2}


def test_nested_values_change_where_they_are_and_nothing_else_does() -> None:
    config = {"optimizer": {"lr": 1.0, "name": "adam", "schedule": {"warmup": 10}}, "width": 64, "lr": 5.0}
    mutations = {"optimizer": {"lr": pt.uniform(0, 10), "schedule": {"warmup": pt.randint(0, 99)}}}
    before = repr(config)
    for found in explored(mutations, config):
        assert found["optimizer"]["lr"] in {0.8, 1.2}
        assert found["optimizer"]["schedule"]["warmup"] in {8, 12}
        assert found["optimizer"]["name"] == "adam"
        assert (found["width"], found["lr"]) == (64, 5.0)
    assert repr(config) == before


def test_two_values_change_apart_from_each_other() -> None:
    found = explored({"a": pt.uniform(0, 9), "b": pt.uniform(0, 9)}, {"a": 1.0, "b": 1.0})
    assert {(each["a"], each["b"]) for each in found} == {(0.8, 0.8), (0.8, 1.2), (1.2, 0.8), (1.2, 1.2)}


def test_functions_are_computed_last_from_the_configuration_as_it_is_then() -> None:
    mutations = {
        "twice": lambda config: 2 * config["x"],
        "x": pt.uniform(0, 10),
        "inner": {"half": pt.sample_from(lambda config: config["x"] / 2)},
    }
    for found in explored(mutations, {"x": 1.0, "twice": 2.0}):
        assert found["twice"] == 2 * found["x"]
        assert found["inner"] == {"half": found["x"] / 2}


def test_a_function_that_returns_what_json_cannot_say_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidInput, match=r"config\.inner\.x"):
        explored({"inner": {"x": lambda config: {len(config)}}}, {})


@settings(max_examples=50)
@given(st.integers(0, 1 << 30), st.text(max_size=5))
def test_the_same_purpose_gives_the_same_configuration(seed: int, purpose: str) -> None:
    mutations = as_mutations({"a": pt.uniform(0, 9), "b": [1, 2, 3]}, "here")

    def once() -> Mapping[str, object]:
        return Explorer(mutations, 0.5, (1.2, 0.8), seed).explored({"a": 1.0, "b": 2}, purpose)

    assert once() == once()


@pytest.mark.parametrize(
    ("mutations", "expected"),
    [
        ({}, "here: expected at least one value"),
        ({"a": {}}, r"here\['a'\]: expected at least one value"),
        ({"a": {"b": 3}}, r"here\['a'\]\['b'\]: expected a domain"),
        ({"a": "text"}, "expected a domain"),
        ({"a": pt.grid_search([1, 2])}, "expected a domain"),
        ({"a": []}, "at least one option"),
        ({"a": [1, {"b": [pt.uniform(0, 1)]}]}, r"here\['a'\]: expected options that are plain values"),
        ({"a": lambda: 3}, r"here\['a'\]: expected a function of the configuration.*For random values"),
    ],
)
def test_what_cannot_be_explored_is_refused_by_its_place(mutations: Mapping[str, object], expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        as_mutations(mutations, "here")
