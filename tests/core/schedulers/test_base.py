"""Without early stopping no trial is stopped; to each scheduler a retried trial that ends again ends once."""

from __future__ import annotations

import pytest

from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Continue, Scheduler
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.schedulers.median_stopping import MedianStopping
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.domains import uniform
from tests.core.schedulers.asking import Asked
from tests.fakes.searches.virtual_driver import would_answer

TRIALS = ("a", "b", "c", "d")
SCHEDULERS: dict[str, Scheduler] = {
    "fifo": FIFO(),
    "asha stopping": ASHA(max_t=27, reduction_factor=3, variant="stopping"),
    "asha promotion": ASHA(max_t=27, reduction_factor=3, variant="promotion"),
    "hyperband": Hyperband(max_t=9),
    "median stopping": MedianStopping(min_samples_required=1),
    "pbt": PBT(perturbation_interval=1, hyperparam_mutations={"x": uniform(0, 1)}),
}


def trained(scheduler: Scheduler, *, again: int) -> Asked:
    """Trials, one of which ended at its first milestone, and was added and ended `again` more times."""
    asked = Asked(scheduler)
    asked.add(*TRIALS, config={"x": 0.5})
    for loss, trial in enumerate(TRIALS):
        asked.report(trial, asked.schedule.milestone(trial, 0) or 1, float(loss), {"x": 0.5})
    asked.end("c")
    for _ in range(again):
        asked.add("c", config={"x": 0.5})
        asked.end("c")
    return asked


@pytest.mark.parametrize("name", sorted(SCHEDULERS.keys() - {"hyperband"}))
@pytest.mark.parametrize("again", [1, 2])
def test_a_trial_that_ends_again_changes_nothing_for_the_others(name: str, again: int) -> None:
    once, more = (trained(SCHEDULERS[name], again=times) for times in (0, again))
    others = [trial for trial in TRIALS if trial != "c"]
    assert would_answer(more.schedule, others) == would_answer(once.schedule, others)
    assert more.resume_all() == once.resume_all()
    for loss, trial in enumerate(others):
        step = once.schedule.milestone(trial, 1) or 2
        assert more.report(trial, step, float(loss), {"x": 0.5}) == once.report(trial, step, float(loss), {"x": 0.5})
    assert (more.stop_all(), more.resume_all()) == (once.stop_all(), once.resume_all())


def test_to_hyperband_a_trial_that_is_tried_again_is_one_more_in_the_bracket_that_fills() -> None:
    once, more = (trained(SCHEDULERS["hyperband"], again=times) for times in (0, 2))
    sizes = []
    for asked in (once, more):
        asked.add(*(filling := [f"new {number}" for number in range(9)]))
        sizes.append(sum(asked.schedule.milestone(trial, 0) == 1 for trial in filling))
    assert sizes == [5, 3]


def test_nobody_is_ever_asked_paused_or_stopped() -> None:
    asked = Asked(FIFO())
    asked.add("a", "b")
    assert asked.schedule.milestone("a", 0) is None
    assert asked.report("a", 1, float("nan")) == Continue()  # a report without metrics is valid
    asked.schedule.resumed("a")
    asked.schedule.exhausted()
    asked.end("a")
    assert (asked.resume_all(), asked.stop_all(), asked.schedule.is_waiting()) == ([], [], False)
