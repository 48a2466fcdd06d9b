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
SOURCE_FOLDERS = ("src/prefect_tune", "blocks", "tasks", "flows")
RECIPES = ROOT / "docs" / "recipes"
KUBERNETES, SPOT = RECIPES / "kubernetes.md", RECIPES / "spot-instances.md"
WORKERS = Path(prefect.__file__).parent / "server/api/collections_data/views/aggregate-worker-metadata.json"
"""The workers of every integration, with their job templates, as Prefect's own server lists them."""
INCLUDED_MODULES = {"keras": {"numpy"}, "lightning": {"torch"}, "scikit-learn": {"numpy"}}
"""The modules that the package of an extra installs besides its own."""
MODULES = {"scikit-learn": "sklearn", "mlflow-skinny": "mlflow"}
"""The modules whose names differ from those of their packages."""
MIN_NOTICE_SECONDS = 30


def list_module_files() -> set[PurePosixPath]:
    """Return every file that belongs into an installation, by its path there."""
    files = set()
    for folder in SOURCE_FOLDERS:
        package = PurePosixPath("prefect_tune", folder.removeprefix("src/prefect_tune"))
        paths = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("py.typed")]
        files |= {package / path.relative_to(ROOT / folder).as_posix() for path in paths}
    return files


def check_packages() -> Iterator[str]:
    """Yield the packages that are not installed, and the public names that a module of the package hides."""
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
    for name in listed ^ {str(path.parent).replace("/", ".") for path in list_module_files()}:
        yield f"pyproject.toml: {name} is a package, or is listed as one, and not both"
    folder = Path(pt.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    for name in modules & set(pt.__all__):
        yield f"pt.{name} is a module too: importing that one puts it in the place of the name"
    errors = vars(import_module("prefect_tune.core.errors"))
    for name in {name for name, value in errors.items() if isinstance(value, type)} - set(pt.__all__):
        yield f"prefect_tune.core.errors.{name} is not a public name"


def check_locks() -> Iterator[str]:
    """Yield the requirements of a lock without an exact version and hashes, and those only in the demo's lock."""
    requirement = re.compile(r"[a-z0-9.-]+==\S+( ; [^\\]+)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+")
    texts = {name: (ROOT / "requirements" / f"{name}.txt").read_text() for name in ("demo", "dev")}
    for name, text in texts.items():
        if rest := requirement.sub("", text):
            yield f"requirements/{name}.txt: expected exact versions with hashes, found {rest[:200]!r}"
    demo, dev = (set(re.findall(r"^\S+==\S+", text, re.MULTILINE)) for text in texts.values())
    yield from (f"requirements/dev.txt: expected {name} as in demo.txt" for name in sorted(demo - dev))


def check_extras() -> Iterator[str]:
    """Yield the errors of missing packages that do not name an extra with that package."""
    source = "\n".join(path.read_text() for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.py"))
    named = re.findall(r"""missing_extra_error\(error, "(\w+)"((?:, "\w+")*)\)""", source)
    extra_modules = [(extra, re.findall(r"\w+", modules) or [extra]) for extra, modules in named]
    extra_modules += [
        (extra, [module]) for module, extra in re.findall(r"""require_package\("(\w+)", "(\w+)\"""", source)
    ]
    extra_modules += [
        (name.removeprefix("prefect-"), [name]) for name in re.findall(r'LazyBlockTypes\("([\w-]+)"', source)
    ]
    if len(extra_modules) != 8 + 3 + 3:
        yield f"expected 14 errors of missing packages in the code, found {len(extra_modules)}"
    for extra, modules in extra_modules:
        yield from (f"the extra {extra} does not bring {name}" for name in set(modules) - _list_extra_modules(extra))
    written = {extra for names in re.findall(r"prefect-tune\[([a-z,]+)\]", source) for extra in names.split(",")}
    yield from (f"there is no extra {name}" for name in written - PYPROJECT["project"]["optional-dependencies"].keys())
    if set(re.findall(r"pip install ([a-z][\w-]*)", source)) != {"scipy"}:  # what no extra brings may be named alone
        yield "expected no other package than scipy after `pip install`: name the extra that brings it"


def _list_extra_modules(extra: str) -> set[str]:
    """Return the modules that an extra installs, according to `pyproject.toml` and `INCLUDED_MODULES`."""
    modules: set[str] = set()
    for requirement in PYPROJECT["project"]["optional-dependencies"][extra]:
        name = re.split(r"[\[<>=]", requirement)[0]
        if name == "prefect-tune":
            included = requirement.partition("[")[2].rstrip("]").split(",")
            modules.update(*map(_list_extra_modules, included))
        else:
            modules |= {MODULES.get(name, name), *INCLUDED_MODULES.get(name, ())}
    return modules


def check_deployments() -> Iterator[str]:
    """Yield the differences between `prefect.yaml`, which Prefect's own command reads, and our deployments."""
    expected: dict[str, tuple[object, ...]] = {}
    for offer in DEPLOYABLE_FLOWS:
        limit = {"limit": offer.concurrency_limit, "collision_strategy": "CANCEL_NEW"}
        expected[offer.name] = (offer.entrypoint, [TAG], [], limit if offer.concurrency_limit else None)
    actual: dict[str, tuple[object, ...]] = {
        name: (deployment["entrypoint"], deployment["tags"], deployment["pull"], deployment.get("concurrency_limit"))
        for name, deployment in _read_deployments().items()
    }
    if actual != expected:
        yield f"prefect.yaml: expected {expected}, found {actual}"


def _read_deployments() -> Mapping[str, Mapping[str, Any]]:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    return {deployment["name"]: deployment for deployment in deployments}


def _find_code(page: Path, language: str, part: str = "") -> str:
    """Return the only block of the page in this language that contains `part`."""
    (block,) = [block.code for block in blocks_of(page) if block.language == language and part in block.code]
    return block


def check_commands() -> Iterator[str]:
    """Yield the commands of the recipes that Dask and Prefect cannot parse."""
    from distributed.cli.dask_worker import main as dask_worker
    from prefect.cli._app import _app

    program, command, scheduler, *options = shlex.split(_find_code(RECIPES / "dask.md", "bash"))
    params = dask_worker.make_context("worker", [scheduler, *options]).params
    if (program, command, params["nthreads"], params["resources"]) != ("dask", "worker", 4, "GPU=4"):
        yield f"docs/recipes/dask.md: expected a worker of 4 threads and GPUs, found {params}"
    lines = [line for block in blocks_of(KUBERNETES) if block.language == "bash" for line in block.code.splitlines()]
    for line in lines:
        program, *words = shlex.split(line)
        if program != "prefect":
            yield f"docs/recipes/kubernetes.md: expected a command of Prefect, found {line}"
        _app.parse_args(words, exit_on_error=False, print_error=False)


def check_policy() -> Iterator[str]:
    """Yield the differences between the policy for a bucket and the needed permissions."""
    of_bucket, of_objects = json.loads(_find_code(RECIPES / "object-stores.md", "json"))["Statement"]
    needed = {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"}
    permitted = {*of_bucket["Action"], *of_objects["Action"]}
    if of_bucket["Resource"] + "/*" != of_objects["Resource"] or permitted != needed:
        yield f"docs/recipes/object-stores.md: expected {sorted(needed)} for one bucket"


def check_kubernetes() -> Iterator[str]:
    """Yield what the job template, the flows and the automations do not accept in the recipe for Kubernetes."""
    template = _make_job_template()
    variables = template["variables"]
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    for name in used - variables["properties"].keys() | {"gpu_limit", "termination_grace_period_seconds"} - used:
        yield f"docs/recipes/kubernetes.md: the template does not define or use {name}"
    search, trial = yaml.safe_load(_find_code(KUBERNETES, "yaml"))["deployments"]
    parameters, schema = flatten_parameters(search["parameters"]), {**variables, "additionalProperties": False}
    job_variables = [deployment["work_pool"]["job_variables"] for deployment in (search, trial)]
    for variables in (*job_variables, parameters["trial_job_variables"]):
        for error in Draft202012Validator(schema).iter_errors(variables):
            yield f"docs/recipes/kubernetes.md: {error.message}"
    for message in validate(search["parameters"], make_form_schema(deployed.tune)):
        yield f"docs/recipes/kubernetes.md: {message}"
    pt.space_from_json(parameters["space"])
    ours = {name: deployment["entrypoint"] for name, deployment in _read_deployments().items()}
    if not {deployment["name"]: deployment["entrypoint"] for deployment in (search, trial)}.items() <= ours.items():
        yield "docs/recipes/kubernetes.md: expected entrypoints as in prefect.yaml"
    if (parameters["trials"], trial["name"], bool(parameters["stop"])) != ("deployment", train_trial.name, True):
        yield "docs/recipes/kubernetes.md: expected a search with a stop, whose trials are runs of the other deployment"
    install = _find_code(KUBERNETES, "python", "install_automations")
    compile(install, "<page>", "exec")
    (window,) = re.findall(r"install_automations\(heartbeat_window_seconds=(\d+)\)", install)
    for deployment in (search, trial):
        frequency = deployment["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
        if deployment["tags"] != [TAG] or int(window) < 2 * int(frequency):
            yield f"docs/recipes/kubernetes.md: the automations do not act on {deployment['name']}, or too early"


def _make_job_template() -> dict[str, Any]:
    """Return the job template of prefect-kubernetes with the changes of the page."""
    default = json.loads(WORKERS.read_text())["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    script = next(block for block in blocks_of(KUBERNETES) if block.language == "python")
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "kubernetes.json")
        template.write_text(json.dumps(default))
        run_blocks([script], Path(folder), {}).check_returncode()
        return dict(json.loads(template.read_text()))


def check_spot_instances() -> Iterator[str]:
    """Yield the options and variables of the recipe that no flow and no worker accepts."""
    from prefect.cli import flow_run

    namespace: dict[str, Any] = {}
    exec(compile(_find_code(SPOT, "python"), "<page>", "exec"), namespace)  # noqa: S102 - a page of this repository
    for flow in (pt.tune, pt.durable_trainable):
        for name in set(namespace["options"]) - set(signature(flow.fn).parameters):
            yield f"docs/recipes/spot-instances.md: {flow.name} has no option {name}"
    source = Path(flow_run.__file__).read_text()
    for text in sum(yaml.safe_load(_find_code(SPOT, "yaml"))["job_variables"]["env"].items(), ()):
        if f'"{text}"' not in source:
            yield f"docs/recipes/spot-instances.md: Prefect does not know {text}"
    if namespace["options"]["grace_period_seconds"] >= MIN_NOTICE_SECONDS - 3:
        yield "docs/recipes/spot-instances.md: the grace leaves no time to end the run"


CHECKS = (
    *(check_packages, check_locks, check_extras, check_deployments),
    *(check_commands, check_policy, check_kubernetes, check_spot_instances),
)
