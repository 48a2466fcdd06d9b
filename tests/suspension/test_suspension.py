"""The resume advice of an ended run, the form of a suspended run, and a resume of a missing experiment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import InvalidInput, ResumeFailed
from prefect_tune.core.experiment.experiment import make_empty_experiment
from prefect_tune.core.journal_events import AttemptStarted, CheckpointCommitted, CheckpointRef, TrialAdded
from prefect_tune.parameters.search_plan import SearchPlan
from prefect_tune.suspension import (
    SEARCH_QUESTION,
    TRAINING_QUESTION,
    LastForm,
    ResumeAction,
    ResumeChoice,
    ResumeLimits,
    RunSegment,
    apply_answers,
    format_resume_advice,
    parse_choice,
    replace_stop_limits,
)
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import apply_events


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
    full_advice = f"experiment 'e': all 0 trials have ended; {advice}"
    assert format_resume_advice(make_empty_experiment(first_generation("e"))) == full_advice


def test_trials_without_a_checkpoint_begin_again() -> None:
    trials = [TrialAdded(trial=f"{n}", config={}) for n in range(3)]
    started = [AttemptStarted(trial=f"{n}", attempt=1, from_step=0) for n in range(3)]
    saved = [CheckpointCommitted(trial=f"{n}", checkpoint=CheckpointRef(step=5 * n, sequence=n)) for n in (1, 2)]
    state = apply_events(make_empty_experiment(first_generation("e")), [*trials, *started, *saved])
    advice = "experiment 'e': 2 of 3 trials resumable, at steps 5 to 10; 1 begins again, without a checkpoint; run it"
    assert format_resume_advice(state).startswith(advice)


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
    limits = SEARCH_QUESTION.get_limits(plan, make_empty_experiment(first_generation("e")))
    assert (limits.samples, limits.scheduler_max_steps, limits.max_trials) == (samples, scheduler_steps, 0)
    budget = plan.with_changes(stop=[{"step": 3}, {"TrialBudget": {"trials": 7}}])
    assert SEARCH_QUESTION.get_limits(budget, make_empty_experiment(first_generation("e"))).max_trials == 7


class _SelfCountingSearch(pt.Search):
    """A search that decides itself how many trials it proposes."""

    num_samples = 4

    def begin(self, space: Mapping[str, object], objective: pt.Objective | None, seed: int) -> pt.SearchState:
        raise NotImplementedError


def test_the_form_offers_no_number_of_samples_for_a_search_that_decides_it(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path))
    plan = SearchPlan(trainable="tests.trainables.counting:Counting", target=target, experiment="e", metric="loss")
    state = make_empty_experiment(first_generation("e"))
    assert SEARCH_QUESTION.get_limits(plan.with_changes(search=_SelfCountingSearch()), state).samples == 0


def test_a_resume_of_a_suspended_run_whose_experiment_is_gone_starts_nothing(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path))
    plan = SearchPlan(trainable="tests.trainables.counting:Counting", target=target, experiment="e")
    shown = LastForm(key="prefect-tune-how-1", answer={})
    with pytest.raises(ResumeFailed, match=r"there is no experiment 'e' at .* Nothing was started"):
        apply_answers(RunSegment(plan), TRAINING_QUESTION, shown)


# How a suspended run may continue: the options of the form, and the settings that each yields.


LIMITS = ResumeLimits(samples=10, steps=100, hours=2, checkpoints=(10, 20))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"action": "stop here", "samples": 10, "steps": 100, "hours": 2, "checkpoint": 20},
        {"samples": 10, "steps": 100, "hours": 2, "checkpoint": 20},
        {"action": "extend", "samples": 11},
        {"action": "extend", "steps": 101, "samples": 10},
        {"action": "extend", "hours": 2.5, "steps": 0},
        {"action": "other checkpoint", "checkpoint": 20},
    ],
)
def test_what_can_be_done_is_chosen(answer: dict[str, Any]) -> None:
    assert parse_choice(answer, LIMITS) == ResumeChoice(**answer)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"action": "begin again"}, "action: "),
        ({"samples": -1}, "samples: "),
        ({"hours": float("inf")}, "hours: "),
        ({"action": "extend", "hours": 1e12}, "hours: "),
        ({"colour": "red"}, "colour: "),
        ({"action": "extend"}, "no number is larger"),
        ({"action": "extend", "samples": 10, "steps": 100}, "no number is larger"),
        ({"action": "extend", "samples": 5, "steps": 200}, r"less than before: samples 5 \(now 10\)"),
        ({"action": "other checkpoint", "checkpoint": 15}, r"the step of a checkpoint \(10, 20\), found 15"),
    ],
)
def test_what_cannot_be_done_says_why(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_choice(answer, LIMITS)


CHANGED: dict[str, Any] = {"samples": 12, "steps": 120, "hours": 3, "checkpoint": 10}
"""A new value of each field beside `action`."""


@pytest.mark.parametrize("field", CHANGED)
@pytest.mark.parametrize("action", get_args(ResumeAction))
def test_what_is_typed_into_a_field_is_used_or_the_form_is_refused(action: ResumeAction, field: str) -> None:
    used_fields = {"extend": {"samples", "steps", "hours"}, "other checkpoint": {"checkpoint"}}
    shown = {"samples": 10, "steps": 100, "hours": 2, "checkpoint": 20}  # as the form shows them
    for others in ({}, shown, {"samples": 11} if action == "extend" and field == "checkpoint" else {}):
        answer = {**others, "action": action, field: CHANGED[field]}
        if field in used_fields.get(action, ()):
            assert getattr(parse_choice(answer, LIMITS), field) == CHANGED[field]
        else:
            other_action = "other checkpoint" if field == "checkpoint" else "extend"
            with pytest.raises(InvalidInput, match=rf"^{action}: .*{CHANGED[field]}.*choose {other_action} to "):
                parse_choice(answer, LIMITS)


def test_steps_beyond_the_end_that_the_scheduler_sets_are_refused() -> None:
    limits = ResumeLimits(steps=20, scheduler_max_steps=27)
    assert parse_choice({"action": "extend", "steps": 27}, limits).steps == 27
    with pytest.raises(InvalidInput, match="the scheduler ends each trial at step 27, but the form has 28"):
        parse_choice({"action": "extend", "steps": 28}, limits)


def test_samples_that_would_change_nothing_are_refused() -> None:
    limits = ResumeLimits(samples=10, max_trials=15)
    assert parse_choice({"action": "extend", "samples": 15}, limits).samples == 15
    with pytest.raises(InvalidInput, match="TrialBudget ends the search after 15 trials, but the form has 16"):
        parse_choice({"action": "extend", "samples": 16}, limits)
    with pytest.raises(InvalidInput, match="a form cannot change the number of samples"):
        parse_choice({"action": "extend", "samples": 16}, ResumeLimits())


def test_what_is_not_there_cannot_be_chosen() -> None:
    with pytest.raises(InvalidInput, match=r"the step of a checkpoint \(none\)"):
        parse_choice({"action": "other checkpoint"}, ResumeLimits())
    with pytest.raises(InvalidInput, match="is code"):
        parse_choice({"action": "extend", "steps": 9}, ResumeLimits(stop_is_code=True))


@pytest.mark.parametrize(
    ("stop", "steps", "hours", "expected"),
    [
        (None, 5, 0, [{"step": 5}]),
        ({"step": 3, "loss": 0.1}, 5, 0, [{"loss": 0.1}, {"step": 5}]),
        ({"MaxSteps": {"steps": 3}}, 5, 0, [{"step": 5}]),
        ([{"step": 3}, {"MaxTime": {"time_seconds": 9}}], 0, 1, [{"step": 3}, {"MaxTime": {"time_seconds": 3600}}]),
        ("package.module:stop", 0, 1, ["package.module:stop", {"MaxTime": {"time_seconds": 3600}}]),
    ],
)
def test_a_larger_limit_takes_the_place_of_the_smaller_one(
    stop: object, steps: int, hours: float, expected: object
) -> None:
    assert replace_stop_limits(stop, steps, hours) == expected
