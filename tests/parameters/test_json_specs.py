"""Schedulers, searches and stoppers as typed into a form or a command line, and the errors for mistakes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, get_args

import pytest

import prefect_tune as pt
from prefect_tune.core.experiment.stoppers import StopCriteria, as_stopper
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.objective import objective_of
from prefect_tune.parameters.argument_checks import scheduler_from, search_from, stop_from, to_json, with_samples
from prefect_tune.parameters.forms import ResumeLike, SchedulerName, SearchName
from prefect_tune.parameters.plan_checks import warn_of_limits
from prefect_tune.parameters.search_plan import resuming
from prefect_tune.registry import BUILT_IN


def test_the_names_that_checkers_know_are_those_that_need_no_options() -> None:
    needy = {"ASHA", "Hyperband", "PBT"}
    assert set(get_args(SchedulerName)) == BUILT_IN["scheduler"].keys() - needy
    assert set(get_args(SearchName)) == BUILT_IN["search"].keys()
    assert [type(scheduler_from(name)).__name__ for name in get_args(SchedulerName)] == [*get_args(SchedulerName)]
    assert all(resuming(word) for word in get_args(ResumeLike))


@pytest.mark.parametrize(
    ("read", "given", "said"),
    [
        (scheduler_from, "ASHA", 'scheduler: ASHA needs max_t: {"ASHA": {"max_t": 81}}'),
        (scheduler_from, {"Hyperband": {}}, 'Hyperband needs max_t: {"Hyperband": {"max_t": 81}}'),
        (scheduler_from, "PBT", "PBT needs perturbation_interval and hyperparam_mutations: "),
        (
            scheduler_from,
            "asha",
            f"unknown name 'asha'; expected one of {', '.join(BUILT_IN['scheduler'])}; did you mean 'ASHA'?",
        ),
        (scheduler_from, "medianstoping", "did you mean 'MedianStopping'?"),
        (scheduler_from, {"ASHA": 27}, 'ASHA: expected its options, as in {"ASHA": {"max_t": 81}}, found 27'),
        (scheduler_from, {"ASHA": {"maxt": 9}}, "ASHA has no option 'maxt'; did you mean 'max_t'?"),
        (scheduler_from, {"FIFO": {"x": 9}}, "FIFO has no option 'x'"),
        (search_from, "randomsearch", "did you mean 'RandomSearch'?"),
        (stop_from, {"MaxFailures": 5}, 'stop: MaxFailures is a stopper: expected {"MaxFailures": {"failures": 3}}'),
        (stop_from, {"TimeBudget": {}}, 'TimeBudget needs time_seconds: {"TimeBudget": {"time_seconds": 3600}}'),
        (stop_from, [{"step": 3}, {"MaxSteps": {"step": 5}}], "MaxSteps has no option 'step'; did you mean 'steps'?"),
    ],
)
def test_what_is_spelled_wrongly_is_told_how_it_is_spelled(
    read: Callable[[object], object], given: object, said: str
) -> None:
    with pytest.raises(pt.InvalidInput) as refused:
        read(given)
    assert said in str(refused.value)
    assert "__init__" not in str(refused.value)


@pytest.mark.parametrize("name", ["FIFO", "MedianStopping"])
def test_what_needs_no_option_is_spelled_by_its_name(name: str) -> None:
    assert to_json(scheduler_from(name)) == {name: {}}


@pytest.mark.parametrize("given", ["RandomSearch", {"RandomSearch": {}}, pt.RandomSearch()])
def test_a_random_search_without_a_number_has_as_many_samples_as_no_search_at_all(
    given: str | dict[str, object] | Search,
) -> None:
    assert search_from(given).trial_count({"x": pt.uniform(0, 1)}) == 10
    assert with_samples(search_from(given), 1).trial_count({"x": pt.uniform(0, 1)}) == 1


@pytest.mark.parametrize(
    ("stop", "mode", "warned"),
    [
        ({"loss": 0.1}, "min", True),
        ([{"step": 5}, {"loss": 0.1}], "min", True),
        ({"loss": 0.1}, "max", False),
        ({"step": 5, "accuracy": 0.9}, "min", False),
        (pt.MaxSteps(3), "min", False),
    ],
)
def test_a_limit_that_ends_trials_the_wrong_way_round_is_warned_of(
    stop: StopCriteria, mode: Literal["min", "max"], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_limits(as_stopper(stop), objective_of("loss", mode), logging.getLogger("a run"))
    assert ["loss >= 0.1" in each.getMessage() for each in caplog.records] == [True] * warned
