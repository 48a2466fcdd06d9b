"""What holds for every scheduler, and FIFO."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.schedulers.asha import ASHA
from prefect_tune.core.schedulers.base import FIFO, Continue, Scheduler
from prefect_tune.core.schedulers.hyperband import Hyperband
from prefect_tune.core.schedulers.median_stopping import MedianStopping
from prefect_tune.core.schedulers.pbt import PBT
from prefect_tune.core.search.domains import uniform
from tests.core.schedulers.asking import LOSS, SCORE, ScheduleDriver
from tests.core.schedulers.record_ray import Answer, Options, answers_to
from tests.fakes.searches.virtual_driver import probe_schedule

TRIALS = ("a", "b", "c", "d")
SCHEDULERS: dict[str, Scheduler] = {
    "fifo": FIFO(),
    "asha stopping": ASHA(max_t=27, reduction_factor=3, variant="stopping"),
    "asha promotion": ASHA(max_t=27, reduction_factor=3, variant="promotion"),
    "hyperband": Hyperband(max_t=9),
    "median stopping": MedianStopping(min_samples_required=1),
    "pbt": PBT(perturbation_interval=1, hyperparam_mutations={"x": uniform(0, 1)}),
}
COMPARING = sorted(SCHEDULERS.keys() - {"fifo"})


def train_trials(scheduler: Scheduler, *, retries: int) -> ScheduleDriver:
    """Train each trial to its first milestone, where "c" ends; it is added and ended `retries` more times."""
    driver = ScheduleDriver(scheduler, *TRIALS, config={"x": 0.5})
    for loss, trial in enumerate(TRIALS):
        driver.report(trial, driver.schedule.next_milestone(trial, 0) or 1, float(loss), {"x": 0.5})
    driver.end("c")
    for _ in range(retries):
        driver.add("c", config={"x": 0.5})
        driver.end("c")
    return driver


@pytest.mark.parametrize("name", COMPARING)
def test_of_a_score_the_negative_is_its_loss(name: str) -> None:
    """The decisions on the trials of one rung are alike, and their reasons hold the values as reported."""
    trials = [f"t{number}" for number in range(9)]
    losses, scores = (
        ScheduleDriver(SCHEDULERS[name], *trials, objective=objective, config={"x": 0.5}) for objective in (LOSS, SCORE)
    )
    for trial, value in zip(trials, (0.5, 0.6, 0.4, 0.9, 0.1, 0.7, 0.3, 0.8, 0.2), strict=True):
        decisions = losses.report(trial, 1, -value), scores.report(trial, 1, value)
        assert decisions[0].type == decisions[1].type
        reasons = [getattr(decision, "reason", None) for decision in decisions]
        loss, score = ({} if reason is None else dict(reason.arguments) for reason in reasons)
        for compared in ("value", "cutoff", "best", "median", "source_value"):
            assert score.get(compared) == (None if compared not in loss else -loss[compared])
    assert losses.resume_all() == scores.resume_all()
    for driver in (losses, scores):
        driver.schedule.on_no_new_trial()
    assert losses.stop_all() == scores.stop_all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.3"])
@pytest.mark.parametrize("name", COMPARING)
def test_a_report_that_cannot_be_compared_is_an_error_that_changes_nothing(name: str, value: object) -> None:
    untouched, driver = (train_trials(SCHEDULERS[name], retries=0) for _ in range(2))
    others = [trial for trial in TRIALS if trial != "c"]
    for trial in others:
        step = (driver.schedule.next_milestone(trial, 1) or 2) + 1
        with pytest.raises(BadMetric, match=rf"trial '{trial}', step {step}"):
            driver.report(trial, step, value, {"x": 9.0})
    assert probe_schedule(driver.schedule, others) == probe_schedule(untouched.schedule, others)


WRONG = [
    (ASHA, {"max_t": 0}, "max_t and grace_period in whole steps, 1 or more$"),
    (ASHA, {"grace_period": 28}, "a grace_period of at most max_t=27$"),
    (ASHA, {"grace_period": 0}, "whole steps, 1 or more$"),
    (ASHA, {"reduction_factor": 1.5}, "a reduction_factor of 2 or more$"),
    (ASHA, {"brackets": 5}, "1 to 4 brackets: there are 3 rungs below max_t"),
    (ASHA, {"brackets": 0}, "1 to 4 brackets"),
    (ASHA, {"variant": "pausing"}, "'promotion' or 'stopping'"),
    (Hyperband, {"max_t": 0}, "expected max_t >= 1, in whole steps"),
    (Hyperband, {"reduction_factor": 1}, "reduction_factor >= 2"),
    (MedianStopping, {"grace_period": 0}, "whole numbers from 1 on"),
    (MedianStopping, {"min_samples_required": 0}, "whole numbers from 1 on"),
    (MedianStopping, {"interval": 0}, "whole numbers from 1 on"),
    (MedianStopping, {"min_time_slice": 0}, "whole numbers from 1 on"),
    (PBT, {"perturbation_interval": 0}, "perturbation_interval >= 1"),
    (PBT, {"burn_in_period": -1}, "burn_in_period >= 0"),
    (PBT, {"quantile_fraction": 0.6}, "quantile_fraction from 0 to 0.5"),
    (PBT, {"quantile_fraction": -0.1}, "quantile_fraction from 0 to 0.5"),
    (PBT, {"resample_probability": 1.1}, "resample_probability from 0 to 1"),
    (PBT, {"resample_probability": None}, "resample_probability from 0 to 1"),
    (PBT, {"perturbation_factors": ()}, "at least one"),
    (PBT, {"perturbation_factors": (1.2, -1)}, "perturbation_factors >= 0"),
    (PBT, {"hyperparam_mutations": {"lr": 3}}, r"hyperparam_mutations\['lr'\]: expected a domain"),
]
NEEDED = {
    ASHA: {"max_t": 27},
    Hyperband: {"max_t": 27},
    MedianStopping: {},
    PBT: {"perturbation_interval": 5, "hyperparam_mutations": {"lr": uniform(0, 1)}},
}


@pytest.mark.parametrize(("kind", "wrong", "expected"), WRONG)
def test_what_cannot_be_is_refused_at_construction_by_name(
    kind: type[Scheduler], wrong: dict[str, object], expected: str
) -> None:
    with pytest.raises(InvalidInput, match=expected) as refused:
        kind(**{**NEEDED[kind], **wrong})
    assert str(refused.value).startswith(kind.__name__)


def test_only_pbt_has_checkpoints_committed_before_it_is_asked_since_others_may_go_on_from_them() -> None:
    assert [name for name, scheduler in SCHEDULERS.items() if scheduler.begin(LOSS, 0).saves_first] == ["pbt"]


@pytest.mark.parametrize("name", sorted(SCHEDULERS.keys() - {"hyperband"}))
@pytest.mark.parametrize("retries", [1, 2])
def test_a_trial_that_ends_again_changes_nothing_for_the_others(name: str, retries: int) -> None:
    once, more = (train_trials(SCHEDULERS[name], retries=count) for count in (0, retries))
    others = [trial for trial in TRIALS if trial != "c"]
    assert probe_schedule(more.schedule, others) == probe_schedule(once.schedule, others)
    assert more.resume_all() == once.resume_all()
    for loss, trial in enumerate(others):
        step = once.schedule.next_milestone(trial, 1) or 2
        assert more.report(trial, step, float(loss), {"x": 0.5}) == once.report(trial, step, float(loss), {"x": 0.5})
    assert (more.stop_all(), more.resume_all()) == (once.stop_all(), once.resume_all())


def test_to_hyperband_a_trial_that_is_tried_again_is_one_more_in_the_bracket_that_fills() -> None:
    once, more = (train_trials(SCHEDULERS["hyperband"], retries=count) for count in (0, 2))
    sizes = []
    for driver in (once, more):
        driver.add(*(new_trials := [f"new {number}" for number in range(9)]))
        sizes.append(sum(driver.schedule.next_milestone(trial, 0) == 1 for trial in new_trials))
    assert sizes == [5, 3]


def test_nobody_is_ever_asked_paused_or_stopped() -> None:
    driver = ScheduleDriver(FIFO(), "a", "b")
    assert driver.schedule.next_milestone("a", 0) is None
    assert driver.report("a", 1, float("nan")) == Continue()  # a report without metrics is valid
    driver.schedule.on_trial_resumed("a")
    driver.schedule.on_no_new_trial()
    driver.end("a")
    assert (driver.resume_all(), driver.stop_all(), driver.schedule.is_waiting()) == ([], [], False)


# The decisions equal those of Ray Tune's own schedulers, as `record_ray.py` has recorded them.

RECORDED = json.loads(Path("tests/data/ray_decisions.json").read_text())


def answer_by_ours(kind: str, options: Options) -> Answer:
    own = {"PBT": {"hyperparam_mutations": {"x": uniform(0, 1)}}, "ASHA": {"variant": "stopping"}}.get(kind, {})
    driver = ScheduleDriver(getattr(pt, kind)(**options, **own))
    milestones: dict[str, int | None] = {}
    last_steps: dict[str, int] = {}

    def answer(trial: str, step: int, value: float) -> str:
        if trial not in milestones:
            driver.add(trial, config={"x": 0.5})
            milestones[trial] = driver.schedule.next_milestone(trial, 0)
        if step < (milestones[trial] or step + 1):
            return "."
        decision = driver.report(trial, step, value)
        last_steps[trial] = last_steps[decision.source] if decision.type == "exploit" else step
        milestones[trial] = driver.schedule.next_milestone(trial, last_steps[trial])
        driver.schedule.on_no_new_trial()
        driver.resume_all()  # each trial has a slot
        if decision.type == "exploit":
            return decision.source
        return "s" if decision.type == "stop" else "-" if kind == "PBT" else "."

    return answer


@pytest.mark.parametrize(("kind", "options", "seed", "expected"), RECORDED, ids=lambda value: str(value)[:60])
def test_each_decision_is_that_of_ray(kind: str, options: Options, seed: int, expected: str) -> None:
    assert answers_to(kind, seed, answer_by_ours(kind, options)) == expected
