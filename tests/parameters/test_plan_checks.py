"""Refusals of a search on a target for one runner, and of a resume of an experiment that is no search."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from prefect.task_runners import ProcessPoolTaskRunner

import prefect_tune as pt
from prefect_tune.attempt.attempt import ReportReader, stays_finished
from prefect_tune.attempt.trial_spec import TrialSpec
from prefect_tune.blocks import FsspecTarget, LocalTarget
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.experiment import Experiment, TrialMap, make_empty_experiment
from prefect_tune.core.experiment.stoppers import MaxSteps, Never, Plateau, Stopper
from prefect_tune.core.experiment.trial_transitions import Phase, Trial
from prefect_tune.core.journal.journal import acquire_ownership, append_events
from prefect_tune.core.journal_events import (
    AttemptStarted,
    CheckpointCloned,
    CheckpointRef,
    Entry,
    Event,
    ExperimentConfigured,
    Owner,
    StepReported,
    TrialAdded,
)
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.core.values import StepReport, WriteStamp
from prefect_tune.executors.launchers import DeploymentLauncher
from prefect_tune.journal_access import read_experiment_to_resume
from prefect_tune.parameters.argument_checks import make_trainable_fingerprint
from prefect_tune.parameters.plan_checks import require_same_training, require_search
from tests.fakes.checkpoints import first_generation
from tests.fakes.searches.experiments import write_experiment
from tests.fakes.stores.memory_store import MemoryStore
from tests.flows.searching.test_tune import run_search
from tests.flows.training import statuses, trial_at


@pytest.fixture
def target(tmp_path: Path) -> FsspecTarget:
    return FsspecTarget(location=f"memory://{tmp_path.name}")


def _train_in_deployments(folder: Path, target: FsspecTarget) -> None:
    run_search(folder, "tests.trainables.moody:Moody", target=target, trials="deployment")


def _train_on_other_processes(_: Path, target: FsspecTarget) -> None:
    runner: Any = ProcessPoolTaskRunner(max_workers=1)
    pt.tune.with_options(task_runner=runner)(
        "tests.trainables.moody:Moody", target=target, experiment="e", metric="loss", num_samples=1
    )


REFUSED = {
    "deployments": (_train_in_deployments, "trials='deployment'"),
    "another task runner": (_train_on_other_processes, "task runner: ProcessPoolTaskRunner"),
}


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize(("search", "message"), REFUSED.values(), ids=REFUSED)
def test_who_would_have_two_write_one_journal_is_refused_and_nothing_is_there(
    search: Callable[..., None], message: str, tmp_path: Path, target: FsspecTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeploymentLauncher, "check_deployment", lambda *_: None)  # the deployment exists
    with pytest.raises(pt.InvalidInput, match=rf"{message}.*{target.uri}.*create-if-absent.*Nothing was started"):
        search(tmp_path, target)
    with target.open(timeout=timedelta(seconds=10)) as store:
        assert [listed.path for listed in store.list("")] == []


@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_whose_trials_clone_each_other_runs_since_one_process_writes_it(
    tmp_path: Path, target: FsspecTarget
) -> None:
    scheduler = pt.PBT(1, {"x": pt.uniform(0, 1)}, quantile_fraction=0.5, resample_probability=1)
    options = {"space": {"x": pt.grid_search([1.0, 100.0])}, "max_concurrent_trials": 1}  # so that trials take turns
    results = run_search(tmp_path, target=target, scheduler=scheduler, **options)
    assert statuses(results) == ["completed", "completed"]
    exploited = read_experiment_to_resume(target, "e").trial("00001")
    assert exploited.config["x"] <= 1
    assert next(checkpoint for checkpoint in exploited.checkpoints if checkpoint.origin).origin


# The error of a resume by name for an experiment that is no search.


_STAMPS = (WriteStamp(write_id=f"w{number}", at="2026-11-21T08:00:00+00:00") for number in count())
ADDED = TrialAdded(trial="trial", config={}, fingerprint={})
TRAINING_ADDED = TrialAdded(trial="trial", config={}, fingerprint={"trainable": "Net"})


def make_experiment(*events: Event, attempt: int = 0) -> Experiment:
    store, owner = MemoryStore(), Owner(name="brave-fox", host="here", pid=1, flow_run="f", attempt=attempt)
    state = acquire_ownership(store, first_generation("e"), owner, next(_STAMPS))
    return append_events(store, state, events, next(_STAMPS))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (make_experiment(ADDED), r"your own flow.*retry the last run of .* brave-fox \(pid 1 on here, flow run f\)"),
        (make_experiment(TRAINING_ADDED, attempt=1), "your own flow"),
        (make_experiment(attempt=1), "your own flow"),
        (make_experiment(TRAINING_ADDED), r"is a single training, not a search: call pt\.durable_trainable"),
        (make_experiment(), "has no trials and no settings yet: repeat the call that began it"),
    ],
    ids=["saves", "attempts of run_trial", "opened by a flow", "one training", "opened only"],
)
def test_an_experiment_that_is_no_search_says_what_continues_it(state: Experiment, message: str) -> None:
    with pytest.raises(pt.InvalidInput, match=rf"experiment 'e' at s3://b .*{message}"):
        require_search(state, "s3://b")


def test_a_search_is_resumed_by_its_name() -> None:
    require_search(make_experiment(ExperimentConfigured(settings={"metric": "loss"})), "s3://b")


# When a call continues the existing trial of an experiment, and when that trial is already complete.


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
        needs_history=False,
        fingerprint=make_trainable_fingerprint("some.module:Model"),
    )


def make_training(**fingerprint: str) -> Experiment:
    """Return a training with a journal."""
    trial = Trial(id="trial", config={}, fingerprint=fingerprint)
    return make_empty_experiment(first_generation(NAME)).model_copy(update={"trials": TrialMap.from_trials([trial])})


@pytest.mark.parametrize("trainable", [train, "some.module:train", "another.module:Other"])
def test_another_trainable_under_the_same_name_is_refused_and_both_are_named(
    spec: TrialSpec, trainable: object
) -> None:
    with pytest.raises(InvalidInput, match="'Model'") as refused:
        require_same_training(make_training(**make_trainable_fingerprint(trainable)), spec, {})
    assert repr(make_trainable_fingerprint(trainable)["trainable"]) in str(refused.value)


@pytest.mark.parametrize("trainable", [Model, "moved.elsewhere:Model", "some.module:Outer.Model"])
def test_the_same_trainable_may_be_named_otherwise(spec: TrialSpec, trainable: object) -> None:
    require_same_training(make_training(**make_trainable_fingerprint(trainable)), spec, {})


def test_a_trial_of_which_no_trainable_is_known_is_taken_for_the_same(spec: TrialSpec) -> None:
    require_same_training(make_training(code="0123"), spec, {})


def test_a_search_is_no_training(spec: TrialSpec) -> None:
    search = make_training(**make_trainable_fingerprint(train)).model_copy(update={"settings": {"metric": "loss"}})
    with pytest.raises(InvalidInput, match="is a search"):
        require_same_training(search, spec, {})


# ---------------------------------------------------------------------------------------- complete trials


def test_the_reports_of_a_lost_attempt_are_replaced_by_those_of_the_next(
    spec: TrialSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_entry(attempt: int, start: int, *losses: float) -> Entry:
        started = AttemptStarted(trial="t", attempt=attempt, from_step=start, from_sequence=None, at="")
        reports = [StepReport(step=step, metrics={"loss": loss}) for step, loss in enumerate(losses, start + 1)]
        events = (started, *(StepReported(trial="t", report=report) for report in reports))
        return Entry.model_construct(number=attempt, events=events)

    entries = [make_entry(1, 0, 1.0, 1.0)]
    monkeypatch.setattr("prefect_tune.attempt.attempt.read_entries", lambda _store, _key, after: entries[after:])
    reader, trial = ReportReader(spec.target, spec.trial.journal_key), Trial(id="t", config={}, step=2, attempt=1)
    assert [report.metrics["loss"] for report in reader.read_reports(trial)] == [1.0, 1.0]
    entries.append(make_entry(2, 1, 2.0))
    later = trial.model_copy(update={"attempt": 2})
    assert [report.metrics["loss"] for report in reader.read_reports(later)] == [1.0, 2.0]
    clone = CheckpointRef(sequence=7, step=2, metrics={"loss": 3.0})
    cloned = CheckpointCloned(trial="t", checkpoint=clone, source="other", config={}, reason="better")
    entries.append(Entry.model_construct(number=3, events=(cloned,)))
    exploited = later.model_copy(update={"last_clone_sequence": 7})
    assert [report.metrics["loss"] for report in reader.read_reports(exploited)] == [3.0]


@pytest.mark.parametrize("stopper", [Never(), MaxSteps(99), MaxSteps(99) | Plateau("loss")])
def test_a_trial_that_said_it_is_done_has_had_enough_of_everything(spec: TrialSpec, stopper: Stopper) -> None:
    trial = Trial(id="trial", config={}, phase=Phase.FINISHED, step=7, metrics={"done": True})
    assert stays_finished(trial, stopper, ReportReader(spec.target, spec.trial.journal_key))


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
    curves = ReportReader(spec.target, spec.trial.journal_key)
    assert stays_finished(trial_at(spec.target, NAME), stopper, curves) is enough
