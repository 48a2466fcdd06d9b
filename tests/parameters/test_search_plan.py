"""The parameters of a search agree: those of the flow, of the plan, and of a resume."""

from __future__ import annotations

import json
import logging
from collections import UserDict
from dataclasses import dataclass
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from prefect.utilities.callables import parameter_docstrings

import prefect_tune as pt
from prefect_tune.cli.search import RESUME_OPTIONS, RUN_OPTIONS
from prefect_tune.core.errors import InvalidInput
from prefect_tune.flows.durable_trainable import durable_trainable
from prefect_tune.flows.resume import resume
from prefect_tune.flows.tune import tune
from prefect_tune.parameters.argument_checks import config_to_json, validate_trainable
from prefect_tune.parameters.plan_checks import warn_of_constant_space
from prefect_tune.parameters.search_plan import OPTIONS, ResumeOption, SearchPlan, parse_resume
from prefect_tune.tasks.trials import run_trial

FIELDS = SearchPlan.model_fields
DEFAULTS = {name: Parameter.empty if field.is_required() else field.default for name, field in FIELDS.items()}
NOT_AN_OPTION = {
    "trainable": "an argument",
    "target": "an argument",
    "experiment": "an argument",
    "sync": "a dozen settings: in code, or in the parameters of a deployment",
    "resources_total": "of the machine; the same for each run on it",
}
"""The parameters of a search that `prefect-tune run` does not take as an option, and why."""


def test_what_the_journal_leaves_out_as_a_default_is_the_default_of_a_search() -> None:
    assert read_defaults(tune) == DEFAULTS


def read_defaults(flow: Any) -> dict[str, object]:
    return {name: parameter.default for name, parameter in signature(flow.fn).parameters.items()}


def test_every_parameter_of_a_search_is_an_option_of_run_or_has_a_reason_not_to_be() -> None:
    assert {option.option for _, option in RUN_OPTIONS} == DEFAULTS.keys() - NOT_AN_OPTION.keys()


def test_a_resume_takes_the_options_that_are_declared_so_and_says_which_experiment_and_what_is_trusted() -> None:
    excluded = {"experiment", "target", "fork", "at", "strict_fork", "trusted_packages"}
    defaults = {name: default for name, default in read_defaults(resume).items() if name not in excluded}
    taken = {name: option for name, option in OPTIONS.items() if option.at_resume}
    assert defaults == {name: None if option.stored else DEFAULTS[name] for name, option in taken.items()}
    assert {option.option for _, option in RESUME_OPTIONS} <= taken.keys()


def test_every_field_of_the_plan_declares_an_option() -> None:
    assert OPTIONS.keys() == FIELDS.keys()


PARSED = {
    *("trainable", "space", "target", "experiment", "stop", "scheduler", "search", "resume", "trial_job_variables"),
    *("sync", "callbacks"),
}
"""The options for which a call takes more types than the plan has: it parses them."""
OTHER_PARAMETERS = {
    tune: set(),
    resume: {"fork", "at", "strict_fork", "trusted_packages"},
    durable_trainable: {"config"},
    run_trial: {"config", "trial"},
}


@pytest.mark.parametrize("called", OTHER_PARAMETERS, ids=lambda called: called.name)
def test_what_a_call_takes_has_the_name_type_and_default_of_the_plan(called: Any) -> None:
    defaults = {
        name: default for name, default in read_defaults(called).items() if name not in OTHER_PARAMETERS[called]
    }
    kinds, planned, searched = map(get_type_hints, (called.fn, SearchPlan, tune.fn))
    assert defaults.keys() <= OPTIONS.keys()
    for name, default in defaults.items():
        kind = searched[name] if name in PARSED else planned[name]
        is_other = {(resume, "experiment"), (resume, "trainable"), (run_trial, "experiment")} & {(called, name)}
        assert is_other or kinds[name] in (kind, kind | None), name
        is_replaced = called is resume and OPTIONS[name].stored
        assert is_other or default == (None if is_replaced else DEFAULTS[name]), name


@pytest.mark.parametrize("called", OTHER_PARAMETERS, ids=lambda called: called.name)
def test_each_parameter_has_its_line_in_the_docstring_which_is_its_help_in_the_form(called: Any) -> None:
    assert parameter_docstrings(getdoc(called.fn)).keys() == signature(called.fn).parameters.keys()


def test_a_number_that_is_too_small_is_refused_by_pydantic() -> None:
    with pytest.raises(pt.InvalidInput, match=r"^nodes_per_trial: Input should be greater .*, found 0$"):
        SearchPlan(trainable=print, target="./nowhere", nodes_per_trial=0)


def test_fields_that_do_not_fit_each_other_are_refused_with_the_name_of_the_parameter() -> None:
    with pytest.raises(pt.InvalidInput, match=r"^retention: `best` and `metric` require each other"):
        SearchPlan(trainable=print, target="./nowhere", retention={"best": 1})


@pytest.mark.parametrize(("value", "expected"), [(4, 4), ("4", 4), ((1, 8), (1, 8)), ([2, 2], (2, 2)), ("1-8", (1, 8))])
def test_processes_are_a_number_or_the_fewest_and_the_most(value: Any, expected: object) -> None:
    plan = SearchPlan(trainable=print, target="./nowhere", processes_per_trial=value)
    assert plan.processes_per_trial == expected
    assert json.loads(plan.model_dump_json(include={"processes_per_trial"})) == {
        "processes_per_trial": [*expected] if isinstance(expected, tuple) else expected
    }


@pytest.mark.parametrize("value", [0, 1025, True, 2.0, "", "x", "1-", "-1", (8, 1), (0, 2), (1, 2, 3), (), None, ["a"]])
def test_what_is_no_number_of_processes_is_refused(value: Any) -> None:
    with pytest.raises(pt.InvalidInput, match=r"^processes_per_trial: expected a number from 1 to 1024, or a minimum"):
        SearchPlan(trainable=print, target="./nowhere", processes_per_trial=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"isolation": "thread"}, "isolation='process'"), ({"nodes_per_trial": 2, "trials": "deployment"}, "one number")],
    ids=["threads", "nodes"],
)
def test_a_range_of_processes_needs_processes_of_one_machine(options: Any, message: str) -> None:
    with pytest.raises(pt.InvalidInput, match=message):
        SearchPlan(trainable=print, target="./nowhere", processes_per_trial=(1, 8), **options)


class _NeverSaved(pt.Trainable):
    def step(self) -> dict[str, object]:
        return {"loss": 1.0}


def test_a_class_that_cannot_save_is_refused_unless_its_cadence_never_saves() -> None:
    with pytest.raises(ValueError, match="trainable _NeverSaved: expected the method `save_checkpoint`"):
        SearchPlan(trainable=_NeverSaved, target="./nowhere", checkpoint=pt.Cadence(every_seconds=None))
    never = pt.Cadence(every_seconds=None, at_end=False)
    assert SearchPlan(trainable=_NeverSaved, target="./nowhere", checkpoint=never).checkpoint == never


def test_the_functions_of_a_space_are_tried_before_there_is_an_experiment() -> None:
    rare = pt.choice([1, {"depth": pt.sample_from(lambda config: config["width"] + "1")}], weights=[1e9, 1])
    with pytest.raises(pt.InvalidInput, match=r"sample_from at model\?1.depth: its function raised TypeError"):
        SearchPlan(trainable=print, target="./nowhere", experiment="e", space={"width": 1, "model": rare})


@pytest.mark.parametrize(
    ("search", "warns"),
    [(None, True), (pt.RandomSearch(3), True), (pt.Repeated(pt.RandomSearch(1), 3, index_as="seed"), False)],
)
def test_nothing_to_draw_is_a_warning_unless_the_search_proposes_more_than_the_space_has(
    search: object, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plan = SearchPlan(trainable=print, target="./nowhere", experiment="e", space=None, search=search)
    warn_of_constant_space(plan, logging.getLogger(__name__))
    assert ("the space has no distribution" in caplog.text) == warns


@dataclass
class Layer:
    width: object
    dropout: float = 0.1


@dataclass
class Network:
    lr: object
    layers: object


def test_a_dataclass_is_a_configuration_and_a_space_and_so_is_one_within() -> None:
    config = Network(0.1, (Layer(3), UserDict({"width": 4})))
    plain = {"lr": 0.1, "layers": [{"width": 3, "dropout": 0.1}, {"width": 4}]}
    assert config_to_json(config) == plain
    assert SearchPlan(trainable=print, target="./runs", experiment="e", space=config).space == plain
    drawn = Network(pt.uniform(0, 1), pt.choice([Layer(pt.randint(1, 9)), Layer(8, 0)]))
    for space in (drawn, {"lr": drawn.lr, "layers": drawn.layers}):
        parsed = pt.tune.validate_parameters({"trainable": print, "target": Path("runs"), "space": space})["space"]
        assert parsed["lr"] == pt.uniform(0, 1)
        assert parsed["layers"] == pt.choice([{"width": pt.randint(1, 9), "dropout": 0.1}, {"width": 8, "dropout": 0}])


@pytest.mark.parametrize("config", [pt.uniform(0, 1), Layer, [Layer(1)]], ids=repr)
def test_a_domain_a_class_and_a_list_are_no_configuration(config: object) -> None:
    with pytest.raises(InvalidInput):
        config_to_json(config)
    with pytest.raises(InvalidInput):
        SearchPlan(trainable=print, target="./runs", experiment="e", space=config)


def test_a_path_is_a_target_of_a_flow_as_of_a_task(tmp_path: Path) -> None:
    target = pt.tune.validate_parameters({"trainable": print, "target": tmp_path / "a" / "b"})["target"]
    assert target == pt.LocalTarget(path=str(tmp_path / "a" / "b"))


def test_a_run_of_a_deployment_says_how_its_worker_finds_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"is its project installed here, or its folder in PYTHONPATH\?"):
        validate_trainable("my_project.train:Net")
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "a worker sets it")
    with pytest.raises(InvalidInput, match=r"install .* --job-variable 'env=\{\"PYTHONPATH\": "):
        validate_trainable("my_project.train:Net")


# The values of `resume=`: ours, Ray's, and those that are refused.


@pytest.mark.parametrize(
    ("value", "option"),
    [
        (None, ResumeOption("auto")),
        ("auto", ResumeOption("auto")),
        (True, ResumeOption("must")),
        ("must", ResumeOption("must")),
        ("REMOTE", ResumeOption("must")),
        ("LOCAL", ResumeOption("must", requires_local_target=True)),
        (False, ResumeOption("never")),
        ("never", ResumeOption("never")),
        ("AUTO+ERRORED", ResumeOption("auto", rerun_errored=True)),
        ("must + errored_only", ResumeOption("must", rerun_errored="only")),
        ("ERRORED", ResumeOption("must", rerun_errored=True)),
    ],
)
def test_a_word_says_whether_the_experiment_has_to_be_there_and_what_of_it_goes_on(
    value: object, option: ResumeOption
) -> None:
    assert parse_resume(value) == option


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("PROMPT", "a flow cannot prompt"),
        ("AUTO+RESTART_ERRORED", "never restarts from step 0"),
        ("always", "expected True, False, 'auto'"),
        ("", "expected True, False, 'auto'"),
        ("must+never", "'must' and 'never' contradict each other"),
        (3, "expected 'auto', 'must' or 'never', found 3"),
    ],
)
def test_a_word_that_means_nothing_here_is_refused_with_what_to_say_instead(value: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_resume(value)
