"""The examples of the documentation run, and its claims are true."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import prefect
import pytest

import prefect_tune as pt
from prefect_tune.deploy.automations import uninstall_automations
from tests.fakes.checkpoints import read_files, write_files
from tests.fakes.pages import PAGES, ROOT, Block, blocks_of, run_blocks
from tests.fakes.searches.experiments import write_experiment
from tests.fakes.servers.moto_server import moto_server

README, DOCS = ROOT / "README.md", ROOT / "docs"
RECIPES = DOCS / "recipes"
KUBERNETES, OBJECT_STORES = RECIPES / "kubernetes.md", RECIPES / "object-stores.md"
START, LAYOUT, SPACES, CLI = (DOCS / f"{name}.md" for name in ("start", "storage-layout", "search-spaces", "cli"))
SCHEDULERS, INTEGRATIONS, TRUST = DOCS / "schedulers.md", DOCS / "integrations.md", DOCS / "trust.md"
STOPPING, MANY_PROCESSES, DRILL = DOCS / "stopping.md", DOCS / "many-processes.md", DOCS / "drill.md"
FROM_RAY_TUNE, MAINTAIN, AUDIT = DOCS / "from-ray-tune.md", DOCS / "maintain.md", DOCS / "audit.md"
DEPLOYMENTS, OWN_FLOWS, TESTING = DOCS / "deployments.md", DOCS / "own-flows.md", DOCS / "testing.md"
_LONG_PAGES = (
    "start schedulers optuna stopping results searches where-trials-run from-optuna from-ray-tune checkpoints cost "
    "audit resume automations cli maintain deployments recipes/kubernetes recipes/object-stores"
)
RUN = (
    pytest.param(README, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    pytest.param(SPACES),
    *(pytest.param(DOCS / f"{name}.md", marks=pytest.mark.long) for name in _LONG_PAGES.split()),
    pytest.param(OWN_FLOWS, marks=pytest.mark.deep),
    pytest.param(DRILL, marks=[pytest.mark.deep, pytest.mark.timeout(900)]),
)
"""The pages whose Python and Bash is run as it stands, from top to bottom, in an empty folder."""
NOT_RUN = {
    **dict.fromkeys(("make demo", "make test"), "tests/demo, and this suite"),
    "pip install '.[server]'": "installed here; tests/test_packaging.py installs what is built",
    "pip install 'prefect-tune[server]'": "not released yet; tests/test_packaging.py installs what is built",
    'dask worker tcp://scheduler:8786 --nthreads 4 --resources "GPU=4" --preload prefect_tune.tasks': (
        "needs a Dask scheduler on a machine of that name; tools/repository_checks.py lets Dask parse it"
    ),
}
"""The lines of Bash that are left out when a page is run, and why."""
MINIO = "http://minio.example.com:9000"
"""An address that a page has and no test: moto's S3 server takes its place."""
TESTED_ELSEWHERE = {
    **dict.fromkeys(((page, "python") for page in (LAYOUT, TESTING, RECIPES / "dask.md", RECIPES / "ray.md")), "below"),
    **dict.fromkeys(((page, "text") for page in (README, LAYOUT, OWN_FLOWS, DRILL)), "below"),
    **dict.fromkeys(((page, "json") for page in (SPACES, STOPPING)), "below"),
    (LAYOUT, "json"): "tools/check_pages.py",
    (DEPLOYMENTS, "json"): "tests/deploy/test_deployment_parameters.py",
    (INTEGRATIONS, "python"): "of the examples, which tests/integrations runs",
    (MANY_PROCESSES, "python"): "of the examples, which tests/integrations runs",
    (TRUST, "text"): "tests/flows/searching/test_trust.py",
    (OBJECT_STORES, "json"): "tools/repository_checks.py",
    (KUBERNETES, "yaml"): "tools/repository_checks.py",
    (RECIPES / "spot-instances.md", "python"): "tools/repository_checks.py",
    (RECIPES / "spot-instances.md", "yaml"): "tools/repository_checks.py",
}
UNTESTED = {
    (START, "text"): "what a command prints",
    (DEPLOYMENTS, "toml"): "a project of setuptools",
    (MANY_PROCESSES, "text"): "two drawings, and what a command prints",
    (SCHEDULERS, "text"): "three lines for PyTorch, which the lock does not hold",
    (FROM_RAY_TUNE, "text"): "code for Ray Tune, which the lock does not hold",
    (KUBERNETES, "text"): "a Dockerfile: there is no container engine, and no registry",
}


def the_block(page: Path, language: str, number: int = 0) -> Block:
    return [block for block in blocks_of(page) if block.language == language][number]


def test_each_block_of_a_page_is_run_or_listed_with_the_reason() -> None:
    blocks = [(page, block) for page in PAGES for block in blocks_of(page)]
    listed = {*TESTED_ELSEWHERE, *UNTESTED}
    run = {(page, language) for page in pages_run() for language in ("python", "bash")}
    assert [
        block for page, block in blocks if (page, block.language) not in run | listed and left_of(block).strip()
    ] == []
    assert listed <= {(page, block.language) for page, block in blocks}
    assert set(NOT_RUN) <= {line for _, block in blocks for line in block.code.splitlines()}
    assert set(CHECKS) | set(PREPARATIONS) <= pages_run()


def pages_run() -> set[Path]:
    return {case.values[0] for case in RUN if isinstance(case.values[0], Path)}


def left_of(block: Block) -> str:
    """Return the code without the lines that are not run."""
    if block.language != "bash":
        return block.code
    return "\n".join(line for line in block.code.splitlines() if line not in NOT_RUN)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_works_as_it_stands_from_top_to_bottom(page: Path, prefect_server: str, tmp_path: Path) -> None:
    PREPARATIONS.get(page, lambda _: None)(tmp_path)
    blocks = [replace(block, code=left_of(block)) for block in blocks_of(page) if block.language in {"python", "bash"}]
    environment = {"PREFECT_API_URL": prefect_server, "PYTHONPATH": ""}  # no page says to set it
    with server_of_buckets() if page == OBJECT_STORES else nullcontext(MINIO) as url:
        blocks = [replace(block, code=block.code.replace(MINIO, url)) for block in blocks]
        done = run_blocks(blocks, tmp_path, environment)
    uninstall_automations()
    assert done.returncode == 0, done.stdout
    CHECKS.get(page, lambda _, __: None)(done.stdout, tmp_path)


@contextmanager
def server_of_buckets() -> Iterator[str]:
    with moto_server() as url:
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
        boto3.Session().client("s3", endpoint_url=url, **keys).create_bucket(Bucket="runs")
        yield url


def prepare_spaces(folder: Path) -> None:
    (folder / "space.json").write_text(the_block(SPACES, "json").code)


def prepare_maintain(folder: Path) -> None:
    write_experiment(folder / "runs", "first", [20, 40], quarantined=(40,))
    write_experiment(folder / "runs", "nightly-1", [1, 2])


PREPARATIONS = {SPACES: prepare_spaces, MAINTAIN: prepare_maintain}
"""What a page finds in the folder."""


def check_readme(printed: str, folder: Path) -> None:
    assert (folder / "runs" / "net").is_dir()
    *shown, drilled = [block for block in blocks_of(README) if block.language == "text"]
    assert "✓ exact: the run that was killed 2 times is the same; 8 metric values" in drilled.code
    assert "exact: the run that was killed 2 times is the same" in printed
    seen = " ".join(printed.split())
    missing = [line for block in shown for line in block.code.splitlines() if line != "…" and not is_in(seen, line)]
    assert missing == []


def is_in(seen: str, line: str) -> bool:
    """Whether the output has a line as the page shows it: in another folder, in another time, in another order.

    The order in which trials are promoted says in how many parts a trial trained, so the number of its commits, too.
    """
    pattern = re.escape(" ".join(line.split())).replace("/home/me", r"\S*").replace(r"after\ 2\ s", r"after\ \d+\ s")
    pattern = pattern.replace(r"1\ completed,\ 9\ pruned", r"\d\ completed,\ \d\ pruned")
    pattern = re.sub(r"(/checkpoints/\d{10}\\-)\d{10}", r"\1\\d{10}", pattern)
    return re.search(pattern, seen) is not None


def check_start(printed: str, folder: Path) -> None:
    assert "{'rate': 0.7105" in printed
    assert re.search(r"^00001  completed  27    \S+  0.710535", printed, re.MULTILINE)  # as on the page
    assert re.search(r"^50 0\.000\d+ Checkpoint\(", printed, re.MULTILINE), printed
    assert "durable-trainable/durable-trainable" in printed
    assert "x" in read_files(folder / "first-model")


def check_stopping(printed: str, _: Path) -> None:
    assert re.search(r"^trial 00001 .*diverges", printed, re.MULTILINE)
    assert re.search(r"^experiment 'digits' ", printed, re.MULTILINE)


def check_cli(_: str, folder: Path) -> None:
    counts = json.loads((folder / "rates.json").read_text())["trials_by_status"]
    assert set(counts) == {"completed", "pruned"}  # which are pruned depends on their order
    assert sum(counts.values()) == 10
    assert (folder / "rates.md").read_text().startswith("# rates\n")


def check_audit(printed: str, _: Path) -> None:
    (first, *_rest), *sampled = re.findall(
        r"^((\d+) of (\d+)) proposals and decisions derived again$", printed, re.MULTILINE
    )
    assert first.split(" of ")[0] == first.split(" of ")[1]
    assert [int(count) - int(derived) for _, derived, count in sampled] == [6, 0]


def check_maintain(printed: str, _: Path) -> None:
    assert "step 40: 4.77 MiB in 2 files, intact" in printed


def check_deployments(printed: str, _: Path) -> None:
    assert "runs at 0 2 * * * Europe/Berlin" in printed
    assert "created  maintain/daily" in printed


def check_own_flows(printed: str, folder: Path) -> None:
    """It survives a kill: at most the step whose save was killed is trained twice, and it ends as without the kill."""
    shown = next(block.code for block in blocks_of(OWN_FLOWS) if block.language == "text")
    lines = {" ".join(line.split()) for line in printed.splitlines()}
    assert {" ".join(line.split()) for line in shown.splitlines()} <= lines
    trained = [int(step) for step in re.findall(r"trained step (\d+)", printed)]
    assert sorted(set(trained)) == list(range(1, 41))
    assert len(trained) <= 41
    restored = pt.restore_checkpoint.fn(target=f"file://{folder / 'runs'}", experiment="descent", trial="slow")
    assert restored is not None
    x = 8.0
    for _ in range(40):
        x *= 0.9
    assert json.loads((restored.directory / "state.json").read_text()) == {"x": x}


def check_drill(printed: str, _: Path) -> None:
    seen = " ".join(printed.split())
    shown = [line for block in blocks_of(DRILL) if block.language == "text" for line in block.code.splitlines()]
    assert [line for line in shown if " ".join(line.split()) not in seen] == []


CHECKS: Mapping[Path, Callable[[str, Path], None]] = {
    README: check_readme,
    START: check_start,
    STOPPING: check_stopping,
    CLI: check_cli,
    AUDIT: check_audit,
    MAINTAIN: check_maintain,
    DEPLOYMENTS: check_deployments,
    OWN_FLOWS: check_own_flows,
    DRILL: check_drill,
}
"""What a page promises of its output."""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_recipe_for_dask_works_as_a_script_that_its_processes_import_again(
    prefect_server: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(the_block(RECIPES / "dask.md", "python").code)
    done = run_blocks([Block("bash", "python script.py")], tmp_path, {"PREFECT_API_URL": prefect_server})
    assert done.returncode == 0, done.stdout


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_recipe_for_ray_works_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    pytest.importorskip("prefect_ray")  # pip install 'prefect-tune[ray]': a hundred megabytes
    code = [block for block in blocks_of(RECIPES / "ray.md") if block.language == "python"]
    done = run_blocks(code, tmp_path, {"PREFECT_API_URL": prefect_server})
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_the_page_on_unit_tests_works_without_a_server(tmp_path: Path) -> None:
    for block in blocks_of(TESTING):
        (tmp_path / str(block.file)).write_text(block.code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "Starting a Prefect server" not in done.stdout + done.stderr


def test_the_script_on_the_page_rebuilds_a_checkpoint_without_this_package(tmp_path: Path) -> None:
    write_experiment(tmp_path / "target", "first", [2, 4])
    rebuilt = rebuild(newest_manifest(tmp_path / "target"), tmp_path / "rebuilt")
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert read_files(tmp_path / "rebuilt") == {"model/weights.bin": b"\x04" * 5_000_000, "state.json": b"4"}


@pytest.mark.parametrize("what", ["blobs/*", "checkpoints/*/manifest.json"])
def test_the_script_on_the_page_finds_altered_bytes(tmp_path: Path, what: str) -> None:
    write_experiment(tmp_path / "target", "first", [2])
    (altered,) = tmp_path.glob(f"target/first/1/trials/trial/{what}")
    data = altered.read_bytes()
    altered.chmod(0o644)
    altered.write_bytes(data.replace(b"\x02\x02", b"\x02\x03", 1).replace(b'"attempt":1', b'"attempt":2'))
    rebuilt = rebuild(newest_manifest(tmp_path / "target"), tmp_path / "rebuilt")
    assert rebuilt.returncode != 0
    assert "AssertionError" in rebuilt.stderr


def newest_manifest(target: Path) -> Path:
    manifests = target.glob("first/1/trials/trial/checkpoints/*/manifest.json")
    return max(manifests, key=lambda each: each.parent.name.partition("-")[2])


def rebuild(manifest: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run the page's script as a user would, in an interpreter that cannot import this package."""
    write_files(directory.parent, {"rebuild.py": the_block(LAYOUT, "python").code.encode()})
    forbid = "import runpy, sys; sys.modules['prefect_tune'] = None; sys.argv = sys.argv[1:]; "
    run = "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", forbid + run, str(directory.parent / "rebuild.py"), str(manifest), str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )


class Counts(pt.Callback):
    """Has a state to keep."""

    def get_state(self) -> Mapping[str, object]:
        return {"reported": 1}


def noting(config: Mapping[str, object]) -> None:
    """Save, and leave a file of the trial's own."""
    trial = pt.get_trial()
    (trial.directory / "notes.txt").write_text(str(config))
    for step in range(1, 4):
        directory = trial.new_checkpoint_dir()
        (directory / "step").write_text(str(step))
        pt.report({"loss": 1 / step}, checkpoint=pt.Checkpoint.from_directory(directory))


@pytest.mark.usefixtures("no_prefect_server")
def test_all_that_a_search_leaves_on_a_target_is_on_the_page(tmp_path: Path) -> None:
    target = tmp_path / "target"
    space = {"x": pt.grid_search([1, 2])}
    options = {"target": str(target), "experiment": "e", "metric": "loss", "isolation": "thread"}
    results = pt.tune(noting, space, num_samples=1, callbacks=[Counts()], **options)
    checkpoint = results.checkpoint(results.best)
    assert checkpoint is not None
    checkpoint.update_metadata({"seen": True})
    pt.maintain(str(target))
    lines = the_block(LAYOUT, "text").code.split()
    found = {path: [line for line in lines if shape_of(line).fullmatch(path)] for path in read_files(target)}
    assert [path for path, matching in found.items() if len(matching) != 1] == []
    # Not of each search: of one that is stopped, of one that still runs, of one whose trials are elsewhere, of one that
    # writes hundreds of entries, of one without a name in another flow.
    rarely = "requests/|live/|trials/<trial>/(answers|nodes|outbox)/|snapshots/|unnamed-call"
    rare = {line for line in lines if re.match(f"<experiment>/(<generation>/({rarely})|generations/)", line)}
    assert {*lines} - rare <= {matching[0] for matching in found.values()}


def shape_of(line: str) -> re.Pattern[str]:
    """Return what the paths look like that a line of the page stands for: its numbers have as many digits as there."""
    shapes = {"<digest>": "[0-9a-f]{64}"} | dict.fromkeys(("<step>", "<sequence>", "<number>"), r"\d{10}")
    pieces = re.split(r"(<\w+>|\d+)", line)
    return re.compile(
        "".join(_shape(each, shapes) if number % 2 else re.escape(each) for number, each in enumerate(pieces))
    )


def _shape(piece: str, shapes: Mapping[str, str]) -> str:
    return rf"\d{{{len(piece)}}}" if piece.isdecimal() else shapes.get(piece, "[^/]+")


# The examples in docstrings.

EXAMPLES = {
    str(path.relative_to(ROOT)): examples
    for room in ("src", "flows", "tasks", "blocks")
    for path in sorted((ROOT / room).rglob("*.py"))
    if (examples := [block.code for block in blocks_of(path) if block.language == "python"])
}
NOT_IN_THE_LOCK = ("keras", "lightning", "torch", "torch_distributed", "transformers")
IN_A_TRIAL = [file for file in EXAMPLES if re.search("src/.*(lightgbm|xgboost|/trainable).py", file)]
IN_A_FLOW = [file for file in EXAMPLES if file.startswith(("blocks/", "tasks/", "flows/drill"))]
ALONE = [file for file in EXAMPLES if file not in IN_A_FLOW and Path(file).stem not in NOT_IN_THE_LOCK]
INSTEAD = {"s3://bucket/runs/digits/1/trials/best/checkpoints/0000000040-0000000012": "model", "BLOCK_NAME": "saved"}
OPTIONS = (pt.Scheduler, pt.Search, pt.Stopper, pt.Callback, pt.Cadence, pt.Retention, pt.FailurePolicy, pt.S3Target)


def module_of(file: str) -> Any:
    return import_module("prefect_tune." + file.removeprefix("src/prefect_tune/").removesuffix(".py").replace("/", "."))


def run_examples(file: str, **names: Any) -> None:
    """Run the examples of a file from top to bottom: one may use the names of those above it, and of its module."""
    names = {"train": train, "optuna": import_module("optuna"), **vars(module_of(file)), "pt": pt, "numpy": np, **names}
    for code in EXAMPLES[file]:
        exec(re.sub("|".join(INSTEAD), lambda found: INSTEAD[found[0]], code), names)
        if code.startswith("def train("):
            names["train"]({"lr": 0.1})


def train(config: Mapping[str, float]) -> None:
    for step in range(1, 4):
        pt.report({"loss": config["lr"] / step, "accuracy": 0.5}, checkpoint=pt.Checkpoint.from_directory("model"))


def run_in_trial(config: Mapping[str, Any]) -> None:
    module, names = module_of(config["file"]), {}
    if library := getattr(module, "xgb", getattr(module, "lgb", None)):
        make = getattr(library, "DMatrix", None) or partial(library.Dataset, free_raw_data=False)
        data = make(np.arange(800.0).reshape(200, 4), np.arange(200) % 2)
        module._save_booster(library.train({"nthread": 1}, data, 1), "model")
        names = {
            "params": {"verbosity": 0, "nthread": 1},
            "data": data,
            "test": data,
            "checkpoint": pt.Checkpoint("model"),
        }
    run_examples(config["file"], **names)
    assert library or pt.get_trial().attempt == 2  # which has a checkpoint


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    np.savez("model/weights.npz", step=1)


@pytest.mark.parametrize("file", [pytest.param(it, marks=[pytest.mark.long] * ("flows/" in it)) for it in ALONE])
@pytest.mark.usefixtures("model", "no_prefect_server")
def test_the_examples_of_docstrings_run(file: str) -> None:
    options: dict[str, Any] = {"target": "runs", "isolation": "thread"}
    if file in IN_A_TRIAL:
        options |= {"failures": pt.FailurePolicy(max_failures=1), "checkpoint": pt.Cadence(every_steps=10)}
        pt.durable_trainable(run_in_trial, {"file": file}, experiment="trial", **options)
    else:
        space = {"lr": pt.loguniform(1e-4, 0.1), "layers": pt.choice([1, 2])}
        options |= {"experiment": "digits", "metric": "loss", "num_samples": 5}
        run_examples(file, results=pt.tune(train, space, **options) if '"runs"' in str(EXAMPLES[file]) else None)


@pytest.mark.long
@pytest.mark.parametrize("file", IN_A_FLOW)
@pytest.mark.usefixtures("model", "prefect_server")
def test_the_examples_of_docstrings_run_in_a_flow(file: str) -> None:
    fields = {"path": "/runs", **dict.fromkeys(("bucket", "container", "account"), "runs"), "location": "memory://runs"}
    for kind in (pt.AzureTarget, pt.FsspecTarget, pt.GcsTarget, pt.LocalTarget, pt.S3Target, pt.SyncConfig):
        kind(**{name: fields[name] for name in fields.keys() & kind.model_fields.keys()}).save("saved", overwrite=True)
    prefect.flow(name="examples")(run_examples)(file)


def test_no_function_and_no_class_with_options_lacks_an_example() -> None:
    assert [(ROOT / file).read_text().count("```python") for file in EXAMPLES] == [*map(len, EXAMPLES.values())]
    for owner in (pt, pt.Results, pt.Checkpoint, *map(module_of, IN_A_TRIAL[:2])):
        for name in {*getattr(owner, "__all__", vars(owner))} - {"Callback", "Decision", "FIFO"}:
            it = getattr(owner, name)
            is_class = isinstance(it, type) and issubclass(it, OPTIONS) and not inspect.isabstract(it)
            if name[0] != "_" and (is_class or (callable(it) and not isinstance(it, type))):
                assert re.search("```python|ee `(uniform|ASHA|Random|MaxSt|FileLo|set_me|Tune)", it.__doc__ or ""), name
