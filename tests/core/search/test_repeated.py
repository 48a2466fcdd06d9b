from __future__ import annotations

from collections.abc import Mapping

import pytest

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.search.base import Exhausted, Proposals, Proposed, Repeated, Search, Space, Suggestion
from prefect_tune.core.search.domains import grid_search, uniform
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import RandomSearch
from prefect_tune.core.values import StepReport

SPACE = {"lr": uniform(0, 1)}


class RecordingSearch(Search):
    """Proposes nothing, and records the ended trials."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, StepReport | None, bool]] = []

    def begin(self, space: Space, objective: Objective | None, seed: int) -> Proposals:
        del space, objective, seed
        return RecordingProposals(self.ended)


class RecordingProposals(Proposals):
    def __init__(self, ended: list[tuple[int, StepReport | None, bool]]) -> None:
        self._ended = ended

    def suggest(self, number: int) -> Suggestion:
        return Exhausted(f"nothing for {number}")

    def recall(self, number: int, config: Mapping[str, object]) -> None:
        raise NotImplementedError

    def ended(self, number: int, last: StepReport | None, *, failed: bool) -> None:
        self._ended.append((number, last, failed))


def configs_of(proposals: Proposals, first: int, last: int) -> list[Mapping[str, object]]:
    suggestions = [proposals.suggest(number) for number in range(first, last)]
    return [each.config for each in suggestions if isinstance(each, Proposed)]


def test_each_configuration_is_proposed_several_times_in_a_row() -> None:
    search = Repeated(RandomSearch(2), 3).begin(SPACE, None, 1)
    configs = configs_of(search, 0, 6)
    assert configs == [configs[0]] * 3 + [configs[3]] * 3
    assert configs[0] != configs[3]
    assert search.suggest(6) == Exhausted("samples drawn: 2 of 2")


def test_the_repetitions_of_a_configuration_can_be_counted_in_it() -> None:
    search = Repeated(RandomSearch(2), 2, index_as="seed").begin(SPACE, None, 1)
    assert [config["seed"] for config in configs_of(search, 0, 4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("index_as", [None, "seed"])
def test_whoever_resumes_within_the_repetitions_goes_on_with_them(index_as: str | None) -> None:
    search = Repeated(RandomSearch(2), 3, index_as)
    space = {"lr": uniform(0, 1), "a": grid_search([1, 2])}
    whole = configs_of(search.begin(space, None, 1), 0, 12)
    assert len(whole) == 12
    for cut in range(13):
        resumed = search.begin(space, None, 1)
        for number, config in enumerate(whole[:cut]):
            resumed.recall(number, config)
        assert configs_of(resumed, cut, 13) == whole[cut:]


def test_the_search_hears_the_mean_once_all_repetitions_are_over() -> None:
    search = RecordingSearch()
    proposals = Repeated(search, 3).begin(SPACE, None, 1)
    proposals.ended(4, StepReport(step=2, metrics={"loss": 1.0}), failed=False)
    proposals.ended(0, StepReport(step=4, metrics={"loss": 1.0, "n": 3, "text": "a"}, trained_seconds=2), failed=False)
    proposals.ended(2, StepReport(step=2, metrics={"loss": 2.0, "text": "b"}, trained_seconds=4), failed=False)
    assert search.ended == []
    proposals.ended(1, StepReport(step=9, metrics={"loss": 9.0}), failed=True)
    assert search.ended == [(0, StepReport(step=4, metrics={"loss": 1.5}, trained_seconds=3), False)]


def test_the_search_hears_of_a_failure_when_no_repetition_succeeded() -> None:
    search = RecordingSearch()
    proposals = Repeated(search, 2).begin(SPACE, None, 1)
    proposals.ended(3, None, failed=False)
    proposals.ended(2, StepReport(step=9, metrics={"loss": 9.0}), failed=True)
    assert search.ended == [(1, None, True)]


def test_what_cannot_be_repeated_is_refused() -> None:
    with pytest.raises(InvalidInput, match="expected at least 1 for times, found 0"):
        Repeated(RandomSearch(1), 0)
    with pytest.raises(InvalidInput, match="expected no 'lr' in the space: it counts the repetitions"):
        Repeated(RandomSearch(1), 2, index_as="lr").begin(SPACE, None, 1)


def test_a_repetition_that_is_tried_again_counts_once_and_the_mean_is_told_again() -> None:
    search = RecordingSearch()
    proposals = Repeated(search, 2).begin(SPACE, None, 1)
    proposals.ended(0, None, failed=True)
    proposals.ended(0, StepReport(step=1, metrics={"loss": 4.0}), failed=False)
    assert search.ended == []
    proposals.ended(1, StepReport(step=1, metrics={"loss": 2.0}), failed=False)
    proposals.ended(1, StepReport(step=2, metrics={"loss": 0.0}), failed=False)
    assert [(number, report.metrics) for number, report, _ in search.ended if report] == [
        (0, {"loss": 3.0}),
        (0, {"loss": 2.0}),
    ]


def test_what_others_found_is_told_to_the_search_that_is_repeated_without_the_count() -> None:
    class Learning(RecordingProposals):
        def learn(self, config: Mapping[str, object], last: StepReport, *, stopped: bool) -> bool:
            self._ended.append((dict(config), last, stopped))
            return True

    class Search(RecordingSearch):
        def begin(self, space: Space, objective: Objective | None, seed: int) -> Proposals:
            del space, objective, seed
            return Learning(self.ended)

    search, report = Search(), StepReport(step=1, metrics={"loss": 1.0})
    proposals = Repeated(search, 2, index_as="seed").begin(SPACE, None, 1)
    assert proposals.learn({"lr": 0.5, "seed": 1}, report, stopped=True)
    assert str(search.ended) == str([({"lr": 0.5}, report, True)])
