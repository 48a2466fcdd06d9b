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
"""The pages whose Python and Bash run unchanged, from top to bottom, in an empty folder."""
NOT_RUN = {
    **dict.fromkeys(("make demo", "make test"), "tests/demo, and this suite"),
    "pip install '.[server]'": "installed here; tests/test_packaging.py installs what is built",
    "pip install 'prefect-tune[server]'": "not released yet; tests/test_packaging.py installs what is built",
    'dask worker tcp://scheduler:8786 --nthreads 4 --resources "GPU=4" --preload prefect_tune.tasks': (
        "needs a Dask scheduler on a machine of that name; tools/repository_checks.py lets Dask parse it"
    ),
}
"""The lines of Bash that are skipped when a page is run, and why."""
MINIO = "http://minio.example.com:9000"
"""An address on a page, which the address of moto's S3 server replaces."""
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


def get_block(page: Path, language: str, number: int = 0) -> Block:
    return [block for block in blocks_of(page) if block.language == language][number]


def test_each_block_of_a_page_is_run_or_listed_with_the_reason() -> None:
    blocks = [(page, block) for page in PAGES for block in blocks_of(page)]
    listed = {*TESTED_ELSEWHERE, *UNTESTED}
    run = {(page, language) for page in list_run_pages() for language in ("python", "bash")}
    others = [block for page, block in blocks if (page, block.language) not in run | listed]
    assert [block for block in others if drop_skipped_lines(block).strip()] == []
    assert listed <= {(page, block.language) for page, block in blocks}
    assert set(NOT_RUN) <= {line for _, block in blocks for line in block.code.splitlines()}
    assert set(CHECKS) | set(PREPARATIONS) <= list_run_pages()


def list_run_pages() -> set[Path]:
    return {case.values[0] for case in RUN if isinstance(case.values[0], Path)}


def drop_skipped_lines(block: Block) -> str:
    """Return the code without the lines that are not run."""
    if block.language != "bash":
        return block.code
    return "\n".join(line for line in block.code.splitlines() if line not in NOT_RUN)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_a_page_works_as_it_stands_from_top_to_bottom(page: Path, prefect_server: str, tmp_path: Path) -> None:
    PREPARATIONS.get(page, lambda _: None)(tmp_path)
    blocks = [block for block in blocks_of(page) if block.language in {"python", "bash"}]
    environment = {"PREFECT_API_URL": prefect_server, "PYTHONPATH": ""}  # no page says to set it
    with serving_bucket() if page == OBJECT_STORES else nullcontext(MINIO) as url:
        blocks = [replace(block, code=drop_skipped_lines(block).replace(MINIO, url)) for block in blocks]
        process = run_blocks(blocks, tmp_path, environment)
    uninstall_automations()
    assert process.returncode == 0, process.stdout
    CHECKS.get(page, lambda _, __: None)(process.stdout, tmp_path)


@contextmanager
def serving_bucket() -> Iterator[str]:
    with moto_server() as url:
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
        boto3.Session().client("s3", endpoint_url=url, **keys).create_bucket(Bucket="runs")
        yield url


def prepare_spaces(folder: Path) -> None:
    (folder / "space.json").write_text(get_block(SPACES, "json").code)


def prepare_maintain(folder: Path) -> None:
    write_experiment(folder / "runs", "first", [20, 40], quarantined=(40,))
    write_experiment(folder / "runs", "nightly-1", [1, 2])


PREPARATIONS = {SPACES: prepare_spaces, MAINTAIN: prepare_maintain}
"""Functions that create the files that a page expects."""


def check_readme(printed: str, folder: Path) -> None:
    assert (folder / "runs" / "net").is_dir()
    *blocks, drill_block = [block for block in blocks_of(README) if block.language == "text"]
    assert "✓ exact: the run that was killed 2 times equals the undisturbed run; 8 metric values" in drill_block.code
    assert "exact: the run that was killed 2 times equals the undisturbed run" in printed
    output = " ".join(printed.split())
    lines = [line for block in blocks for line in block.code.splitlines() if line != "…"]
    assert [line for line in lines if not contains_line(output, line)] == []


def contains_line(output: str, line: str) -> bool:
    """Return whether the output has a line of the page, but for folders, times and the order of trials."""
    pattern = re.escape(" ".join(line.split())).replace("/home/me", r"\S*").replace(r"after\ 2\ s", r"after\ \d+\ s")
    pattern = pattern.replace(r"1\ completed,\ 9\ pruned", r"\d\ completed,\ \d\ pruned")
    pattern = re.sub(r"(/checkpoints/\d{10}\\-)\d{10}", r"\1\\d{10}", pattern)
    return re.search(pattern, output) is not None


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
    pattern = r"^((\d+) of (\d+)) proposals and decisions derived again$"
    (first, *_rest), *sampled = re.findall(pattern, printed, re.MULTILINE)
    assert first.split(" of ")[0] == first.split(" of ")[1]
    assert [int(count) - int(derived) for _, derived, count in sampled] == [6, 0]


def check_maintain(printed: str, _: Path) -> None:
    assert "step 40: 4.77 MiB in 2 files, intact" in printed


def check_deployments(printed: str, _: Path) -> None:
    assert "runs at 0 2 * * * Europe/Berlin" in printed
    assert "created  maintain/daily" in printed


def check_own_flows(printed: str, folder: Path) -> None:
    """At most the step whose save was killed is trained twice, and the result is that of a run without a kill."""
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
    output = " ".join(printed.split())
    lines = [line for block in blocks_of(DRILL) if block.language == "text" for line in block.code.splitlines()]
    assert [line for line in lines if " ".join(line.split()) not in output] == []


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
"""Checks of the output that a page promises."""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_recipe_for_dask_works_as_a_script_that_its_processes_import_again(
    prefect_server: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(get_block(RECIPES / "dask.md", "python").code)
    process = run_blocks([Block("bash", "python script.py")], tmp_path, {"PREFECT_API_URL": prefect_server})
    assert process.returncode == 0, process.stdout


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_recipe_for_ray_works_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    pytest.importorskip("prefect_ray")  # pip install 'prefect-tune[ray]': a hundred megabytes
    code = [block for block in blocks_of(RECIPES / "ray.md") if block.language == "python"]
    process = run_blocks(code, tmp_path, {"PREFECT_API_URL": prefect_server})
    assert process.returncode == 0, process.stdout


@pytest.mark.long
def test_the_page_on_unit_tests_works_without_a_server(tmp_path: Path) -> None:
    for block in blocks_of(TESTING):
        (tmp_path / str(block.file)).write_text(block.code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "."]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in process.stdout, process.stdout + process.stderr
    assert "Starting a Prefect server" not in process.stdout + process.stderr


def test_the_script_on_the_page_rebuilds_a_checkpoint_without_this_package(tmp_path: Path) -> None:
    write_experiment(tmp_path / "target", "first", [2, 4])
    rebuilt = rebuild_checkpoint(find_newest_manifest(tmp_path / "target"), tmp_path / "rebuilt")
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert read_files(tmp_path / "rebuilt") == {"model/weights.bin": b"\x04" * 5_000_000, "state.json": b"4"}


@pytest.mark.parametrize("what", ["blobs/*", "checkpoints/*/manifest.json"])
def test_the_script_on_the_page_finds_altered_bytes(tmp_path: Path, what: str) -> None:
    write_experiment(tmp_path / "target", "first", [2])
    (altered,) = tmp_path.glob(f"target/first/1/trials/trial/{what}")
    data = altered.read_bytes()
    altered.chmod(0o644)
    altered.write_bytes(data.replace(b"\x02\x02", b"\x02\x03", 1).replace(b'"attempt":1', b'"attempt":2'))
    rebuilt = rebuild_checkpoint(find_newest_manifest(tmp_path / "target"), tmp_path / "rebuilt")
    assert rebuilt.returncode != 0
    assert "AssertionError" in rebuilt.stderr


def find_newest_manifest(target: Path) -> Path:
    manifests = target.glob("first/1/trials/trial/checkpoints/*/manifest.json")
    return max(manifests, key=lambda path: path.parent.name.partition("-")[2])


def rebuild_checkpoint(manifest: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run the page's script as a user would, in an interpreter that cannot import this package."""
    write_files(directory.parent, {"rebuild.py": get_block(LAYOUT, "python").code.encode()})
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


def save_with_notes(config: Mapping[str, object]) -> None:
    """Save checkpoints, and write a file into the trial's directory."""
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
    results = pt.tune(save_with_notes, space, num_samples=1, callbacks=[Counts()], **options)
    checkpoint = results.checkpoint(results.best)
    assert checkpoint is not None
    checkpoint.update_metadata({"seen": True})
    pt.maintain(str(target))
    lines = get_block(LAYOUT, "text").code.split()
    patterns = {line: make_path_pattern(line) for line in lines}
    matches = {path: [line for line in lines if patterns[line].fullmatch(path)] for path in read_files(target)}
    assert [path for path, matching in matches.items() if len(matching) != 1] == []
    # Only stopped, running, remote or long searches leave these, and searches without a name in another flow.
    rarely = "requests/|live/|trials/<trial>/(answers|nodes|outbox)/|snapshots/|unnamed-call"
    rare = {line for line in lines if re.match(f"<experiment>/(<generation>/({rarely})|generations/)", line)}
    assert {*lines} - rare <= {matching[0] for matching in matches.values()}


def make_path_pattern(line: str) -> re.Pattern[str]:
    """Return a pattern of the paths that a line of the page describes: its numbers have as many digits."""
    shapes = {"<digest>": "[0-9a-f]{64}"} | dict.fromkeys(("<step>", "<sequence>", "<number>"), r"\d{10}")
    pieces = re.split(r"(<\w+>|\d+)", line)
    for index, piece in enumerate(pieces):
        shape = rf"\d{{{len(piece)}}}" if piece.isdecimal() else shapes.get(piece, "[^/]+")
        pieces[index] = shape if index % 2 else re.escape(piece)
    return re.compile("".join(pieces))


# The examples in docstrings.

EXAMPLES = {
    str(path.relative_to(ROOT)): examples
    for folder in ("src", "flows", "tasks", "blocks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if (examples := [block.code for block in blocks_of(path) if block.language == "python"])
}
NOT_IN_THE_LOCK = ("keras", "lightning", "torch", "torch_distributed", "transformers")
IN_A_TRIAL = [file for file in EXAMPLES if re.search("src/.*(lightgbm|xgboost|/trainable).py", file)]
IN_A_FLOW = [file for file in EXAMPLES if file.startswith(("blocks/", "tasks/", "flows/drill"))]
ALONE = [file for file in EXAMPLES if file not in IN_A_FLOW and Path(file).stem not in NOT_IN_THE_LOCK]
INSTEAD = {"s3://bucket/runs/digits/1/trials/best/checkpoints/0000000040-0000000012": "model", "BLOCK_NAME": "saved"}
OPTIONS = (pt.Scheduler, pt.Search, pt.Stopper, pt.Callback, pt.Cadence, pt.Retention, pt.FailurePolicy, pt.S3Target)


def import_file(file: str) -> Any:
    return import_module("prefect_tune." + file.removeprefix("src/prefect_tune/").removesuffix(".py").replace("/", "."))


def run_examples(file: str, **names: Any) -> None:
    """Run the examples of a file in their order; they share their names, and those of the module."""
    imports = {"optuna": import_module("optuna"), **vars(import_file(file)), "pt": pt, "numpy": np}
    names = {"train": train, **imports, **names}
    for code in EXAMPLES[file]:
        exec(re.sub("|".join(INSTEAD), lambda match: INSTEAD[match[0]], code), names)
        if code.startswith("def train("):
            names["train"]({"lr": 0.1})


def train(config: Mapping[str, float]) -> None:
    for step in range(1, 4):
        pt.report({"loss": config["lr"] / step, "accuracy": 0.5}, checkpoint=pt.Checkpoint.from_directory("model"))


def run_in_trial(config: Mapping[str, Any]) -> None:
    module, names = import_file(config["file"]), {}
    if library := getattr(module, "xgb", getattr(module, "lgb", None)):
        make = getattr(library, "DMatrix", None) or partial(library.Dataset, free_raw_data=False)
        data = make(np.arange(800.0).reshape(200, 4), np.arange(200) % 2)
        module._save_booster(library.train({"nthread": 1}, data, 1), "model")
        names = {"params": {"verbosity": 0, "nthread": 1}, "data": data, "test": data}
        names["checkpoint"] = pt.Checkpoint("model")
    run_examples(config["file"], **names)
    assert library or pt.get_trial().attempt == 2  # which has a checkpoint


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    np.savez("model/weights.npz", step=1)


@pytest.mark.parametrize("file", [pytest.param(file, marks=[pytest.mark.long] * ("flows/" in file)) for file in ALONE])
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
    for owner in (pt, pt.Results, pt.Checkpoint, *map(import_file, IN_A_TRIAL[:2])):
        for name in {*getattr(owner, "__all__", vars(owner))} - {"Callback", "Decision", "FIFO"}:
            value = getattr(owner, name)
            is_class = isinstance(value, type) and issubclass(value, OPTIONS) and not inspect.isabstract(value)
            if name[0] != "_" and (is_class or (callable(value) and not isinstance(value, type))):
                example = "```python|ee `(uniform|ASHA|Random|MaxSt|FileLo|set_me|Tune)|has an example"
                assert re.search(example, value.__doc__ or ""), name
