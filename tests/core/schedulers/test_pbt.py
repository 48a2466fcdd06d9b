"""Population based training: which trials exploit which others, and how a configuration is perturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.reasons import get_reason_code, make_reason
from prefect_tune.core.schedulers.base import FIFO, Exploit, Pause, Scheduler
from prefect_tune.core.schedulers.pbt import PBT, Explorer, parse_mutations
from prefect_tune.core.search import domains as pt
from prefect_tune.core.search.domains import choice, grid_search, sample_from, uniform
from tests.core.schedulers.asking import SCORE, ScheduleDriver
from tests.fakes.searches.virtual_driver import Config, State, VirtualRun, World
from tests.long_cases import long_after

MUTATIONS = {"lr": uniform(0, 1)}


def make_population(size: int = 4, **options: object) -> ScheduleDriver:
    """A population of running trials a, b, c, ... with learning rates 0.1, 0.2, 0.3, ..."""
    driver = ScheduleDriver(PBT(**{"perturbation_interval": 5, "hyperparam_mutations": MUTATIONS, **options}))
    for number, trial in enumerate("abcdefghijkl"[:size]):
        driver.add(trial, config={"lr": (number + 1) / 10, "width": number})
    driver.schedule.on_no_new_trial()
    return driver


def report_and_resume(driver: ScheduleDriver, step: int, losses: Mapping[str, float]) -> dict[str, str]:
    """Report at a milestone, with a slot for each trial; return the type of each decision."""
    decisions = {}
    for trial, loss in losses.items():
        decisions[trial] = driver.decide(trial, step, loss)
        driver.resume_all()
    return decisions


def require_perturbed(value: float, original: float) -> None:
    assert pytest.approx(value) in [0.8 * original, 1.2 * original]


def test_a_trial_that_continues_after_its_end_is_asked_an_interval_after_its_last_comparison() -> None:
    driver = make_population()
    driver.decide("a", 5, 0.5)
    driver.end("a")
    driver.add("a", config={"lr": 0.1})
    assert driver.schedule.next_milestone("a", 5) == 10


def test_who_has_exploited_stays_among_the_worst_until_its_new_weights_are_evaluated() -> None:
    driver = make_population()
    report_and_resume(driver, 5, {"a": 0.3, "b": 0.1, "c": 0.2})
    assert driver.decide("d", 5, 0.4) == "exploit"
    assert driver.decide("a", 10, 0.3) == "pause"  # one of four is among the worst, and that is still "d"
    driver.resume_all()
    driver.decide("d", 10, 0.1)
    assert driver.decide("a", 15, 0.3) == "exploit"


def test_who_is_among_the_worst_goes_on_from_one_of_the_best_with_its_configuration_changed() -> None:
    driver = make_population(resample_probability=0.0)
    assert set(report_and_resume(driver, 5, {"a": 0.3, "c": 0.2, "b": 0.1}).values()) == {"pause"}
    exploit = driver.report("d", 5, 0.4)
    assert isinstance(exploit, Exploit)
    assert (exploit.source, exploit.config["width"]) == ("b", 1)
    require_perturbed(exploit.config["lr"], 0.2)
    assert get_reason_code(exploit.reason) == "exploit"
    sentence = "loss = 0.4 at step 5 is among the worst; the other trial's loss = 0.1 at step 5 is among the best"
    assert str(exploit.reason) == sentence


@pytest.mark.parametrize(("fraction", "worst"), [(0.0, ""), (0.1, "a"), (0.25, "ab"), (0.3, "abc"), (0.5, "abcd")])
def test_a_quantile_is_rounded_up_and_never_more_than_half(fraction: float, worst: str) -> None:
    losses = {trial: 1 - number / 10 for number, trial in enumerate("abcdefgh")}
    for trial, loss in losses.items():
        driver = make_population(8, quantile_fraction=fraction)
        report_and_resume(driver, 5, losses)
        assert driver.decide(trial, 10, loss) == ("exploit" if trial in worst else "pause")


def test_of_an_odd_number_less_than_half_are_among_the_worst() -> None:
    losses = {"a": 0.3, "b": 0.2, "c": 0.1}
    for trial, decision in (("a", "exploit"), ("b", "pause"), ("c", "pause")):
        driver = make_population(3, quantile_fraction=0.5)
        report_and_resume(driver, 5, losses)
        assert driver.decide(trial, 10, losses[trial]) == decision


def test_every_one_of_the_best_is_copied_by_somebody() -> None:
    sources = set()
    for seed in range(40):
        driver = ScheduleDriver(PBT(5, MUTATIONS, quantile_fraction=0.5), *"abcd", seed=seed, config={"lr": 0.5})
        report_and_resume(driver, 5, {"c": 0.3, "b": 0.2, "a": 0.1})
        exploit = driver.report("d", 5, 0.4)
        assert isinstance(exploit, Exploit)
        sources.add(exploit.source)
    assert sources == {"a", "b"}


def test_who_has_exploited_is_nobodys_source_until_its_new_weights_are_evaluated() -> None:
    driver = make_population(2)
    driver.decide("a", 5, 0.1)
    driver.resume_all()
    assert driver.decide("b", 5, 0.2) == "exploit"
    assert driver.decide("a", 10, 0.9) == "pause"  # "b" would be better, but has reported nothing
    driver.resume_all()
    assert driver.decide("b", 10, 0.1) == "pause"
    assert driver.report("a", 15, 0.8).type == "exploit"


def test_it_is_the_configuration_that_the_source_trains_with_now_that_is_copied() -> None:
    driver = make_population(2, resample_probability=0.0)
    driver.decide("a", 5, 0.1)
    driver.resume_all()
    first = driver.report("b", 5, 0.2)
    assert isinstance(first, Exploit)
    driver.decide("b", 10, 0.05)
    driver.resume_all()
    second = driver.report("a", 10, 0.9)
    assert isinstance(second, Exploit)
    require_perturbed(second.config["lr"], first.config["lr"])


def test_what_a_trial_says_it_trains_with_is_believed_before_what_it_was_told() -> None:
    driver = make_population(2, resample_probability=0.0)
    driver.report("a", 5, 0.1, {"lr": 0.5, "width": 77})
    driver.resume_all()
    exploit = driver.report("b", 5, 0.2)
    assert isinstance(exploit, Exploit)
    assert exploit.config["width"] == 77
    require_perturbed(exploit.config["lr"], 0.5)


def test_who_has_ended_is_neither_source_nor_compared_with() -> None:
    driver = make_population(3)
    report_and_resume(driver, 5, {"b": 0.2, "a": 0.1})
    driver.end("a")
    exploit = driver.report("c", 5, 0.3)
    assert isinstance(exploit, Exploit)
    assert exploit.source == "b"
    driver.end("b")
    assert driver.decide("c", 10, 0.3) == "pause"


def test_steps_that_are_trained_again_are_not_counted_twice_and_answered_as_before() -> None:
    driver = make_population(2)
    driver.decide("a", 5, 0.1)
    assert driver.decide("a", 5, 0.9) == "pause"  # the trial died during its save
    assert driver.resume_all() == ["a"]
    assert driver.decide("a", 5, 0.9) == "continue"  # the trial died after it got its slot back
    exploit = driver.report("b", 5, 0.2)
    assert isinstance(exploit, Exploit)
    assert exploit.source == "a"


def test_after_an_exploit_the_steps_of_the_source_count() -> None:
    """The source may be behind: later reports at the same steps come from other weights."""
    driver = make_population(2)
    driver.decide("a", 5, 0.1)
    driver.resume_all()
    assert driver.decide("b", 20, 0.2) == "exploit"
    assert driver.schedule.next_milestone("b", 5) == 10
    assert driver.decide("b", 10, 0.05) == "pause"
    driver.resume_all()
    assert driver.decide("a", 10, 0.1) == "exploit"


def test_a_trial_that_trained_on_though_it_was_to_pause_has_its_slot() -> None:
    driver = make_population(2)
    driver.decide("a", 5, 0.1)
    assert driver.decide("a", 10, 0.1) == "pause"
    assert driver.resume_all() == ["a"]


# More trials than slots.


def test_a_population_larger_than_its_slots_takes_turns_and_all_of_it_is_in_the_competition() -> None:
    driver = ScheduleDriver(PBT(5, MUTATIONS), "a", "b", config={"lr": 0.5})
    assert driver.report("a", 5, 0.1) == Pause(reason=make_reason("turn-over", step=5))
    assert driver.resume_all() == []  # a new trial gets the slot
    driver.add("c", config={"lr": 0.5})
    driver.decide("c", 5, 0.05)
    driver.schedule.on_no_new_trial()
    assert driver.resume() == "a"
    driver.decide("a", 10, 0.01)
    assert driver.resume() == "c"
    driver.end("a")
    assert driver.resume() is None


def test_a_turn_is_over_after_one_exploit_when_others_wait() -> None:
    driver = make_population(3)
    driver.decide("a", 5, 0.2)
    driver.decide("b", 5, 0.1)
    assert driver.decide("c", 5, 0.3) == "exploit"
    assert driver.decide("c", 10, 0.9) == "pause"
    assert driver.resume_all() == ["a", "b", "c"]
    assert driver.decide("c", 15, 0.9) == "exploit"
    assert driver.decide("c", 20, 0.9) == "exploit"  # no trial waits


# Jaderberg et al., Figure 2.


@dataclass(frozen=True)
class Toy:
    """Maximize 1.2 - x² - y² by ascending 1.2 - h0 x² - h1 y², from (0.9, 0.9)."""

    rate: float = 0.01

    def begin(self, config: Config) -> State:
        del config
        return (0.9, 0.9)

    def advance(self, config: Config, state: tuple[float, float], steps: int) -> State:
        x, y = state
        keep_x, keep_y = (1 - 2 * self.rate * float(str(config[name])) for name in ("h0", "h1"))
        return (x * keep_x**steps, y * keep_y**steps)

    def metrics(self, config: Config, state: tuple[float, float], step: int) -> Mapping[str, object]:
        del config, step
        return {"score": 1.2 - state[0] ** 2 - state[1] ** 2}


def train_toy_population(scheduler: Scheduler, slots: int, seed: int) -> float:
    """Return the best score of two trials."""
    toy, configs = Toy(), [{"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0}]
    run = VirtualRun(scheduler.begin(SCORE, seed), toy, configs, World(slots=slots, max_steps=400))
    return max(float(str(toy.metrics({}, trial.state, 0)["score"])) for trial in run.run().trials.values())


def test_two_that_each_see_half_of_the_problem_do_not_solve_it() -> None:
    assert train_toy_population(FIFO(), slots=2, seed=0) == pytest.approx(0.39, abs=0.001)


@pytest.mark.parametrize("slots", long_after(1, [1, 2]))
def test_two_that_each_see_half_of_the_problem_solve_it_by_exploiting_each_other(slots: int, record_property) -> None:
    pbt = PBT(4, {"h0": uniform(0, 1), "h1": uniform(0, 1)})
    worst = min(train_toy_population(pbt, slots, seed) for seed in range(100))
    record_property(f"figure: PBT toy, {slots} slots: worst of 100 seeds", round(worst, 4))
    assert worst >= 1.19


LAYERS = {"layers": {"width": [16, 32]}}


@pytest.mark.parametrize(
    ("mutations", "space", "expected"),
    [
        (
            {"learnin_rate": uniform(0, 1)},
            {"learning_rate": 0.1},
            r"\['learnin_rate'\].*did you mean 'learning_rate'\?",
        ),
        ({"learning_rate": uniform(0, 1)}, {"lr": uniform(0, 1), "b": 3}, r"\['learning_rate'\].*it has b, lr"),
        (LAYERS, {"layers": {"widht": 3}}, r"\['layers'\]\['width'\].*did you mean 'widht'\?"),
        (LAYERS, {"layers": choice([{"units": 3}, 2])}, r"\['layers'\]\['width'\].*it has units"),
        (LAYERS, {"layers": 3}, r"\['layers'\]\['width'\].*it has nothing"),
    ],
)
def test_what_mutates_and_is_not_in_the_space_is_refused_with_the_nearest_name(
    mutations: dict[str, object], space: dict[str, object], expected: str
) -> None:
    with pytest.raises(InvalidInput, match=expected):
        PBT(5, mutations).require_supported_space(space)


@pytest.mark.parametrize(
    "layers",
    [
        {"width": uniform(0, 1)},
        choice([{"depth": 3}, {"width": 16}]),
        grid_search([choice([{"width": 16}, {"depth": 1}]), 3]),
        sample_from(lambda _: {"width": 3}),
    ],
)
def test_what_mutates_may_stand_in_any_part_of_the_space(layers: object) -> None:
    PBT(5, LAYERS).require_supported_space({"layers": layers, "lr": 0.1})
    PBT(5, LAYERS).require_supported_space({})
    FIFO().require_supported_space({"layers": layers})


# How a configuration is perturbed.


def explore(
    mutations: Mapping[str, object], config: Mapping[str, object], *, resample: float = 0.0, times: int = 200
) -> list[Mapping[str, Any]]:
    """Explore from one configuration many times."""
    explorer = Explorer(parse_mutations(mutations, "here"), resample, (1.2, 0.8), seed=7)
    return [explorer.explore(config, "test", number) for number in range(times)]


def count_values(mutation: object, value: object, *, resample: float = 0.0, times: int = 200) -> Counter[Any]:
    return Counter(config["x"] for config in explore({"x": mutation}, {"x": value}, resample=resample, times=times))


def test_a_number_is_multiplied_by_one_of_the_factors() -> None:
    counts = count_values(pt.uniform(0, 10), 1.0)
    assert set(counts) == {1.2, 0.8}
    assert min(counts.values()) > 60


def test_a_whole_number_stays_one_and_moves_by_a_step_at_least() -> None:
    assert set(count_values(pt.randint(1, 100), 10)) == {8, 12}
    assert set(count_values(pt.randint(1, 100), 2)) == {1, 3}
    assert set(count_values(pt.randint(1, 100), 1)) == {1, 2}  # not 0
    assert set(count_values(pt.qrandint(0, 64, 8), 16)) == {8, 24}
    assert all(type(value) is int for value in count_values(pt.randint(1, 100), 10))


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
        perturbed = count_values(domain, present)
        assert {round(number, 9) for number in perturbed} == expected
        assert {type(number) for number in perturbed} == {float}
        assert all(type(number) is float for number in count_values(domain, present, resample=1.0))


@pytest.mark.parametrize("domain", [pt.randint(1, 100), pt.lograndint(1, 100), pt.qrandint(0, 64, 8)])
@pytest.mark.parametrize("value", [16, 16.0])
def test_a_domain_of_integers_gives_integers_also_where_the_present_value_is_a_float(
    domain: object, value: float
) -> None:
    for resample in (0.0, 1.0):
        assert {type(number) for number in count_values(domain, value, resample=resample)} == {int}


def test_the_factors_may_be_whole_numbers() -> None:
    explorer = Explorer(parse_mutations({"x": pt.uniform(0, 10)}, "here"), 0.0, (2,), seed=7)
    assert repr(explorer.explore({"x": 1}, "test")) == "{'x': 2.0}"


@pytest.mark.parametrize("domain", [pt.uniform(0, 0.5), pt.uniform(-1, 1), pt.randn(0, 1)])
@pytest.mark.parametrize("zero", [0, 0.0])
def test_a_real_zero_that_no_factor_changes_is_drawn_anew(domain: object, zero: float) -> None:
    counts = count_values(domain, zero)
    assert len(counts) == 200
    assert {type(value) for value in counts} == {float}


@pytest.mark.parametrize(
    "mutation", [[0.1], [1, 1.0], pt.choice(["a", "a"]), pt.randint(3, 4), pt.quniform(1, 1, 1), pt.qrandint(8, 8, 8)]
)
def test_a_mutation_that_can_change_nothing_is_refused(mutation: object) -> None:
    with pytest.raises(InvalidInput, match=r"here\['a'\]\['b'\]: expected .* two .*this mutation changes nothing"):
        parse_mutations({"a": {"b": mutation}}, "here")


def test_factors_that_can_change_nothing_are_refused() -> None:
    mutations = {"x": pt.uniform(0, 1)}
    with pytest.raises(InvalidInput, match="expected a factor other than 1"):
        PBT(2, mutations, resample_probability=0, perturbation_factors=(1.0, 1))
    PBT(2, mutations, resample_probability=0.5, perturbation_factors=(1.0,))


def test_an_option_is_recognized_by_its_value_and_its_type_in_json() -> None:
    assert set(count_values([0, False, 1], False)) == {0, 1}
    assert {(type(value), value) for value in count_values([0.5, 1.0, 2.0], 1)} == {(float, 0.5), (float, 2.0)}


def test_a_number_with_a_step_stays_a_multiple_and_moves_by_a_step_at_least() -> None:
    assert set(count_values(pt.quniform(0, 1, 0.25), 0.5)) == {0.25, 0.75}
    assert set(count_values(pt.qrandn(0, 1, 0.5), 0.5)) == {0.0, 1.0}
    assert set(count_values(pt.randn(0, 1), -1.0)) == {-1.2, -0.8}


def test_an_option_becomes_one_of_its_neighbours() -> None:
    assert set(count_values([16, 32, 64, 128], 32)) == {16, 64}
    assert set(count_values([16, 32, 64, 128], 128)) == {64, 128}
    assert set(count_values(pt.choice(["relu", "tanh", "gelu"]), "relu")) == {"relu", "tanh"}
    assert set(count_values((False, True), False)) == {False, True}


def test_a_value_is_drawn_anew_with_the_probability_that_was_asked_for() -> None:
    counts = count_values(pt.uniform(0, 10), 1.0, resample=0.25, times=2_000)
    assert counts[1.2] + counts[0.8] == pytest.approx(1_500, rel=0.05)
    assert len(counts) > 400
    assert set(count_values([1, 2, 3, 4], 1, resample=1.0)) == {1, 2, 3, 4}


def test_a_weighted_choice_is_drawn_by_its_weights() -> None:
    counts = count_values(pt.choice(["a", "b"], weights=[3, 1]), "a", resample=1.0, times=1_000)
    assert counts["a"] == pytest.approx(750, rel=0.1)


@pytest.mark.parametrize("value", ["none", None, True, float("nan")])
def test_what_is_no_value_of_the_domain_is_drawn_anew(value: object) -> None:
    assert all(0 <= number < 10 for number in count_values(pt.uniform(0, 10), value))
    assert set(count_values([1, 2], value if value is not True else 3)) == {1, 2}


def test_what_the_configuration_lacks_is_drawn() -> None:
    (config,) = explore({"a": {"b": pt.uniform(0, 1)}, "c": [1, 2]}, {"a": "text"}, times=1)
    assert 0 <= config["a"]["b"] < 1
    assert config["c"] in {1, 2}


def test_nested_values_change_where_they_are_and_nothing_else_does() -> None:
    config = {"optimizer": {"lr": 1.0, "name": "adam", "schedule": {"warmup": 10}}, "width": 64, "lr": 5.0}
    mutations = {"optimizer": {"lr": pt.uniform(0, 10), "schedule": {"warmup": pt.randint(0, 99)}}}
    before = repr(config)
    for perturbed in explore(mutations, config):
        assert perturbed["optimizer"]["lr"] in {0.8, 1.2}
        assert perturbed["optimizer"]["schedule"]["warmup"] in {8, 12}
        assert perturbed["optimizer"]["name"] == "adam"
        assert (perturbed["width"], perturbed["lr"]) == (64, 5.0)
    assert repr(config) == before


def test_two_values_change_apart_from_each_other() -> None:
    configs = explore({"a": pt.uniform(0, 9), "b": pt.uniform(0, 9)}, {"a": 1.0, "b": 1.0})
    assert {(config["a"], config["b"]) for config in configs} == {(0.8, 0.8), (0.8, 1.2), (1.2, 0.8), (1.2, 1.2)}


def test_functions_are_computed_last_from_the_configuration_as_it_is_then() -> None:
    mutations = {
        "twice": lambda config: 2 * config["x"],
        "x": pt.uniform(0, 10),
        "inner": {"half": pt.sample_from(lambda config: config["x"] / 2)},
    }
    for config in explore(mutations, {"x": 1.0, "twice": 2.0}):
        assert config["twice"] == 2 * config["x"]
        assert config["inner"] == {"half": config["x"] / 2}


def test_a_function_that_returns_what_json_cannot_say_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidInput, match=r"config\.inner\.x"):
        explore({"inner": {"x": lambda config: {len(config)}}}, {})


@settings(max_examples=50)
@given(st.integers(0, 1 << 30), st.text(max_size=5))
def test_the_same_purpose_gives_the_same_configuration(seed: int, purpose: str) -> None:
    mutations = parse_mutations({"a": pt.uniform(0, 9), "b": [1, 2, 3]}, "here")
    explorers = [Explorer(mutations, 0.5, (1.2, 0.8), seed) for _ in range(2)]
    first, second = (explorer.explore({"a": 1.0, "b": 2}, purpose) for explorer in explorers)
    assert first == second


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
        parse_mutations(mutations, "here")
