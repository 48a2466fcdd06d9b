"""The last line of a run that a signal ended: how to resume, by what Prefect offers for it; a resume of nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import ResumeFailed
from prefect_tune.core.experiment.experiment import nothing_yet
from prefect_tune.core.journal_events import CheckpointRef, Committed, Started, TrialAdded
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.suspension import SEARCH_QUESTION, TRAINING_QUESTION, Shown, Turn, first_turn, resumable
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import after


@pytest.mark.parametrize(
    ("deployment", "advice"),
    [
        (None, "run it again under the same experiment name, to resume"),
        (uuid4(), "press Retry, or run it again under the same experiment name, to resume"),
    ],
    ids=["a script", "a run of a deployment"],
)
def test_only_for_a_run_of_a_deployment_retry_is_named(
    monkeypatch: pytest.MonkeyPatch, deployment: UUID | None, advice: str
) -> None:
    run = FlowRun(flow_id=uuid4(), deployment_id=deployment)
    monkeypatch.setattr(FlowRunContext, "get", lambda: cast("FlowRunContext", SimpleNamespace(flow_run=run)))
    assert resumable(nothing_yet(first_generation("e"))) == f"experiment 'e': all 0 trials have ended; {advice}"


def test_trials_without_a_checkpoint_begin_again() -> None:
    trials = [TrialAdded(trial=f"{n}", config={}) for n in range(3)]
    started = [Started(trial=f"{n}", attempt=1, from_step=0) for n in range(3)]
    saved = [Committed(trial=f"{n}", checkpoint=CheckpointRef(step=5 * n, sequence=n)) for n in (1, 2)]
    state = after(nothing_yet(first_generation("e")), [*trials, *started, *saved])
    said = "experiment 'e': 2 of 3 trials resumable, at steps 5 to 10; 1 begins again, without a checkpoint; run it"
    assert resumable(state).startswith(said)


@pytest.mark.parametrize(
    ("options", "samples", "scheduler_steps"),
    [
        ({}, 10, 0),
        ({"num_samples": 4, "scheduler": {"ASHA": {"max_t": 9}}}, 4, 9),
        ({"search": {"OptunaSearch": {"num_samples": 6}}}, 6, 0),
        ({"search": {"OptunaSearch": {"num_samples": 6}}, "num_samples": 7}, 7, 0),
        ({"search": {"RandomSearch": {"num_samples": -1}}}, 0, 0),
    ],
)
def test_the_form_of_a_search_shows_the_samples_that_it_has_wherever_they_are_set(
    options: Mapping[str, Any], samples: int, scheduler_steps: int, tmp_path: Path
) -> None:
    trainable, target = "tests.trainables.counting:Counting", LocalTarget(path=str(tmp_path))
    plan = SearchPlan(trainable=trainable, target=target, experiment="e", metric="loss", **options)
    limits = SEARCH_QUESTION.limits(plan, nothing_yet(first_generation("e")))
    assert (limits.samples, limits.scheduler_steps, limits.stop_trials) == (samples, scheduler_steps, 0)
    budget = plan.extended(stop=[{"step": 3}, {"TrialBudget": {"trials": 7}}])
    assert SEARCH_QUESTION.limits(budget, nothing_yet(first_generation("e"))).stop_trials == 7


class _CountsItself(pt.Search):
    """A search that decides itself how many it proposes."""

    num_samples = 4

    def begin(self, space: Mapping[str, object], objective: pt.Objective | None, seed: int) -> pt.Proposals:
        raise NotImplementedError


def test_the_form_offers_no_number_of_samples_for_a_search_that_decides_it(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path))
    plan = SearchPlan(trainable="tests.trainables.counting:Counting", target=target, experiment="e", metric="loss")
    limits = SEARCH_QUESTION.limits(plan.extended(search=_CountsItself()), nothing_yet(first_generation("e")))
    assert limits.samples == 0


def test_a_resume_of_a_suspended_run_whose_experiment_is_gone_starts_nothing(tmp_path: Path) -> None:
    plan = SearchPlan(
        trainable="tests.trainables.counting:Counting", target=LocalTarget(path=str(tmp_path)), experiment="e"
    )
    shown = Shown(key="prefect-tune-how-1", answer={})
    with pytest.raises(ResumeFailed, match=r"there is no experiment 'e' at .* Nothing was started"):
        first_turn(Turn(plan), TRAINING_QUESTION, shown)
