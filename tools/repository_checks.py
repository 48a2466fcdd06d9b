"""Whether the recipes, the locks, `pyproject.toml` and `prefect.yaml` fit the code, Prefect and Dask.

`tools/check_pages.py` runs `CHECKS`; each yields a line per problem. What is built and installed is tested by
`tests/test_packaging.py`.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path, PurePosixPath
from typing import Any

import prefect
import yaml
from jsonschema import Draft202012Validator
from prefect.utilities.schema_tools.validation import validate

import prefect_tune as pt
from prefect_tune.deploy.deployment_specs import DEPLOYABLE_FLOWS, TAG
from prefect_tune.flows import deployed
from prefect_tune.flows.train_trial import train_trial
from prefect_tune.parameters.forms import flatten_parameters, make_form_schema
from tests.fakes.pages import ROOT, blocks_of, run_blocks

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("src/prefect_tune", "blocks", "tasks", "flows")
RECIPES = ROOT / "docs" / "recipes"
KUBERNETES, SPOT = RECIPES / "kubernetes.md", RECIPES / "spot-instances.md"
WORKERS = Path(prefect.__file__).parent / "server/api/collections_data/views/aggregate-worker-metadata.json"
"""The records of Prefect's own server about the workers of every integration, with their job templates."""
BROUGHT = {"keras": {"numpy"}, "lightning": {"torch"}, "scikit-learn": {"numpy"}}
"""What the package of an extra brings itself."""
MODULES = {"scikit-learn": "sklearn", "mlflow-skinny": "mlflow"}
"""The modules of packages that have another name."""
SHORTEST_NOTICE_SECONDS = 30


def module_files() -> set[PurePosixPath]:
    """Return every file that belongs into an installation, by its path there."""
    found = set()
    for room in ROOMS:
        package = PurePosixPath("prefect_tune") / PurePosixPath(room).relative_to(
            "src/prefect_tune" if room.startswith("src") else "."
        )
        paths = [*(ROOT / room).rglob("*.py"), *(ROOT / room).rglob("py.typed")]
        found |= {package / path.relative_to(ROOT / room).as_posix() for path in paths}
    return found


def packages() -> Iterator[str]:
    """Yield the packages that are not installed, and the public names that a module of the package hides."""
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    for name in listed ^ {str(path.parent).replace("/", ".") for path in module_files()}:
        yield f"pyproject.toml: {name} is a package, or is listed as one, and not both"
    folder = Path(pt.__file__).parent
    modules = {each.stem for each in folder.iterdir() if each.suffix == ".py" or each.is_dir()}
    for name in modules & set(pt.__all__):
        yield f"pt.{name} is a module too: importing that one puts it in the place of the name"
    errors = vars(import_module("prefect_tune.core.errors"))
    for name in {name for name, each in errors.items() if isinstance(each, type)} - set(pt.__all__):
        yield f"prefect_tune.core.errors.{name} is not a public name"


def locks() -> Iterator[str]:
    """Yield what a lock names without an exact version and hashes, and what only that of the demo names."""
    requirement = re.compile(r"[a-z0-9.-]+==\S+( ; [^\\]+)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+")
    texts = {name: (ROOT / "requirements" / f"{name}.txt").read_text() for name in ("demo", "dev")}
    for name, text in texts.items():
        if left := requirement.sub("", text):
            yield f"requirements/{name}.txt: expected exact versions with hashes, found {left[:200]!r}"
    demo, dev = (set(re.findall(r"^\S+==\S+", text, re.MULTILINE)) for text in texts.values())
    yield from (f"requirements/dev.txt: expected {name} as in demo.txt" for name in sorted(demo - dev))


def extras() -> Iterator[str]:
    """Yield the errors of a missing package that name no extra which brings it."""
    source = "\n".join(path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    named = re.findall(r"""missing_extra_error\(error, "(\w+)"((?:, "\w+")*)\)""", source)
    asked = [(extra, re.findall(r"\w+", modules) or [extra]) for extra, modules in named]
    asked += [(extra, [module]) for module, extra in re.findall(r"""require_package\("(\w+)", "(\w+)\"""", source)]
    asked += [(name.removeprefix("prefect-"), [name]) for name in re.findall(r'NamedBlocks\("([\w-]+)"', source)]
    if len(asked) != 8 + 3 + 3:
        yield f"expected 14 errors of missing packages in the code, found {len(asked)}"
    for extra, modules in asked:
        yield from (f"the extra {extra} does not bring {name}" for name in set(modules) - _brought_by(extra))
    written = {each for names in re.findall(r"prefect-tune\[([a-z,]+)\]", source) for each in names.split(",")}
    yield from (f"there is no extra {name}" for name in written - PYPROJECT["project"]["optional-dependencies"].keys())
    if set(re.findall(r"pip install ([a-z][\w-]*)", source)) != {"scipy"}:  # what no extra brings may be named alone
        yield "expected no other package than scipy after `pip install`: name the extra that brings it"


def _brought_by(extra: str) -> set[str]:
    """Return the modules that an extra installs, as far as `pyproject.toml` and `BROUGHT` say."""
    found: set[str] = set()
    for requirement in PYPROJECT["project"]["optional-dependencies"][extra]:
        name = re.split(r"[\[<>=]", requirement)[0]
        if name == "prefect-tune":
            found.update(*(_brought_by(each) for each in requirement.partition("[")[2].rstrip("]").split(",")))
        else:
            found |= {MODULES.get(name, name), *BROUGHT.get(name, ())}
    return found


def deployments() -> Iterator[str]:
    """Yield the deployments that `prefect.yaml`, for Prefect's own command, describes otherwise than ours."""
    there = _shipped_deployments()
    expected: dict[str, tuple[object, ...]] = {
        offer.name: (
            offer.entrypoint,
            [TAG],
            [],
            {"limit": offer.concurrency_limit, "collision_strategy": "CANCEL_NEW"} if offer.concurrency_limit else None,
        )
        for offer in DEPLOYABLE_FLOWS
    }
    found: dict[str, tuple[object, ...]] = {
        name: (each["entrypoint"], each["tags"], each["pull"], each.get("concurrency_limit"))
        for name, each in there.items()
    }
    if found != expected:
        yield f"prefect.yaml: expected {expected}, found {found}"


def _shipped_deployments() -> Mapping[str, Mapping[str, Any]]:
    return {each["name"]: each for each in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}


def _code(page: Path, language: str, part: str = "") -> str:
    """Return the only block of the page in this language that contains `part`."""
    (block,) = [block.code for block in blocks_of(page) if block.language == language and part in block.code]
    return block


def commands() -> Iterator[str]:
    """Yield what Dask and Prefect do not understand of the commands of the recipes."""
    from distributed.cli.dask_worker import main as dask_worker
    from prefect.cli._app import _app

    program, command, scheduler, *options = shlex.split(_code(RECIPES / "dask.md", "bash"))
    asked = dask_worker.make_context("worker", [scheduler, *options]).params
    if (program, command, asked["nthreads"], asked["resources"]) != ("dask", "worker", 4, "GPU=4"):
        yield f"docs/recipes/dask.md: expected a worker of 4 threads and GPUs, found {asked}"
    lines = [line for block in blocks_of(KUBERNETES) if block.language == "bash" for line in block.code.splitlines()]
    for line in lines:
        program, *words = shlex.split(line)
        if program != "prefect":
            yield f"docs/recipes/kubernetes.md: expected a command of Prefect, found {line}"
        _app.parse_args(words, exit_on_error=False, print_error=False)


def policy() -> Iterator[str]:
    """Yield what the policy for a bucket permits beyond what is needed, or lacks."""
    of_bucket, of_objects = json.loads(_code(RECIPES / "object-stores.md", "json"))["Statement"]
    needed = {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"}
    if (
        of_bucket["Resource"] + "/*" != of_objects["Resource"]
        or {*of_bucket["Action"], *of_objects["Action"]} != needed
    ):
        yield f"docs/recipes/object-stores.md: expected {sorted(needed)} for one bucket"


def kubernetes() -> Iterator[str]:
    """Yield what the template for jobs, the flows and the automations do not take of the recipe for Kubernetes."""
    template = _changed_template()
    variables = template["variables"]
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    for name in used - variables["properties"].keys() | {"gpu_limit", "termination_grace_period_seconds"} - used:
        yield f"docs/recipes/kubernetes.md: the template does not define or use {name}"
    search, trial = yaml.safe_load(_code(KUBERNETES, "yaml"))["deployments"]
    parameters, schema = flatten_parameters(search["parameters"]), {**variables, "additionalProperties": False}
    for given in (*(each["work_pool"]["job_variables"] for each in (search, trial)), parameters["trial_job_variables"]):
        yield from (
            f"docs/recipes/kubernetes.md: {each.message}" for each in Draft202012Validator(schema).iter_errors(given)
        )
    yield from (
        f"docs/recipes/kubernetes.md: {each}"
        for each in validate(search["parameters"], make_form_schema(deployed.tune))
    )
    pt.space_from_json(parameters["space"])
    ours = {name: each["entrypoint"] for name, each in _shipped_deployments().items()}
    if not {each["name"]: each["entrypoint"] for each in (search, trial)}.items() <= ours.items():
        yield "docs/recipes/kubernetes.md: expected entrypoints as in prefect.yaml"
    if (parameters["trials"], trial["name"], bool(parameters["stop"])) != ("deployment", train_trial.name, True):
        yield "docs/recipes/kubernetes.md: expected a search with a stop, whose trials are runs of the other deployment"
    install = _code(KUBERNETES, "python", "install_automations")
    compile(install, "<page>", "exec")
    (window,) = re.findall(r"install_automations\(heartbeat_window_seconds=(\d+)\)", install)
    for each in (search, trial):
        frequency = each["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
        if each["tags"] != [TAG] or int(window) < 2 * int(frequency):
            yield f"docs/recipes/kubernetes.md: the automations do not act on {each['name']}, or too early"


def _changed_template() -> dict[str, Any]:
    """Return the template for jobs of prefect-kubernetes as the page changes it."""
    default = json.loads(WORKERS.read_text())["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    script = next(block for block in blocks_of(KUBERNETES) if block.language == "python")
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "kubernetes.json")
        template.write_text(json.dumps(default))
        run_blocks([script], Path(folder), {}).check_returncode()
        changed: dict[str, Any] = json.loads(template.read_text())
    return changed


def spot_instances() -> Iterator[str]:
    """Yield the options and variables of the recipe that no flow and no worker takes."""
    from prefect.cli import flow_run

    given: dict[str, Any] = {}
    exec(compile(_code(SPOT, "python"), "<page>", "exec"), given)  # noqa: S102 - a page of this repository
    for flow in (pt.tune, pt.durable_trainable):
        for name in set(given["options"]) - set(signature(flow.fn).parameters):
            yield f"docs/recipes/spot-instances.md: {flow.name} has no option {name}"
    source = Path(flow_run.__file__).read_text()
    for text in sum(yaml.safe_load(_code(SPOT, "yaml"))["job_variables"]["env"].items(), ()):
        if f'"{text}"' not in source:
            yield f"docs/recipes/spot-instances.md: Prefect does not know {text}"
    if given["options"]["grace_period_seconds"] >= SHORTEST_NOTICE_SECONDS - 3:
        yield "docs/recipes/spot-instances.md: the grace leaves no time to end the run"


CHECKS = (packages, locks, extras, deployments, commands, policy, kubernetes, spot_instances)
