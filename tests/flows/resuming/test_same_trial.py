"""When a call continues the existing trial of an experiment, and when that trial is already complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefect_tune.attempt.attempt import CurveReader, has_had_enough
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment, TrialMap, nothing_yet
from prefect_tune.core.experiment.stoppers import MaxSteps, Never, Plateau, Stopper
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.parameters.argument_checks import name_of
from prefect_tune.parameters.plan_checks import require_same_training
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import write_experiment
from tests.flows.training import trial_at

NAME = "digits"


class Model:
    def step(self) -> None: ...


def train(_config: object) -> None: ...


@pytest.fixture
def spec(tmp_path: Path) -> TrialSpec:
    return TrialSpec(
        target=LocalTarget(path=str(tmp_path / "target")),
        trial=TrialKey(experiment=NAME, generation=1, trial="trial"),
        trainable="",
        stopper="",
        needs_curve=False,
        fingerprint=name_of("some.module:Model"),
    )


def known(**fingerprint: str) -> Experiment:
    """A training with a journal."""
    trial = Trial(trial="trial", config={}, fingerprint=fingerprint)
    return nothing_yet(first_generation(NAME)).model_copy(update={"trials": TrialMap.of([trial])})


@pytest.mark.parametrize("trainable", [train, "some.module:train", "another.module:Other"])
def test_another_trainable_under_the_same_name_is_refused_and_both_are_named(
    spec: TrialSpec, trainable: object
) -> None:
    with pytest.raises(InvalidInput, match="'Model'") as refused:
        require_same_training(known(**name_of(trainable)), spec, {})
    assert repr(name_of(trainable)["trainable"]) in str(refused.value)


@pytest.mark.parametrize("trainable", [Model, "moved.elsewhere:Model", "some.module:Outer.Model"])
def test_the_same_trainable_may_be_named_otherwise(spec: TrialSpec, trainable: object) -> None:
    require_same_training(known(**name_of(trainable)), spec, {})


def test_a_trial_of_which_no_trainable_is_known_is_taken_for_the_same(spec: TrialSpec) -> None:
    require_same_training(known(code="0123"), spec, {})


def test_a_search_is_no_training(spec: TrialSpec) -> None:
    search = known(**name_of(train)).model_copy(update={"settings": {"metric": "loss"}})
    with pytest.raises(InvalidInput, match="is a search"):
        require_same_training(search, spec, {})


# ---------------------------------------------------------------------------------------- complete trials


@pytest.mark.parametrize("stopper", [Never(), MaxSteps(99), MaxSteps(99) | Plateau("loss")])
def test_a_trial_that_said_it_is_done_has_had_enough_of_everything(spec: TrialSpec, stopper: Stopper) -> None:
    done = Trial(trial="trial", config={}, phase=Phase.FINISHED, step=7, metrics={"done": True})
    assert has_had_enough(done, stopper, CurveReader(spec.target, spec.trial.of_experiment))


@pytest.mark.parametrize(
    ("stopper", "enough"),
    [
        (MaxSteps(4) | Plateau("loss", std=0.0001, reports=2), True),
        (MaxSteps(20) | Plateau("loss", std=0.0001, reports=2), False),
        (MaxSteps(20) | Plateau("loss", std=0.3, reports=3), True),
        (MaxSteps(4), True),
        (MaxSteps(20), False),
    ],
)
def test_a_larger_budget_goes_on_unless_what_was_reported_before_says_enough(
    spec: TrialSpec, stopper: Stopper, enough: bool
) -> None:
    assert isinstance(spec.target, LocalTarget)
    write_experiment(Path(spec.target.path), NAME, [1, 2, 3, 4])
    curves = CurveReader(spec.target, spec.trial.of_experiment)
    assert has_had_enough(trial_at(spec.target, NAME), stopper, curves) is enough
