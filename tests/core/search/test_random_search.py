"""Random and grid search, and repetitions of a search."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.search.base import Exhausted, Proposed, Repeated, Search, SearchState, Space, Suggestion
from prefect_tune.core.search.domains import choice, grid_search, randint, sample_from, uniform
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import (
    UNLIMITED,
    RandomSearch,
    count_grid_points,
    extract_grids,
    find_grid_points,
    get_default_num_samples,
    iter_grid_choices,
)
from prefect_tune.core.search.space import are_json_equal, resolve_space, validate_space
from prefect_tune.core.values import StepReport
from tests.fakes.searches.spaces import spaces

Config = Mapping[str, Any]


def propose(state: SearchState, first: int = 0, count: int = 100) -> list[Config]:
    """Return the configurations of the trials from `first` on, until the search proposes none."""
    configs: list[Config] = []
    for number in range(first, first + count):
        if not isinstance(suggestion := state.suggest(number), Proposed):
            break
        configs.append(suggestion.config)
    return configs


def resume(search: RandomSearch, space: Config, earlier: Sequence[Config], seed: int = 1) -> SearchState:
    """Begin again and replay the journal's configurations, as JSON with its keys in another order."""
    state = search.begin(space, None, seed)
    for number, config in enumerate(json.loads(json.dumps(earlier, sort_keys=True))):
        state.restore_trial(number, config)
        state.on_trial_ended(number, None, failed=False)
    return state


def propose_all(search: RandomSearch, space: Config, *, count: int = 100, seed: int = 1) -> list[Config]:
    return propose(search.begin(space, None, seed), count=count)


def propose_in_portions(search: RandomSearch, space: Config, portion: int, total: int) -> list[Config]:
    earlier: list[Config] = []
    while len(earlier) < total:
        earlier += propose(resume(search, space, earlier), len(earlier), portion)
    return earlier


MODELS = [{"kind": "mlp", "depth": grid_search([1, 2])}, {"kind": "cnn", "width": randint(8, 65)}]
SPACE = {
    "model": grid_search(MODELS),
    "lr": uniform(0, 1),
    "batch": grid_search([32, 64]),
    "twice": sample_from(lambda config: 2 * config["lr"]),
    "dropout": choice([0, uniform(0, 0.5)]),
}


# Samples and grids.


def test_without_a_grid_there_are_as_many_trials_as_samples() -> None:
    search = RandomSearch(10).begin({"lr": uniform(0, 1)}, None, 1)
    configs = propose(search)
    assert len({config["lr"] for config in configs}) == 10
    assert search.suggest(10) == Exhausted("samples drawn: 10 of 10")
    assert search.suggest(10) == Exhausted("samples drawn: 10 of 10")


def test_a_grid_is_tried_whole_for_each_sample_and_the_rest_is_drawn_anew() -> None:
    space = {"b": grid_search([1, 2, 3]), "a": grid_search(["x", "y"]), "lr": uniform(0, 1)}
    configs = propose_all(RandomSearch(2), space)
    once = [("x", 1), ("y", 1), ("x", 2), ("y", 2), ("x", 3), ("y", 3)]
    assert [(config["a"], config["b"]) for config in configs] == once * 2
    assert len({config["lr"] for config in configs}) == 12


def test_what_is_drawn_can_be_the_same_for_all_points_of_the_grid() -> None:
    space = {"a": grid_search([1, 2, 3]), "lr": uniform(0, 1), "c": choice([{"b": uniform(0, 1)}])}
    search = RandomSearch(2, constant_grid_search=True)
    configs = propose_all(search, space)
    assert [config["a"] for config in configs] == [1, 2, 3] * 2
    draws = [(config["lr"], config["c"]["b"]) for config in configs]
    assert [draws.index(draw) for draw in draws] == [0, 0, 0, 3, 3, 3]
    assert propose_in_portions(search, space, 4, 6) == configs


def test_a_grid_of_spaces_has_the_points_of_each() -> None:
    configs = propose_all(RandomSearch(1), SPACE)
    points = [(config["batch"], config["model"]["kind"], config["model"].get("depth")) for config in configs]
    models = [("mlp", 1), ("mlp", 2), ("cnn", None)]
    assert points == [(batch, *model) for model in models for batch in (32, 64)]


@pytest.mark.parametrize(
    ("space", "samples"),
    [
        ({"a": grid_search([1, 2]), "b": 3}, 1),
        ({"a": {"b": [grid_search([1, 2]), 5]}}, 1),
        ({"a": grid_search([{"b": grid_search([1, 2])}, {"b": 3}])}, 1),
        ({"a": grid_search([1, 2]), "b": uniform(0, 1)}, 10),
        ({"a": grid_search([{"b": uniform(0, 1)}, {"b": 3}])}, 10),
        ({"a": grid_search([1, 2]), "b": choice([1, 2])}, 10),
        ({"a": grid_search([1, 2]), "b": sample_from(lambda config: config["a"])}, 10),
        ({"a": uniform(0, 1)}, 10),
        ({"a": 1}, 10),
        ({}, 10),
    ],
)
def test_without_a_number_a_grid_alone_is_tried_once_and_all_else_ten_times(space: Config, samples: int) -> None:
    assert get_default_num_samples(space) == samples
    tried = propose_all(RandomSearch(), space, count=1000)
    assert tried == propose_all(RandomSearch(samples), space, count=1000)
    assert len(tried) == RandomSearch().trial_count(space) == samples * count_grid_points(extract_grids(space))


def test_a_value_that_stands_twice_in_a_grid_is_tried_twice() -> None:
    assert [config["a"] for config in propose_all(RandomSearch(2), {"a": grid_search([1, 1, 2])})] == [1, 1, 2] * 2


def test_options_of_a_grid_that_overlap_are_each_drawn_once_per_sample() -> None:
    space = {"a": grid_search([uniform(0, 1), uniform(0, 2), uniform(0, 1)])}
    configs = propose_all(RandomSearch(3), space)
    assert len(configs) == 9
    assert configs == propose_in_portions(RandomSearch(3), space, 1, 9)


def test_a_grid_too_large_to_be_listed_is_tried_from_its_start() -> None:
    space = {f"p{index}": grid_search(list(range(10))) for index in range(9)}
    configs = propose_all(RandomSearch(1), space, count=12)
    assert [config["p0"] for config in configs] == [*range(10), 0, 1]
    assert [config["p1"] for config in configs] == [0] * 10 + [1, 1]


def test_endless_search_goes_on() -> None:
    configs = propose_all(RandomSearch(UNLIMITED), {"a": grid_search([1, 2]), "lr": uniform(0, 1)}, count=500)
    assert len({config["lr"] for config in configs}) == 500


def test_a_space_of_constants_is_one_configuration() -> None:
    assert propose_all(RandomSearch(1), {"a": (1, 2)}) == [{"a": [1, 2]}]
    assert propose_all(RandomSearch(2), {}) == [{}, {}]


def test_seeds_differ_and_one_seed_gives_the_same() -> None:
    space = {"lr": uniform(0, 1)}
    assert propose_all(RandomSearch(5), space, seed=1) == propose_all(RandomSearch(5), space, seed=1)
    assert propose_all(RandomSearch(5), space, seed=1) != propose_all(RandomSearch(5), space, seed=2)


# Resume.


@pytest.mark.parametrize("portion", [20, 8, 1])
def test_forty_trials_are_the_same_in_one_go_and_in_portions(portion: int) -> None:
    search = RandomSearch(UNLIMITED, points_to_evaluate=[{"lr": 0.5}, {"batch": 64, "lr": 0.25}, {"dropout": 0.125}])
    assert propose_in_portions(search, SPACE, portion, 40) == propose_all(search, SPACE, count=40)


@given(spaces(), st.integers(0, 9), st.integers(1, 3))
def test_whoever_resumes_anywhere_proposes_the_same(space: dict[str, object], cut: int, samples: int) -> None:
    whole = propose_all(RandomSearch(samples), space, count=10)
    earlier = whole[:cut]
    assert [*earlier, *propose(resume(RandomSearch(samples), space, earlier), cut, 10 - len(earlier))] == whole
    assert len(whole) == min(10, samples * count_grid_points(space))


def test_more_samples_go_on_where_fewer_ended() -> None:
    ten, forty = RandomSearch(10), RandomSearch(40)
    earlier = propose_all(ten, {"lr": uniform(0, 1)})
    more = [*earlier, *propose(resume(forty, {"lr": uniform(0, 1)}, earlier), 10)]
    assert more == propose_all(forty, {"lr": uniform(0, 1)})


def test_draws_of_a_parameter_stay_when_others_come_and_go() -> None:
    few = propose_all(RandomSearch(9), {"lr": uniform(0, 1), "m": {"depth": randint(1, 99)}})
    space = {"a": uniform(0, 1), "lr": uniform(0, 1), "m": {"width": randint(1, 99), "depth": randint(1, 99)}}
    more = propose_all(RandomSearch(9), space)
    pairs = [[(config["lr"], config["m"]["depth"]) for config in configs] for configs in (few, more)]
    assert pairs[0] == pairs[1]


def test_a_parameter_that_is_added_on_resume_leaves_what_counts_as_tried() -> None:
    earlier = propose_all(RandomSearch(2), {"a": grid_search([{"b": 1}, {"b": 2}]), "lr": uniform(0, 1)}, count=3)
    space = {"a": grid_search([{"b": 1, "c": uniform(0, 1)}, {"b": 2}]), "lr": uniform(0, 1), "new": uniform(0, 1)}
    rest = propose(resume(RandomSearch(2), space, earlier), 3)
    assert [config["a"]["b"] for config in rest] == [2]


def test_a_value_that_is_added_to_a_grid_is_all_that_is_tried_on_resume() -> None:
    earlier = propose_all(RandomSearch(1), {"a": grid_search([1, 2]), "b": grid_search(["x", "y"])})
    space = {"a": grid_search([3, 1, 2]), "b": grid_search(["x", "y"])}
    rest = propose(resume(RandomSearch(1), space, earlier), 4)
    assert rest == [{"a": 3, "b": "x"}, {"a": 3, "b": "y"}]


def test_a_grid_that_is_added_on_resume_is_tried_whole() -> None:
    earlier = propose_all(RandomSearch(1), {"a": grid_search([1, 2])})
    rest = list(propose(resume(RandomSearch(1), {"a": grid_search([1, 2]), "b": grid_search(["x", "y"])}, earlier), 2))
    assert len(rest) == 4


@pytest.mark.parametrize("foreign", [{"a": 7}, {"a": "1"}, {"b": 1}, {"a": {"c": 1}}, {}])
def test_trials_of_another_space_take_nothing_from_the_grid(foreign: dict[str, object]) -> None:
    search = resume(RandomSearch(1), {"a": grid_search([1, 2])}, [foreign])
    assert propose(search, 1) == [{"a": 1}, {"a": 2}]


def test_what_was_tried_elsewhere_is_not_repeated() -> None:
    search = resume(RandomSearch(1), {"a": grid_search([1, 2, 3])}, [{"a": 2}])
    assert propose(search, 1) == [{"a": 1}, {"a": 3}]


def test_results_change_nothing() -> None:
    search = RandomSearch(3).begin({"lr": uniform(0, 1)}, None, 1)
    configs = []
    for number in range(3):
        configs += propose(search, number, 1)
        search.on_report(number, StepReport(step=1, metrics={"loss": 1.0}))
        search.on_trial_stopped(number)
        search.on_trial_ended(number, None, failed=True)
    assert configs == propose_all(RandomSearch(3), {"lr": uniform(0, 1)})


# --------------------------------------------------------------------------------------------- points to evaluate


def test_points_come_first_and_count_as_samples() -> None:
    points = [{"lr": 0.5, "depth": 3}, {"lr": 0.25}]
    configs = propose_all(RandomSearch(4, points), {"lr": uniform(0, 1), "depth": randint(1, 9)})
    assert configs[0] == points[0]
    assert configs[1]["lr"] == 0.25
    assert 1 <= configs[1]["depth"] < 9
    assert len(configs) == 4


def test_points_are_tried_though_they_are_more_than_samples() -> None:
    points = [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.2}]
    assert propose_all(RandomSearch(1, points), {"lr": uniform(0, 1)}) == points


def test_a_point_takes_its_place_in_the_grid_and_leaves_the_others() -> None:
    space = {"a": grid_search([1, 2, 3]), "lr": uniform(0, 1)}
    configs = propose_all(RandomSearch(1, [{"a": 2}, {"lr": 0.5}]), space)
    assert [config["a"] for config in configs] == [2, 1, 3]
    assert configs[1]["lr"] == 0.5


def test_a_point_can_choose_among_options_and_fix_what_they_draw() -> None:
    points = [{"model": {"depth": 2}, "dropout": 0.25}, {"model": {"width": 9}, "twice": 7}]
    first, second = propose_all(RandomSearch(1, points), SPACE, count=2)
    assert first["model"] == {"kind": "mlp", "depth": 2}
    assert first["dropout"] == 0.25
    assert second["model"] == {"kind": "cnn", "width": 9}
    assert second["twice"] == 7


def test_a_point_in_a_list_of_spaces_is_not_asked_for_again() -> None:
    space = {"layers": [{"units": randint(1, 9), "name": "first"}]}
    configs = propose_all(RandomSearch(2, [{"layers": [{"units": 3}]}]), space)
    assert configs[0] == {"layers": [{"units": 3, "name": "first"}]}
    assert len(configs) == 2


def test_a_point_of_another_branch_draws_from_the_grids_in_it() -> None:
    space = {"a": grid_search([{"b": 1}, {"c": grid_search([5, 6]), "d": randint(0, 3)}])}
    configs = propose_all(RandomSearch(1, [{"a": {"d": 1}}]), space)
    assert configs[0]["a"]["d"] == 1
    assert sorted(config["a"].get("c", 0) for config in configs) == [0, 5, 6]


@given(spaces(), st.integers(0, 9))
def test_a_point_that_the_space_gives_is_proposed_as_it_is_and_once(space: dict[str, object], seed: int) -> None:
    given_point = propose_all(RandomSearch(1), space, seed=seed, count=5)[-1]
    search = RandomSearch(1, [given_point]).begin(space, None, 0)
    assert are_json_equal(propose(search, 0, 1)[0], given_point)
    assert len(propose(search, 1, count=20)) == min(20, count_grid_points(space) - 1)


def test_points_that_are_given_on_resume_come_next_unless_they_were_tried() -> None:
    space = {"a": grid_search([1, 2, 3, 4])}
    search = resume(RandomSearch(1, [{"a": 1}, {"a": 4}]), space, [{"a": 1}])
    assert propose(search, 1) == [{"a": 4}, {"a": 2}, {"a": 3}]


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"lr": 2}, r"points_to_evaluate: lr: expected uniform\(0.0, 1.0\), found 2, in \{'lr': 2\}; correct"),
        ({"lrr": 0.5}, r"points_to_evaluate: lrr: expected one of \['c', 'lr'\], found 0.5"),
        ({"c": 4}, "points_to_evaluate: c: expected 3, found 4"),
    ],
)
def test_a_point_outside_of_the_space_is_refused(point: Config, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        RandomSearch(1, [point]).begin({"lr": uniform(0, 1), "c": 3}, None, 1)


@pytest.mark.parametrize("point", [{"lr": uniform(0, 1)}, {"lr": {1, 2}}, 3, [1]])
def test_a_point_that_is_no_configuration_is_refused(point: Any) -> None:
    with pytest.raises(InvalidInput, match=r"points_to_evaluate\[1\]"):
        RandomSearch(1, [{}, point])


@pytest.mark.parametrize("count", [0, -2, 1.5, True, "3"])
def test_a_number_of_samples_that_cannot_be_is_refused(count: object) -> None:
    with pytest.raises(InvalidInput, match="num_samples: expected 1 or more, or -1 for no limit, found"):
        RandomSearch(count)


def test_a_search_does_not_change_with_the_list_it_was_given() -> None:
    points = [{"lr": 0.5}]
    search = RandomSearch(1, points)
    points[0]["lr"] = 7
    assert search == RandomSearch(1, ({"lr": 0.5},))


# Grids as numbers.


@given(spaces())
def test_every_point_of_a_grid_is_another_and_is_read_back(space: dict[str, object]) -> None:
    whole = validate_space(space)
    grids = extract_grids(whole)
    assert count_grid_points(grids) == count_grid_points(whole)
    all_choices = [tuple(iter_grid_choices(point, grids)) for point in range(min(count_grid_points(whole), 50))]
    assert len(set(all_choices)) == len(all_choices)
    for point, choices in enumerate(all_choices):
        config = resolve_space(whole, lambda _, domain: domain.draw_at(0.3), dict(choices))
        assert point in find_grid_points(config, grids)


def test_trials_of_other_experiments_count_as_no_samples() -> None:
    space = {"a": grid_search([1, 2]), "lr": uniform(0, 1)}
    search = RandomSearch(1).begin(space, None, 1)
    for a in (1, 1, 2, 2, 7):
        assert not search.add_prior_trial({"a": a, "lr": 0.5}, StepReport(step=1, metrics={}), stopped=False)
    assert propose(search, 0) == propose_all(RandomSearch(1), space)


# Repetitions.


ONE_PARAMETER = {"lr": uniform(0, 1)}


class RecordingSearch(Search):
    """Proposes nothing, and records the ended trials."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, StepReport | None, bool]] = []

    def begin(self, space: Space, objective: Objective | None, seed: int) -> SearchState:
        del space, objective, seed
        return RecordingProposals(self.ended)


class RecordingProposals(SearchState):
    def __init__(self, ended: list[tuple[int, StepReport | None, bool]]) -> None:
        self._ended = ended

    def suggest(self, number: int) -> Suggestion:
        return Exhausted(f"nothing for {number}")

    def restore_trial(self, number: int, config: Mapping[str, object]) -> None:
        raise NotImplementedError

    def on_trial_ended(self, number: int, report: StepReport | None, *, failed: bool) -> None:
        self._ended.append((number, report, failed))


def test_each_configuration_is_proposed_several_times_in_a_row() -> None:
    search = Repeated(RandomSearch(2), 3).begin(ONE_PARAMETER, None, 1)
    configs = propose(search, 0, 6)
    assert configs == [configs[0]] * 3 + [configs[3]] * 3
    assert configs[0] != configs[3]
    assert search.suggest(6) == Exhausted("samples drawn: 2 of 2")


def test_the_repetitions_of_a_configuration_can_be_counted_in_it() -> None:
    search = Repeated(RandomSearch(2), 2, index_as="seed").begin(ONE_PARAMETER, None, 1)
    assert [config["seed"] for config in propose(search, 0, 4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("index_as", [None, "seed"])
def test_whoever_resumes_within_the_repetitions_goes_on_with_them(index_as: str | None) -> None:
    search = Repeated(RandomSearch(2), 3, index_as)
    space = {"lr": uniform(0, 1), "a": grid_search([1, 2])}
    whole = propose(search.begin(space, None, 1), 0, 12)
    assert len(whole) == 12
    for cut in range(13):
        state = search.begin(space, None, 1)
        for number, config in enumerate(whole[:cut]):
            state.restore_trial(number, config)
        assert propose(state, cut, 13 - cut) == whole[cut:]


def test_the_search_hears_the_mean_once_all_repetitions_are_over() -> None:
    search = RecordingSearch()
    proposals = Repeated(search, 3).begin(ONE_PARAMETER, None, 1)
    proposals.on_trial_ended(4, StepReport(step=2, metrics={"loss": 1.0}), failed=False)
    first = StepReport(step=4, metrics={"loss": 1.0, "n": 3, "text": "a"}, trained_seconds=2)
    proposals.on_trial_ended(0, first, failed=False)
    proposals.on_trial_ended(2, StepReport(step=2, metrics={"loss": 2.0, "text": "b"}, trained_seconds=4), failed=False)
    assert search.ended == []
    proposals.on_trial_ended(1, StepReport(step=9, metrics={"loss": 9.0}), failed=True)
    assert search.ended == [(0, StepReport(step=4, metrics={"loss": 1.5}, trained_seconds=3), False)]


def test_the_search_hears_of_a_failure_when_no_repetition_succeeded() -> None:
    search = RecordingSearch()
    proposals = Repeated(search, 2).begin(ONE_PARAMETER, None, 1)
    proposals.on_trial_ended(3, None, failed=False)
    proposals.on_trial_ended(2, StepReport(step=9, metrics={"loss": 9.0}), failed=True)
    assert search.ended == [(1, None, True)]


def test_what_cannot_be_repeated_is_refused() -> None:
    with pytest.raises(InvalidInput, match="expected at least 1 for times, found 0"):
        Repeated(RandomSearch(1), 0)
    with pytest.raises(InvalidInput, match="expected no 'lr' in the space, because index_as adds it"):
        Repeated(RandomSearch(1), 2, index_as="lr").begin(ONE_PARAMETER, None, 1)


def test_a_repetition_that_is_tried_again_counts_once_and_the_mean_is_told_again() -> None:
    search = RecordingSearch()
    proposals = Repeated(search, 2).begin(ONE_PARAMETER, None, 1)
    proposals.on_trial_ended(0, None, failed=True)
    proposals.on_trial_ended(0, StepReport(step=1, metrics={"loss": 4.0}), failed=False)
    assert search.ended == []
    proposals.on_trial_ended(1, StepReport(step=1, metrics={"loss": 2.0}), failed=False)
    proposals.on_trial_ended(1, StepReport(step=2, metrics={"loss": 0.0}), failed=False)
    means = [(number, report.metrics) for number, report, _ in search.ended if report]
    assert means == [(0, {"loss": 3.0}), (0, {"loss": 2.0})]


def test_what_others_found_is_told_to_the_search_that_is_repeated_without_the_count() -> None:
    class Learning(RecordingProposals):
        def add_prior_trial(self, config: Mapping[str, object], report: StepReport, *, stopped: bool) -> bool:
            self._ended.append((dict(config), report, stopped))
            return True

    class Search(RecordingSearch):
        def begin(self, space: Space, objective: Objective | None, seed: int) -> SearchState:
            del space, objective, seed
            return Learning(self.ended)

    search, report = Search(), StepReport(step=1, metrics={"loss": 1.0})
    proposals = Repeated(search, 2, index_as="seed").begin(ONE_PARAMETER, None, 1)
    assert proposals.add_prior_trial({"lr": 0.5, "seed": 1}, report, stopped=True)
    assert str(search.ended) == str([({"lr": 0.5}, report, True)])
