"""Runs that add samples to those of earlier runs: each once, what was left over first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.events import Described, Event
from prefect_tune.core.experiment import Experiment, after_event, nothing_yet
from prefect_tune.flows.agreement import settings_today
from prefect_tune.flows.asked import Asked
from prefect_tune.flows.extending import extended
from prefect_tune.flows.resuming import read_known
from tests.flows.training import experiment_at
from tests.trainables.digits_table import ROWS

DIGITS = "tests.trainables.digits_table:DigitsTable"


def asked(**options: Any) -> Asked:
    return Asked(trainable=DIGITS, target="/runs", metric="error", **options)


def after(state: Experiment, events: Sequence[Event]) -> Experiment:
    for event in events:
        state = after_event(state, event, state.number + 1)
    return state


def begun(**options: Any) -> Experiment:
    """An experiment as a run without `samples_per_run` describes it."""
    return after(nothing_yet("nightly"), [Described(settings=settings_today(asked(**options)))])


def run(state: Experiment, number: str, **options: Any) -> Experiment:
    """The experiment as the journal has it when a run with this id has opened it."""
    now, added = extended(asked(**options), state, number)
    return after(state, [Described(settings=settings_today(now)), *added])


def total(state: Experiment) -> object:
    return state.settings["num_samples"]


def test_each_run_adds_its_samples_and_a_run_that_starts_again_adds_none() -> None:
    state = nothing_yet("nightly")
    for number, expected in (("a", 5), ("a", 5), ("b", 10), ("a", 10), ("b", 10), ("c", 15)):
        state = run(state, number, samples_per_run=5)
        assert total(state) == expected
    assert state.extensions == {"a": 5, "b": 5, "c": 5}


@pytest.mark.parametrize(
    ("before", "samples"),
    [
        ({"num_samples": 20}, 25),
        ({}, 15),  # ten are the default
        ({"search": {"OptunaSearch": {"num_samples": 40}}}, 45),
        ({"search": {"OptunaSearch": {"num_samples": 40}}, "num_samples": 7}, 12),
    ],
)
def test_what_was_begun_by_hand_is_extended_from_there(before: Mapping[str, Any], samples: int) -> None:
    assert total(run(begun(**before), "a", samples_per_run=5)) == samples


def test_a_run_that_adds_nothing_asks_for_what_it_says_as_ever() -> None:
    state = run(nothing_yet("nightly"), "a", samples_per_run=5)
    same, added = extended(asked(num_samples=3), state, "b")
    assert (same.num_samples, added) == (3, ())


@pytest.mark.parametrize("before", [{"num_samples": -1}, {"search": {"OptunaSearch": {"sampler": "GridSampler"}}}])
def test_what_has_no_end_is_not_extended(before: Mapping[str, Any]) -> None:
    state = after(nothing_yet("nightly"), [Described(settings=before)])
    with pytest.raises(pt.InvalidInput, match="samples_per_run: experiment 'nightly' was not begun with a number"):
        extended(asked(samples_per_run=5), state, "a")


@pytest.mark.parametrize(("options", "said"), [({"num_samples": 3}, "give one of them"), ({}, "found -2")])
@pytest.mark.usefixtures("prefect_server")
def test_how_many_there_are_to_be_is_said_once(options: Any, said: str, local_target: LocalTarget) -> None:
    count = {"samples_per_run": 3} if options else {"samples_per_run": -2}
    with pytest.raises(pt.InvalidInput, match=said):
        pt.tune(DIGITS, {"row": 1}, target=local_target, **count, **options)
    with pytest.raises(pt.InvalidInput, match=said):
        pt.resume("nightly", target=local_target, **count, **options)
    assert not Path(local_target.path).exists()


# --------------------------------------------------------------------------------------------------- real searches


def search(target: LocalTarget, **options: Any) -> pt.Results:
    common: dict[str, Any] = {
        "space": {"row": pt.randint(0, ROWS)},
        "target": target,
        "experiment": "nightly",
        "metric": "error",
        "stop": {"step": 2},
        "max_concurrent_trials": 1,
        "isolation": "thread",
    }
    return pt.tune(DIGITS, **{**common, **options})


def rows(results: pt.Results) -> Sequence[object]:
    return [each.config["row"] for each in results.trials.values()]


@pytest.mark.usefixtures("prefect_server")
def test_three_runs_try_what_one_would_have_tried(local_target: LocalTarget, tmp_path: Path) -> None:
    counts = [len(search(local_target, samples_per_run=2).trials) for _ in range(2)]
    third = pt.resume("nightly", target=local_target, samples_per_run=2)
    assert [*counts, len(third.trials)] == [2, 4, 6]
    assert list(third.experiment.extensions.values()) == [2, 2, 2]
    at_once = search(LocalTarget(path=str(tmp_path / "at-once")), num_samples=6)
    assert rows(third) == rows(at_once)


@pytest.mark.usefixtures("prefect_server")
def test_the_report_of_the_third_run_shows_what_all_three_have_added(local_target: LocalTarget) -> None:
    for samples in (2, 1, 3):
        search(local_target, samples_per_run=samples)
    with get_client(sync_client=True) as client:
        reports = client.read_latest_artifacts(artifact_filter=None)
    (report,) = [str(each.data) for each in reports if each.key == "report-nightly"]
    runs = [row.split(" | ") for row in report.partition("## Runs")[2].splitlines() if row.startswith("| ")]
    assert [row[-3:-1] for row in runs[2:]] == [["+2", "2"], ["+1", "1"], ["+3", "3"]]


@pytest.mark.usefixtures("prefect_server")
def test_the_same_root_run_adds_once_and_what_it_left_over_comes_first(local_target: LocalTarget) -> None:
    cut_short = {"stop": {"step": 2, "TrialBudget": {"trials": 1}}}

    @flow
    def nightly() -> list[int]:
        """What a Retry does: the same root run comes to the same search again."""
        first = search(local_target, samples_per_run=3, **cut_short)
        return [len(first.trials), len(search(local_target, samples_per_run=3, **cut_short).trials)]

    assert nightly() == [1, 1]
    assert len(search(local_target, samples_per_run=2).trials) == 5
    state = experiment_at(local_target, "nightly")
    assert sorted(state.extensions.values()) == [2, 3]


@pytest.mark.usefixtures("prefect_server")
def test_a_run_that_reads_the_journal_just_before_another_one_adds_to_what_both_have_added(
    local_target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    search(local_target, samples_per_run=1)
    read_before = read_known(local_target, "nightly")
    search(local_target, samples_per_run=1)
    with monkeypatch.context() as reads:
        reads.setattr("prefect_tune.flows.search.read_known", lambda *_: read_before)
        assert len(search(local_target, samples_per_run=1).trials) == 3
    assert experiment_at(local_target, "nightly").settings["num_samples"] == 3
