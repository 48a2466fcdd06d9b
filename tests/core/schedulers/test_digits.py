"""The training time that each scheduler saves on 160 recorded trainings, in 200 orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import pytest

from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Scheduler
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.schedulers.median_stopping import MedianStopping
from tests.core.schedulers.asking import LOSS
from tests.fakes.searches.digits import EPOCHS, TRIALS, configs, is_good, table
from tests.fakes.searches.virtual_driver import Outcome, VirtualRun, World

ORDERS = 200


@dataclass(frozen=True)
class Figures:
    """Results over all orders, with one trial at a time."""

    budget: float
    """The trained share of all epochs of all configurations."""
    probability: float
    """The probability to train one of the best configurations to the end."""
    epochs_to_target: float
    """The median number of epochs until one of them was trained to the end."""


def searches(scheduler: Scheduler, orders: int) -> Sequence[Outcome]:
    world = World(max_steps=EPOCHS + (0 if scheduler == FIFO() else 1))
    return [VirtualRun(scheduler.begin(LOSS, seed), table(), configs(seed), world).run() for seed in range(orders)]


def figures(outcomes: Sequence[Outcome]) -> Figures:
    never = 10 * TRIALS * EPOCHS
    found = [
        outcome.steps_until(lambda each, of=outcome: each.end >= EPOCHS and is_good(of.trials[each.trial].config))
        for outcome in outcomes
    ]
    return Figures(
        budget=mean(outcome.steps for outcome in outcomes) / (TRIALS * EPOCHS),
        probability=mean(each is not None for each in found),
        epochs_to_target=median(never if each is None else each for each in found),
    )


@pytest.fixture
def recorded(record_property):
    def record(name: str, found: Figures) -> Figures:
        record_property(f"figure: digits, {name}: share of the budget", round(found.budget, 3))
        record_property(f"figure: digits, {name}: probability of a good one", found.probability)
        record_property(f"figure: digits, {name}: median epochs to one", found.epochs_to_target)
        return found

    return record


@pytest.mark.long
def test_asha_that_stops_finds_a_good_one_with_a_sixth_of_the_budget(recorded) -> None:
    found = recorded("ASHA stopping", figures(searches(ASHA(EPOCHS, variant="stopping"), ORDERS)))
    assert found.budget <= 0.16
    assert found.probability >= 0.95
    assert found.epochs_to_target <= 250


@pytest.mark.long
def test_asha_that_promotes_finds_a_good_one_with_a_sixth_of_the_budget_and_trains_no_epoch_twice(recorded) -> None:
    outcomes = searches(ASHA(EPOCHS, variant="promotion"), ORDERS)
    found = recorded("ASHA promotion", figures(outcomes))
    assert found.budget <= 0.16
    assert found.probability >= 0.95
    assert found.epochs_to_target <= 250
    for outcome in outcomes:
        trained = [(each.trial, epoch) for each in outcome.segments for epoch in range(each.start, each.end)]
        assert len(trained) == len(set(trained))


@pytest.mark.long
def test_hyperband_needs_a_third_of_the_budget_at_most(recorded) -> None:
    found = recorded("Hyperband", figures(searches(Hyperband(EPOCHS), ORDERS)))
    assert found.budget <= 0.35
    assert found.probability >= 0.95


def test_the_median_rule_needs_less_than_half_of_the_budget(recorded) -> None:
    rule = MedianStopping()
    found = recorded("median rule", figures(searches(rule, 20)))
    assert found.budget <= 0.45
    assert found.probability >= 0.95


def test_without_a_scheduler_the_search_is_as_long_as_it_is_known_to_be(recorded) -> None:
    found = recorded("FIFO", figures(searches(FIFO(), ORDERS)))
    assert (found.budget, found.probability) == (1.0, 1.0)
    assert found.epochs_to_target == pytest.approx(878, rel=0.1)
