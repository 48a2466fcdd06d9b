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
from tests.core.schedulers.asking import LOSS, SCORE, Asked
from tests.core.schedulers.record_ray import Answer, Options, answers_to
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
COMPARING = sorted(SCHEDULERS.keys() - {"fifo"})


def trained(scheduler: Scheduler, *, again: int) -> Asked:
    """Trials, one of which ended at its first milestone, and was added and ended `again` more times."""
    asked = Asked(scheduler)
    asked.add(*TRIALS, config={"x": 0.5})
    for loss, trial in enumerate(TRIALS):
        asked.report(trial, asked.schedule.next_milestone(trial, 0) or 1, float(loss), {"x": 0.5})
    asked.end("c")
    for _ in range(again):
        asked.add("c", config={"x": 0.5})
        asked.end("c")
    return asked


@pytest.mark.parametrize("name", COMPARING)
def test_of_a_score_the_negative_is_its_loss(name: str) -> None:
    """The trials of one rung: each is decided on alike, with its value and the one it is compared with as reported."""
    losses, scores = Asked(SCHEDULERS[name], LOSS), Asked(SCHEDULERS[name], SCORE)
    trials = [f"t{number}" for number in range(9)]
    for asked in (losses, scores):
        asked.add(*trials, config={"x": 0.5})
    for trial, value in zip(trials, (0.5, 0.6, 0.4, 0.9, 0.1, 0.7, 0.3, 0.8, 0.2), strict=True):
        decisions = losses.report(trial, 1, -value), scores.report(trial, 1, value)
        assert decisions[0].type == decisions[1].type
        reasons = [getattr(each, "reason", None) for each in decisions]
        loss, score = ({} if each is None else dict(each.arguments) for each in reasons)
        for compared in ("value", "cutoff", "best", "median", "source_value"):
            assert score.get(compared) == (None if compared not in loss else -loss[compared])
    assert losses.resume_all() == scores.resume_all()
    for asked in (losses, scores):
        asked.schedule.on_search_exhausted()
    assert losses.stop_all() == scores.stop_all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.3"])
@pytest.mark.parametrize("name", COMPARING)
def test_a_report_that_cannot_be_compared_is_an_error_that_changes_nothing(name: str, value: object) -> None:
    untouched, asked = trained(SCHEDULERS[name], again=0), trained(SCHEDULERS[name], again=0)
    others = [trial for trial in TRIALS if trial != "c"]
    for trial in others:
        step = (asked.schedule.next_milestone(trial, 1) or 2) + 1
        with pytest.raises(BadMetric, match=rf"trial '{trial}', step {step}"):
            asked.report(trial, step, value, {"x": 9.0})
    assert would_answer(asked.schedule, others) == would_answer(untouched.schedule, others)


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
    assert [name for name, each in SCHEDULERS.items() if each.begin(LOSS, 0).saves_first] == ["pbt"]


@pytest.mark.parametrize("name", sorted(SCHEDULERS.keys() - {"hyperband"}))
@pytest.mark.parametrize("again", [1, 2])
def test_a_trial_that_ends_again_changes_nothing_for_the_others(name: str, again: int) -> None:
    once, more = (trained(SCHEDULERS[name], again=times) for times in (0, again))
    others = [trial for trial in TRIALS if trial != "c"]
    assert would_answer(more.schedule, others) == would_answer(once.schedule, others)
    assert more.resume_all() == once.resume_all()
    for loss, trial in enumerate(others):
        step = once.schedule.next_milestone(trial, 1) or 2
        assert more.report(trial, step, float(loss), {"x": 0.5}) == once.report(trial, step, float(loss), {"x": 0.5})
    assert (more.stop_all(), more.resume_all()) == (once.stop_all(), once.resume_all())


def test_to_hyperband_a_trial_that_is_tried_again_is_one_more_in_the_bracket_that_fills() -> None:
    once, more = (trained(SCHEDULERS["hyperband"], again=times) for times in (0, 2))
    sizes = []
    for asked in (once, more):
        asked.add(*(filling := [f"new {number}" for number in range(9)]))
        sizes.append(sum(asked.schedule.next_milestone(trial, 0) == 1 for trial in filling))
    assert sizes == [5, 3]


def test_nobody_is_ever_asked_paused_or_stopped() -> None:
    asked = Asked(FIFO())
    asked.add("a", "b")
    assert asked.schedule.next_milestone("a", 0) is None
    assert asked.report("a", 1, float("nan")) == Continue()  # a report without metrics is valid
    asked.schedule.on_trial_resumed("a")
    asked.schedule.on_search_exhausted()
    asked.end("a")
    assert (asked.resume_all(), asked.stop_all(), asked.schedule.is_waiting()) == ([], [], False)


# The decisions equal those of Ray Tune's own schedulers, as `record_ray.py` has recorded them.

RECORDED = json.loads(Path("tests/data/ray_decisions.json").read_text())


def ours(kind: str, options: Options) -> Answer:
    own = {"hyperparam_mutations": {"x": uniform(0, 1)}} if kind == "PBT" else {}
    asked = Asked(getattr(pt, kind)(**options, **own, **({"variant": "stopping"} if kind == "ASHA" else {})))
    milestones: dict[str, int | None] = {}
    decided: dict[str, int] = {}

    def answer(trial: str, step: int, value: float) -> str:
        if trial not in milestones:
            asked.add(trial, config={"x": 0.5})
            milestones[trial] = asked.schedule.next_milestone(trial, 0)
        if step < (milestones[trial] or step + 1):
            return "."
        decision = asked.report(trial, step, value)
        decided[trial] = decided[decision.source] if decision.type == "exploit" else step
        milestones[trial] = asked.schedule.next_milestone(trial, decided[trial])
        asked.schedule.on_search_exhausted()
        asked.resume_all()  # each trial has a slot
        if decision.type == "exploit":
            return decision.source
        return "s" if decision.type == "stop" else "-" if kind == "PBT" else "."

    return answer


@pytest.mark.parametrize(("kind", "options", "seed", "rays"), RECORDED, ids=lambda each: str(each)[:60])
def test_each_decision_is_that_of_ray(kind: str, options: Options, seed: int, rays: str) -> None:
    assert answers_to(kind, seed, ours(kind, options)) == rays
