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


def imported_by(*command: object) -> tuple[str, set[str]]:
    """Return what a command prints, and which heavy packages it imports, in a process of its own."""
    code = (
        f"import sys; sys.argv = ['prefect-tune', *{list(map(str, command))}]; from prefect_tune.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*[name for name in ('prefect', 'pyarrow', 'obstore', 'fsspec', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *printed, names = done.stdout.splitlines()
    return "\n".join(printed), set(names.split())


def test_help_waits_neither_for_prefect_nor_for_any_client() -> None:
    printed, imported = imported_by("--help")
    assert "export" in printed
    assert imported == set()


@pytest.mark.parametrize("command", long_after(1, ["show", "checkpoints", "verify", "gc"]))
def test_an_experiment_in_a_folder_is_read_without_prefect(target: Path, command: str) -> None:
    printed, imported = imported_by(command, target, "digits")
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_full_disk_behind_stdout_is_one_line(target: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_in_process("show", target, "digits", stdout=full)
    assert (done.code, done.err) == (1, "prefect-tune: [Errno 28] No space left on device\n")


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
    done = run(*command.replace("TARGET", str(target)).split())
    assert done.code in {1, 2}
    assert f"{option} 'here:ABSENT'" in done.err
    assert f"({tmp_path / 'here.py'}) has no 'ABSENT'" in done.err


def test_every_command_that_takes_a_module_is_among_those_tested_with_one_in_the_working_directory() -> None:
    commands = vars(get_command(load_application()))["commands"]
    texts = {
        name: [f"{each.metavar} {getattr(each, 'help', '')}" for each in one.params] for name, one in commands.items()
    }
    takers = {name for name, words in texts.items() if any("MODULE:NAME" in text for text in words)}
    assert takers == {command.split()[0] for command, _ in NAMED_MODULES}


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").out == f"prefect-tune {pt.__version__}\n"


def test_the_commands_stand_in_the_order_in_which_they_are_needed(run: Run) -> None:
    assert re.findall(r"^│ (\w+) ", run("--help").out, re.MULTILINE) == NAMES


@pytest.mark.parametrize("command", [[], *([name] for name in NAMES), *GROUPS], ids=" ".join)
def test_the_help_of_each_command_fits_80_columns_whole(run: Run, command: list[str]) -> None:
    done = run(*command, "--help", columns=80)
    assert done.code == 0
    assert "…" not in done.out
    assert "bool" not in done.out.lower(), "a flag takes no value"
    assert max(map(len, done.out.splitlines())) <= 80


def test_a_target_that_works_is_checked_in_one_line(run: Run, tmp_path: Path) -> None:
    done = run("blocks", "check", tmp_path / "target")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith((tmp_path / "target").as_uri())
    assert done.out.count("\n") == 1


def test_the_blocks_are_registered_with_the_server(run: Run, prefect_server: str) -> None:
    import httpx

    done = run("blocks", "register")
    assert done.out.split() == [
        "local-target",
        "s3-target",
        "gcs-target",
        "azure-target",
        "fsspec-target",
        "sync-config",
    ]
    there = httpx.post(f"{prefect_server}/block_types/filter", json={}).json()
    assert {"local-target", "sync-config"} <= {each["slug"] for each in there}


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

    def drilled(plan: DrillPlan, *_: object, **__: object) -> _Report:
        plans.append(plan)
        return _Report(is_exact)

    monkeypatch.setattr("prefect_tune.drills.run_drill.run_drill_in_terminal", drilled)
    assert run(*command).code == code
    if command[0] == "drill":
        (plan,) = plans
        assert (plan.trainable, plan.config, [step for step, _ in plan.kills]) == (
            "my.module:Net",
            {"width": 3},
            [2, 5],
        )
        assert json.loads(run(*command, "--json").out) == {"is_exact": is_exact}


def test_a_drill_that_could_not_run_ends_with_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise TuneError("run 'undisturbed' of the drill ended with exit code 1")

    monkeypatch.setattr("prefect_tune.drills.run_drill.run_drill_in_terminal", fails)
    assert run("drill", "my.module:Net").code == 2
    assert run("drill", "my.module:Net", "--at", "a").err.startswith(
        "prefect-tune: --at 'a': expected steps, such as 3,7"
    )


# The claims of the docs page on the command line are true.


PAGE = ROOT / "docs" / "cli.md"


def test_the_page_names_every_command(run: Run) -> None:
    shown = set(re.findall(r"^│ (\w+) +[A-Z]", run("--help").out, re.MULTILINE))
    assert shown == set(re.findall(r"^\| `(\w+)", PAGE.read_text(), re.MULTILINE))
