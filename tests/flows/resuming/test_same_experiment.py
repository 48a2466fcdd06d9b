"""A run whose parameters do not fit the experiment is refused; a running owner is not disturbed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from tests.flows.resuming.test_resume import DIGITS, SPACE, TPE, objects, searched
from tests.flows.training import experiment_at
from tests.long_cases import long_after
from tests.trainables.digits_table import DigitsTable
from tests.trainables.moody import Moody

pytestmark = [pytest.mark.usefixtures("no_prefect_server"), pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("changed", "said"),
    long_after(
        1,
        [
            ({"metric": "accuracy"}, "metric: experiment 'old' was begun with 'error'"),
            ({"mode": "max"}, "mode: experiment 'old' was begun with 'min', and this run passes 'max'"),
            ({"seed": 3}, "seed: experiment 'old' was begun with"),
        ],
    ),
)
def test_another_metric_mode_or_seed_is_refused_before_anybody_is_superseded(
    local_target: LocalTarget, changed: dict[str, Any], said: str
) -> None:
    searched(local_target, num_samples=1)
    before = objects(local_target)
    with pytest.raises(pt.InvalidInput, match=said):
        searched(local_target, **changed)
    assert objects(local_target) == before


@pytest.mark.long
def test_a_run_without_a_seed_continues_with_that_of_the_experiment(local_target: LocalTarget) -> None:
    configs = [
        [each.config for each in searched(local_target, name, num_samples=count, **seed).trials.values()]
        for name, count, seed in (("one", 1, {"seed": 3}), ("one", 2, {}), ("other", 2, {"seed": 3}))
    ]
    assert configs[1] == configs[2]


@pytest.mark.long
def test_a_search_is_no_training_and_a_training_is_no_search(local_target: LocalTarget) -> None:
    searched(local_target, num_samples=1)
    pt.durable_trainable(Moody, {"x": 1.0}, target=local_target, experiment="one", stop={"step": 2})
    before = objects(local_target)
    with pytest.raises(pt.InvalidInput, match=r"'old' at .* is a search"):
        pt.durable_trainable(Moody, {"x": 1.0}, target=local_target, experiment="old", stop={"step": 2})
    with pytest.raises(pt.InvalidInput, match="'one' is a single training, not a search"):
        searched(local_target, experiment="one", metric=None)
    assert objects(local_target) == before
    assert len(pt.resume("old", target=local_target, num_samples=2).trials) == 2


@pytest.mark.long
def test_more_samples_are_those_of_the_search_that_was_asked_for(local_target: LocalTarget) -> None:
    searched(local_target, search=TPE, stop={"step": 1})
    whole = searched(local_target, "whole", search=TPE, num_samples=8, stop={"step": 1}, seed=5)
    assert len(whole.trials) == 8
    more = pt.resume("old", target=local_target, num_samples=8)
    assert len(more.trials) == 8
    other = pt.resume("old", target=local_target, search={"RandomSearch": {"num_samples": 9}})
    assert len(other.trials) == 9


class Diary(pt.Callback):
    def __init__(self) -> None:
        self.ended: list[str] = []

    def on_trial_complete(self, trial: Any, finished: Any) -> None:
        assert finished
        self.ended.append(trial.trial)


@pytest.mark.long
def test_it_goes_on_without_callbacks_that_no_journal_holds_and_says_so(
    local_target: LocalTarget, caplog: pytest.LogCaptureFixture
) -> None:
    searched(local_target, num_samples=1, callbacks=[Diary()])
    with caplog.at_level(logging.WARNING):
        assert len(pt.resume("old", target=local_target, num_samples=2).trials) == 2
    assert "the callbacks were objects" in caplog.text
    diary = Diary()
    pt.resume("old", target=local_target, num_samples=3, callbacks=[diary])
    assert diary.ended[-1] == "00002"


def test_what_is_before_the_first_entry_cannot_be_forked(local_target: LocalTarget) -> None:
    searched(local_target, num_samples=1)
    with pytest.raises(pt.InvalidInput, match="0"):
        pt.resume("old", target=local_target, fork="new", at=0)
    assert not objects(local_target, "new")


@pytest.mark.long
def test_a_fork_that_cannot_be_resumed_with_its_arguments_is_not_made(local_target: LocalTarget) -> None:
    def no_journal_names_it(_config: object) -> None:
        pt.report({"error": 1.0})

    searched(local_target, num_samples=2)
    searched(local_target, "unnamed", no_journal_names_it, num_samples=1)
    with pytest.raises(pt.InvalidInput, match="has 2 already"):
        pt.resume("old", target=local_target, fork="new", num_samples=1)
    with pytest.raises(pt.InvalidInput, match="does not store 'trainable'"):
        pt.resume("unnamed", target=local_target, fork="new")
    assert not objects(local_target, "new")


def test_a_search_that_counts_for_itself_takes_no_number_of_samples() -> None:
    with pytest.raises(pt.InvalidInput, match=r"num_samples: .* decides itself how many"):
        pt.tune(Moody, SPACE, target="./nowhere", search=pt.Repeated(pt.RandomSearch(2), 2), num_samples=3)


def enough(metrics: Mapping[str, Any]) -> bool:
    return metrics["step"] >= 2


def row(_config: Mapping[str, Any]) -> int:
    return 3


@pytest.mark.long
def test_objects_with_an_import_path_are_resumed_by_name(
    local_target: LocalTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"stop": enough, "space": {"row": pt.sample_from(row)}, "callbacks": [Diary]}
    searched(local_target, num_samples=1, trainable=DigitsTable, **options)
    here = __name__
    paths = {"trainable": DIGITS, "stop": f"{here}:enough", "callbacks": [f"{here}:Diary"]}
    settings = experiment_at(local_target, "old").settings
    assert {name: settings[name] for name in paths} == paths
    assert settings["space"] == {"row": {"sample_from": f"{here}:row"}}
    assert len(pt.resume("old", target=local_target, num_samples=2).trials) == 2
    # The object and its name are the same trainable: the journal takes the second call for no change.
    searched(local_target, num_samples=3, trainable=DigitsTable, on_code_change="refuse", **options)
    searched(local_target, num_samples=4, trainable=DIGITS, on_code_change="refuse", **options)
    resumed = pt.resume("old", target=local_target, num_samples=5, on_code_change="refuse")
    assert dict(resumed.experiment.settings) == {**settings, "num_samples": 5}
    assert [(each.status, each.step) for each in resumed.trials.values()] == [("completed", 2)] * 5
    assert not any("has changed" in each.message for each in caplog.records)
    # An experiment that was begun with an object without a path resumes with the object, and then by name.
    monkeypatch.setattr("prefect_tune.parameters.search_plan.import_path_of", lambda _: None)
    searched(local_target, "earlier", num_samples=1, trainable=DigitsTable)
    monkeypatch.undo()
    with pytest.raises(pt.InvalidInput, match="does not store 'trainable'"):
        pt.resume("earlier", target=local_target)
    searched(local_target, "earlier", num_samples=2, trainable=DigitsTable)
    assert len(pt.resume("earlier", target=local_target, num_samples=3).trials) == 3
