"""ASHA with promotion: Algorithm 2 of Li et al. 2020."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_tune.core.reasons import make_reason
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import Stop
from prefect_tune.parameters.argument_checks import component_to_json, parse_scheduler
from tests.core.schedulers.asking import LOSS, ScheduleDriver
from tests.fakes.searches.virtual_driver import Config, State, Table, VirtualRun, World

PROMOTION = ASHA(max_t=27, variant="promotion")


def report_losses(*losses: float, max_t: int = 27) -> ScheduleDriver:
    """Trials a, b, c, ... that reached the first rung with these losses."""
    driver = ScheduleDriver(ASHA(max_t=max_t, variant="promotion"))
    for trial, loss in zip("abcdefghijkl", losses, strict=False):
        driver.add(trial)
        driver.report(trial, 1, loss)
    return driver


def test_the_first_pause_until_there_are_enough_to_choose_from() -> None:
    driver = report_losses(0.1, 0.2)
    assert driver.schedule.next_trial_to_resume() is None
    driver.add("c")
    assert driver.decide("c", 1, 0.3) == "pause"
    assert driver.resume_all() == ["a"]


def test_who_would_be_promoted_at_once_goes_on_without_a_pause() -> None:
    driver = report_losses(0.3, 0.2)
    driver.add("c")
    assert driver.decide("c", 1, 0.1) == "continue"
    assert driver.resume_all() == []
    assert driver.schedule.next_milestone("c", 1) == 3


def iter_reference_jobs(losses: list[list[int]], factor: int) -> Iterator[tuple[int, int]]:
    """Algorithm 2 of the paper for one worker: the trial and the rung of each job, in order."""
    rungs: list[list[tuple[int, int]]] = [[] for _ in losses[0]]
    promoted: list[set[int]] = [set() for _ in losses[0]]
    new = iter(range(len(losses)))
    while True:
        for rung in reversed(range(len(rungs) - 1)):
            best = sorted(rungs[rung], key=itemgetter(0))[: len(rungs[rung]) // factor]
            candidates = [trial for _, trial in best if trial not in promoted[rung]]
            if candidates:
                promoted[rung].add(candidates[0])
                job = (candidates[0], rung + 1)
                break
        else:
            trial = next(new, None)
            if trial is None:
                return
            job = (trial, 0)
        yield job
        rungs[job[1]].append((losses[job[0]][job[1]], job[0]))


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=40), st.integers(2, 4))
def test_jobs_are_those_of_the_papers_algorithm(losses: list[list[int]], factor: int) -> None:
    steps = [factor**rung for rung in range(4)]
    rung_of = [bisect_right(steps, step) - 1 for step in range(1, steps[-1] + 1)]
    table = Table([[row[rung] for rung in rung_of] for row in losses])
    schedule = ASHA(max_t=steps[-1], reduction_factor=factor, variant="promotion").begin(LOSS, 0)
    outcome = VirtualRun(schedule, table, ({"row": row} for row in range(len(losses))), World()).run()
    jobs = [(int(segment.trial[1:]), steps.index(segment.end)) for segment in outcome.segments]
    expected = list(iter_reference_jobs(losses, factor))
    assert jobs[: len(expected)] == expected


# Late, repeated and skipped reports, and trials that end early.


def test_a_late_report_counts_at_the_highest_rung_that_it_has_passed_and_at_no_lower_one() -> None:
    driver = ScheduleDriver(PROMOTION, "a", "b", "c", "d")
    assert driver.decide("a", 4, 0.1) == "pause"
    for trial in "bcd":
        driver.decide(trial, 1, 0.5)
    assert driver.resume_all() == ["b"]  # rung 1 has three trials, rung 3 has one
    assert driver.schedule.next_milestone("a", 4) == 9


def test_steps_that_are_trained_again_are_not_counted_twice_and_answered_as_before() -> None:
    driver = report_losses(0.1, 0.2, 0.3)
    assert driver.decide("a", 1, 0.9) == "pause"  # the trial died during its save
    assert driver.resume_all() == ["a"]
    assert driver.decide("a", 1, 0.9) == "continue"  # the trial died after its promotion
    assert driver.decide("b", 1, 0.0) == "pause"
    assert driver.resume_all() == []
    assert driver.schedule.next_milestone("a", 0) == 3


def test_a_paused_trial_that_is_ended_is_not_promoted_any_more() -> None:
    driver = report_losses(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    driver.end("a")
    assert driver.resume_all() == ["b"]


def test_a_trial_that_trained_on_though_it_was_to_pause_is_compared_where_it_is() -> None:
    driver = report_losses(0.1, 0.2)
    assert driver.decide("a", 3, 0.1) == "pause"
    driver.add("c")
    driver.decide("c", 1, 0.3)
    assert driver.resume_all() == []  # the best of three at rung 1 has already continued
    driver.end("a", "b", "c")


# No new trial is left.


def test_a_small_search_trains_its_best_trial_to_the_end_and_then_stops_the_others_worst_first() -> None:
    driver = report_losses(0.3, 0.1, 0.2, max_t=9)
    assert driver.resume_all() == ["b"]
    driver.schedule.on_no_new_trial()
    assert driver.schedule.next_trial_to_resume() is None
    assert driver.schedule.next_trial_to_stop() is None  # "b" is running, and may still be given up
    assert driver.decide("b", 3, 0.1) == "pause"
    assert driver.resume_all() == ["b"]
    assert isinstance(driver.report("b", 9, 0.1), Stop)
    driver.end("b")
    assert driver.schedule.next_trial_to_resume() is None
    reason = make_reason("rank-promoted", metric="loss", value=0.3, step=1, rank=3, ranked=3, quota=1)
    assert driver.schedule.next_trial_to_stop() == ("a", Stop(reason=reason))
    assert driver.stop_all() == ["a", "c"]


def test_the_one_that_would_be_trained_to_the_end_is_replaced_if_it_is_given_up_before_its_last_rung() -> None:
    driver = report_losses(0.1, 0.2, max_t=9)
    driver.schedule.on_no_new_trial()
    assert driver.resume_all() == ["a"]
    driver.end("a")
    assert driver.resume_all() == ["b"]
    assert driver.decide("b", 3, 0.2) == "pause"
    assert driver.resume_all() == ["b"]
    driver.end("b")
    assert (driver.resume_all(), driver.stop_all()) == ([], [])


def test_nobody_is_trained_to_the_end_for_want_of_others_once_somebody_was() -> None:
    driver = report_losses(*([0.5] * 9), max_t=3)  # one rung
    assert driver.resume_all() == ["a", "b", "c"]
    driver.end("a", "b", "c")
    driver.schedule.on_no_new_trial()
    assert driver.resume_all() == []
    assert driver.stop_all() == ["i", "h", "g", "f", "e", "d"]


def test_a_new_trial_takes_back_that_there_is_none() -> None:
    driver = report_losses(0.1, 0.2, max_t=9)
    driver.schedule.on_no_new_trial()
    driver.add("c")
    driver.end("c")
    assert (driver.schedule.next_trial_to_resume(), driver.schedule.next_trial_to_stop()) == (None, None)


def test_those_who_were_stopped_at_the_end_are_still_compared_with_when_the_search_goes_on() -> None:
    driver = report_losses(0.1, 0.2, 0.3, 0.4, 0.5, max_t=3)
    driver.resume()
    driver.end("a")
    driver.schedule.on_no_new_trial()
    assert driver.stop_all() == ["e", "d", "c", "b"]
    driver.add("f")
    assert driver.decide("f", 1, 0.25) == "pause"  # the third of six
    driver.add("g")
    assert driver.decide("g", 1, 0.15) == "continue"


# ASHA on 25 preempted workers (the simulation of Li et al. 2020, Appendix A.1): eta 4, R 256.

R = 256
UNITS = 2000
CALM = World(slots=25)
PREEMPTED = replace(CALM, death_probability=0.01)


@dataclass(frozen=True)
class ConstantLoss:
    """A benchmark in which each configuration has one constant loss."""

    def begin(self, config: Config) -> State:
        del config
        return None

    def advance(self, config: Config, state: State, steps: int) -> State:
        del config, state, steps
        return None

    def metrics(self, config: Config, state: State, step: int) -> Mapping[str, object]:
        del state, step
        return {"loss": config["loss"]}


def draw_configs(seed: int) -> Iterator[Config]:
    chance = random.Random(seed)
    while True:
        yield {"loss": chance.random()}


def count_full_trainings(world: World, seeds: int) -> float:
    """Return the mean number of trials that are trained to R in 2000 units of time."""
    asha, count = ASHA(R, reduction_factor=4, variant="promotion"), 0
    for seed in range(seeds):
        run = VirtualRun(asha.begin(LOSS, seed), ConstantLoss(), draw_configs(seed), replace(world, seed=seed))
        count += len(run.run(UNITS).trials_reaching(R))
    return count / seeds


@pytest.mark.long
@pytest.mark.timeout(900)
def test_with_a_checkpoint_per_unit_preempted_workers_yield_nine_tenths_at_least(record_property) -> None:
    calm, preempted = count_full_trainings(CALM, 2), count_full_trainings(PREEMPTED, 2)
    record_property("figure: full trainings in the preemption simulation, fault-free", round(calm, 1))
    record_property("figure: full trainings in the preemption simulation, preempted", round(preempted, 1))
    assert preempted >= 0.9 * calm


@pytest.mark.long
def test_it_is_the_checkpoints_that_do_it(record_property) -> None:
    """Without checkpoints, a trial that dies is lost: proof that the simulation kills trials."""
    lost = count_full_trainings(replace(PREEMPTED, saves_every=0, deaths_allowed=0), 1)
    record_property("figure: full trainings in the preemption simulation, without checkpoints", lost)
    assert lost <= 10


def test_promotion_is_the_default() -> None:
    assert ASHA(max_t=9) == ASHA(max_t=9, variant="promotion") == parse_scheduler({"ASHA": {"max_t": 9}})
    assert component_to_json(ASHA(max_t=9)) == {"ASHA": {"max_t": 9}}
    assert component_to_json(ASHA(max_t=9, variant="stopping")) == {"ASHA": {"max_t": 9, "variant": "stopping"}}
