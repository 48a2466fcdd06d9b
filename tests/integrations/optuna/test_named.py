"""Samplers by name, as forms, deployments and the command line pass them."""

from __future__ import annotations

from typing import Any

import pytest
from optuna import samplers

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.search.domains import uniform
from prefect_tune.integrations.optuna import OptunaSearch
from prefect_tune.parameters.argument_checks import search_from, to_json
from tests.integrations.optuna.experiments import LOSS, SEED

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

SPACE = {"x": uniform(0, 1)}


@pytest.mark.parametrize("sampler", ["RandomSampler", {"TPESampler": {"n_startup_trials": 3, "multivariate": True}}])
def test_a_sampler_that_is_named_proposes_what_the_object_does_and_can_be_journaled(sampler: Any) -> None:
    given = {"OptunaSearch": {"sampler": sampler, "num_samples": 6}}
    search = search_from(given)
    name, options = next(iter(sampler.items())) if isinstance(sampler, dict) else (sampler, {})
    same = OptunaSearch(getattr(samplers, name)(**options), num_samples=6)
    assert to_json(search) == given
    proposed = [[each.begin(SPACE, LOSS, SEED).suggest(number) for number in range(3)] for each in (search, same)]
    assert proposed[0] == proposed[1]


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ("TPE", "expected one of Optuna's, its name such as 'TPESampler'"),
        ("TPESamplr", "did you mean 'TPESampler'?"),
        ("Study", "found 'Study'"),
        ({"TPESampler": 3}, "found {'TPESampler': 3}"),
        ({"TPESampler": {"n_startup": 3}}, "sampler: TPESampler: "),
        ("GridSampler", "sampler: GridSampler: "),
        (3, "found 3"),
    ],
)
def test_a_sampler_that_is_none_is_refused_before_anything_is_begun(sampler: Any, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        search_from({"OptunaSearch": {"sampler": sampler, "num_samples": 3}})
    assert said in str(refused.value)
