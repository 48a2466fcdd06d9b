"""What each domain draws or refuses, here and in Ray Tune: the table of the page on search spaces."""

from __future__ import annotations

import re

import pytest

import prefect_tune as pt
from prefect_tune.core.errors import BadMetric, InvalidInput
from prefect_tune.core.metrics import storable
from prefect_tune.core.search import domains
from prefect_tune.core.search.space import resolve, valid_space
from tests.fakes.pages import ROOT

BY_RAY = {
    "uniform(0, 1)": "from 0 to 1",
    "uniform(1, 1)": "1.0",
    "uniform(1, 0)": "from 0 to 1",
    "loguniform(1, 10)": "from 1 to 10",
    "loguniform(0, 1)": "refused",
    "quniform(0, 1, 0.25)": "0.0, 0.25, 0.5, 0.75, 1.0",
    "quniform(0, 1, 0.3)": "refused",
    "randint(0, 3)": "0, 1, 2",
    "randint(0.0, 3.0)": "0, 1, 2",
    "randint(3, 3)": "fails at the first draw",
    "qrandint(1, 5)": "1, 2, 3, 4",
    "qrandint(2, 10, 4)": "4, 8",
    "qrandint(1, 10, 3)": "3, 6, 9",
    "lograndint(1, 4)": "1, 2, 3",
    "qlograndint(1, 3)": "refused: `q` is missing",
    "randn(0, 0)": "refused",
    "choice([1, 2])": "1, 2",
    "choice([])": "fails at the first draw",
    "choice('abc')": "a, b, c",
    "choice({1, 2})": "1, 2",
    "choice([len])": "the function",
    "grid_search([1, 2])": "1, 2",
    "grid_search([])": "no trial at all",
    "grid_search('ab')": "a, b",
    "sample_from(lambda config: 3)": "3",
    "sample_from(lambda: 3)": "3",
}
"""Each call, and what Ray Tune 2.60 drew for it: `generate_variants` of 600 seeds was run once for each."""
_DRAWS = 1000
_MOST_VALUES = 10


def drawn(call: str) -> str:
    """What `call` of `pt` draws at evenly spaced quantiles, or the first thing that its refusal expects."""
    try:
        node = eval(call, dict(vars(domains)))
    except InvalidInput as refused:
        return f"refused: {re.findall('expected [^,;:]+', str(refused))[0]}"
    space = valid_space({"x": node})
    count = len(node.options) if isinstance(node, domains.Grid) else _DRAWS
    quantiles = [index / count for index in range(count)] + [1 - 2**-53]
    values = [resolve(space, lambda _, domain, at=at: domain.at(at))["x"] for at in quantiles]  # type: ignore[misc]  # of a loop
    different = list(dict.fromkeys(values))
    if len(different) <= _MOST_VALUES:
        return ", ".join(map(str, different))
    return f"from {values[0]:g} to {values[-1]:g}"


def drawn_or_refused_table() -> str:
    rows = [f"| `{call}` | {drawn(call)} | {by_ray} |" for call, by_ray in BY_RAY.items()]
    return "\n".join(["| call | here | Ray Tune 2.60 |", "|---|---|---|", *rows])


def test_the_page_on_search_spaces_says_what_each_call_draws_or_that_it_is_refused() -> None:
    assert drawn_or_refused_table() in (ROOT / "docs" / "search-spaces.md").read_text()


def test_what_the_page_says_below_the_table_is_refused_too() -> None:
    with pytest.raises(InvalidInput, match="expected a parameter of the space at this place"):
        pt.PBT(perturbation_interval=2, hyperparam_mutations={"lr": pt.uniform(0, 1)}).require_serves({"x": 1})
    with pytest.raises(BadMetric, match="expected a dict of metrics, found float; give it a name"):
        storable(0.5, "step 1")  # type: ignore[arg-type]  # that is the fault
