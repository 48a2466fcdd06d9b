"""The examples of the documentation run, and its claims are true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from datetime import timedelta
from inspect import signature
from pathlib import Path
from zipfile import ZipFile

import pytest

import prefect_tune as pt
from prefect_tune import loggers
from prefect_tune.core.checkpoints.manifest import Manifest
from prefect_tune.core.experiment.stoppers import ExperimentStopper, of_experiment
from prefect_tune.core.journal_events import Entry
from prefect_tune.core.search import space_json
from prefect_tune.core.storage import layout
from prefect_tune.deploy.automations import shipped, uninstall_automations
from prefect_tune.flows.tune import tune
from prefect_tune.parameters.argument_checks import stopper_for
from prefect_tune.registry import BUILT_IN
from tests.fakes.checkpoints import files_in, write
from tests.fakes.event_table import events_table, journal_events_table
from tests.fakes.pages import PAGES, ROOT, Block, blocks_of, run_blocks
from tests.fakes.searches.experiments import write_experiment

README = ROOT / "README.md"
START = ROOT / "docs" / "start.md"
RECIPES = ROOT / "docs" / "recipes"
LAYOUT = ROOT / "docs" / "storage-layout.md"
SPACES = ROOT / "docs" / "search-spaces.md"
SCHEDULERS = ROOT / "docs" / "schedulers.md"
OPTUNA = ROOT / "docs" / "optuna.md"
RESULTS = ROOT / "docs" / "results.md"
CLI = ROOT / "docs" / "cli.md"
SEARCHES = ROOT / "docs" / "searches.md"
RESUME = ROOT / "docs" / "resume.md"
INTEGRATIONS = ROOT / "docs" / "integrations.md"
EVENTS = ROOT / "docs" / "events.md"
AUTOMATIONS = ROOT / "docs" / "automations.md"
STOPPING = ROOT / "docs" / "stopping.md"
MANY_PROCESSES = ROOT / "docs" / "many-processes.md"
WHERE_TRIALS_RUN = ROOT / "docs" / "where-trials-run.md"
FROM_OPTUNA = ROOT / "docs" / "from-optuna.md"
FROM_RAY_TUNE = ROOT / "docs" / "from-ray-tune.md"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
MAINTAIN = ROOT / "docs" / "maintain.md"
COST = ROOT / "docs" / "cost.md"
DRILL = ROOT / "docs" / "drill.md"
AUDIT = ROOT / "docs" / "audit.md"
DEPLOYMENTS = ROOT / "docs" / "deployments.md"
TRUST = ROOT / "docs" / "trust.md"
OWN_FLOWS = ROOT / "docs" / "own-flows.md"
TESTING = ROOT / "docs" / "testing.md"
TESTED = {
    README: {"python", "bash", "text"},
    START: {"python", "bash"},
    LAYOUT: {"python", "json", "text"},
    SPACES: {"python", "json"},
    SCHEDULERS: {"python"},
    OPTUNA: {"python"},
    STOPPING: {"python", "json", "bash"},
    RESULTS: {"python"},
    CLI: {"bash"},  # by tests/cli/test_page.py
    SEARCHES: {"python"},
    WHERE_TRIALS_RUN: {"python"},
    FROM_OPTUNA: {"python"},
    FROM_RAY_TUNE: {"python"},
    CHECKPOINTS: {"python"},
    INTEGRATIONS: {"python"},
    MANY_PROCESSES: {"python"},
    MAINTAIN: {"python", "bash"},
    # By tests/test_recipes.py:
    RECIPES / "object-stores.md": {"python", "bash", "json"},
    RECIPES / "kubernetes.md": {"python", "bash", "yaml"},
    RECIPES / "spot-instances.md": {"python", "yaml"},
    RECIPES / "dask.md": {"python", "bash"},
    RECIPES / "ray.md": {"python"},
    AUTOMATIONS: {"python"},
    DEPLOYMENTS: {"python", "bash", "json", "toml"},  # json: in tests/deploy/test_deployment_parameters.py
    RESUME: {"bash", "python"},
    OWN_FLOWS: {"python", "bash", "text"},
    COST: {"python"},
    DRILL: {"python", "bash", "text"},
    AUDIT: {"python", "bash"},
    TESTING: {"python"},
    TRUST: {"text"},  # in tests/flows/searching/test_trust.py
}
every_scheduler = pytest.mark.parametrize("scheduler", [getattr(pt, name) for name in BUILT_IN["scheduler"]])
UNTESTED = {
    (START, "text"): "what a command prints",
    (MANY_PROCESSES, "text"): "a drawing",
    (SCHEDULERS, "text"): "three lines for PyTorch, which the lock does not hold",
    (FROM_RAY_TUNE, "text"): "code for Ray Tune, which the lock does not hold",
    (RECIPES / "kubernetes.md", "text"): "a Dockerfile: there is no container engine, and no registry",
}
NOT_RUN = {
    "pip install '.[server]'": "installed here; tests/test_packaging.py installs what is built",
    "pip install 'prefect-tune[server]'": "not released yet; tests/test_packaging.py installs what is built",
}
"""Lines of Bash that are left out when a page is run, and why."""


def the_block(page: Path, language: str, number: int = 0) -> Block:
    return [block for block in blocks_of(page) if block.language == language][number]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_code_that_no_test_here_runs(page: Path) -> None:
    untested = {language for where, language in UNTESTED if where == page}
    assert {block.language for block in blocks_of(page)} <= TESTED.get(page, set()) | untested


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_readme_and_the_first_page_work_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    (tmp_path / "prefect.yaml").symlink_to(ROOT / "prefect.yaml")
    (tmp_path / "first_search.py").write_text(the_block(README, "python").code)
    runs = [each for page in (START, README) for each in blocks_of(page) if each.language in ("python", "bash")]
    runs = [Block(each.language, without(NOT_RUN, each.code)) for each in runs]
    done = run_blocks(runs, tmp_path, {"PREFECT_API_URL": prefect_server, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout
    assert "{'rate': 0.7105" in done.stdout
    assert re.search(r"^00001  completed  27    \S+  0.710535", done.stdout, re.MULTILINE)  # as on the page
    assert re.search(r"^50 0\.000\d+ Checkpoint\(", done.stdout, re.MULTILINE), done.stdout
    assert "durable-trainable/durable-trainable" in done.stdout
    assert list(files_in(tmp_path / "plain-directory")) == ["x"]
    *printed, drilled = [each for each in blocks_of(README) if each.language == "text"]
    assert "✓ exact: the run that was killed 2 times is the same; 8 metric values" in drilled.code
    assert "exact: the run that was killed 2 times is the same" in done.stdout
    seen = " ".join(done.stdout.split())
    missing = [line for each in printed for line in each.code.splitlines() if line != "…" and not is_in(seen, line)]
    assert missing == []


def is_in(seen: str, line: str) -> bool:
    """Whether the output has a line as the page shows it: in another folder, in another time, in another order.

    The order in which trials are promoted says in how many parts a trial trained, so the number of its commits, too.
    """
    pattern = re.escape(" ".join(line.split())).replace("/home/me", r"\S*").replace(r"after\ 2\ s", r"after\ \d+\ s")
    pattern = pattern.replace(r"1\ completed,\ 9\ pruned", r"\d\ completed,\ \d\ pruned")
    pattern = re.sub(r"(/checkpoints/\d{10}\\-)\d{10}", r"\1\\d{10}", pattern)
    return re.search(pattern, seen) is not None


def without(lines: Collection[str], code: str) -> str:
    return "\n".join(line for line in code.splitlines() if line not in lines)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "page",
    [SEARCHES, WHERE_TRIALS_RUN, FROM_OPTUNA, FROM_RAY_TUNE, CHECKPOINTS, RESULTS, COST, OPTUNA, SCHEDULERS],
    ids=lambda page: page.name,
)
def test_each_page_on_searches_and_results_works_from_top_to_bottom(
    page: Path, prefect_server: str, tmp_path: Path
) -> None:
    runs = [block for block in blocks_of(page) if block.language == "python"]
    done = run_blocks(runs, tmp_path, {"PREFECT_API_URL": prefect_server})
    assert done.returncode == 0, done.stdout


@pytest.mark.deep
def test_the_page_on_flows_of_ones_own_works_and_its_flow_survives_a_kill(prefect_server: str, tmp_path: Path) -> None:
    descent, *rest = blocks_of(OWN_FLOWS)
    (tmp_path / "descent.py").write_text(descent.code)
    shown = next(each.code for each in rest if each.language == "text")
    code = [each for each in rest if each.language != "text"]
    done = run_blocks(code, tmp_path, {"PREFECT_API_URL": prefect_server})
    assert done.returncode == 0, done.stdout
    assert {" ".join(line.split()) for line in shown.splitlines()} <= {
        " ".join(x.split()) for x in done.stdout.splitlines()
    }
    trained = [int(step) for step in re.findall(r"trained step (\d+)", done.stdout)]
    assert sorted(set(trained)) == list(range(1, 41))
    assert len(trained) <= 41  # at most the step whose save was killed is trained twice
    target = f"file://{tmp_path / 'runs'}"
    restored = pt.restore_checkpoint.fn(target=target, experiment="descent", trial="slow")
    assert restored is not None
    x = 8.0
    for _ in range(40):
        x *= 0.9  # as without the kill
    assert json.loads((restored.directory / "state.json").read_text()) == {"x": x}


@pytest.mark.long
def test_the_page_on_audits_works_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    done = run_blocks(blocks_of(AUDIT), tmp_path, {"PREFECT_API_URL": prefect_server, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout
    (first, *_), *sampled = re.findall(
        r"^((\d+) of (\d+)) proposals and decisions derived again$", done.stdout, re.MULTILINE
    )
    assert first.split(" of ")[0] == first.split(" of ")[1]
    assert [int(count) - int(derived) for _, derived, count in sampled] == [6, 0]


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_page_on_drills_works_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    net, forgets, said_wrong, mended, exact, said_exact, *rest = blocks_of(DRILL)
    (tmp_path / "train.py").write_text(net.code)
    (tmp_path / "mended.py").write_text(mended.code)
    shown = f"{said_wrong.code}\n{said_exact.code}"
    code = [forgets, exact, *rest]
    done = run_blocks(code, tmp_path, {"PREFECT_API_URL": prefect_server, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout
    seen = " ".join(done.stdout.split())
    assert [line for line in shown.splitlines() if " ".join(line.split()) not in seen] == []


@pytest.mark.long
def test_the_page_on_unit_tests_works_without_a_server(tmp_path: Path) -> None:
    for name, block in zip(["conftest.py", "test_search.py"], blocks_of(TESTING), strict=True):
        (tmp_path / name).write_text(block.code)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "Starting a Prefect server" not in done.stdout + done.stderr


@pytest.mark.long
def test_the_page_on_automations_works_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    done = run_blocks(blocks_of(AUTOMATIONS), tmp_path, {"PREFECT_API_URL": prefect_server})
    uninstall_automations()
    assert done.returncode == 0, done.stdout


def test_the_page_on_automations_names_each() -> None:
    named = re.findall(r"^\| `(prefect-tune: [^`]*)`", AUTOMATIONS.read_text(), re.MULTILINE)
    assert named == list(shipped(timedelta(seconds=90)))


def test_the_page_on_events_has_every_event_with_all_that_it_says() -> None:
    assert events_table() in EVENTS.read_text()


@pytest.mark.deep
@pytest.mark.timeout(400)
def test_the_page_on_deployments_works_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    environment = {"PREFECT_API_URL": prefect_server, "PYTHONPATH": str(tmp_path)}
    runs = [each for each in blocks_of(DEPLOYMENTS) if each.language in {"python", "bash"}]
    done = run_blocks(runs, tmp_path, environment)
    assert done.returncode == 0, done.stdout
    assert "runs at 0 2 * * * Europe/Berlin" in done.stdout
    assert "created  maintain/daily" in done.stdout


@pytest.mark.long
def test_the_project_on_the_page_on_deployments_installs_its_trainable(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(the_block(DEPLOYMENTS, "toml").code)
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "train.py").touch()
    # As `pip install -e .` would, but from what is installed here, and not into it.
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "."]
    subprocess.run([sys.executable, *build], cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "my_project/train.py" in ZipFile(wheel).namelist()


@pytest.mark.long
def test_the_page_on_resuming_works_and_its_trainable_asks_and_goes_on_as_it_is_answered(
    prefect_server: str, tmp_path: Path
) -> None:
    asking = [
        "class Session:",
        "    def ask(self, question, fields, key, save):",
        "        return {**fields, 'rate': 0.25}",
        "from prefect_tune.runtime.trainable import enter",
        "enter(Session(), whole_process=False)",
        "careful = Careful()",
        "careful.setup({'rate': 0.5})",
        "for _ in range(4): careful.step()",
        "assert (careful.steps, careful.rate) == (4, 0.25)",
        "careful.save_checkpoint('.')",
        "careful.load_checkpoint('.')",
        "assert (careful.steps, careful.rate) == (4, 0.25)",
    ]
    environment = {"PREFECT_API_URL": prefect_server}
    done = run_blocks([*blocks_of(RESUME), Block("python", "\n".join(asking))], tmp_path, environment)
    assert done.returncode == 0, done.stdout


def test_the_page_on_results_names_every_hook_and_every_logger() -> None:
    page = RESULTS.read_text()
    hooks = {name for name in vars(pt.Callback) if not name.startswith("_")} - {"name"}
    assert hooks <= set(re.findall(r"`(\w+)\(", page[page.index("## Callbacks") :]))
    assert set(loggers.__all__) <= set(re.findall(r"`pt\.(\w+)\(", page[page.index("## Loggers") :]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_public_name_on_a_page_is_there(page: Path) -> None:
    assert set(re.findall(r"\bpt\.(\w+)", page.read_text())) <= set(pt.__all__)


@pytest.mark.parametrize("page", [SEARCHES, WHERE_TRIALS_RUN, RESUME, README], ids=lambda page: page.name)
def test_every_parameter_of_a_search_that_a_page_names_is_there(page: Path) -> None:
    parameters = {*signature(pt.tune.fn).parameters, *signature(pt.resume.fn).parameters}
    named = set(re.findall(r"`(\w+)=", page.read_text())) - {"commit"}  # of SyncConfig
    assert named <= parameters | set(signature(pt.durable_trainable.fn).parameters)


def test_the_page_on_search_spaces_works_from_top_to_bottom(tmp_path: Path) -> None:
    (tmp_path / "space.json").write_text(the_block(SPACES, "json").code)
    runs = [block for block in blocks_of(SPACES) if block.language == "python"]
    done = run_blocks(runs, tmp_path, {})
    assert done.returncode == 0, done.stdout


@pytest.mark.deep
def test_the_page_on_looking_after_a_target_works_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    write_experiment(tmp_path / "runs", "first", [20, 40], quarantined=(40,))
    write_experiment(tmp_path / "runs", "nightly-1", [1, 2])
    done = run_blocks(blocks_of(MAINTAIN), tmp_path, {"PREFECT_API_URL": prefect_server})
    assert done.returncode == 0, done.stdout
    assert "step 40: 4.77 MiB in 2 files, whole" in done.stdout


@pytest.mark.long
def test_the_page_on_stopping_works_from_top_to_bottom(prefect_server: str, tmp_path: Path) -> None:
    runs = [block for block in blocks_of(STOPPING) if block.language != "json"]
    done = run_blocks(runs, tmp_path, {"PREFECT_API_URL": prefect_server})
    assert done.returncode == 0, done.stdout
    assert re.search(r"^trial 00001 .*diverges", done.stdout, re.MULTILINE)
    assert re.search(r"^experiment 'digits' ", done.stdout, re.MULTILINE)


def test_the_page_on_stopping_names_options_and_stoppers_that_there_are() -> None:
    spelled = stopper_for(json.loads(the_block(STOPPING, "json").code))
    assert len(of_experiment(spelled)) == 2
    named = set(re.findall(r"\*\*`(\w+)\(", STOPPING.read_text()))
    assert named == {each.__name__ for each in ExperimentStopper.__subclasses__()}
    options = set(signature(tune.fn).parameters)
    assert set(re.findall(r'`(\w+)=[{\["\d]', STOPPING.read_text())) - {"stop"} <= options


def test_the_page_on_optuna_names_every_sampler_and_pruner() -> None:
    from optuna import pruners, samplers

    every = {*samplers.__all__, *pruners.__all__} - {"BaseSampler", "BaseGASampler", "BasePruner", "nsgaii"}
    assert every <= set(re.findall(r"`(\w+(?:Sampler|Pruner))`", OPTUNA.read_text()))


@every_scheduler
def test_every_option_of_a_scheduler_has_a_line_in_its_docstring(scheduler: type) -> None:
    _, _, lines = str(scheduler.__doc__).partition("Args:\n")
    assert re.findall(r"^ +(\w+): ", lines, re.MULTILINE) == list(signature(scheduler).parameters)


@every_scheduler
def test_the_page_on_schedulers_shows_every_parameter_and_its_default(scheduler: type) -> None:
    page = " ".join(SCHEDULERS.read_text().replace('"', "'").split())
    parameters = [
        re.sub(r": [^=]*", "", str(each)).replace(" ", "") for each in signature(scheduler).parameters.values()
    ]
    shown = ", ".join(parameters).replace("(1.2,0.8)", "(1.2, 0.8)")
    assert f"**`{scheduler.__name__}({shown})`**" in page


def test_the_page_on_search_spaces_names_every_domain() -> None:
    page = SPACES.read_text()
    named = {*re.findall(r"`(\w+)\(", page[page.index("| name |") : page.index("## Conditional")])}
    assert named == set(space_json._FORMS) - {"constant", "space"}


def test_the_script_on_the_page_rebuilds_a_checkpoint_without_this_package(tmp_path: Path) -> None:
    write_experiment(tmp_path / "target", "first", [2, 4])
    rebuilt = rebuild(newest_manifest(tmp_path / "target"), tmp_path / "rebuilt")
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert files_in(tmp_path / "rebuilt") == {"model/weights.bin": b"\x04" * 5_000_000, "state.json": b"4"}


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
    write(directory.parent, {"rebuild.py": the_block(LAYOUT, "python").code.encode()})
    forbid = "import runpy, sys; sys.modules['prefect_tune'] = None; sys.argv = sys.argv[1:]; "
    run = "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", forbid + run, str(directory.parent / "rebuild.py"), str(manifest), str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_paths_on_the_page_are_those_of_the_code() -> None:
    assert the_block(LAYOUT, "text").code.split() == [
        line for line in (layout.__doc__ or "").split() if line.startswith("<experiment>")
    ]


class Counts(pt.Callback):
    """Has a state to keep."""

    def get_state(self) -> Mapping[str, object]:
        return {"reported": 1}


def noting(config: Mapping[str, object]) -> None:
    """Save often enough for a segment of the journal, and leave a file of the trial's own."""
    trial = pt.get_trial()
    (trial.directory / "notes.txt").write_text(str(config))
    for step in range(1, 13):
        directory = trial.new_checkpoint_dir()
        (directory / "step").write_text(str(step))
        pt.report({"loss": 1 / step}, checkpoint=pt.Checkpoint.from_directory(directory))


def test_all_that_a_search_leaves_on_a_target_is_on_the_page(prefect_server: str, tmp_path: Path) -> None:
    assert prefect_server
    target = tmp_path / "target"
    space = {"x": pt.grid_search([1, 2])}
    options = {"target": str(target), "experiment": "e", "metric": "loss", "isolation": "thread"}
    results = pt.tune(noting, space, num_samples=1, callbacks=[Counts()], **options)
    checkpoint = results.checkpoint(results.best)
    assert checkpoint is not None
    checkpoint.update_metadata({"seen": True})
    pt.maintain(str(target))
    lines = the_block(LAYOUT, "text").code.split()
    found = {path: [line for line in lines if shape_of(line).fullmatch(path)] for path in files_in(target)}
    assert [path for path, matching in found.items() if len(matching) != 1] == []
    # Not of each search: of one that is stopped, of one that still runs, of one whose trials are elsewhere, of one that
    # writes ten entries, of one without a name in another flow.
    rarely = "requests/|live/|trials/<trial>/(answers|live|nodes)/|segments/|unnamed-call"
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


def test_the_manifest_on_the_page_is_one_with_every_field() -> None:
    shown = json.loads(the_block(LAYOUT, "json", 1).code)
    assert Manifest.model_validate(shown).model_dump(mode="json") == shown


def test_the_entry_on_the_page_is_one_with_every_field() -> None:
    shown = json.loads(the_block(LAYOUT, "json", 2).code)
    assert Entry.model_validate(shown).model_dump(mode="json") == shown


def test_the_page_names_every_event_and_its_meaning() -> None:
    assert journal_events_table() in LAYOUT.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
    named = re.findall(r"`((?:tests|docs|src|flows|tasks|blocks|benchmarks)/[^`<> ]*)`", page.read_text())
    missing = [each for each in links if not (page.parent / each).exists()]
    missing += [each for each in named if not (ROOT / each.partition("::")[0]).exists()]
    assert missing == []


def test_the_pages_on_frameworks_show_what_the_examples_do_and_name_each() -> None:
    examples = {path.name: dedent_all(path.read_text()) for path in (ROOT / "examples").glob("*.py")}
    assert set(examples) == set(re.findall(r"`examples/(\w+\.py)`", INTEGRATIONS.read_text()))
    shown = [*blocks_of(INTEGRATIONS), *blocks_of(MANY_PROCESSES)]
    for code in [block.code for block in shown if block.language == "python"]:
        assert any(dedent_all(code) in example for example in examples.values()), code


def dedent_all(code: str) -> str:
    """Return the lines without their indentation: a piece of a function is shown without the function."""
    return "\n".join(line.strip() for line in code.strip().splitlines())
