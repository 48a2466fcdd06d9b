"""The parameters of a deployment are checked before anything is written, and contain no secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from inspect import cleandoc, signature
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.collections import visit_collection
from prefect.utilities.schema_tools.hydration import HydrationContext, hydrate
from prefect.utilities.schema_tools.validation import ValidationError, validate

import prefect_tune as pt
from prefect_tune.attempt.trial_spec import AttemptRequest
from prefect_tune.core.experiment.trial_transitions import Trial
from prefect_tune.deploy.deployment_specs import (
    DEPLOYABLE_FLOWS,
    DeploymentSchedule,
    Interval,
    find_deployable_flows,
    make_experiment_spec,
    make_general_specs,
)
from prefect_tune.deploy.deployments import validate_parameters
from prefect_tune.executors.remote_executor import make_request_parameter, make_spec_parameter, parse_request
from prefect_tune.flows import deployed
from prefect_tune.flows.train_trial import train_trial
from prefect_tune.parameters.forms import (
    ADVANCED_PARAMETER,
    OPTIONS_DEFINITION,
    GroupedFlow,
    flatten_parameters,
    make_form_schema,
)
from tests.fakes.searches.far_attempts import make_spec

SECRET = "never-shown-to-anybody"
TUNE, RESUME = make_form_schema(pt.tune), make_form_schema(pt.resume)
REQUIRED = {"trainable": "my_project.train:Net", "target": "s3-target/prod"}


def find_slug(document: str) -> str | None:
    saved = {"1f0e": "s3-target/prod", "2f0e": "sync-config/slow"}
    return saved.get(document) or (document if document in saved.values() else None)


def check_parameters(schema: Any = TUNE, *, complete: bool = False, **parameters: Any) -> Mapping[str, Any]:
    return validate_parameters(parameters, schema, find_slug, complete=complete)


@pytest.mark.parametrize(
    "target",
    [
        "s3-target/prod",
        {"$ref": {"block_document_slug": "s3-target/prod"}},
        {"$ref": {"block_document_id": "1f0e"}},
        {"$ref": "1f0e"},
        "{{ prefect.blocks.s3-target.prod }}",
    ],
)
def test_however_a_saved_block_is_meant_its_name_is_stored_and_nothing_of_it(target: object) -> None:
    assert check_parameters(target=target) == {"target": "s3-target/prod"}
    stored = check_parameters(sync={"upload_dir": target, "commit": "async"})
    assert stored == {"sync": {"upload_dir": "s3-target/prod", "commit": "async"}}


def test_a_saved_way_to_sync_is_stored_as_a_reference() -> None:
    assert check_parameters(sync={"$ref": {"block_document_id": "2f0e"}}) == {
        "sync": {"$ref": {"block_document_slug": "sync-config/slow"}}
    }


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            {"bucket": "b", "access_key_id": "id", "secret_access_key": SECRET},
            "found a block's fields, whose credentials",
        ),
        (pt.S3Target(bucket="bucket", access_key_id="id", secret_access_key=SECRET), "and pass its slug"),
        (f"sftp://me:{SECRET}@host/runs", "no credentials in a URI"),
        (f"s3://me:{SECRET}@bucket/runs", "no credentials in a URI"),
        ("s3-target/gone", "no block 's3-target/gone' is saved"),
        ({"$ref": {"block_document_id": "9f0e"}}, "no block '9f0e' is saved"),
        ("runs/first", "'runs' is not a type of target block"),
        (3, "expected a URI or the type/name of a saved block, found int"),
    ],
)
@pytest.mark.parametrize("option", ["target", "sync"])
def test_what_would_tell_a_secret_or_is_not_there_is_refused_and_not_repeated(
    target: object, message: str, option: str
) -> None:
    parameters = {"target": target} if option == "target" else {"sync": {"upload_dir": target}}
    with pytest.raises(pt.InvalidInput, match=message) as refused:
        check_parameters(**parameters)
    assert SECRET not in str(refused.value)


def test_a_folder_is_stored_so_that_it_means_the_same_elsewhere() -> None:
    assert check_parameters(target="/runs") == {"target": "file:///runs"}
    assert check_parameters(target="s3://bucket/runs") == {"target": "s3://bucket/runs"}


RELATIVE = [
    *("./runs", "runs", "~/runs", "../runs", "runs/first", ".", "file:runs", "file://runs", "local://./runs", " /runs")
]
ABSOLUTE = ["/runs", "file:///runs", "file://localhost/runs", "s3://bucket/runs", "s3-target/prod"]
FORMS = [deployed.tune, deployed.resume, deployed.durable_trainable, pt.maintain, pt.drill]


@pytest.mark.parametrize("flow", FORMS, ids=lambda flow: flow.name)
def test_a_form_says_that_a_folder_is_an_absolute_path_and_the_api_refuses_another_one(flow: Flow[Any, Any]) -> None:
    form = make_form_schema(flow)
    names = {"trainable": "my_project.train:Net", "experiment": "e", "space": {}, "config": {}}
    beside = {name: names[name] for name in names if name in form["properties"]}
    field = form["properties"]["target"]
    assert "absolute path or URI" in field["description"].replace("An abs", "an abs")
    assert any(kind.get("title") == "Absolute path or URI, or type/name of a saved block" for kind in field["anyOf"])
    for target in RELATIVE:
        assert validate({**beside, "target": target}, form), target
    for target in ABSOLUTE:
        assert not validate({**beside, "target": target}, form), target


@pytest.mark.parametrize("option", ["warm_start", "sync"])
def test_a_relative_path_is_refused_wherever_a_form_takes_a_target(option: str) -> None:
    form = make_form_schema(deployed.tune)

    def is_refused(target: str) -> bool:
        value = [f"{target}/first"] if option == "warm_start" else {"upload_dir": target}
        return bool(validate({**REQUIRED, "advanced": {option: value}}, form))

    assert [target for target in RELATIVE if not is_refused(target)] == []
    assert [target for target in ABSOLUTE if is_refused(target)] == []
    assert not validate({**REQUIRED, "advanced": {"warm_start": ["first"]}}, form)


@pytest.mark.parametrize("target", ["./runs", "runs", "~/runs", "../runs"])
def test_a_deployment_with_a_relative_path_is_refused_with_what_to_write(target: str) -> None:
    sync, warm_start = {"sync": {"upload_dir": target}}, {"warm_start": [f"{target}/first"]}
    message = f"'{re.escape(target)}': expected an absolute path or a URI"
    for name, parameters in {"target": {"target": target}, "sync.upload_dir": sync, "warm_start": warm_start}.items():
        with pytest.raises(pt.InvalidInput, match=f"^{name}: {message}"):
            check_parameters(**parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"num_sample": 3}, r"unknown parameter 'num_sample': did you mean 'num_samples'\?"),
        ({"num_samples": 3, "samples_per_run": 3}, "pass only one of them"),
        ({"space": {"net": {"lr": {"loguniorm": [0.1, 1]}}}}, r"lr: unknown distribution 'loguniorm'; did you mean"),
        ({"trials": "somewhere"}, "trials: Input should be 'tasks' or 'deployment'"),
        ({"trial_job_variables": {"image": "mine"}}, "requires trials='deployment'"),
        ({"stop": "my_project.stops:"}, "stop 'my_project.stops:': expected 'package.module:Name'"),
        ({"warm_start": ["first/"]}, "becomes a folder"),
    ],
)
def test_what_a_run_would_refuse_is_refused_before_there_is_one(parameters: Mapping[str, Any], message: str) -> None:
    with pytest.raises(pt.InvalidInput, match=message):
        check_parameters(**{**REQUIRED, **parameters})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"search": "OptunaSearch", "metric": "loss"}, "expected num_samples"),
        ({"search": "OptunaSearch", "num_samples": 3}, "expected a metric"),
        ({"scheduler": {"ASHA": {"max_t": 81}}}, "compares trials by a metric"),
    ],
)
def test_what_only_a_person_could_add_is_missed_where_a_schedule_asks_nobody(
    parameters: Mapping[str, Any], message: str
) -> None:
    assert check_parameters(**REQUIRED, **parameters)
    with pytest.raises(pt.InvalidInput, match=message):
        check_parameters(complete=True, **REQUIRED, **parameters)
    added = {"metric": "loss", "samples_per_run": 3, "num_samples": None}
    assert check_parameters(complete=True, **{**REQUIRED, **parameters, **added})


@pytest.mark.parametrize(
    "parameters",
    [
        {"warm_start": [f"ftp://u:{SECRET}@host/x/exp"]},
        {"warm_start": [f"s3://key:{SECRET}@bucket/exp"]},
        {"warm_start": [{"secret_access_key": SECRET}]},
        {"sync": {"upload_dri": {"secret_access_key": SECRET}}},
        {"sync": {"commit": SECRET}},
        {"checkpoint": {"every": SECRET}},
        {"target": f"https://host/runs?token={SECRET}"},
        {"target": f"ftp://host/runs?password={SECRET}"},
        {"target": f"s3://bucket/runs?endpoint_url=https://host?token={SECRET}"},
    ],
)
def test_a_secret_in_any_place_is_refused_and_not_repeated(parameters: Mapping[str, Any]) -> None:
    with pytest.raises(pt.InvalidInput) as refused:
        check_parameters(**{**REQUIRED, **parameters})
    assert SECRET not in str(refused.value)


def test_what_nobody_will_be_asked_for_must_be_there() -> None:
    assert check_parameters(target="s3-target/prod") == {"target": "s3-target/prod"}
    with pytest.raises(pt.InvalidInput, match="'trainable' is a required property"):
        check_parameters(target="s3-target/prod", complete=True)
    assert check_parameters(RESUME, complete=True, experiment="digits", target="/runs", samples_per_run=5)


def test_a_resume_may_change_what_only_fits_the_options_in_the_journal() -> None:
    for changed in ({"min_nodes": 2}, {"resources_total": {"gpu": 2}}, {"trial_job_variables": {"cpu": 1}}):
        assert check_parameters(RESUME, complete=True, experiment="digits", target="/runs", **changed)


def test_what_does_not_fit_together_is_refused_for_a_single_training_too() -> None:
    form = make_form_schema(pt.durable_trainable)
    assert check_parameters(form, complete=True, **REQUIRED, processes_per_trial=2)
    with pytest.raises(pt.InvalidInput, match="processes_per_trial=2: expected isolation='process'"):
        check_parameters(form, **REQUIRED, processes_per_trial=2, isolation="thread")


def test_all_that_a_form_offers_is_accepted() -> None:
    full: dict[str, Any] = {
        **REQUIRED,
        "space": {"lr": {"loguniform": [1e-4, 0.1]}, "layers": {"choice": [1, 2]}, "batch": 32},
        "experiment": "nightly",
        "metric": "loss",
        "mode": "min",
        "samples_per_run": 20,
        "stop": {"step": 100, "MaxFailures": {"failures": 5}},
        "scheduler": {"ASHA": {"max_t": 81}},
        "search": {"OptunaSearch": {"num_samples": 40}},
        "max_concurrent_trials": 4,
        "warm_start": ["first", "s3-target/prod/second", "s3://bucket/runs/third"],
        "trials": "deployment",
        "trial_job_variables": {"env": {"WANDB_API_KEY": "{{ prefect.blocks.secret.wandb }}"}},
        "checkpoint": {"every_steps": 5},
        "retention": {"last": 2},
        "failures": {"max_failures": 1},
        "resume": True,
        "rerun_errored": "only",
        "sync": {"commit": "async", "sync_period_seconds": 30},
        "callbacks": ["my_project.hear:Me"],
    }
    assert check_parameters(complete=True, **full) == full
    assert check_parameters(scheduler="FIFO", resume="auto+errored", stop="my_project.stops:enough", rerun_errored=True)
    assert check_parameters(resources_per_trial={"cpu": 2, "gpu": 0.5}, reuse="never")


def test_a_deployment_names_the_packages_that_it_trusts() -> None:
    trusting = {"trusted_packages": ["my_project", "other.package"], "trial_job_variables": {"image": "mine"}}
    assert check_parameters(RESUME, **trusting) == trusting
    with pytest.raises(pt.InvalidInput, match="trusted_packages: expected names of packages"):
        check_parameters(RESUME, trusted_packages=["my_project", "*"])


def test_what_a_search_says_to_its_trials_fits_their_form(tmp_path: Path) -> None:
    plan = make_spec(pt.LocalTarget(path=str(tmp_path)), trainable="package.module:Name")
    spec = make_spec_parameter(plan)
    request = make_request_parameter(AttemptRequest(owner_term=1, trial=Trial(id="t", config={})))
    assert spec["cadence"]["every_steps"] is None
    parameters = {"spec": spec, "request": request, "attempt": 1}
    validate(parameters, make_form_schema(train_trial), raise_on_error=True)


def test_prefect_loads_and_renders_nothing_that_stands_in_a_trials_configuration() -> None:
    block = {"$ref": {"block_document_slug": "secret/prod"}}
    template = {"__prefect_kind": "jinja", "template": "{{ 7 * 7 }}"}
    request = AttemptRequest(owner_term=1, trial=Trial(id="t", config={"block": block, "template": template}))
    context = HydrationContext(render_jinja=True, render_workspace_variables=True)
    sent = hydrate(
        {"spec": {}, "request": make_request_parameter(request), "attempt": 1}, context
    )  # as the server does
    values: list[object] = []
    visit_collection(sent, values.append, return_data=False)  # as a flow run looks for blocks
    assert not [value for value in values if isinstance(value, dict) and "$ref" in value]
    assert parse_request(sent["request"]) == request


@pytest.mark.parametrize("kind", [pt.FailurePolicy, pt.Retention, pt.Cadence])
def test_the_help_of_a_policy_says_what_its_fields_mean(kind: type[pt.Cadence]) -> None:
    described = re.findall(r"^ {4}(\w+): ", cleandoc(kind.__doc__ or ""), re.MULTILINE)
    assert described == list(kind.model_fields)


# The deployable flows are listed once, and both ways to deploy use that list.


TUNE_OFFER = find_deployable_flows(["tune"])[0]


def test_deployments_with_another_name_start_trials_of_their_own_kind() -> None:
    staged = {spec.flow.name: spec for spec in make_general_specs(DEPLOYABLE_FLOWS, "staging-")}
    assert staged["resume"].full_name == "resume/staging-resume"
    assert staged["tune"].parameters == {"trial_deployment": "train-trial/staging-train-trial"}
    assert all(spec.parameters == {} for spec in make_general_specs(DEPLOYABLE_FLOWS))
    nightly = make_experiment_spec(TUNE_OFFER, "nightly", {}, None, prefix="staging-")
    assert nightly.parameters == {"experiment": "staging-nightly", **staged["tune"].parameters}


def test_a_deployment_for_one_experiment_is_named_like_it_and_runs_once_at_a_time() -> None:
    schedules = [DeploymentSchedule("0 2 * * *", "Europe/Berlin"), DeploymentSchedule(Interval(timedelta(hours=12)))]
    nightly = make_experiment_spec(TUNE_OFFER, "nightly", {"samples_per_run": 20}, schedules)
    assert nightly.parameters == {"experiment": "nightly", "samples_per_run": 20}
    assert (nightly.full_name, nightly.concurrency_limit, nightly.collision) == ("tune/nightly", 1, "cancel-new")
    other = make_experiment_spec(TUNE_OFFER, "nightly", {"experiment": "digits"}, None)
    assert other.parameters == {"experiment": "digits"}
    (maintain,) = find_deployable_flows(["maintain"])
    hourly = make_experiment_spec(maintain, "hourly", {"target": "s3://b/runs"}, schedules)
    assert hourly.parameters == {"target": "s3://b/runs"}


def test_what_is_not_offered_is_said_with_what_was_meant() -> None:
    with pytest.raises(pt.InvalidInput, match=r"no deployable flow 'tunes': .* did you mean 'tune'\?"):
        find_deployable_flows(["tunes"])
    with pytest.raises(pt.InvalidInput, match="becomes a folder on the target"):
        make_experiment_spec(TUNE_OFFER, "every night", {}, None)


# A form shows the common parameters, and all others in one group; flat parameters stay accepted.


FLOWS: Mapping[str, GroupedFlow[..., Any]] = {
    flow.name: flow for flow in (deployed.durable_trainable, deployed.resume, deployed.tune)
}
TUNE_FLOW = deployed.tune
FORM = make_form_schema(TUNE_FLOW)
NEEDED = {"trainable": "my_project.train:Net", "target": "s3://bucket/runs"}


@pytest.mark.parametrize("name", FLOWS)
def test_each_parameter_is_in_the_form_once_and_the_required_ones_come_first(name: str) -> None:
    flow = FLOWS[name]
    form, flat = make_form_schema(flow), make_form_schema(flow.flat_flow)
    *first, last = form["properties"]
    assert last == ADVANCED_PARAMETER
    rest = form["definitions"][OPTIONS_DEFINITION]["properties"]
    assert sorted([*first, *rest]) == sorted(flat["properties"])
    assert sorted(first[: len(flat["required"])]) == sorted(flat["required"]) == sorted(form["required"])
    assert [field["position"] for field in form["properties"].values()] == list(range(len(first) + 1))
    assert [field["position"] for field in rest.values()] == list(range(len(rest)))
    assert len(first) <= 10


@pytest.mark.parametrize("name", FLOWS)
def test_a_parameter_has_the_same_field_in_the_group_as_without_groups(name: str) -> None:
    form, flat = make_form_schema(FLOWS[name]), make_form_schema(FLOWS[name].flat_flow)
    fields = {**form["properties"], **form["definitions"][OPTIONS_DEFINITION]["properties"]}
    for field, schema in flat["properties"].items():
        assert {**fields[field], "position": None} == {**schema, "position": None}
    assert form["definitions"].items() >= flat["definitions"].items()


def test_prefects_own_command_makes_the_same_fields_of_the_flow() -> None:
    assert list(parameter_schema(TUNE_FLOW).properties) == list(FORM["properties"])
    assert list(parameter_schema(TUNE_FLOW.with_options(name="mine")).properties) == list(FORM["properties"])


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


def test_stored_parameters_are_grouped_as_the_form_shows_them() -> None:
    flat = {**NEEDED, "num_samples": 3, "seed": 3, "isolation": "thread"}
    stored = TUNE_FLOW.group_parameters(flat)
    assert stored == {**NEEDED, "num_samples": 3, "advanced": {"seed": 3, "isolation": "thread"}}
    assert flatten_parameters(stored) == flat
    assert flatten_parameters({**stored, "seed": 4}) == {**flat, "seed": 4}
    assert TUNE_FLOW.group_parameters(NEEDED) == flatten_parameters({**NEEDED, "advanced": None}) == NEEDED
    with pytest.raises(pt.InvalidInput, match="advanced: expected an object with parameters, found a str"):
        flatten_parameters({**NEEDED, "advanced": "seed"})


def test_python_code_passes_flat_parameters() -> None:
    assert "advanced" not in signature(pt.tune).parameters
    with pytest.raises(pt.InvalidInput, match=r"advanced: pt.tune has no such parameter"):
        pt.tune("m:N", {}, target="s3://bucket/runs", advanced={"seed": 3})  # type: ignore[call-arg]  # it is wrong
    with pytest.raises(pt.InvalidInput, match=r"^sede: pt.tune has no such parameter; did you mean 'seed'\?$"):
        TUNE_FLOW(**NEEDED, advanced={"sede": 3})
