"""The decisions equal those of Ray Tune's own schedulers, as `record_ray.py` has recorded them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.core.search.domains import uniform
from tests.core.schedulers.asking import Asked
from tests.core.schedulers.record_ray import Answer, Options, answers_to

RECORDED = json.loads(Path("tests/data/ray_decisions.json").read_text())


def ours(kind: str, options: Options) -> Answer:
    own = {"hyperparam_mutations": {"x": uniform(0, 1)}} if kind == "PBT" else {}
    asked = Asked(getattr(pt, kind)(**options, **own, **({"variant": "stopping"} if kind == "ASHA" else {})))
    milestones: dict[str, int | None] = {}
    decided: dict[str, int] = {}

    def answer(trial: str, step: int, value: float) -> str:
        if trial not in milestones:
            asked.add(trial, config={"x": 0.5})
            milestones[trial] = asked.schedule.milestone(trial, 0)
        if step < (milestones[trial] or step + 1):
            return "."
        decision = asked.report(trial, step, value)
        decided[trial] = decided[decision.source] if decision.type == "exploit" else step
        milestones[trial] = asked.schedule.milestone(trial, decided[trial])
        asked.schedule.exhausted()
        asked.resume_all()  # each trial has a slot
        if decision.type == "exploit":
            return decision.source
        return "s" if decision.type == "stop" else "-" if kind == "PBT" else "."

    return answer


@pytest.mark.parametrize(("kind", "options", "seed", "rays"), RECORDED, ids=lambda each: str(each)[:60])
def test_each_decision_is_that_of_ray(kind: str, options: Options, seed: int, rays: str) -> None:
    assert answers_to(kind, seed, ours(kind, options)) == rays
