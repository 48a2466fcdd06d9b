"""The settings that name code, files or commands to run, import or open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.core.errors import InvalidInput
from prefect_tune.parameters.search_plan import OPTIONS, SearchPlan, Stored, from_settings
from prefect_tune.trust import _FINDERS, code_choices


def chosen(settings: Mapping[str, object], known_sources: Sequence[str] = ()) -> list[tuple[str, str | None]]:
    return [(each.parameter, each.name) for each in code_choices(settings, known_sources)]


def test_each_option_that_is_declared_as_a_choice_is_examined() -> None:
    assert {name for name, option in OPTIONS.items() if option.stored is Stored.CHOICE} == _FINDERS.keys()


def test_a_resume_takes_nothing_of_one_run_from_the_journal() -> None:
    of_the_run = {name: "of a journal" for name, option in OPTIONS.items() if option.stored is None}
    run = {"target": "/runs", "experiment": "e"}
    plan = from_settings({"trainable": "json:loads", **of_the_run}, run, {})
    assert plan == SearchPlan(trainable="json:loads", **run)


def test_a_search_that_is_all_data_chooses_nothing() -> None:
    plan = SearchPlan(
        trainable=lambda _: None,
        target="/runs",
        space={"x": pt.loguniform(1e-4, 1), "text": "subprocess:call", "n": pt.choice([1, {"m": pt.randint(0, 3)}])},
        metric="a:b",
        search={"OptunaSearch": {"sampler": {"TPESampler": {"n_startup_trials": 3}}, "num_samples": 4}},
        scheduler=pt.PBT(perturbation_interval=2, hyperparam_mutations={"x": pt.uniform(0, 1)}),
        stop={"a:b": 3, "MaxFailures": {"failures": 2}},
        trials="deployment",
        trial_deployment="train-trial/gpu",
        sync=pt.SyncConfig(upload_dir="s3-target/artifacts"),
        warm_start=["earlier"],
        failures=pt.FailurePolicy(max_failures=1),
    )
    assert chosen(plan.settings) == []


@pytest.mark.parametrize(
    ("settings", "choices"),
    [
        ({"trainable": "a:B"}, [("trainable", "a:B")]),
        ({"space": {"x": {"choice": [1, {"sample_from": "a:f"}]}}}, [("space", "a:f")]),
        ({"stop": "a:f"}, [("stop", "a:f")]),
        ({"stop": [{"step": 3}, ["a:f", "b:g"]]}, [("stop", "a:f"), ("stop", "b:g")]),
        ({"callbacks": ["a:B", "c:D"]}, [("callbacks", "a:B"), ("callbacks", "c:D")]),
        ({"callbacks": "a:B"}, [("callbacks", None), ("callbacks", "a:B")]),
        ({"sync": {"syncer": "a:B"}}, [("sync", "a:B")]),
        ({"sync": {"syncer": None, "upload_dir": "s3://bucket"}}, [("sync", None)]),
        ({"sync": {"upload_dir": {"block_type_slug": "fsspec-target", "location": "dask://h"}}}, [("sync", None)]),
        ({"sync": {"upload_dir": "/etc"}}, [("sync", None)]),
        ({"trial_job_variables": {"command": "sh"}}, [("trial_job_variables", None)]),
        ({"trial_job_variables": ["command"]}, [("trial_job_variables", None)]),
        ({"trial_job_variables": {}}, []),
        ({"trial_deployment": "other/train-trial"}, [("trial_deployment", None)]),
        ({"trial_deployment": 3}, [("trial_deployment", None)]),
        ({"warm_start": ["s3://bucket/x", "here", "s3-target/prod/x"]}, [("warm_start", None)] * 2),
    ],
)
def test_what_names_code_or_a_place_or_a_command_is_a_choice(
    settings: Mapping[str, Any], choices: list[tuple[str, str | None]]
) -> None:
    assert chosen(settings) == choices


def test_a_place_that_was_learned_from_already_is_not_opened_again() -> None:
    settings = {"warm_start": ["s3://bucket/x", "s3://bucket/y"]}
    assert chosen(settings, ["s3://bucket/x"]) == [("warm_start", None)]


def test_a_space_that_is_none_is_refused_before_it_is_used() -> None:
    with pytest.raises(InvalidInput, match="sample_from: expected"):
        chosen({"space": {"x": {"sample_from": "no name"}}})
