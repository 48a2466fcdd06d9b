"""Scripts that use the package pass mypy --strict and pyright in strict mode, and mistakes in them do not.

Each checker runs once, over all scripts in one folder, with the package as an installation has it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import venv
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.fakes.pages import PAGES, ROOT, blocks_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
]  # so that it begins early: the checkers take a minute of CPU time
Problems: TypeAlias = Mapping[str, Mapping[int, str]]
"""Messages by the name of the script and the line."""

PYTHON = Path(".environment", "bin", "python")
"""Of the environment beside the scripts, in which the package is installed as its users have it."""
NOT_CHECKED = {
    "automations.md": "Prefect's notification block asks for fields that have defaults",
    "integrations.md": "pieces of the scripts in examples/, which are checked",
    "many-processes.md": "pieces of the scripts in examples/, which are checked",
    "kubernetes.md": "it edits JSON, and calls nothing that is typed",
    "storage-layout.md": "it works without this package",
}
UNTYPED = (
    "deepspeed",
    "keras",
    "lightgbm",
    "lightning",
    "optuna",
    "prefect_ray",
    "pyarrow",
    "sklearn",
    "torch",
    "transformers",
    "xgboost",
)
"""Libraries without types, or not installed here: a script that imports one may use its values, which are unknown."""
THEIRS = "# pyright: " + ", ".join(
    f"report{name}=false"
    for name in (
        *(f"Unknown{each}Type" for each in ("Argument", "Lambda", "Member", "Parameter", "Variable")),
        "AttributeAccessIssue",
        "MissingImports",
        "MissingModuleSource",
        "MissingTypeArgument",
        "MissingTypeStubs",
        "UntypedBaseClass",
    )
)

HEREDOC = re.compile(r"^cat > (\S+\.py) <<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)
WRONG = {
    "a misspelt option": 'pt.tune(Walk, target="./runs", experment="e")  # wrong',
    "a wrong word": 'pt.tune(Walk, target="./runs", metric="loss", mode="minimum")  # wrong',
    "a misspelt scheduler": 'pt.tune(Walk, target="./runs", metric="loss", scheduler="ASAH")  # wrong',
    "a misspelt word of resume": 'pt.tune(Walk, target="./runs", resume="always")  # wrong',
    "a wrong type": 'pt.tune(Walk, target="./runs", num_samples="10")  # wrong',
    "a result without this attribute": 'pt.tune(Walk, target="./runs").best_config  # wrong',
    "a state's method of a result": 'pt.tune(Walk, target="./runs").is_completed()  # wrong',
    "an unknown option of a scheduler": 'pt.tune(Walk, target="./runs", scheduler=pt.ASHA(max_steps=9))  # wrong',
    "an unknown field of a value": "pt.Retention(lsat=3)  # wrong",
    "no target": "pt.durable_trainable(Walk)  # wrong",
    "no trainable": 'pt.tune(3, {"pace": 1.0}, target="./runs")  # wrong',
    "a function of two arguments": """
        def train(config: dict[str, float], data: str) -> None: ...
        pt.tune(train, target="./runs")  # wrong
    """,
    "what save_checkpoint returns": """
        class Wrong(Walk):
            def save_checkpoint(self, checkpoint_dir: str) -> int:  # wrong
                return 3
    """,
    "what step returns": """
        class Wrong(Walk):
            def step(self) -> float:  # wrong
                return 0.5
    """,
    "metrics that are a number": "pt.report(0.5)  # wrong",
    "a checkpoint that may be missing": """
        result = pt.durable_trainable(Walk, target="./runs")
        result.checkpoint.to_directory("d")  # wrong
    """,
    "a misspelt option of resume": 'pt.resume("e", target="./runs", rerun_error=True)  # wrong',
    "a misspelt option of maintain": 'pt.maintain("./runs", dryrun=True)  # wrong',
    "a misspelt option of a task": 'pt.run_trial(Walk, target="./runs", experiment="e", trail="a")  # wrong',
    "a submitted task's misspelt option": 'pt.delete_checkpoint.submit(target="./a", experiment="e", stpe=1)  # wrong',
    "a task's result without this attribute": """
        from prefect import flow

        @flow
        def train() -> None:
            future = pt.save_checkpoint.submit("d", target="./runs", experiment="e", step=1, wait_for=[])
            print(future.result().path)  # wrong
    """,
}
WALK = """
import prefect_tune as pt

class Walk(pt.Trainable):
    def setup(self, config: dict[str, float]) -> None:
        self.pace = config["pace"]

    def step(self) -> dict[str, float]:
        return {"loss": self.pace}

"""
ACCEPTED = """
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prefect_tune as pt
from typing_extensions import assert_type


@dataclass
class Space:
    pace: object
    layers: int = 3


class OfAny(pt.Trainable):
    def setup(self, config: dict[str, Any]) -> None:
        self.pace: float = config["pace"]

    def step(self) -> Mapping[str, object]:
        return {"loss": self.pace}


class OfMapping(OfAny):
    def setup(self, config: Mapping[str, float]) -> None:
        self.pace = config["pace"]

    def reset_config(self, config: Mapping[str, float]) -> bool:
        self.setup(config)
        return True


def train(config: Mapping[str, float]) -> None:
    pt.report({"loss": config["pace"] * pt.get_trial().config["layers"]})


def is_good(config: dict[str, float]) -> bool:
    results = pt.tune(OfAny, config, target=Path("runs"), stop=lambda metrics: metrics["loss"] < 0.1)
    loss: float = results.best.metrics["loss"]
    return loss < 0.1


limits = {"step": 100, "accuracy": 0.95}
loggers = [pt.FileLogger("./logs", "json")]
cores = {"cpu": 2}
results = pt.tune(
    train,
    Space(pt.uniform(0, 1)),
    target="./runs",
    metric=["loss", "accuracy"],
    mode=["min", "max"],
    stop=limits,
    scheduler={"ASHA": {"max_t": 81}},
    search=pt.RandomSearch(num_samples=3),
    callbacks=loggers,
    resources_per_trial=cores,
)
assert_type(results, pt.Results)
pt.tune("my_project.train:Model", {"pace": {"uniform": [0, 1]}}, target="./runs", callbacks=["my_project.log:Log"])
pt.tune.with_options(name="nightly")(OfMapping, {"pace": pt.uniform(0, 1)}, target=pt.S3Target(bucket="runs"))
result = pt.durable_trainable(OfMapping, Space(0.5), target="./runs", stop=pt.MaxSteps(3))
assert_type(result.checkpoint, pt.Checkpoint | None)
rows = results.to_arrow("reports").num_rows
means = results.to_pandas().groupby("config/pace").mean()
print(rows, means)
assert_type(pt.run_trial(OfAny, Space(0.5), target="./runs", experiment="e"), pt.TrialState)
"""


def right_scripts() -> dict[str, str]:
    """Return the scripts of the pages, of which each is read from top to bottom, and the examples, by name."""
    pages = {
        page.name: imported_once("\n\n".join(block.code for block in blocks_of(page) if block.language == "python"))
        for page in PAGES
        if page.name not in NOT_CHECKED
    }
    heredocs = {
        f"{path} in {page.name}": code
        for page in PAGES
        for path, code in re.findall(
            r"^cat > (\S+\.py) <<'END'\n(.*?)^END$", page.read_text(), re.MULTILINE | re.DOTALL
        )
    }
    examples = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    notebook = json.loads((ROOT / "examples" / "search.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells = [cell for cell in cells if "to_pandas" not in cell]  # pandas' own types are partly unknown
    return {
        "accepted": ACCEPTED,
        **{name: code for name, code in pages.items() if code},
        **heredocs,
        **examples,
        "search.ipynb": "# pyright: reportUnusedExpression=false\n" + "\n\n".join(cells),
    }


def imported_once(code: str) -> str:
    """Return a page's code without imports of what an earlier block imports or defines: some are files of their own."""
    known: set[str] = set()
    lines = []
    for line in code.splitlines():
        start, word, names = line.rpartition("import ")
        if word and line.startswith(("import ", "from ")):
            new = [each for each in names.split(", ") if start + each not in known]
            known.update(start + each for each in names.split(", "))
            new = [each for each in new if f"class {each}" not in known]
            lines.append(f"{start}import {', '.join(new)}" if new else "")
        else:
            known.add(line.partition("(")[0])
            lines.append(line)
    return "\n".join(lines)


RIGHT = right_scripts()


def wrong_script(mistake: str) -> str:
    lines = mistake.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return WALK + "\n".join(line[indent:] for line in lines) + "\n"


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all scripts, and `PYTHON`."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, code in RIGHT.items():
        uses_untyped = any(f"import {each}" in code or f"from {each}" in code for each in UNTYPED)
        (folder / file_of(name)).write_text(f"{THEIRS if uses_untyped else ''}\n{code}\n")
    for name, mistake in WRONG.items():
        (folder / file_of(name)).write_text(wrong_script(mistake))
    place_environment(folder / PYTHON.parts[0])
    return folder


def file_of(name: str) -> str:
    return "".join(each if each.isalnum() else "_" for each in name) + ".py"


def place_environment(folder: Path) -> None:
    """Make a Python that finds the package in a folder of packages, and all else where this Python does."""
    venv.create(folder, with_pip=False, symlinks=True)
    package = folder / "installed" / "prefect_tune"
    package.mkdir(parents=True)
    rooms = [ROOT / room for room in ("flows", "tasks", "blocks")]
    for path in [*(ROOT / "src" / "prefect_tune").iterdir(), *rooms]:
        (package / path.name).symlink_to(path)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "installed.pth").write_text(f"{package.parent}\n{sysconfig.get_path('purelib')}\n")


def lines_of(found: str) -> list[int]:
    return [number for number, line in enumerate(found.splitlines(), 1) if "# wrong" in line]


@pytest.fixture(scope="module")
def mypy(scripts: Path) -> Problems:
    """What `mypy --strict` reports."""
    (scripts / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\ndisallow_subclassing_any = False\npython_executable = {scripts / PYTHON}\n"
        + "".join(f"[mypy-{each}.*]\nignore_missing_imports = True\n" for each in UNTYPED)
    )
    command = [sys.executable, "-m", "mypy", "--output=json", "."]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for each in map(json.loads, done.stdout.splitlines()):
        if each["severity"] == "error":
            found[Path(each["file"]).name][each["line"]] = each["message"]
    return found


@pytest.fixture(scope="module")
def pyright(scripts: Path) -> Problems:
    """What pyright reports in strict mode."""
    (scripts / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict", "exclude": [".environment"]}))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", str(scripts / PYTHON), "--outputjson"]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, check=False)
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            found[Path(each["file"]).name][each["range"]["start"]["line"] + 1] = each["message"]
    return found


@pytest.mark.parametrize("script", RIGHT)
def test_a_script_of_the_documentation_passes_both_checkers(script: str, mypy: Problems, pyright: Problems) -> None:
    assert (mypy.get(file_of(script), {}), pyright.get(file_of(script), {})) == ({}, {})


@pytest.mark.parametrize("script", WRONG)
def test_a_mistake_fails_with_both_checkers_at_its_line(script: str, mypy: Problems, pyright: Problems) -> None:
    expected = lines_of(wrong_script(WRONG[script]))
    assert len(expected) == 1
    assert (list(mypy.get(file_of(script), {})), list(pyright.get(file_of(script), {}))) == (expected, expected)
