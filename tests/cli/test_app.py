"""The program itself: its help, `blocks check`, `blocks register`, and the exit codes of `demo` and `drill`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

import prefect_tune as pt
from prefect_tune.cli import load_application
from prefect_tune.cli.app import COMMANDS
from prefect_tune.core.errors import TuneError
from prefect_tune.drills.plan import DrillPlan
from tests.fakes.command_line import Run, run_in_process
from tests.fakes.pages import ROOT
from tests.fakes.searches.experiments import write_search
from tests.long_cases import long_after

NAMES = [name for names in COMMANDS.values() for name in names]
GROUPS = [["blocks", "register"], ["blocks", "check"]]


def run_and_list_imports(*command: object) -> tuple[str, set[str]]:
    """Return what a command prints, and which heavy packages it imports, in a process of its own."""
    code = (
        f"import sys; sys.argv = ['prefect-tune', *{list(map(str, command))}]; from prefect_tune.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*[name for name in ('prefect', 'pyarrow', 'obstore', 'fsspec', 'numpy') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *printed, names = process.stdout.splitlines()
    return "\n".join(printed), set(names.split())


def test_help_waits_neither_for_prefect_nor_for_any_client() -> None:
    printed, imported = run_and_list_imports("--help")
    assert "export" in printed
    assert imported == set()


@pytest.mark.parametrize("command", long_after(1, ["show", "checkpoints", "verify", "gc"]))
def test_an_experiment_in_a_folder_is_read_without_prefect(target: Path, command: str) -> None:
    printed, imported = run_and_list_imports(command, target, "digits")
    assert re.search("6|nothing to collect", printed)
    assert imported == set()


def test_ctrl_c_while_the_commands_are_imported_ends_without_a_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from prefect_tune.cli import main\n"
        "main()\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (-signal.SIGINT, "", "")


def test_a_full_disk_behind_stdout_is_one_line(target: Path) -> None:
    with Path("/dev/full").open("w") as full:
        result = run_in_process("show", target, "digits", stdout=full)
    assert (result.code, result.err) == (1, "prefect-tune: [Errno 28] No space left on device\n")


NAMED_MODULES = [
    ("run here:ABSENT --target TARGET --experiment e", "trainable"),
    ("resume TARGET searched --trainable here:ABSENT", "trainable"),
    ("drill here:ABSENT --target TARGET", "trainable"),
    ("audit TARGET digits --space here:ABSENT", "--space"),
    ("run tests.trainables.moody:Moody --target TARGET --experiment e --callback here:ABSENT", "callback"),
    ("run tests.trainables.moody:Moody --target TARGET --experiment e --metric x --stop here:ABSENT", "stop"),
    (
        'run tests.trainables.moody:Moody --target TARGET --experiment e --set x={"sample_from":"here:ABSENT"}',
        "sample_from",
    ),
    ("audit TARGET digits --search here:ABSENT", "--search"),
    ("audit TARGET digits --scheduler here:ABSENT", "--scheduler"),
    ("audit TARGET digits --stop here:ABSENT", "--stop"),
]
"""Each command with an option that takes MODULE:NAME, and what its message calls the option."""


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize(("command", "option"), long_after(4, NAMED_MODULES))
def test_a_module_in_the_working_directory_is_found_by_every_option_that_takes_one(
    command: str, option: str, run: Run, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here.py").write_text("PRESENT = 1\n")
    write_search(target, "searched", {"00000": 0.5})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "here", raising=False)
    result = run(*command.replace("TARGET", str(target)).split())
    assert result.code in {1, 2}
    assert f"{option} 'here:ABSENT'" in result.err
    assert f"({tmp_path / 'here.py'}) has no 'ABSENT'" in result.err


def test_every_command_that_takes_a_module_is_among_those_tested_with_one_in_the_working_directory() -> None:
    commands = vars(get_command(load_application()))["commands"]
    takers = {
        name
        for name, command in commands.items()
        if any("MODULE:NAME" in f"{option.metavar} {getattr(option, 'help', '')}" for option in command.params)
    }
    assert takers == {command.split()[0] for command, _ in NAMED_MODULES}


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").out == f"prefect-tune {pt.__version__}\n"


def test_the_commands_stand_in_the_order_in_which_they_are_needed(run: Run) -> None:
    assert re.findall(r"^│ (\w+) ", run("--help").out, re.MULTILINE) == NAMES


@pytest.mark.parametrize("command", [[], *([name] for name in NAMES), *GROUPS], ids=" ".join)
def test_the_help_of_each_command_fits_80_columns_whole(run: Run, command: list[str]) -> None:
    result = run(*command, "--help", columns=80)
    assert result.code == 0
    assert "…" not in result.out
    assert "bool" not in result.out.lower(), "a flag takes no value"
    assert max(map(len, result.out.splitlines())) <= 80


def test_a_target_that_works_is_checked_in_one_line(run: Run, tmp_path: Path) -> None:
    result = run("blocks", "check", tmp_path / "target")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith((tmp_path / "target").as_uri())
    assert result.out.count("\n") == 1


def test_the_blocks_are_registered_with_the_server(run: Run, prefect_server: str) -> None:
    import httpx

    targets = ["local-target", "s3-target", "gcs-target", "azure-target", "fsspec-target"]
    assert run("blocks", "register").out.split() == [*targets, "sync-config"]
    block_types = httpx.post(f"{prefect_server}/block_types/filter", json={}).json()
    assert {"local-target", "sync-config"} <= {block_type["slug"] for block_type in block_types}


@dataclass
class _Report:
    is_exact: bool

    def fields(self) -> dict[str, object]:
        return {"is_exact": self.is_exact}


@pytest.mark.parametrize("command", [["demo"], ["drill", "my.module:Net", "--config", "width=3", "--at", "2,5"]])
@pytest.mark.parametrize(("is_exact", "code"), [(True, 0), (False, 1)])
def test_a_drill_ends_with_0_only_if_the_runs_are_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str], *, is_exact: bool, code: int
) -> None:
    plans: list[DrillPlan] = []

    def run_drill(plan: DrillPlan, *_: object, **__: object) -> _Report:
        plans.append(plan)
        return _Report(is_exact)

    monkeypatch.setattr("prefect_tune.drills.run_drill.run_drill_in_terminal", run_drill)
    assert run(*command).code == code
    if command[0] == "drill":
        (plan,) = plans
        assert (plan.trainable, plan.config) == ("my.module:Net", {"width": 3})
        assert [step for step, _ in plan.kills] == [2, 5]
        assert json.loads(run(*command, "--json").out) == {"is_exact": is_exact}


def test_a_drill_that_could_not_run_ends_with_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(*_: object, **__: object) -> None:
        raise TuneError("run 'undisturbed' of the drill ended with exit code 1")

    monkeypatch.setattr("prefect_tune.drills.run_drill.run_drill_in_terminal", raise_error)
    assert run("drill", "my.module:Net").code == 2
    result = run("drill", "my.module:Net", "--at", "a")
    assert result.err.startswith("prefect-tune: --at 'a': expected steps, such as 3,7")


def test_the_page_names_every_command(run: Run) -> None:
    names = set(re.findall(r"^│ (\w+) +[A-Z]", run("--help").out, re.MULTILINE))
    page = (ROOT / "docs" / "cli.md").read_text()
    assert names == set(re.findall(r"^\| `(\w+)", page, re.MULTILINE))
