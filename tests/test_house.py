"""The checks of names and sizes report violations."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefect_tune import cli
from prefect_tune.cli.app import COMMANDS, PANELS
from tools.house import (
    FILE_LINES,
    check_journeys,
    find_unexplained_exemptions,
    find_unpromised_uses,
    find_violations,
    main,
    measure_lines,
)
from tools.journeys import __main__ as journey_tool
from tools.plain_words import count_plain_words, find_shared_class_names, find_vague_names
from tools.sources import Source


def make_source(text: str, path: str = "src/some.py") -> Source:
    return Source(Path(path), text, ast.parse(text))


def test_a_house_with_one_long_file_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "long.py").write_text("x = 1\n" * (FILE_LINES + 1))
    (tmp_path / "CONTRIBUTING.md").touch()
    assert main(tmp_path) == 1
    assert f"src/long.py:1: {FILE_LINES + 1} lines" in capsys.readouterr().out


def test_a_journey_is_counted_and_names_files_that_exist(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "a.py").touch()
    page = "```journey\nhere   tasks/a.py  gone/b.py\nthere  tasks/a.py\n```\n`tasks/<name>.py`, `tasks/`, `lost.py`\n"
    (tmp_path / "CONTRIBUTING.md").write_text(page)
    counts, missing = check_journeys(tmp_path)
    assert counts.endswith(": 2 files")
    assert missing == [f"CONTRIBUTING.md names {name}, which does not exist" for name in ("gone/b.py", "lost.py")]


def test_a_journey_lists_the_files_that_decide_before_those_that_only_pass_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "src/prefect_tune/tuner/a.py": "def f(x):\n    return x or (1 if x else 2)\n",
        "tasks/b.py": "def g(x): ...\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(journey_tool, "ROOT", tmp_path)
    traced = [journey_tool.TracedFile(path, True, {1: "f"}) for path in reversed(files)]
    drawn = journey_tool.draw_journey("metric", traced)
    assert "```journey\nsearch              tuner/a.py\nonly passed on by   tasks/b.py\n```" in drawn


def test_two_classes_of_one_name_are_a_violation_and_methods_of_one_name_are_not() -> None:
    one, other = (make_source("class Same:\n    def same(self): ...", f"src/{name}.py") for name in "ab")
    assert list(find_shared_class_names([one])) == []
    assert list(find_shared_class_names([one, other])) == ["src/b.py:1: class Same has the name of one in src/a.py"]


def test_the_package_and_the_tests_have_limits_too() -> None:
    nine = make_source("x = 1\n" * 9)
    assert measure_lines("package", [nine], limit=9) == ("package: 1 files, 9 lines", [])
    assert measure_lines("tests", [nine], limit=8)[1] == ["tests: 9 lines, at most 8"]


@pytest.mark.parametrize(
    ("check", "text", "count"),
    [
        (find_violations, "try:\n    x = 1\nexcept:\n    x = 1", 1),
        (find_violations, "try:\n    x = 1\nexcept Exception:\n    if x:\n        raise", 1),
        (find_violations, "try:\n    x = 1\nexcept OSError:\n    pass", 0),
        (find_violations, "try:\n    x = 1\nexcept Exception as e:\n    raise ValueError from e", 0),
        (find_violations, "try:\n    x = 1\nexcept Exception:  # noqa: BLE001  the process ends here\n    x = 1", 0),
        (find_unexplained_exemptions, "x = 1  # noqa: S101, E501", 1),
        (find_unexplained_exemptions, "x = 1  # type: ignore[arg-type]", 1),
        (find_unexplained_exemptions, "x = 1  # noqa: S101  a narrowed type, not a check", 0),
        (find_unexplained_exemptions, "x = 1  # type: ignore[arg-type]  # the stub is wrong about None", 0),
        (find_unexplained_exemptions, 'x = "# noqa"  # a string', 0),
        (find_unpromised_uses, "import prefect._internal.observers", 1),
        (find_unpromised_uses, "from prefect.context import _private", 1),
        (find_unpromised_uses, "from prefect.context import FlowRunContext as Context\nContext._of()", 1),
        (find_unpromised_uses, "client.set_flow_run_state(run, state, force=True)", 1),
        (find_unpromised_uses, "import prefect\nprefect.__version__\nself._flow = flow\nlock(force=False)", 0),
        (find_vague_names, "def set_aside(): ...", 1),
        (find_vague_names, "class Outside: ...", 1),
        (find_vague_names, "class A:\n    left: bool = False", 1),
        (find_vague_names, "left = total - done\nbeside = 1\nuse(told)\nstandings = 1\ndef say(): ...", 0),
    ],
)
def test_a_text_has_violations(check: Callable[[Source], Iterator[str]], text: str, count: int) -> None:
    assert len(list(check(make_source(f"{text}\n")))) == count


def test_a_test_may_have_any_word_in_its_sentence_and_fewer_vague_ones_elsewhere() -> None:
    path = "tests/test_some.py"
    plain = "def test_what_is_told_is_heard(): ...\naside = 1\nclass A:\n    left: bool"
    assert list(find_vague_names(make_source(plain, path))) == []
    assert len(list(find_vague_names(make_source("told = 1", path)))) == 1


def test_each_command_is_in_the_module_of_its_panel() -> None:
    homes = {}
    for command in cli.load_application().registered_commands:
        homes[command.name or command.callback.__name__] = (command.callback.__module__, command.rich_help_panel)
    for group in cli.load_application().registered_groups:
        for command in group.typer_instance.registered_commands:
            homes[str(group.name)] = (command.callback.__module__, group.rich_help_panel)
    assert homes == {
        name: (f"prefect_tune.cli.{panel}", PANELS[panel]) for panel, names in COMMANDS.items() for name in names
    }


def test_a_name_that_is_not_plain_is_counted() -> None:
    text = "MOST_RACES = 16\n\n\ndef _opened() -> None:\n    for each in ():\n        print(each)\n"
    counts, exceeded = count_plain_words([make_source(text)])
    assert counts.startswith("1 functions named by a participle")
    assert [line.partition(": one of")[0] for line in exceeded] == [
        "src/some.py:4: _opened",
        "src/some.py:1: MOST_RACES",
    ]
