"""A form shows the common parameters, and all others in one group; flat parameters stay accepted."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

import prefect_tune as pt
from prefect_tune.flows import deployed
from prefect_tune.parameters.forms import ADVANCED, OPTIONS, GroupedFlow, flattened, form_of

FLOWS: Mapping[str, GroupedFlow[..., Any]] = {
    each.name: each for each in (deployed.durable_trainable, deployed.resume, deployed.tune)
}
TUNE = deployed.tune
FORM = form_of(TUNE)
NEEDED = {"trainable": "my_project.train:Net", "target": "s3://bucket/runs"}


@pytest.mark.parametrize("name", FLOWS)
def test_each_parameter_is_in_the_form_once_and_the_required_ones_come_first(name: str) -> None:
    flow = FLOWS[name]
    form, flat = form_of(flow), form_of(flow.flat)
    *first, last = form["properties"]
    assert last == ADVANCED
    rest = form["definitions"][OPTIONS]["properties"]
    assert sorted([*first, *rest]) == sorted(flat["properties"])
    assert sorted(first[: len(flat["required"])]) == sorted(flat["required"]) == sorted(form["required"])
    assert [each["position"] for each in form["properties"].values()] == list(range(len(first) + 1))
    assert [each["position"] for each in rest.values()] == list(range(len(rest)))
    assert len(first) <= 10


@pytest.mark.parametrize("name", FLOWS)
def test_a_parameter_has_the_same_field_in_the_group_as_without_groups(name: str) -> None:
    form, flat = form_of(FLOWS[name]), form_of(FLOWS[name].flat)
    fields = {**form["properties"], **form["definitions"][OPTIONS]["properties"]}
    for field, there in flat["properties"].items():
        assert {**fields[field], "position": None} == {**there, "position": None}
    assert form["definitions"].items() >= flat["definitions"].items()


def test_prefects_own_command_makes_the_same_fields_of_the_flow() -> None:
    assert list(parameter_schema(TUNE).properties) == list(FORM["properties"])
    assert list(parameter_schema(TUNE.with_options(name="mine")).properties) == list(FORM["properties"])


def test_options_apply_to_a_call_too() -> None:
    assert TUNE.with_options(retries=3).flat.retries == 3
    assert TUNE.flat.retries == 0


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"advanced": None},
        {"advanced": {"seed": 3, "sync": {"commit": "async"}, "checkpoint": {"every_steps": 5}}},
        {"seed": 3, "sync": {"commit": "async"}, "checkpoint": {"every_steps": 5}},
        {"seed": None, "sync": None, "checkpoint": None, "trial_job_variables": None},
        {"advanced": {"seed": None, "checkpoint": None}, "resume": "must", "rerun_errored": "only"},
    ],
)
def test_the_server_accepts_parameters_in_the_group_and_beside_it(parameters: Mapping[str, Any]) -> None:
    validate({**NEEDED, **parameters}, FORM, raise_on_error=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": "three"},
        {"trials": "somewhere"},
        {"sync": {"upload_dir": {"bucket": "b", "secret_access_key": "never shown"}}},
        {"checkpoint": {"every_steps": 0}},
    ],
)
def test_what_is_wrong_is_refused_in_the_group_and_beside_it(wrong: Mapping[str, Any]) -> None:
    for parameters in (wrong, {"advanced": wrong}):
        with pytest.raises(ValidationError):
            validate({**NEEDED, **parameters}, FORM, raise_on_error=True)


def test_a_misspelt_parameter_in_the_group_is_refused() -> None:
    with pytest.raises(ValidationError, match="'sede' was unexpected"):
        validate({**NEEDED, "advanced": {"sede": 3}}, FORM, raise_on_error=True)


def test_stored_parameters_are_grouped_as_the_form_shows_them() -> None:
    flat = {**NEEDED, "num_samples": 3, "seed": 3, "isolation": "thread"}
    stored = TUNE.grouped(flat)
    assert stored == {**NEEDED, "num_samples": 3, "advanced": {"seed": 3, "isolation": "thread"}}
    assert flattened(stored) == flat
    assert flattened({**stored, "seed": 4}) == {**flat, "seed": 4}
    assert TUNE.grouped(NEEDED) == flattened({**NEEDED, "advanced": None}) == NEEDED
    with pytest.raises(pt.InvalidInput, match="advanced: expected an object with parameters, found a str"):
        flattened({**NEEDED, "advanced": "seed"})


def test_python_code_passes_flat_parameters() -> None:
    assert "advanced" not in signature(pt.tune).parameters
    with pytest.raises(pt.InvalidInput, match=r"advanced: pt.tune has no such parameter"):
        pt.tune("m:N", {}, target="s3://bucket/runs", advanced={"seed": 3})  # type: ignore[call-arg]  # it is wrong
    with pytest.raises(pt.InvalidInput, match=r"^sede: pt.tune has no such parameter; did you mean 'seed'\?$"):
        TUNE(**NEEDED, advanced={"sede": 3})
