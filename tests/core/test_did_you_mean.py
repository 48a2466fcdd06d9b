from __future__ import annotations

import pytest

from prefect_tune.core.texts import did_you_mean, did_you_mean_or_has

KNOWN = ("cpu", "gpu", "OptunaSearch")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("gpus", "gpu"), ("num_gpus", "gpu"), ("CPU", "cpu"), ("optuna", "OptunaSearch"), ("OPTUNASERCH", "OptunaSearch")],
)
def test_the_nearest_name_is_meant_in_any_case(given: str, meant: str) -> None:
    assert did_you_mean(given, KNOWN) == f"; did you mean {meant!r}?"
    assert did_you_mean_or_has(given, iter(KNOWN)) == f"did you mean {meant!r}?"


@pytest.mark.parametrize("given", ["memory", "", "gpu"])
def test_where_none_is_near_or_it_is_right_already_no_name_is_meant(given: str) -> None:
    assert did_you_mean(given, KNOWN) == ""
    assert did_you_mean_or_has(given, iter(KNOWN)) == "it has cpu, gpu, OptunaSearch"
