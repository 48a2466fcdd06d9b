"""The settings in the recipes are accepted by Prefect, and by the package, exactly as shown."""

from __future__ import annotations

import json
import re
import shlex
from inspect import signature
from pathlib import Path
from typing import Any

import prefect
import pytest
import yaml
from jsonschema import validate
from prefect.utilities.schema_tools.validation import validate as prefect_validate

import prefect_tune as pt
from prefect_tune.deploy.deployment_specs import TAG
from prefect_tune.flows import deployed
from prefect_tune.flows.train_trial import train_trial
from prefect_tune.parameters.forms import flattened, form_of
from tests.fakes.pages import ROOT, Block, blocks_of, run_blocks

RECIPES = ROOT / "docs" / "recipes"
KUBERNETES = RECIPES / "kubernetes.md"
SPOT = RECIPES / "spot-instances.md"
WORKERS = Path(prefect.__file__).parent / "server/api/collections_data/views/aggregate-worker-metadata.json"
"""The records of Prefect's own server about the workers of every integration, with their job templates."""


def blocks(page: Path, *languages: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.language in languages]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_recipe_for_dask_works_as_a_script_that_its_processes_import_again(
    prefect_server: str, tmp_path: Path
) -> None:
    (script,) = blocks(RECIPES / "dask.md", "python")
    (tmp_path / "script.py").write_text(script.code)
    done = run_blocks([Block("bash", "python script.py")], tmp_path, {"PREFECT_API_URL": prefect_server})
    assert done.returncode == 0, done.stdout


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_recipe_for_ray_works_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    pytest.importorskip("prefect_ray")  # pip install 'prefect-tune[ray]': a hundred megabytes
    done = run_blocks(blocks(RECIPES / "ray.md", "python"), tmp_path, {"PREFECT_API_URL": prefect_server})
    assert done.returncode == 0, done.stdout


def test_the_command_for_dask_workers_is_one_that_dask_takes() -> None:
    from distributed.cli.dask_worker import main

    (block,) = blocks(RECIPES / "dask.md", "bash")
    program, command, scheduler, *options = shlex.split(block.code)
    assert (program, command) == ("dask", "worker")
    asked = main.make_context("worker", [scheduler, *options]).params
    assert (asked["nthreads"], asked["resources"]) == (4, "GPU=4")


def test_the_policy_for_s3_lets_an_own_bucket_be_read_and_written_and_nothing_else() -> None:
    (block,) = blocks(RECIPES / "object-stores.md", "json")
    of_bucket, of_objects = json.loads(block.code)["Statement"]
    assert of_bucket["Resource"] + "/*" == of_objects["Resource"]
    assert {*of_bucket["Action"], *of_objects["Action"]} == {
        "s3:ListBucket",
        "s3:GetObject",
        "s3:PutObject",
        "s3:DeleteObject",
    }


@pytest.fixture
def template(tmp_path: Path) -> dict[str, Any]:
    """The template for jobs of prefect-kubernetes, as the page changes it."""
    default = json.loads(WORKERS.read_text())["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    (tmp_path / "kubernetes.json").write_text(json.dumps(default))
    done = run_blocks(blocks(KUBERNETES, "python")[:1], tmp_path, {})
    assert done.returncode == 0, done.stdout
    changed: dict[str, Any] = json.loads((tmp_path / "kubernetes.json").read_text())
    return changed


def test_every_word_that_the_changed_template_uses_is_one_of_its_variables(template: dict[str, Any]) -> None:
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used <= set(template["variables"]["properties"])
    assert {"gpu_limit", "termination_grace_period_seconds"} <= used


def test_the_deployments_for_kubernetes_give_jobs_what_the_template_and_the_flows_take(
    template: dict[str, Any],
) -> None:
    (block,) = blocks(KUBERNETES, "yaml")
    search, trial = yaml.safe_load(block.code)["deployments"]
    parameters = flattened(search["parameters"])
    schema = {**template["variables"], "additionalProperties": False}
    for variables in (
        search["work_pool"]["job_variables"],
        trial["work_pool"]["job_variables"],
        parameters["trial_job_variables"],
    ):
        validate(variables, schema)
    ours = {
        each["name"]: each["entrypoint"] for each in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    }
    assert {each["name"]: each["entrypoint"] for each in (search, trial)}.items() <= ours.items()
    assert prefect_validate(search["parameters"], form_of(deployed.tune)) == []
    pt.space_from_json(parameters["space"])
    assert parameters["trials"] == "deployment"
    assert train_trial.name == trial["name"]
    assert parameters["stop"]


def test_the_deployments_for_kubernetes_are_those_that_the_automations_it_installs_act_on() -> None:
    (block,) = blocks(KUBERNETES, "yaml")
    (install,) = [each.code for each in blocks(KUBERNETES, "python") if "install_automations" in each.code]
    (window,) = re.findall(r"install_automations\(heartbeat_window_seconds=(\d+)\)", install)
    compile(install, "<page>", "exec")
    for each in yaml.safe_load(block.code)["deployments"]:
        assert each["tags"] == [TAG]
        variables = each["work_pool"]["job_variables"]
        assert int(window) >= 2 * int(variables["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])


def test_the_commands_for_the_work_pool_are_ones_that_prefect_takes() -> None:
    from prefect.cli._app import _app

    lines = "".join(each.code for each in blocks(KUBERNETES, "bash")).splitlines()
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "prefect"
        _app.parse_args(words, exit_on_error=False, print_error=False)


def test_the_options_for_spot_instances_are_ones_that_a_search_and_a_training_take() -> None:
    (python,), (variables,) = blocks(SPOT, "python"), blocks(SPOT, "yaml")
    given: dict[str, Any] = {}
    exec(compile(python.code, "<page>", "exec"), given)
    for flow in (pt.tune, pt.durable_trainable):
        assert set(given["options"]) <= set(signature(flow.fn).parameters)
    from prefect.cli import flow_run

    source = Path(flow_run.__file__).read_text()
    for name, value in yaml.safe_load(variables.code)["job_variables"]["env"].items():
        assert f'"{name}"' in source
        assert f'"{value}"' in source
    assert given["options"]["grace_period_seconds"] < 30 - 3  # the shortest notice, and the last words
