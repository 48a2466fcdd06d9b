"""Check that scripts which use the package pass mypy --strict and pyright in strict mode, and that mistakes do not.

Each checker runs once, over all scripts of the documentation, the examples and `WRONG` in one folder, with the package
as an installation has it. Prints one line per problem; exits with 1 if there is one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import TypeAlias

from tests.fakes.pages import PAGES, ROOT, blocks_of

Problems: TypeAlias = Mapping[str, Mapping[int, str]]
"""Messages by the name of the script and the line."""

PYTHON = Path(".environment", "bin", "python")
"""The Python of the environment in which the package is installed as users have it."""
NOT_CHECKED = {
    "automations.md": "Prefect's notification block asks for fields that have defaults",
    "integrations.md": "pieces of the scripts in examples/, which are checked",
    "many-processes.md": "pieces of the scripts in examples/, which are checked",
    "kubernetes.md": "it edits JSON, and calls nothing that is typed",
    "storage-layout.md": "it works without this package",
}
UNTYPED = (
    *("deepspeed", "keras", "lightgbm", "lightning", "optuna", "prefect_ray", "pyarrow", "sklearn", "torch"),
    *("transformers", "xgboost"),
)
"""Libraries without types, or not installed here: a script that imports one may use its values, which are unknown."""
UNTYPED_SETTINGS = "# pyright: " + ", ".join(
    f"report{name}=false"
    for name in (
        *(f"Unknown{kind}Type" for kind in ("Argument", "Lambda", "Member", "Parameter", "Variable")),
        *(f"Missing{kind}" for kind in ("Imports", "ModuleSource", "TypeArgument", "TypeStubs")),
        *("AttributeAccessIssue", "UntypedBaseClass"),
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


def collect_right_scripts() -> dict[str, str]:
    """Return the scripts of the pages and the examples, by name."""
    pages = {
        page.name: "\n\n".join(block.code for block in blocks_of(page) if block.language == "python")
        for page in PAGES
        if page.name not in NOT_CHECKED
    }
    heredocs = {f"{path} in {page.name}": code for page in PAGES for path, code in HEREDOC.findall(page.read_text())}
    examples = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    notebook = json.loads((ROOT / "examples" / "search.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells = [cell for cell in cells if "to_pandas" not in cell]  # pandas' own types are partly unknown
    return {
        "accepted": ACCEPTED,
        **{name: drop_repeated_imports(code) for name, code in pages.items() if code},
        **heredocs,
        **examples,
        "search.ipynb": "# pyright: reportUnusedExpression=false\n" + "\n\n".join(cells),
    }


def drop_repeated_imports(code: str) -> str:
    """Return a page's code without imports of what an earlier block imports or defines: some are files of their own."""
    seen: set[str] = set()
    lines = []
    for line in code.splitlines():
        start, word, names = line.rpartition("import ")
        if word and line.startswith(("import ", "from ")):
            new = [name for name in names.split(", ") if start + name not in seen]
            seen.update(start + name for name in names.split(", "))
            new = [name for name in new if f"class {name}" not in seen]
            lines.append(f"{start}import {', '.join(new)}" if new else "")
        else:
            seen.add(line.partition("(")[0])
            lines.append(line)
    return "\n".join(lines)


def make_wrong_script(mistake: str) -> str:
    """Return a script with a mistake."""
    return f"{WALK}{dedent(mistake).strip()}\n"


def get_file_name(name: str) -> str:
    """Return the file of a script."""
    return "".join(letter if letter.isalnum() else "_" for letter in name) + ".py"


def create_environment(folder: Path) -> None:
    """Create an environment with the package in its own folder, and all else from this Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    package = folder / "installed" / "prefect_tune"
    package.mkdir(parents=True)
    folders = [ROOT / name for name in ("flows", "tasks", "blocks")]
    for path in [*(ROOT / "src" / "prefect_tune").iterdir(), *folders]:
        (package / path.name).symlink_to(path)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "installed.pth").write_text(f"{package.parent}\n{sysconfig.get_path('purelib')}\n")


def find_mypy_problems(folder: Path) -> Problems:
    """Return the errors of `mypy --strict`, with the overrides of this repository."""
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    skipped = {name for rule in overrides if rule.get("follow_imports") == "skip" for name in rule["module"]}
    settings = {f"{name}.*": "" for name in UNTYPED} | dict.fromkeys(skipped, "follow_imports = skip\n")
    (folder / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\ndisallow_subclassing_any = False\npython_executable = {folder / PYTHON}\n"
        + "".join(f"[mypy-{name}]\nignore_missing_imports = True\n{line}" for name, line in settings.items())
    )
    lines = run_checker(["mypy", f"--cache-dir={os.devnull}", "--output=json", "."], folder).splitlines()
    return group_errors(
        (problem["severity"], problem["file"], problem["line"], problem["message"])
        for problem in map(json.loads, lines)
    )


def find_pyright_problems(folder: Path) -> Problems:
    """Return the errors of pyright in strict mode."""
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict", "exclude": [".environment"]}))
    output = run_checker(["basedpyright", "--pythonpath", str(folder / PYTHON), "--outputjson"], folder)
    problems = json.loads(output)["generalDiagnostics"]
    return group_errors(
        (problem["severity"], problem["file"], problem["range"]["start"]["line"] + 1, problem["message"])
        for problem in problems
    )


def run_checker(command: Sequence[str], folder: Path) -> str:
    """Run a checker, and return its output; it exits with 1 if it has found something."""
    process = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False)
    if process.returncode not in (0, 1):
        sys.exit(process.stdout + process.stderr)
    return process.stdout


def group_errors(problems: Iterable[tuple[str, str, int, str]]) -> Problems:
    """Return the errors among problems by file and line."""
    errors: dict[str, dict[int, str]] = defaultdict(dict)
    for severity, file, line, message in problems:
        if severity == "error":
            errors[Path(file).name][line] = message
    return errors


def main() -> int:
    """Return the exit code."""
    right, wrong = collect_right_scripts(), {name: make_wrong_script(mistake) for name, mistake in WRONG.items()}
    with tempfile.TemporaryDirectory(prefix="prefect-tune-types-") as name:
        folder = Path(name)
        for script, code in right.items():
            uses_untyped = any(f"import {library}" in code or f"from {library}" in code for library in UNTYPED)
            (folder / get_file_name(script)).write_text(f"{UNTYPED_SETTINGS if uses_untyped else ''}\n{code}\n")
        for script, code in wrong.items():
            (folder / get_file_name(script)).write_text(code)
        create_environment(folder / PYTHON.parts[0])
        checked = {"mypy": find_mypy_problems(folder), "pyright": find_pyright_problems(folder)}
    complaints = [
        f"{script}, line {line}: {checker}: {message}"
        for checker, problems in checked.items()
        for script in right
        for line, message in problems.get(get_file_name(script), {}).items()
    ]
    for checker, problems in checked.items():
        for script, code in wrong.items():
            expected = [number for number, line in enumerate(code.splitlines(), 1) if "# wrong" in line]
            if (lines := list(problems.get(get_file_name(script), {}))) != expected:
                complaints.append(f"{script}: {checker} reports lines {lines}, expected {expected}")
    print(*complaints, sep="\n", end="\n" if complaints else "")
    print(f"types: {len(right)} scripts, {len(wrong)} mistakes; {len(complaints)} problems")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
