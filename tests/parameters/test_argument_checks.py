"""JSON of schedulers, searches, stoppers and spaces: sent by Prefect's client, or typed into a form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args
from uuid import uuid4

import pytest
from prefect.client.schemas.actions import DeploymentCreate, DeploymentFlowRunCreate
from pydantic_core import PydanticSerializationError

import prefect_tune as pt
from prefect_tune.core.experiment.stoppers import (
    StopCriteria,
    as_stopper,
    extract_experiment_stoppers,
    extract_trial_stopper,
)
from prefect_tune.core.search import domains
from prefect_tune.core.search.base import Search
from prefect_tune.core.search.objective import make_objective
from prefect_tune.core.search.space import validate_space
from prefect_tune.core.search.space_json import match_option_class, space_from_json
from prefect_tune.parameters.argument_checks import (
    component_to_json,
    config_to_json,
    make_stopper,
    parse_scheduler,
    parse_search,
    parse_stop,
    with_samples,
)
from prefect_tune.parameters.forms import ResumeLike, SchedulerName, SearchName
from prefect_tune.parameters.plan_checks import warn_of_unusual_stop_limits
from prefect_tune.parameters.search_plan import SearchPlan, parse_resume
from prefect_tune.registry import BUILT_IN_MODULES, OPTION_FIELDS


def double(config: Any) -> object:
    return 2 * config["x"]


def send_parameter(value: object) -> Any:
    """Return the value of a parameter that a run of a deployment receives."""
    return DeploymentFlowRunCreate(parameters={"p": value}).model_dump(mode="json")["parameters"]["p"]


def store_parameter(value: object) -> Any:
    """Return the value of a parameter that a deployment stores."""
    deployment = DeploymentCreate(name="a", flow_id=uuid4(), parameters={"p": value})
    return deployment.model_dump(mode="json")["parameters"]["p"]


DISTRIBUTIONS = [
    *(pt.uniform(0, 1), pt.quniform(0, 1, 0.25), pt.loguniform(1e-4, 1), pt.qloguniform(0.5, 1, 0.5)),
    *(pt.randint(0, 5), pt.qrandint(0, 4, 2), pt.lograndint(1, 5), pt.qlograndint(2, 4, 2), pt.randn(0, 2)),
    *(pt.qrandn(0, 2, 0.5), pt.choice(["adam", {"lr": pt.uniform(0, 1)}]), pt.choice([1, 2], [0.5, 1])),
    *(pt.grid_search([1, {"a": [pt.grid_search([2])]}]), pt.sample_from(double)),
]


@pytest.mark.parametrize("node", DISTRIBUTIONS, ids=repr)
def test_a_distribution_is_sent_as_its_json_form_wherever_it_stands(node: object) -> None:
    wrap = pt.grid_search if domains.has_grid(node) else pt.choice
    space = {"x": node, "list": [1, node], "model": {"deep": [{"x": node}]}, "of": wrap([{"y": node, "z": 1}])}
    received = send_parameter(space)
    assert store_parameter(space) == received
    assert space_from_json(received, load=lambda _: double) == validate_space(name_functions(space))


def name_functions(node: Any) -> Any:
    """Return a space whose functions are named, as after it was sent."""
    match node:
        case dict():
            return {key: name_functions(value) for key, value in node.items()}
        case list():
            return [*map(name_functions, node)]
        case domains.Choice() if any(domains.find_domains(option) for option in node.options):
            return pt.choice(name_functions([*node.options]), node.weights)
        case domains.Grid() if any(domains.find_domains(option) for option in node.options):
            return pt.grid_search(name_functions([*node.options]))
        case domains.SampleFrom():
            return domains.SampleFrom(double, f"{__name__}:double")
        case _:
            return node


CONFIGURED: list[tuple[Callable[[Any], object], object]] = [
    (parse_scheduler, pt.FIFO()),
    (parse_scheduler, pt.ASHA(max_t=81, variant="promotion")),
    (parse_scheduler, pt.Hyperband(max_t=9)),
    (parse_scheduler, pt.MedianStopping(min_time_slice=3)),
    (parse_scheduler, pt.PBT(2, {"lr": pt.loguniform(1e-4, 1), "model": {"width": [1, 2]}})),
    (parse_search, pt.RandomSearch(3, [{"x": 1}], constant_grid_search=True)),
    (parse_search, pt.OptunaSearch({"TPESampler": {"n_startup_trials": 5}}, 3)),
    *(
        (make_stopper, stopper)
        for stopper in (
            *(pt.MaxSteps(3), pt.MaxTime(60), pt.Plateau("loss"), pt.MaxFailures(3), pt.TrialBudget(9)),
            *(pt.TimeBudget(60), pt.ExperimentPlateau(metric="loss"), pt.MaxSteps(3) | pt.MaxFailures(2)),
            pt.MaxSteps(3) | {"loss": 5},
        )
    ),
]


@pytest.mark.parametrize(("read", "configured"), CONFIGURED, ids=lambda value: type(value).__name__)
def test_a_scheduler_a_search_and_a_stopper_are_sent_as_their_json_form(
    read: Callable[[Any], object], configured: object
) -> None:
    assert store_parameter(configured) == send_parameter(configured)
    for received in (send_parameter(configured), send_parameter([configured])[0]):
        parsed = read(received)
        if isinstance(configured, pt.Stopper):
            assert describe_stopper(parsed) == describe_stopper(configured)
        else:
            assert parsed == configured


def describe_stopper(stopper: Any) -> tuple[str, str]:
    return repr(extract_trial_stopper(stopper)), repr(extract_experiment_stoppers(stopper))


@pytest.mark.parametrize(
    "value",
    [
        *(pt.Retention(best=2, metric="loss"), pt.FailurePolicy(max_failures=2), pt.Cadence(every_steps=5)),
        *(pt.SyncConfig(sync_period_seconds=9), pt.LocalTarget(path="/a"), pt.S3Target(bucket="abc")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_or_a_block_without_secrets_is_read_back_from_its_fields(value: Any) -> None:
    assert type(value).model_validate(send_parameter(value)) == value


def test_a_block_whose_secrets_were_left_out_is_refused_and_says_what_to_pass() -> None:
    blocks = [
        pt.S3Target(bucket="abc", access_key_id="k", secret_access_key="never shown"),
        pt.FsspecTarget(location="memory://a", secret_options={"password": "never shown"}),
        pt.SyncConfig(upload_dir=pt.S3Target(bucket="abc", access_key_id="k", secret_access_key="never shown")),
    ]
    for block in blocks:
        with pytest.raises(
            pt.InvalidInput, match=r"found asterisks: .*Save the block, and pass its reference"
        ) as error:
            type(block)(**send_parameter(block))
        assert "never shown" not in str(error.value)


class OwnScheduler(pt.Scheduler):
    def begin(self, objective: pt.Objective, seed: int) -> pt.Schedule:
        raise NotImplementedError


def make_objects_without_json() -> Iterator[object]:
    yield pt.sample_from(lambda config: config["x"])
    yield pt.Repeated(pt.RandomSearch(), 2)
    yield pt.OptunaPruner(__import__("optuna").pruners.MedianPruner())
    yield pt.OptunaSearch(__import__("optuna").samplers.RandomSampler(), 3)
    yield pt.PBT(2, {"lr": lambda config: config["x"]})
    yield pt.MaxSteps(3) | (lambda metrics: metrics["x"] > 1)
    yield OwnScheduler()


@pytest.mark.parametrize("value", [*make_objects_without_json()], ids=lambda value: type(value).__name__)
def test_an_object_without_a_json_form_is_refused_by_the_client(value: object) -> None:
    with pytest.raises(PydanticSerializationError, match=r"no JSON form|cannot be imported by name|found <function"):
        send_parameter({"deep": [value]})


# ---------------------------------------------------------------------------------------------- without their class


def strip_classes(value: object) -> Any:
    """Return a dataclass as sent by clients that do not know its JSON form."""
    if isinstance(value, list | tuple):
        return [*map(strip_classes, value)]
    if isinstance(value, dict):
        return {key: strip_classes(item) for key, item in value.items()}
    if not is_dataclass(value):
        return value
    return {field.name: strip_classes(getattr(value, field.name)) for field in fields(value)}


def make_plan(**options: Any) -> SearchPlan:
    return SearchPlan(trainable="prefect_tune.demo:train", target="/a", experiment="a", **options)


@pytest.mark.parametrize("node", [node for node in DISTRIBUTIONS if not isinstance(node, domains.SampleFrom)], ids=repr)
def test_the_fields_of_a_distribution_are_no_constant_of_a_space_and_of_a_config(node: object) -> None:
    plain = strip_classes(node)
    for space in ({"x": plain}, {"a": [{"b": plain}]}, {"a": pt.grid_search([1]), "x": plain}, plain):
        with pytest.raises(pt.InvalidInput, match=r"without its class: .*JSON form|found one distribution"):
            make_plan(space=space)
    for config in ({"x": plain}, {"a": [{"b": plain}]}):
        with pytest.raises(pt.InvalidInput, match="config: expected values, found distribution"):
            config_to_json(config)


@pytest.mark.parametrize("node", DISTRIBUTIONS, ids=repr)
def test_the_json_form_of_a_distribution_is_no_constant_of_a_config_and_no_whole_space(node: object) -> None:
    for config in ({"x": send_parameter(node)}, {"a": [{"b": send_parameter(node)}]}):
        with pytest.raises(pt.InvalidInput, match="config: expected values, found distribution"):
            config_to_json(config)
    if not any(domains.find_domains([*getattr(node, "options", ())])):
        with pytest.raises(pt.InvalidInput, match=r"found one distribution|found the fields of a choice"):
            make_plan(space=send_parameter(node))


@pytest.mark.parametrize(
    "value",
    [
        *(pt.ASHA(max_t=9), pt.PBT(2, {"x": [1, 2]}), pt.Plateau("loss"), pt.RandomSearch(3), pt.MedianStopping()),
        *(pt.Retention(last=1), pt.FailurePolicy(), pt.Cadence()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_option_object_is_no_constant_of_a_space_with_or_without_its_class(value: Any) -> None:
    plain = value.model_dump(mode="json") if isinstance(value, pt.Retention | pt.FailurePolicy | pt.Cadence) else None
    for received in (strip_classes(value) if plain is None else plain, send_parameter(value)):
        with pytest.raises(pt.InvalidInput, match=r'^x: .*write \{"constant": \.\.\.\}'):
            make_plan(space={"x": received, "y": pt.uniform(0, 1)})


def test_a_value_that_has_these_fields_is_kept_as_a_constant_and_read_back_so() -> None:
    constant = {"options": [1], "deep": {"low": 0, "high": 1, "scale": "log", "q": None}, "ASHA": {"max_t": 1}}
    one = {"options": [1]}
    for value in (constant, one, {"PBT": {}}):
        plan = make_plan(space={"x": {"constant": value}, "y": pt.uniform(0, 1)})
        assert plan.space is not None
        assert plan.space["x"] == value
        assert make_plan(space=plan.settings["space"]).space == plan.space
    assert make_plan(space={"warmup": {"steps": 3}, "low": 0, "high": {"low": 0, "high": 1}}).space is not None


def test_a_config_keeps_what_only_resembles_a_distribution() -> None:
    config = {"a": {"choice": "adam"}, "b": {"uniform": 3}, "c": {"options": 3}, "space": {"low": 1}, "constant": [1]}
    assert config_to_json(config) == config


@pytest.mark.parametrize("stopper", [pt.MaxSteps(3), pt.MaxFailures(3), pt.TrialBudget(9), pt.Plateau("loss")])
def test_the_fields_of_a_stopper_are_no_limits_of_metrics(stopper: pt.Stopper) -> None:
    for stop in (strip_classes(stopper), [{"step": 3}, strip_classes(stopper)]):
        with pytest.raises(pt.InvalidInput, match=rf"without its class: .*{type(stopper).__name__}"):
            make_plan(stop=stop)


def test_a_time_without_its_class_is_no_limit_of_a_metric() -> None:
    with pytest.raises(pt.InvalidInput, match=r'expected \{"MaxTime": \{"time_seconds": 3600\}\}'):
        make_plan(stop={"time": 60.0})
    make_plan(stop={"time": 60.0, "step": 3})


@pytest.mark.parametrize("value", [pt.ASHA(max_t=9), pt.FIFO(), pt.PBT(2, {"x": [1, 2]})], ids=repr)
def test_a_scheduler_without_its_class_is_refused(value: object) -> None:
    with pytest.raises(pt.InvalidInput, match="scheduler: expected an object, or its JSON such as"):
        make_plan(scheduler=strip_classes(value))


def test_the_table_of_fields_is_that_of_the_classes() -> None:
    named = {name: getattr(pt, name) for name in OPTION_FIELDS}
    assert {name: " ".join(list_fields(kind)) for name, kind in named.items()} == OPTION_FIELDS
    missing = {name for kind in BUILT_IN_MODULES.values() for name in kind} - OPTION_FIELDS.keys()
    assert missing == {"FIFO", "TimeBudget"}  # FIFO has no field, and TimeBudget that of MaxTime
    assert match_option_class({"low": 0, "high": 1, "scale": "log", "q": None}) == "uniform or randint"


def list_fields(kind: Any) -> list[str]:
    return [*kind.model_fields] if hasattr(kind, "model_fields") else [field.name for field in fields(kind)]


# As typed into a form or a command line.


def test_the_names_that_checkers_know_are_those_that_need_no_options() -> None:
    needy = {"ASHA", "Hyperband", "PBT"}
    assert set(get_args(SchedulerName)) == BUILT_IN_MODULES["scheduler"].keys() - needy
    assert set(get_args(SearchName)) == BUILT_IN_MODULES["search"].keys()
    assert [type(parse_scheduler(name)).__name__ for name in get_args(SchedulerName)] == [*get_args(SchedulerName)]
    assert all(parse_resume(word) for word in get_args(ResumeLike))


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (parse_scheduler, "ASHA", 'scheduler: ASHA needs max_t: {"ASHA": {"max_t": 81}}'),
        (parse_scheduler, {"Hyperband": {}}, 'Hyperband needs max_t: {"Hyperband": {"max_t": 81}}'),
        (parse_scheduler, "PBT", "PBT needs perturbation_interval and hyperparam_mutations: "),
        (
            parse_scheduler,
            "asha",
            f"unknown name 'asha'; expected one of {', '.join(BUILT_IN_MODULES['scheduler'])}; did you mean 'ASHA'?",
        ),
        (parse_scheduler, "medianstoping", "did you mean 'MedianStopping'?"),
        (parse_scheduler, {"ASHA": 27}, 'ASHA: expected its options, as in {"ASHA": {"max_t": 81}}, found 27'),
        (parse_scheduler, {"ASHA": {"maxt": 9}}, "ASHA has no option 'maxt'; did you mean 'max_t'?"),
        (parse_scheduler, {"FIFO": {"x": 9}}, "FIFO has no option 'x'"),
        (parse_search, "randomsearch", "did you mean 'RandomSearch'?"),
        (parse_stop, {"MaxFailures": 5}, 'stop: MaxFailures is a stopper: expected {"MaxFailures": {"failures": 3}}'),
        (parse_stop, {"TimeBudget": {}}, 'TimeBudget needs time_seconds: {"TimeBudget": {"time_seconds": 3600}}'),
        (parse_stop, [{"step": 3}, {"MaxSteps": {"step": 5}}], "MaxSteps has no option 'step'; did you mean 'steps'?"),
    ],
)
def test_what_is_spelled_wrongly_is_told_how_it_is_spelled(
    read: Callable[[object], object], value: object, message: str
) -> None:
    with pytest.raises(pt.InvalidInput) as refused:
        read(value)
    assert message in str(refused.value)
    assert "__init__" not in str(refused.value)


@pytest.mark.parametrize("name", ["FIFO", "MedianStopping"])
def test_what_needs_no_option_is_spelled_by_its_name(name: str) -> None:
    assert component_to_json(parse_scheduler(name)) == {name: {}}


@pytest.mark.parametrize("search", ["RandomSearch", {"RandomSearch": {}}, pt.RandomSearch()])
def test_a_random_search_without_a_number_has_as_many_samples_as_no_search_at_all(
    search: str | dict[str, object] | Search,
) -> None:
    assert parse_search(search).trial_count({"x": pt.uniform(0, 1)}) == 10
    assert with_samples(parse_search(search), 1).trial_count({"x": pt.uniform(0, 1)}) == 1


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
    warn_of_unusual_stop_limits(as_stopper(stop), make_objective("loss", mode), logging.getLogger("a run"))
    assert ["loss >= 0.1" in record.getMessage() for record in caplog.records] == [True] * warned
