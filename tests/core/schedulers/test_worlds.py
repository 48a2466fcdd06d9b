"""Simulated experiments: no trial is forgotten, nothing hangs, and a replay ends in the same state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Schedule, Scheduler
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.schedulers.median_stopping import MedianStopping
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.domains import uniform
from tests.core.schedulers.asking import LOSS
from tests.fakes.searches.virtual_driver import (
    Config,
    Outcome,
    RecordedCall,
    RecordingSchedule,
    Table,
    VirtualRun,
    World,
    probe_schedule,
)

MAX_T = 27
SCHEDULERS: Mapping[str, Scheduler] = {
    "fifo": FIFO(),
    "asha-stopping": ASHA(MAX_T, variant="stopping"),
    "asha-promotion": ASHA(MAX_T, variant="promotion"),
    "asha-brackets": ASHA(MAX_T, grace_period=2, reduction_factor=2, brackets=3, variant="promotion"),
    "hyperband": Hyperband(MAX_T),
    "hyperband-2.5": Hyperband(20, 2.5),
    "median": MedianStopping(grace_period=2, min_samples_required=2),
    "median-sliced": MedianStopping(interval=2, min_samples_required=3, min_time_slice=3),
    "pbt": PBT(4, {"lr": uniform(0, 1), "row": list(range(8))}),
    "pbt-burn-in": PBT(3, {"lr": uniform(0, 1)}, quantile_fraction=0.5, burn_in_period=7),
}
every_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)

worlds = st.builds(
    World,
    slots=st.integers(1, 6),
    max_steps=st.sampled_from([5, 20, 30]),  # before, between and after the last rungs
    death_probability=st.sampled_from([0.0, 0.02, 0.2]),
    saves_every=st.sampled_from([0, 1, 4]),
    reports_every=st.sampled_from([1, 1, 3, 10, 40]),
    deaths_allowed=st.sampled_from([0, 3, 20]),
    seed=st.integers(0, 1 << 20),
)


def make_table(seed: int) -> Table:
    """Eight learning curves with many equal losses."""
    chance = random.Random(seed)
    return Table([[float(chance.randint(0, 5)) for _ in range(40)] for _ in range(8)])


def run_experiment(scheduler: Scheduler, world: World, trials: int) -> tuple[RecordingSchedule, Outcome]:
    configs: list[Config] = [{"row": number % 8, "lr": 0.5} for number in range(trials)]
    recorded = RecordingSchedule(scheduler.begin(LOSS, world.seed))
    return recorded, VirtualRun(recorded, make_table(world.seed), configs, world).run()


@every_scheduler
@settings(max_examples=20)
@given(world=worlds, trials=st.integers(0, 30))
def test_every_experiment_comes_to_its_end_with_no_trial_left_behind(
    scheduler: Scheduler, world: World, trials: int
) -> None:
    _, outcome = run_experiment(scheduler, world, trials)
    assert len(outcome.trials) == trials
    assert {trial.status for trial in outcome.trials.values()} <= {"ended"}


def replay_calls(schedule: Schedule, calls: list[RecordedCall]) -> Schedule:
    """Replay recorded calls; "on_no_new_trial" is not journaled, so it is repeated only at the end."""
    for call in calls:
        if call.name != "on_no_new_trial":
            call.replay_on(schedule)
    last = [call.name for call in calls if call.name in {"on_trial_added", "on_no_new_trial"}][-1:]
    if last == ["on_no_new_trial"]:
        schedule.on_no_new_trial()
    return schedule


@every_scheduler
@settings(max_examples=5)
@given(world=worlds, trials=st.integers(1, 12))
def test_at_every_point_one_that_is_told_the_history_is_in_the_same_state(
    scheduler: Scheduler, world: World, trials: int
) -> None:
    """Replaying any prefix of the recorded calls yields the same state and the same later answers."""
    recorded, _ = run_experiment(scheduler, world, trials)
    for cut in range(len(recorded.calls) + 1):
        fresh = replay_calls(scheduler.begin(LOSS, world.seed), recorded.calls[:cut])
        if cut:
            added = [call.arguments[0] for call in recorded.calls[:cut] if call.name == "on_trial_added"]
            assert probe_schedule(fresh, added) == recorded.calls[cut - 1].state
        for call in recorded.calls[cut:]:
            assert call.replay_on(fresh) == call.answer


@every_scheduler
@settings(max_examples=10)
@given(world=worlds, trials=st.integers(1, 12))
def test_who_asks_twice_gets_the_same_kind_of_answer_and_changes_nothing(
    scheduler: Scheduler, world: World, trials: int
) -> None:
    recorded, _ = run_experiment(scheduler, world, trials)
    schedule = scheduler.begin(LOSS, world.seed)
    for call in recorded.calls:
        answer: Any = call.replay_on(schedule)
        assert answer == call.answer
        if call.name == "decide" and answer.type != "exploit":  # after an exploit the next call is of another trial
            second_answer: Any = call.replay_on(schedule)
            assert second_answer.type == answer.type


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_promotion_and_hyperband_train_no_step_twice_when_nobody_dies(slots: int) -> None:
    for scheduler in (SCHEDULERS["asha-promotion"], SCHEDULERS["asha-brackets"], SCHEDULERS["hyperband"]):
        _, outcome = run_experiment(scheduler, World(slots=slots, seed=5), 60)
        steps = [(part.trial, step) for part in outcome.segments for step in range(part.start, part.end)]
        assert len(steps) == len(set(steps))


@pytest.mark.parametrize("trials", [1, 2, 3, 8, 9, 20])
def test_even_a_small_search_trains_a_trial_to_the_end(trials: int) -> None:
    for name in ("asha-stopping", "asha-promotion", "hyperband"):
        _, outcome = run_experiment(SCHEDULERS[name], World(slots=4), trials)
        assert outcome.trials_reaching(MAX_T)
