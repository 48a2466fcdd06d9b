"""Population based training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.reasons import code_of, make_reason
from prefect_tune.core.schedulers.base import FIFO, Exploit, Pause, Scheduler
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.domains import choice, grid_search, sample_from, uniform
from tests.core.schedulers.asking import SCORE, Asked
from tests.fakes.searches.virtual_driver import Config, State, VirtualRun, World
from tests.long_cases import long_after

MUTATIONS = {"lr": uniform(0, 1)}


def population(size: int = 4, **rule: object) -> Asked:
    """A population of running trials a, b, c, ... with learning rates 0.1, 0.2, 0.3, ..."""
    asked = Asked(PBT(**{"perturbation_interval": 5, "hyperparam_mutations": MUTATIONS, **rule}))
    for number, trial in enumerate("abcdefghijkl"[:size]):
        asked.add(trial, config={"lr": (number + 1) / 10, "width": number})
    asked.schedule.exhausted()
    return asked


def report_and_go_on(asked: Asked, step: int, losses: Mapping[str, float]) -> dict[str, str]:
    """Report at a milestone, with a slot for each trial."""
    said = {}
    for trial, loss in losses.items():
        said[trial] = asked.says(trial, step, loss)
        asked.resume_all()
    return said


def is_perturbed(value: float, of: float) -> bool:
    return pytest.approx(value) in [0.8 * of, 1.2 * of]


@pytest.mark.parametrize(
    ("interval", "burn_in", "asked_at"), [(3, 4, [4, 7, 10]), (4, 10, [10, 14, 18]), (5, 0, [5, 10, 15])]
)
def test_a_trial_is_asked_an_interval_after_its_last_comparison_and_not_before_the_burn_in_period(
    interval: int, burn_in: int, asked_at: list[int]
) -> None:
    asked = population(perturbation_interval=interval, burn_in_period=burn_in)
    steps = [0]
    for _ in asked_at:
        steps.append(asked.schedule.milestone("a", steps[-1]) or 0)
        asked.says("a", steps[-1], 0.5)
    assert steps[1:] == asked_at
    assert asked.schedule.milestone("a", asked_at[-1] + 9) == asked_at[-1] + 10
    late = population()
    late.says("a", 7, 0.5)  # it could not report at step 5
    assert late.schedule.milestone("a", 7) == 12


def test_a_trial_that_continues_after_its_end_is_asked_an_interval_after_its_last_comparison() -> None:
    asked = population()
    asked.says("a", 5, 0.5)
    asked.end("a")
    asked.add("a", config={"lr": 0.1})
    assert asked.schedule.milestone("a", 5) == 10


def test_who_has_exploited_stays_among_the_worst_until_its_new_weights_are_evaluated() -> None:
    asked = population()
    report_and_go_on(asked, 5, {"a": 0.3, "b": 0.1, "c": 0.2})
    assert asked.says("d", 5, 0.4) == "exploit"
    assert asked.says("a", 10, 0.3) == "pause"  # one of four is among the worst, and that is still "d"
    asked.resume_all()
    asked.says("d", 10, 0.1)
    assert asked.says("a", 15, 0.3) == "exploit"


def test_checkpoints_are_committed_before_it_is_asked_since_others_may_go_on_from_them() -> None:
    assert population().schedule.saves_first


def test_who_is_among_the_worst_goes_on_from_one_of_the_best_with_its_configuration_changed() -> None:
    asked = population(resample_probability=0.0)
    said = report_and_go_on(asked, 5, {"a": 0.3, "c": 0.2, "b": 0.1})
    assert set(said.values()) == {"pause"}
    exploit = asked.report("d", 5, 0.4)
    assert isinstance(exploit, Exploit)
    assert exploit.source == "b"
    assert is_perturbed(exploit.config["lr"], 0.2)
    assert exploit.config["width"] == 1
    assert code_of(exploit.reason) == "exploit"
    assert str(exploit.reason) == "loss = 0.4 at step 5 is among the worst, loss = 0.1 at step 5 among the best"


def test_a_score_is_to_be_large() -> None:
    asked = Asked(PBT(5, MUTATIONS), SCORE)
    asked.add("a", "b", config={"lr": 0.5})
    asked.says("a", 5, 0.9)
    exploit = asked.report("b", 5, 0.4)
    assert isinstance(exploit, Exploit)
    assert exploit.source == "a"
    results = {"metric": "score", "value": 0.4, "step": 5, "source_value": 0.9, "source_step": 5}
    assert exploit.reason == make_reason("exploit", **results)


def test_who_is_good_enough_goes_on_and_so_does_a_trial_without_others() -> None:
    asked = population()
    losses = {"a": 0.4, "d": 0.3, "c": 0.2, "b": 0.1}
    assert set(report_and_go_on(asked, 5, losses).values()) == {"pause"}
    assert asked.says("c", 10, 0.25) == "pause"
    assert population(1).says("a", 5, 0.5) == "pause"


@pytest.mark.parametrize(("fraction", "worst"), [(0.0, ""), (0.1, "a"), (0.25, "ab"), (0.3, "abc"), (0.5, "abcd")])
def test_a_quantile_is_rounded_up_and_never_more_than_half(fraction: float, worst: str) -> None:
    losses = {trial: 1 - number / 10 for number, trial in enumerate("abcdefgh")}
    for trial, loss in losses.items():
        asked = population(8, quantile_fraction=fraction)
        report_and_go_on(asked, 5, losses)
        assert asked.says(trial, 10, loss) == ("exploit" if trial in worst else "pause")


def test_of_an_odd_number_less_than_half_are_among_the_worst() -> None:
    for trial, said in (("a", "exploit"), ("b", "pause"), ("c", "pause")):
        asked = population(3, quantile_fraction=0.5)
        report_and_go_on(asked, 5, {"a": 0.3, "b": 0.2, "c": 0.1})
        assert asked.says(trial, 10, {"a": 0.3, "b": 0.2, "c": 0.1}[trial]) == said


def test_every_one_of_the_best_is_copied_by_somebody() -> None:
    sources = set()
    for seed in range(40):
        asked = Asked(PBT(5, MUTATIONS, quantile_fraction=0.5), seed=seed)
        asked.add("a", "b", "c", "d", config={"lr": 0.5})
        report_and_go_on(asked, 5, {"c": 0.3, "b": 0.2, "a": 0.1})
        exploit = asked.report("d", 5, 0.4)
        assert isinstance(exploit, Exploit)
        sources.add(exploit.source)
    assert sources == {"a", "b"}


def test_who_has_exploited_is_nobodys_source_until_its_new_weights_are_evaluated() -> None:
    asked = population(2)
    asked.says("a", 5, 0.1)
    asked.resume_all()
    assert asked.says("b", 5, 0.2) == "exploit"
    assert asked.says("a", 10, 0.9) == "pause"  # "b" would be better, but has reported nothing
    asked.resume_all()
    assert asked.says("b", 10, 0.1) == "pause"
    assert asked.report("a", 15, 0.8).type == "exploit"


def test_it_is_the_configuration_that_the_source_trains_with_now_that_is_copied() -> None:
    asked = population(2, resample_probability=0.0)
    asked.says("a", 5, 0.1)
    asked.resume_all()
    first = asked.report("b", 5, 0.2)
    assert isinstance(first, Exploit)
    asked.says("b", 10, 0.05)
    asked.resume_all()
    second = asked.report("a", 10, 0.9)
    assert isinstance(second, Exploit)
    assert is_perturbed(second.config["lr"], first.config["lr"])


def test_what_a_trial_says_it_trains_with_is_believed_before_what_it_was_told() -> None:
    asked = population(2, resample_probability=0.0)
    asked.report("a", 5, 0.1, {"lr": 0.5, "width": 77})
    asked.resume_all()
    exploit = asked.report("b", 5, 0.2)
    assert isinstance(exploit, Exploit)
    assert exploit.config["width"] == 77
    assert is_perturbed(exploit.config["lr"], 0.5)


def test_who_has_ended_is_neither_source_nor_compared_with() -> None:
    asked = population(3)
    report_and_go_on(asked, 5, {"b": 0.2, "a": 0.1})
    asked.end("a")
    exploit = asked.report("c", 5, 0.3)
    assert isinstance(exploit, Exploit)
    assert exploit.source == "b"
    asked.end("b")
    assert asked.says("c", 10, 0.3) == "pause"


def test_steps_that_are_trained_again_are_not_counted_twice_and_answered_as_before() -> None:
    asked = population(2)
    asked.says("a", 5, 0.1)
    assert asked.says("a", 5, 0.9) == "pause"  # the trial died during its save
    assert asked.resume_all() == ["a"]
    assert asked.says("a", 5, 0.9) == "continue"  # the trial died after it got its slot back
    exploit = asked.report("b", 5, 0.2)
    assert isinstance(exploit, Exploit)
    assert exploit.source == "a"


def test_after_an_exploit_the_steps_of_the_source_count() -> None:
    """The source may be behind: later reports at the same steps come from other weights."""
    asked = population(2)
    asked.says("a", 5, 0.1)
    asked.resume_all()
    assert asked.says("b", 20, 0.2) == "exploit"
    assert asked.schedule.milestone("b", 5) == 10
    assert asked.says("b", 10, 0.05) == "pause"
    asked.resume_all()
    assert asked.says("a", 10, 0.1) == "exploit"


def test_a_report_that_cannot_be_compared_is_an_error_that_changes_nothing() -> None:
    asked = population(2)
    asked.says("a", 5, 0.1)
    with pytest.raises(BadMetric):
        asked.report("b", 5, float("nan"), {"lr": 9.0})
    assert asked.says("b", 5, 0.2) == "exploit"


def test_a_trial_that_trained_on_though_it_was_to_pause_has_its_slot() -> None:
    asked = population(2)
    asked.says("a", 5, 0.1)
    assert asked.says("a", 10, 0.1) == "pause"
    assert asked.resume_all() == ["a"]


# ------------------------------------------------------------------------- more trials than slots


def test_a_population_larger_than_its_slots_takes_turns_and_all_of_it_is_in_the_competition() -> None:
    asked = Asked(PBT(5, MUTATIONS))
    asked.add("a", "b", config={"lr": 0.5})
    assert asked.report("a", 5, 0.1) == Pause(reason=make_reason("turn-over", step=5))
    assert asked.resume_all() == []  # a new trial gets the slot
    asked.add("c", config={"lr": 0.5})
    asked.says("c", 5, 0.05)
    asked.schedule.exhausted()
    assert asked.resume() == "a"
    asked.says("a", 10, 0.01)
    assert asked.resume() == "c"
    asked.end("a")
    assert asked.resume() is None


def test_a_turn_is_over_after_one_exploit_when_others_wait() -> None:
    asked = population(3)
    asked.says("a", 5, 0.2)
    asked.says("b", 5, 0.1)
    assert asked.says("c", 5, 0.3) == "exploit"
    assert asked.says("c", 10, 0.9) == "pause"
    assert asked.resume_all() == ["a", "b", "c"]
    assert asked.says("c", 15, 0.9) == "exploit"
    assert asked.says("c", 20, 0.9) == "exploit"  # no trial waits


# ------------------------------------------------------------------------- Jaderberg et al., Figure 2


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


def best_of_the_toy(scheduler: Scheduler, slots: int, seed: int) -> float:
    toy, configs = Toy(), [{"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0}]
    run = VirtualRun(scheduler.begin(SCORE, seed), toy, configs, World(slots=slots, max_steps=400))
    return max(float(str(toy.metrics({}, each.state, 0)["score"])) for each in run.run().trials.values())


def test_two_that_each_see_half_of_the_problem_do_not_solve_it() -> None:
    assert best_of_the_toy(FIFO(), slots=2, seed=0) == pytest.approx(0.39, abs=0.001)


@pytest.mark.parametrize("slots", long_after(1, [1, 2]))
def test_two_that_each_see_half_of_the_problem_solve_it_by_exploiting_each_other(slots: int, record_property) -> None:
    pbt = PBT(4, {"h0": uniform(0, 1), "h1": uniform(0, 1)})
    worst = min(best_of_the_toy(pbt, slots, seed) for seed in range(100))
    record_property(f"figure: PBT toy, {slots} slots: worst of 100 seeds", round(worst, 4))
    assert worst >= 1.19


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"perturbation_interval": 0}, "perturbation_interval >= 1"),
        ({"burn_in_period": -1}, "burn_in_period >= 0"),
        ({"quantile_fraction": 0.6}, "quantile_fraction from 0 to 0.5"),
        ({"quantile_fraction": -0.1}, "quantile_fraction from 0 to 0.5"),
        ({"resample_probability": 1.1}, "resample_probability from 0 to 1"),
        ({"resample_probability": None}, "resample_probability from 0 to 1"),
        ({"perturbation_factors": ()}, "at least one"),
        ({"perturbation_factors": (1.2, -1)}, "perturbation_factors >= 0"),
        ({"hyperparam_mutations": {"lr": 3}}, r"hyperparam_mutations\['lr'\]: expected a domain"),
    ],
)
def test_what_cannot_be_is_refused_at_construction_by_name(wrong: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected) as refused:
        PBT(**{"perturbation_interval": 5, "hyperparam_mutations": MUTATIONS, **wrong})
    assert str(refused.value).startswith("PBT")


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
        PBT(5, mutations).require_serves(space)


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
    PBT(5, LAYERS).require_serves({"layers": layers, "lr": 0.1})
    PBT(5, LAYERS).require_serves({})
    FIFO().require_serves({"layers": layers})
