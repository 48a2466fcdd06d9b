"""The output about a search that has ended."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.core.journal.journal import as_of, write_snapshot
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.checkpoints import first_generation
from tests.fakes.command_line import Run
from tests.fakes.searches.experiments import write_experiment, write_search


def test_a_search_is_shown_with_its_trials_the_best_first(run: Run, moods: Path) -> None:
    shown = json.loads(run("show", moods, "moods", "--json").out)
    assert shown["trials_by_status"] == {"completed": 2, "errored": 2}
    assert (shown["metric"], shown["mode"]) == (["loss"], ["min"])
    assert [each["trial"] for each in shown["trials"][:2]] == ["00003", "00001"]
    assert shown["trials"][0]["config"] == {"fails": "not", "x": 0.25, "always": "[bold]"}
    assert shown["settings"]["stop"] == {"step": 3}


def test_for_people_a_search_is_a_table_of_what_its_trials_differ_in(run: Run, moods: Path) -> None:
    lines = run("show", moods, "moods").out.splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("trial "))
    assert lines[header].split() == ["trial", "status", "step", "loss", "fails", "x"]
    assert lines[header + 1].split() == ["00003", "completed", "3", "0.583333", "not", "0.25"]
    assert "trials      2 completed, 2 errored" in "\n".join(lines)


def test_below_it_stands_why_trials_errored(run: Run, moods: Path) -> None:
    out = run("show", moods, "moods").out
    assert "ValueError: in a mood" in out
    assert "Traceback" not in out
    assert "--trial 00000 prints its traceback" in out
    assert "Traceback" in run("show", moods, "moods", "--trial", "00000").out


def test_a_traceback_is_printed_as_it_is_however_narrow_the_terminal(run: Run, moods: Path) -> None:
    reason = json.loads(run("show", moods, "moods", "--trial", "00000", "--json").out)["reason"]
    out = run("show", moods, "moods", "--trial", "00000", columns=40).out
    assert out.endswith(f"\n\n{reason.strip()}\n")
    assert "ValueError: in a mood" in out.partition("\nconfig")[0]


@pytest.mark.parametrize("columns", [80, 140])
def test_no_line_is_wider_than_the_terminal(run: Run, moods: Path, columns: int) -> None:
    for command in (["ls", moods], ["show", moods, "moods"], ["checkpoints", moods, "moods"], ["gc", moods, "moods"]):
        assert max(map(len, run(*command, columns=columns).out.splitlines())) <= columns


def test_one_trial_of_a_search_is_shown_with_all_that_is_known(run: Run, moods: Path) -> None:
    shown = json.loads(run("show", moods, "moods", "--trial", "00002", "--json").out)
    assert (shown["trial"], shown["status"], shown["step"]) == ("00002", "errored", 1)
    assert "in a mood" in shown["reason"]
    assert "[bold]" in run("show", moods, "moods", "--trial", "00002").out


def test_where_the_best_trial_has_errored_it_says_so_wherever_it_is_named(run: Run, tmp_path: Path) -> None:
    write_search(tmp_path / "target", "rates", {"00000": 0.5, "00001": 0.25}, errored="00001")
    assert pt.load_results(tmp_path / "target", "rates").best.trial == "00001"
    assert "(00001, errored)" in run("ls", tmp_path / "target").out
    assert json.loads(run("ls", tmp_path / "target", "--json").out)[0]["best_status"] == "errored"
    page = run("report", tmp_path / "target", "rates").out
    assert "(trial 00001, errored)" in page
    assert "## Best trial: 00001, errored" in page
    exported = run("export", tmp_path / "target", "rates", tmp_path / "out")
    assert "trial '00001', which has errored: there is no checkpoint" in exported.err


def test_a_trial_that_is_not_there_is_one_line(run: Run, moods: Path) -> None:
    done = run("show", moods, "moods", "--trial", "9")
    assert (done.code, done.out) == (2, "")
    assert done.err == "prefect-tune: experiment 'moods': there is no trial '9' among its 4 (00000 to 00003)\n"


@pytest.mark.parametrize("named", ["3", "00003", "003"])
@pytest.mark.parametrize(
    "command",
    [("show",), ("checkpoints",), ("verify",), ("gc",), ("stop", "--wait-seconds", 1)],
    ids=lambda each: each[0],
)
def test_a_trial_is_found_by_its_number_alone(run: Run, moods: Path, command: tuple[str, ...], named: str) -> None:
    verb, *options = command
    done = run(verb, moods, "moods", "--trial", named, *options, "--json")
    assert (done.code, done.err) == (0, "")
    assert "00003" in done.out
    assert "00001" not in done.out


def test_the_experiments_of_a_target_are_listed(run: Run, moods: Path) -> None:
    write_experiment(moods, "alone", [2])
    (moods / "alone" / "a file").touch()
    (moods / "another tool's").mkdir(exist_ok=True)
    listed = json.loads(run("ls", moods, "--json").out)
    assert [(each["experiment"], each["kind"]) for each in listed] == [("alone", "training"), ("moods", "search")]
    assert listed[1]["trials"] == {"completed": 2, "errored": 2}
    assert listed[1]["best_trial"] == "00003"
    assert listed[1]["best"]["loss"] == pytest.approx(0.25 + 1 / 3)
    assert "loss 0.583333 (00003)" in run("ls", moods).out


def test_an_experiment_whose_journal_is_damaged_does_not_hide_the_others(run: Run, tmp_path: Path) -> None:
    write_experiment(tmp_path, "whole", [2])
    write_experiment(tmp_path, "torn", [2])
    entry = sorted(tmp_path.glob("torn/1/journal/*.json"))[1]
    entry.chmod(0o644)
    entry.write_bytes(entry.read_bytes()[:-20])
    listed = json.loads(run("ls", tmp_path, "--json").out)
    assert [(each["experiment"], each["damage"] is None) for each in listed] == [("torn", False), ("whole", True)]


def test_an_altered_entry_before_a_snapshot_is_a_warning_of_show_and_an_error_of_audit_with_what_to_do(
    run: Run, tmp_path: Path
) -> None:
    for name in ("whole", "torn"):
        write_experiment(tmp_path, name, list(range(1, 10)))
        state, _ = as_of(PosixStore(tmp_path), first_generation(name), 10, side_by_side=map)
        write_snapshot(PosixStore(tmp_path), state)
    entry = sorted(tmp_path.glob("torn/1/journal/*.json"))[1]
    entry.chmod(0o644)
    entry.write_bytes(entry.read_bytes().replace(b'"trial"', b'"Trial"'))
    assert run("show", tmp_path, "whole").err == ""
    shown, audited = run("show", tmp_path, "torn"), run("audit", tmp_path, "torn")
    assert (shown.code, audited.code) == (0, 1)
    for err in (shown.err, audited.err):
        assert "torn or altered since it was written" in err
        assert "; restore this object from a backup" in err
        assert "'A damaged journal' in docs/maintain.md" in err
    assert shown.err.startswith("warning: ")


@pytest.mark.parametrize(
    "command",
    [("ls",), ("show", "digits"), ("report", "digits"), ("maintain",), ("stop", "e"), ("delete", "--yes", "e")],
)
def test_a_folder_that_does_not_exist_is_named_and_not_created(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    verb, *experiment = command
    done = run(verb, tmp_path / "runs", *experiment)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"prefect-tune: {tmp_path / 'runs'}: there is no such folder\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [("ls",), ("show", "digits")])
def test_a_folder_that_cannot_be_looked_up_is_one_line(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    verb, *experiment = command
    done = run(verb, tmp_path / ("long" * 100), *experiment)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("prefect-tune: ")
    assert done.err.endswith("(File name too long)\n")


def test_a_target_without_experiments_says_so(run: Run, tmp_path: Path) -> None:
    assert run("ls", tmp_path).out == f"{tmp_path}: no experiments\n"
    assert json.loads(run("ls", tmp_path, "--json").out) == []


def test_a_report_has_the_best_trial_every_trial_and_every_error(run: Run, moods: Path, tmp_path: Path) -> None:
    page = run("report", moods, "moods").out
    assert "## Best trial: 00003" in page
    assert page.partition("## Trials")[2].count("| completed |") == 2
    assert page.partition("## Errors (2)")[2].count("ValueError: in a mood (moody.py:") == 1, "said once of both"
    assert "| fails | grid\\_search(" in page.partition("## Space")[2]
    assert run("report", moods, "moods", "--output", tmp_path / "page.md").out == ""
    in_file = (tmp_path / "page.md").read_text().splitlines()
    assert len(in_file) == len(page.splitlines())
    differ = [pair for pair in zip(in_file, page.splitlines(), strict=True) if pair[0] != pair[1]]
    assert differ, "there are pictures"
    for picture, words in differ:
        shows = re.match(r"!\[(.*)\]\(data:image/svg", picture)
        assert shows is not None
        assert words == f"[{shows[1]}: a picture, see --output]"


def test_a_report_is_one_html_file_or_json_of_the_same_facts(run: Run, moods: Path, tmp_path: Path) -> None:
    assert run("report", moods, "moods", "--output", tmp_path / "page.html").out == ""
    html = (tmp_path / "page.html").read_text()
    assert html.startswith("<!doctype html>")
    assert "<h2>Best trial: 00003</h2>" in html
    assert not re.search(r'(src|href)="(?!data:|http://[^"]*/runs/)', html)
    report = json.loads(run("report", moods, "moods", "--json").out)
    assert (report["best"][0]["trial"], report["trials_by_status"]) == ("00003", {"completed": 2, "errored": 2})
    assert [each["trial"] for each in report["errors"]] == ["00000", "00002"]
    assert report["cost"]["sent_bytes"] > 0
    assert report["runs"][0]["attempts"] == 4


def test_a_report_that_cannot_be_written_is_one_line(run: Run, moods: Path, tmp_path: Path) -> None:
    done = run("report", moods, "moods", "--output", tmp_path / "no" / "page.md")
    assert done.code == 2
    assert done.err == f"prefect-tune: {tmp_path / 'no' / 'page.md'}: No such file or directory\n"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["page.pdf"], "ends in .html or .md"),
        (["page.json"], "--json prints to stdout"),
        (["page.html", "--json"], "--json prints to stdout"),
    ],
)
def test_a_report_of_another_kind_is_refused_and_nothing_is_written(
    run: Run, moods: Path, tmp_path: Path, asked: list[str], expected: str
) -> None:
    done = run("report", moods, "moods", "--output", tmp_path / asked[0], *asked[1:])
    assert done.code == 2
    assert expected in done.err
    assert not (tmp_path / asked[0]).exists()


def test_a_report_in_a_file_says_what_it_has_written(run: Run, moods: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.HTML"
    assert run("report", moods, "moods", "--output", page).err == f"the report of moods is in {page}\n"


def test_what_a_user_named_is_text_in_a_report_and_no_markup(run: Run, moods: Path) -> None:
    write_experiment(moods.parent / "odd", "a_b", [2])
    assert run("report", moods.parent / "odd", "a_b").out.startswith("# a\\_b\n")
