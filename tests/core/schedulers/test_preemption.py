"""ASHA on 25 preempted workers (the simulation of Li et al. 2020, Appendix A.1): eta 4, R 256."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest

from prefect_tune.core.schedulers.asha import ASHA
from tests.core.schedulers.asking import LOSS
from tests.fakes.searches.virtual_driver import Config, State, VirtualRun, World

R = 256
UNITS = 2000
CALM = World(slots=25)
PREEMPTED = replace(CALM, death_probability=0.01)


@dataclass(frozen=True)
class Draws:
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


def configs(seed: int) -> Iterator[Config]:
    chance = random.Random(seed)
    while True:
        yield {"loss": chance.random()}


def full_trainings(world: World, seeds: int, variant: str = "promotion") -> float:
    """The mean number of trials that are trained to R in 2000 units of time."""
    asha = ASHA(R, reduction_factor=4, variant=variant)
    runs = (
        VirtualRun(asha.begin(LOSS, seed), Draws(), configs(seed), replace(world, seed=seed)) for seed in range(seeds)
    )
    return sum(len(run.run(UNITS).reached(R)) for run in runs) / seeds


@pytest.mark.timeout(900)
def test_with_a_checkpoint_per_unit_preempted_workers_yield_nine_tenths_at_least(record_property) -> None:
    calm, preempted = full_trainings(CALM, 2), full_trainings(PREEMPTED, 2)
    record_property("figure: full trainings in the preemption simulation, fault-free", round(calm, 1))
    record_property("figure: full trainings in the preemption simulation, preempted", round(preempted, 1))
    assert preempted >= 0.9 * calm


@pytest.mark.deep
@pytest.mark.parametrize("variant", ["stopping", "promotion"])
def test_preempted_workers_yield_nine_tenths_at_least_whatever_the_variant(variant: str) -> None:
    assert full_trainings(PREEMPTED, 20, variant) >= 0.9 * full_trainings(CALM, 20, variant)


def test_it_is_the_checkpoints_that_do_it(record_property) -> None:
    """Without checkpoints, a trial that dies is lost: proof that the simulation kills trials."""
    lost = full_trainings(replace(PREEMPTED, saves_every=0, deaths_allowed=0), 1)
    record_property("figure: full trainings in the preemption simulation, without checkpoints", lost)
    assert lost <= 10
