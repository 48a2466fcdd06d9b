"""What a search refuses on a target for one runner only, and a resume by name of an experiment that is no search."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from prefect.task_runners import ProcessPoolTaskRunner

import prefect_tune as pt
from prefect_tune.blocks import FsspecTarget
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.journal.journal import append, take_over
from prefect_tune.core.journal_events import Configured, Event, Owner, TrialAdded
from prefect_tune.core.values import Stamp
from prefect_tune.executors.launchers import DeploymentLauncher
from prefect_tune.journal_access import read_known
from prefect_tune.parameters.plan_checks import require_search
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.memory_store import MemoryStore
from tests.flows.searching.test_tune import searched
from tests.flows.training import statuses

pytestmark = pytest.mark.usefixtures("no_prefect_server")


@pytest.fixture
def target(tmp_path: Path) -> FsspecTarget:
    return FsspecTarget(location=f"memory://{tmp_path.name}")


def _trains_in_deployments(folder: Path, target: FsspecTarget) -> None:
    searched(folder, "tests.trainables.moody:Moody", target=target, trials="deployment")


def _trains_on_other_processes(_: Path, target: FsspecTarget) -> None:
    runner: Any = ProcessPoolTaskRunner(max_workers=1)
    pt.tune.with_options(task_runner=runner)(
        "tests.trainables.moody:Moody", target=target, experiment="e", metric="loss", num_samples=1
    )


REFUSED = {
    "deployments": (_trains_in_deployments, "trials='deployment'"),
    "another task runner": (_trains_on_other_processes, "task runner: ProcessPoolTaskRunner"),
}


@pytest.mark.parametrize(("search", "said"), REFUSED.values(), ids=REFUSED)
def test_who_would_have_two_write_one_journal_is_refused_and_nothing_is_there(
    search: Callable[[Path, FsspecTarget], None],
    said: str,
    tmp_path: Path,
    target: FsspecTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeploymentLauncher, "require", lambda *_: None)  # there is one
    with pytest.raises(pt.InvalidInput, match=rf"{said}.*{target.uri}.*create-if-absent.*Nothing was started"):
        search(tmp_path, target)
    with target.open(timeout=timedelta(seconds=10)) as store:
        assert [each.path for each in store.list("")] == []


def test_a_search_whose_trials_clone_each_other_runs_since_one_process_writes_it(
    tmp_path: Path, target: FsspecTarget
) -> None:
    scheduler = pt.PBT(1, {"x": pt.uniform(0, 1)}, quantile_fraction=0.5, resample_probability=1)
    results = searched(tmp_path, target=target, scheduler=scheduler, space={"x": pt.grid_search([1.0, 100.0])})
    assert statuses(results) == ["completed", "completed"]
    exploited = read_known(target, "e").trial("00001")
    assert exploited.config["x"] <= 1
    assert next(each for each in exploited.checkpoints if each.origin).origin


# The error of a resume by name for an experiment that is no search.


_STAMPS = (Stamp(write_id=f"w{number}", at="2026-11-21T08:00:00+00:00") for number in count())
TRAINABLE = {"trainable": "Net"}


def begun(*events: Event, attempt: int = 0) -> Experiment:
    store, owner = MemoryStore(), Owner(name="brave-fox", host="here", pid=1, flow_run="f", attempt=attempt)
    state = take_over(store, first_generation("e"), owner, next(_STAMPS))
    return append(store, state, events, next(_STAMPS))


def added(fingerprint: dict[str, str]) -> TrialAdded:
    return TrialAdded(trial="trial", config={}, fingerprint=fingerprint)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (begun(added({})), r"a flow of your own.*Retry its last run, brave-fox \(pid 1 on here, flow run f\)"),
        (begun(added(TRAINABLE), attempt=1), "a flow of your own"),
        (begun(attempt=1), "a flow of your own"),
        (begun(added(TRAINABLE)), r"is a single training, not a search: call pt\.durable_trainable"),
        (begun(), "has no trials and no settings yet: call again what began it"),
    ],
    ids=["saves", "attempts of run_trial", "opened by a flow", "one training", "opened only"],
)
def test_an_experiment_that_is_no_search_says_what_continues_it(state: Experiment, said: str) -> None:
    with pytest.raises(pt.InvalidInput, match=rf"experiment 'e' at s3://b .*{said}"):
        require_search(state, "s3://b")


def test_a_search_is_resumed_by_its_name() -> None:
    require_search(begun(Configured(settings={"metric": "loss"})), "s3://b")
