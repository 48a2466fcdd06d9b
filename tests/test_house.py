"""The check of the size limits fails when one is exceeded."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from prefect_tune import cli
from prefect_tune.cli.app import COMMANDS, PANELS
from tools.house import (
    FILE_LINES,
    Source,
    exemptions,
    journeys,
    main,
    measure_lines,
    shared_class_names,
    unpromised,
    vague_names,
    violations,
)


def source(text: str) -> Source:
    return Source(Path("src/some.py"), text, ast.parse(text))


def test_a_house_with_one_long_file_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "long.py").write_text("x = 1\n" * (FILE_LINES + 1))
    (tmp_path / "CONTRIBUTING.md").touch()
    assert main(tmp_path) == 1
    assert "src/long.py:1: 701 lines" in capsys.readouterr().out


def test_a_journey_is_counted_and_names_files_that_exist(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "a.py").touch()
    page = "```journey\nhere   tasks/a.py  gone/b.py\nthere  tasks/a.py\n```\n"
    (tmp_path / "CONTRIBUTING.md").write_text(page)
    counts, missing = journeys(tmp_path)
    assert counts.endswith(": 2 files")
    assert missing == ["CONTRIBUTING.md names gone/b.py, which does not exist"]
    (tmp_path / "CONTRIBUTING.md").write_text(
        "Edit `tasks/a.py` and `tasks/<name>.py`, `tasks/` and `gone/`, `lost.py`.\n"
    )
    _, missing = journeys(tmp_path)
    assert missing == [f"CONTRIBUTING.md names {each}, which does not exist" for each in ("gone/", "lost.py")]


def test_two_classes_of_one_name_are_a_violation_and_methods_of_one_name_are_not() -> None:
    text = "class Same:\n    def same(self): ..."
    one, other = (Source(Path(f"src/{name}.py"), text, ast.parse(text)) for name in "ab")
    assert list(shared_class_names([one])) == []
    assert list(shared_class_names([one, other])) == ["src/b.py:1: class Same has the name of one in src/a.py"]


def test_the_package_and_the_tests_have_limits_too() -> None:
    source = Source(Path("tasks/a.py"), "x = 1\n" * 9, ast.parse(""))
    assert measure_lines("package", [source], limit=9) == ("package: 1 files, 9 lines", [])
    assert measure_lines("tests", [source], limit=8)[1] == ["tests: 9 lines, at most 8"]


@pytest.mark.parametrize(
    "handler",
    [
        "except:\n    x = 1",
        "except Exception:\n    if x:\n        raise",
        "except (OSError, BaseException) as e:\n    pass",
    ],
)
def test_a_broad_except_that_may_swallow_is_a_violation(handler: str) -> None:
    assert len(list(violations(source(f"try:\n    x = 1\n{handler}\n")))) == 1


@pytest.mark.parametrize(
    "handler",
    [
        "except OSError:\n    pass",
        "except Exception as e:\n    x = 1\n    raise ValueError from e",
        "except Exception:  # noqa: BLE001  the process ends here, and reports to its parent\n    x = 1",
    ],
)
def test_a_narrow_one_or_one_that_raises_or_says_why_is_not(handler: str) -> None:
    assert list(violations(source(f"try:\n    x = 1\n{handler}\n"))) == []


@pytest.mark.parametrize(
    ("comment", "has_reason"),
    [
        ("# noqa: S101", False),
        ("# noqa: S101, E501", False),
        ("# type: ignore[arg-type]", False),
        ("# pragma: no cover", False),
        ("# noqa: S101  a narrowed type, not a check", True),
        ("# type: ignore[arg-type]  # the stub is wrong about None", True),
    ],
)
def test_an_exemption_needs_its_reason_on_the_line(comment: str, *, has_reason: bool) -> None:
    assert list(exemptions(f"x = 1  {comment}\n")) == [(1, has_reason)]


def test_what_only_looks_like_an_exemption_is_none() -> None:
    assert list(exemptions('x = "# noqa"  # a string\n')) == []


def test_each_command_is_in_the_module_of_its_panel() -> None:
    named = {each.name or each.callback.__name__: each for each in cli.application().registered_commands}
    homes = {name: (each.callback.__module__, each.rich_help_panel) for name, each in named.items()}
    homes |= {
        str(group.name): (each.callback.__module__, group.rich_help_panel)
        for group in cli.application().registered_groups
        for each in group.typer_instance.registered_commands
    }
    assert homes == {
        name: (f"prefect_tune.cli.{panel}", PANELS[panel]) for panel, names in COMMANDS.items() for name in names
    }


@pytest.mark.parametrize(
    "text",
    [
        "import prefect._internal.observers",
        "from prefect._flow_run_suspension import FlowRunSuspensionRequest",
        "from prefect.context import _private",
        "from prefect.context import FlowRunContext as Context\nContext._of()",
        "client.set_flow_run_state(run, state, force=True)",
        "flow.__class__ = Other",
    ],
)
def test_what_prefect_does_not_promise_is_a_violation(text: str) -> None:
    assert len(list(unpromised(source(text)))) == 1


def test_what_prefect_promises_is_none() -> None:
    text = (
        "import prefect\nfrom prefect import flow\nprefect.__version__\nflow.name\nself._flow = flow\nlock(force=False)"
    )
    assert list(unpromised(source(text))) == []


@pytest.mark.parametrize(
    "text",
    [
        "def set_aside(): ...",
        "class Outside: ...",
        "def f(told): ...",
        "heard = 1",
        "self.happened = 1",
        "class A:\n    left: bool = False",
        "class A:\n    go_on: bool",
    ],
)
def test_a_vague_word_in_a_name_or_as_a_field_is_a_violation(text: str) -> None:
    assert len(list(vague_names(source(text)))) == 1


@pytest.mark.parametrize("text", ["left = total - done", "def say(): ...", "beside = 1", "use(told)", "standings = 1"])
def test_a_word_that_is_plain_where_it_is_used_is_none(text: str) -> None:
    assert list(vague_names(source(text))) == []


def test_a_test_may_have_any_word_in_its_sentence_and_fewer_vague_ones_elsewhere() -> None:
    def found(text: str) -> list[str]:
        return list(vague_names(Source(Path("tests/test_some.py"), text, ast.parse(text))))

    assert found("def test_what_is_told_is_heard(): ...") == []
    assert found("aside = 1\nclass A:\n    left: bool") == []
    assert found("told = 1") == ["tests/test_some.py:1: told: 'told' says less than the noun of the field"]
