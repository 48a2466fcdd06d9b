"""The calls that an Optuna sampler gets from a search, and the use of its suggestions."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna import samplers
from optuna.trial import FrozenTrial, TrialState

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.search.base import Exhausted, Proposed, SearchState
from prefect_tune.core.search.domains import (
    choice,
    grid_search,
    has_grid,
    loguniform,
    quniform,
    randint,
    randn,
    sample_from,
    uniform,
)
from prefect_tune.core.search.objective import Objective
from prefect_tune.core.search.random_search import UNLIMITED
from prefect_tune.core.search.space import ParameterMatch, interpret_config
from prefect_tune.core.values import StepReport
from prefect_tune.integrations.optuna import OptunaSearch
from prefect_tune.parameters.argument_checks import component_to_json, parse_search
from tests.fakes.searches.functions import BRANIN, HARTMANN, Problem, measure_regret
from tests.fakes.searches.spaces import spaces
from tests.integrations.optuna.experiments import LOSS, LOSS_AND_SCORE, SEED, Experiment

warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # half of Optuna is experimental
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

SPACE = {"x": uniform(0, 1)}


class RecordingSampler(samplers.RandomSampler):
    """Records the trials that Optuna shows it at each call."""

    seen: list[list[FrozenTrial]] = []  # noqa: RUF012 - of the class: each use gets a fresh copy

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        self.seen.append([other for other in study.get_trials() if other.number != trial.number])
        return {}


@pytest.fixture(autouse=True)
def clean_record() -> None:
    RecordingSampler.seen = []


def begin_search(search: OptunaSearch, space: Mapping[str, object] = SPACE, objective: Objective = LOSS) -> SearchState:
    return search.begin(space, objective, SEED)


def propose(proposals: SearchState, number: int) -> Mapping[str, Any]:
    suggestion = proposals.suggest(number)
    assert isinstance(suggestion, Proposed)
    return suggestion.config


def report(step: int = 1, **metrics: object) -> StepReport:
    return StepReport(step=step, metrics=metrics)


def list_seen_trials(proposals: SearchState, number: int) -> list[FrozenTrial]:
    propose(proposals, number)
    return RecordingSampler.seen[-1]


# --------------------------------------------------------------------------------------- the calls that it receives


def test_a_sampler_sees_states_values_and_what_was_reported_on_the_way() -> None:
    proposals = begin_search(OptunaSearch(RecordingSampler(), UNLIMITED))
    for number in range(4):
        propose(proposals, number)
    proposals.on_report(0, report(1, loss=3.0))
    proposals.on_trial_ended(0, report(2, loss=2.0), failed=False)
    proposals.on_trial_stopped(1)
    proposals.on_trial_ended(1, report(1, loss=5.0), failed=False)
    proposals.on_trial_ended(2, report(1, loss=1.0), failed=True)
    seen = list_seen_trials(proposals, 4)
    assert [trial.state.name for trial in seen] == ["COMPLETE", "PRUNED", "FAIL", "RUNNING"]
    assert [trial.values for trial in seen] == [[2.0], [5.0], None, None]
    assert [trial.intermediate_values for trial in seen] == [{1: 3.0, 2: 2.0}, {1: 5.0}, {}, {}]
    assert seen[0].user_attrs == {"loss": 2.0}


def test_a_sampler_sees_metrics_as_they_were_reported_and_which_way_is_better() -> None:
    directions: list[object] = []

    class DirectionSampler(RecordingSampler):
        def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
            directions.append([direction.name for direction in study.directions])
            return super().infer_relative_search_space(study, trial)

    proposals = begin_search(OptunaSearch(DirectionSampler(), UNLIMITED), objective=LOSS_AND_SCORE)
    propose(proposals, 0)
    proposals.on_report(0, report(1, loss=1.0, score=0.5))
    proposals.on_trial_stopped(0)
    proposals.on_trial_ended(0, report(1, loss=1.0, score=0.5), failed=False)
    (trial,) = list_seen_trials(proposals, 1)
    assert (trial.values, trial.state, trial.intermediate_values) == ([1.0, 0.5], TrialState.COMPLETE, {})
    assert directions[-1] == ["MINIMIZE", "MAXIMIZE"]


@pytest.mark.parametrize(
    "constraints", [["size", "cost"], lambda config, metrics: (metrics["size"], config["x"] * 0 - 2.0)]
)
def test_a_sampler_sees_how_far_a_trial_is_from_feasible(constraints: Any) -> None:
    proposals = begin_search(OptunaSearch(RecordingSampler(), UNLIMITED, constraints=constraints))
    propose(proposals, 0)
    proposals.on_trial_ended(0, report(loss=0.0, size=1.5, cost=-2.0), failed=False)
    (trial,) = list_seen_trials(proposals, 1)
    assert list(trial.constraints.values()) == [1.5, -2.0]


def test_constraints_change_what_is_proposed() -> None:
    def median_x(constraints: Sequence[str] | None) -> float:
        search = OptunaSearch(samplers.TPESampler(n_startup_trials=5), UNLIMITED, constraints=constraints)
        proposals = begin_search(search)
        for number in range(40):
            x = propose(proposals, number)["x"]
            proposals.on_trial_ended(number, report(loss=x, infeasible=0.5 - x), failed=False)
        return sorted(propose(proposals, number)["x"] for number in range(40, 61))[10]

    assert median_x(None) < 0.2
    assert median_x(["infeasible"]) > 0.4


@pytest.mark.parametrize("constraints", [["size"], lambda _config, metrics: [metrics["size"]]])
def test_a_trial_that_lacks_a_metric_has_failed_for_the_search_which_goes_on_and_says_so(
    constraints: Any, caplog: pytest.LogCaptureFixture
) -> None:
    proposals = begin_search(OptunaSearch(RecordingSampler(), UNLIMITED, constraints=constraints))
    for number in range(3):
        propose(proposals, number)
    proposals.on_trial_ended(0, report(accuracy=1.0, size=0.0), failed=False)
    proposals.on_trial_ended(1, report(loss=1.0), failed=False)
    proposals.on_trial_ended(2, report(loss=1.0, size=0.0), failed=False)
    seen = list_seen_trials(proposals, 3)
    assert [trial.state for trial in seen] == [TrialState.FAIL, TrialState.FAIL, TrialState.COMPLETE]
    assert "trial 0, step 1: expected a number for metric 'loss'" in caplog.text
    assert "trial 1, step 1: constraints: " in caplog.text
    proposals.on_trial_ended(1, report(2, loss=1.0, size=0.0), failed=False)
    assert list_seen_trials(proposals, 4)[1].state == TrialState.COMPLETE


def test_a_trial_that_ended_may_go_on_and_end_again() -> None:
    proposals = begin_search(OptunaSearch(RecordingSampler(), UNLIMITED))
    propose(proposals, 0)
    proposals.on_trial_ended(0, report(1, loss=3.0), failed=False)
    proposals.on_report(0, report(2, loss=2.5))
    assert list_seen_trials(proposals, 1)[0].state == TrialState.RUNNING
    proposals.on_trial_ended(0, report(3, loss=2.0), failed=False)
    again = list_seen_trials(proposals, 2)[0]
    assert (again.state, again.values) == (TrialState.COMPLETE, [2.0])
    assert again.intermediate_values == {1: 3.0, 2: 2.5, 3: 2.0}


# --------------------------------------------------------------------------------------------------- another space


def restore_trials(
    sampler: samplers.BaseSampler, space: Mapping[str, object], *configs: Mapping[str, object]
) -> SearchState:
    proposals = begin_search(OptunaSearch(sampler, UNLIMITED), space)
    for number, config in enumerate(configs):
        proposals.restore_trial(number, config)
        proposals.on_trial_ended(number, report(loss=float(number)), failed=False)
    return proposals


def test_what_other_experiments_found_is_seen_and_counts_as_no_sample() -> None:
    seen: list[list[FrozenTrial]] = []

    class StudySampler(samplers.RandomSampler):
        def sample_relative(self, study: Any, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
            seen.append(study.get_trials(deepcopy=False))
            return super().sample_relative(study, trial, search_space)

    space = {"x": uniform(0, 1), "note": "here"}
    proposals = begin_search(OptunaSearch(StudySampler(), 2, constraints=["over"]), space)
    last = report(3, loss=0.25, over=-1.0)
    assert proposals.add_prior_trial({"x": 0.5, "note": "here"}, last, stopped=False)
    assert proposals.add_prior_trial({"x": 0.75, "note": "here"}, last, stopped=True)
    assert proposals.add_prior_trial({"x": 0.25, "note": "here"}, report(3, loss=0.5), stopped=False)
    assert not proposals.add_prior_trial({"x": 7.0, "note": "here"}, last, stopped=False)
    assert not proposals.add_prior_trial({"x": 0.5, "note": "here"}, report(1, other=1), stopped=False)
    suggestions = [proposals.suggest(number) for number in range(3)]
    assert [type(suggestion) for suggestion in suggestions] == [Proposed, Proposed, Exhausted]
    first, second, _ = trials = seen[0][:3]
    assert [trial.params for trial in trials] == [{"x": 0.5}, {"x": 0.75}, {"x": 0.25}]
    assert [trial.state.name for trial in trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert (first.value, second.intermediate_values) == (0.25, {3: 0.25})
    proposals.on_trial_ended(0, last, failed=False)


def test_a_trial_of_another_space_is_data_where_it_lies_in_this_one() -> None:
    space = {"x": uniform(0, 1), "kind": choice(["a", "b"], [1, 0]), "epochs": 20}
    proposals = restore_trials(
        RecordingSampler(),
        space,
        {"x": 0.5, "kind": "a", "epochs": 10, "gone": 1},
        {"x": 2.0, "kind": "a", "epochs": 10},  # x is smaller today
        {"x": 0.5, "kind": "c", "epochs": 10},  # the option is gone
        {"x": 0.5, "kind": "b", "epochs": 10},  # or is not to be drawn any more
    )
    assert [trial.values for trial in list_seen_trials(proposals, 4)] == [[0.0]]
    assert [trial.params for trial in RecordingSampler.seen[-1]] == [{"x": 0.5, "kind": "a"}]


def test_only_who_can_use_part_of_a_configuration_sees_it() -> None:
    space = {"x": uniform(0, 1), "y": uniform(0, 1)}
    old = [{"x": 0.5}] * 20
    for sampler in (samplers.CmaEsSampler(popsize=4), samplers.NSGAIISampler(population_size=4)):
        untouched = begin_search(OptunaSearch(sampler, UNLIMITED), space)
        proposals = restore_trials(sampler, space, *old)
        assert [propose(proposals, number) for number in range(20, 23)] == [
            propose(untouched, number) for number in range(20, 23)
        ]
    restored = restore_trials(samplers.TPESampler(), space, *old)
    assert propose(restored, 20) != propose(begin_search(OptunaSearch(None, UNLIMITED), space), 20)


def test_what_somebody_else_proposed_takes_the_place_of_no_point_of_a_grid() -> None:
    space = {"a": choice([1, 2]), "b": choice([3, 4])}
    for earlier in ({"a": 9, "b": 9}, {"a": 1, "b": 3}):
        proposals = restore_trials(samplers.GridSampler({"a": [1, 2], "b": [3, 4]}), space, earlier, earlier)
        assert {*_propose_all(proposals, first=2), tuple(earlier.values())} >= {(a, b) for a in (1, 2) for b in (3, 4)}


# ------------------------------------------------------------------------------------------------------- proposals


def _propose_all(proposals: SearchState, first: int = 0) -> Counter[tuple[object, ...]]:
    """Propose until the search is exhausted, with three trials running."""
    counts: Counter[tuple[object, ...]] = Counter()
    for number in range(first, 1000):
        suggestion = proposals.suggest(number)
        if isinstance(suggestion, Exhausted):
            assert proposals.suggest(number) == suggestion
            return counts
        counts[tuple(suggestion.config.values())] += 1
        if number - 3 >= first:
            proposals.on_trial_ended(number - 3, report(loss=0.0), failed=False)
    raise AssertionError("the search never ends")


@pytest.mark.parametrize(
    "sampler",
    [
        samplers.GridSampler({"a": [1, 2, 3], "b": [0, 1, 2, 3]}),
        samplers.BruteForceSampler(),
        samplers.BruteForceSampler(avoid_premature_stop=True),
    ],
    ids=["grid", "brute force", "brute force to the end"],
)
def test_a_finite_space_is_proposed_once_and_wholly_while_trials_run(sampler: samplers.BaseSampler) -> None:
    proposals = begin_search(OptunaSearch(sampler), {"a": choice([1, 2, 3]), "b": randint(0, 4)})
    assert _propose_all(proposals) == Counter({(a, b): 1 for a in (1, 2, 3) for b in range(4)})


def test_brute_force_goes_down_every_branch() -> None:
    space = {"model": choice([{"depth": randint(1, 3)}, {"width": choice(["s", "m", "l"])}])}
    configs = Experiment(OptunaSearch(samplers.BruteForceSampler()), space).run(99)
    assert sorted(str(config["model"]) for config in configs) == [
        "{'depth': 1}", "{'depth': 2}", "{'width': 'l'}", "{'width': 'm'}", "{'width': 's'}"
    ]  # fmt: skip


def test_points_come_first_and_what_they_leave_out_is_sampled() -> None:
    space = {"x": uniform(0, 1), "z": randn(0, 1), "kind": choice(["a", "b"]), "twice": sample_from(_double)}
    points = [{"x": 0.25, "z": 1.1, "kind": "b", "twice": 7}, {"x": 0.75}]
    for sampler in (None, samplers.NSGAIISampler(population_size=2), samplers.CmaEsSampler()):
        configs = Experiment(OptunaSearch(sampler, 6, points), space).run(6)
        assert configs[0] == points[0]
        assert (configs[1]["x"], configs[1]["twice"]) == (0.75, 1.5)
        assert configs[2]["x"] not in (0.25, 0.75)
        assert Experiment(OptunaSearch(sampler, 6, points), space).run(6, sessions=6) == configs


def _double(config: Mapping[str, Any]) -> object:
    return 2 * config["x"]


def test_a_grid_is_tried_whole_besides_its_points() -> None:
    search = OptunaSearch(samplers.GridSampler({"a": [1, 2]}), None, [{"a": 2}])
    assert [config["a"] for config in Experiment(search, {"a": choice([1, 2])}).run(9)] in ([2, 1, 2], [2, 2, 1])


def test_there_are_as_many_trials_as_samples_and_more_after_more_samples() -> None:
    first = Experiment(OptunaSearch(None, 3), SPACE)
    assert len(first.run(10)) == 3
    assert first.resume().suggest(3) == Exhausted("3 samples")
    longer = Experiment(OptunaSearch(None, 5), SPACE, events=first.events, configs=first.configs, running=first.running)
    assert longer.run(10) == Experiment(OptunaSearch(None, 5), SPACE).run(5)


@settings(max_examples=60)
@given(spaces().filter(lambda space: not has_grid(space)), st.integers(0, 99))
def test_a_proposal_is_json_of_the_space_and_is_read_back_as_it_was(space: dict[str, Any], seed: int) -> None:
    proposals = OptunaSearch(samplers.TPESampler(n_startup_trials=1), 3).begin(space, LOSS, seed)
    for number in range(3):
        config = propose(proposals, number)
        assert json.loads(json.dumps(config, allow_nan=False)) == config
        assert all(isinstance(reading, ParameterMatch) for reading in interpret_config(space, config))
        proposals.on_trial_ended(number, report(loss=float(number)), failed=False)


def test_the_seed_of_the_experiment_counts_and_not_that_of_the_sampler() -> None:
    def first(seed: int, sampler: samplers.BaseSampler) -> Mapping[str, object]:
        return propose(OptunaSearch(sampler, 1).begin(SPACE, LOSS, seed), 0)

    assert first(1, samplers.TPESampler(seed=1)) == first(1, samplers.TPESampler(seed=2))
    assert first(1, samplers.TPESampler(seed=1)) != first(2, samplers.TPESampler(seed=1))


def test_a_sampler_that_was_used_before_begins_anew() -> None:
    space = {"x": uniform(0, 1), "y": uniform(0, 1)}
    used = samplers.TPESampler(n_startup_trials=2)
    optuna.create_study(sampler=used).optimize(lambda trial: trial.suggest_float("other", 0, 1), n_trials=5)
    fresh = OptunaSearch(samplers.TPESampler(n_startup_trials=2), 8)
    assert Experiment(OptunaSearch(used, 8), space).run(8) == Experiment(fresh, space).run(8)


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (OptunaSearch(), "expected num_samples, since TPESampler never ends"),
        (OptunaSearch(samplers.CmaEsSampler(), 9), "CmaEsSampler: expected one metric, found 2"),
        (OptunaSearch(samplers.GridSampler({"y": [1]})), "GridSampler: expected values for each parameter.*'x'"),
        (
            OptunaSearch(samplers.PartialFixedSampler({"lr": 1}, samplers.RandomSampler()), 9),
            "PartialFixedSampler: unknown parameters.*'lr'.*'x'",
        ),
        (OptunaSearch(None, 9, [{"x": 3}]), "points_to_evaluate: x: expected uniform"),
        (
            OptunaSearch(samplers.GridSampler({"x": [0.5]}), 9, [{}]),
            "points_to_evaluate: expected values for all .*found {}",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_trial(search: OptunaSearch, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        search.begin(SPACE, LOSS_AND_SCORE, 1)


def test_a_grid_and_a_missing_metric_are_refused() -> None:
    with pytest.raises(InvalidInput, match="grid_search"):
        OptunaSearch(None, 9).begin({"x": choice([1, 2]), "y": grid_search([1, 2])}, LOSS, 1)
    with pytest.raises(InvalidInput, match="expected a metric"):
        OptunaSearch(None, 9).begin(SPACE, None, 1)


@pytest.mark.parametrize("count", [0, -2, True, 1.5])
def test_a_number_of_samples_is_a_number_of_samples(count: Any) -> None:
    with pytest.raises(InvalidInput, match="num_samples"):
        OptunaSearch(None, count)


@pytest.mark.parametrize(
    ("sampler", "package"),
    [(samplers.CmaEsSampler, "cmaes"), (samplers.QMCSampler, "scipy"), (samplers.GPSampler, "torch")],
)
def test_a_sampler_says_which_package_it_misses(monkeypatch: pytest.MonkeyPatch, sampler: Any, package: str) -> None:
    monkeypatch.setattr("prefect_tune.integrations.optuna_study.find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match=f"{sampler.__name__}: it needs {package}.*pip install {package}"):
        OptunaSearch(sampler(), 9).begin(SPACE, LOSS, 1)


def test_without_optuna_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['optuna'] = None; import prefect_tune.integrations.optuna"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert run.stderr.endswith(
        "ImportError: OptunaSearch and OptunaPruner need Optuna 5: pip install 'prefect-tune[optuna]'\n"
    )


# -------------------------------------------------------------------------------------------------- other behaviour


def test_optuna_says_nothing_and_is_as_talkative_afterwards_as_before() -> None:
    messages: list[str] = []
    handler, before = logging.Handler(), optuna.logging.get_verbosity()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]  # as short as can be
    logging.getLogger("optuna").addHandler(handler)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    try:
        space = {"x": uniform(0, 1), "kind": choice([1, 2])}  # of which CMA-ES says each time that it cannot learn it
        Experiment(OptunaSearch(samplers.CmaEsSampler(), 9), space).run(9)
        assert (messages, optuna.logging.get_verbosity()) == ([], optuna.logging.INFO)
    finally:
        optuna.logging.set_verbosity(before)
        logging.getLogger("optuna").removeHandler(handler)


MANY = {"x": uniform(-1, 1), "y": loguniform(1e-3, 1), "q": quniform(0, 1, 0.1), "n": randint(0, 50)}


@pytest.mark.parametrize(
    "sampler",
    [None, *(pytest.param(name, marks=pytest.mark.deep) for name in ("CmaEsSampler", "NSGAIISampler", "QMCSampler"))],
)
def test_a_thousand_trials_are_recalled_in_seconds(sampler: str | None, record_property: Any) -> None:
    search = OptunaSearch(getattr(samplers, sampler)() if sampler else None, UNLIMITED)
    configs = [{"x": i / 1000, "y": 1 / (i + 1), "q": i % 11 / 10, "n": i % 50} for i in range(1000)]
    before = time.process_time()
    proposals = restore_trials(search.sampler or samplers.TPESampler(), MANY, *configs)
    seconds = time.process_time() - before
    record_property(f"figure: CPU seconds to recall 1,000 trials, {sampler or 'TPESampler'}", round(seconds, 2))
    assert len(propose(proposals, 1000)) == 4
    assert seconds < 10


# Samplers by name, as forms, deployments and the command line pass them.


@pytest.mark.parametrize("sampler", ["RandomSampler", {"TPESampler": {"n_startup_trials": 3, "multivariate": True}}])
def test_a_sampler_that_is_named_proposes_what_the_object_does_and_can_be_journaled(sampler: Any) -> None:
    component = {"OptunaSearch": {"sampler": sampler, "num_samples": 6}}
    search = parse_search(component)
    name, options = next(iter(sampler.items())) if isinstance(sampler, dict) else (sampler, {})
    same = OptunaSearch(getattr(samplers, name)(**options), num_samples=6)
    assert component_to_json(search) == component
    for number in range(3):
        assert begin_search(search).suggest(number) == begin_search(same).suggest(number)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("TPE", "expected a sampler of Optuna, its name such as 'TPESampler'"),
        ("TPESamplr", "did you mean 'TPESampler'?"),
        ("Study", "found 'Study'"),
        ({"TPESampler": 3}, "found {'TPESampler': 3}"),
        ({"TPESampler": {"n_startup": 3}}, "sampler: TPESampler: "),
        ("GridSampler", "sampler: GridSampler: "),
        (3, "found 3"),
    ],
)
def test_a_sampler_that_is_none_is_refused_before_anything_is_begun(sampler: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_search({"OptunaSearch": {"sampler": sampler, "num_samples": 3}})
    assert message in str(error.value)


# The regret of TPE after a hundred trials.


@pytest.mark.deep
@pytest.mark.parametrize(("problem", "limit"), [(BRANIN, 0.05), (HARTMANN, 0.30)], ids=lambda value: str(value)[:16])
def test_the_median_regret_of_twenty_seeds_is_small(
    problem: Problem, limit: float, record_property: Callable[[str, object], None]
) -> None:
    median_regret = median(measure_regret(OptunaSearch(None, 100), problem, seed).value for seed in range(20))
    record_property(f"figure: median regret of TPE after 100 trials, {problem.name}", round(median_regret, 4))
    assert median_regret <= limit
