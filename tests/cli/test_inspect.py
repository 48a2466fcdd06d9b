"""The output of `ls`, `show`, `checkpoints`, `verify` and `report`: searches, trainings, forged journals, widths."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.cli.inspect import format_last_report_age
from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.journal.journal import acquire_ownership, append_events, load_at, write_snapshot
from prefect_tune.core.journal_events import (
    AttemptEnded,
    AttemptStarted,
    Cause,
    ExperimentConfigured,
    Owner,
    TrialAdded,
)
from prefect_tune.core.messages.target_messages import LiveStatus, RunningAttempt, write_live_status
from prefect_tune.core.operations.scrub import inspect_live_checkpoint
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.core.values import WriteStamp
from prefect_tune.stores.posix_store import PosixStore, make_root
from tests.fakes.checkpoints import first_generation, write_files
from tests.fakes.command_line import PROGRAM, Run
from tests.fakes.searches.experiments import write_experiment, write_search


def test_a_search_is_shown_with_its_trials_the_best_first(run: Run, moods: Path) -> None:
    output = json.loads(run("show", moods, "moods", "--json").out)
    assert output["trials_by_status"] == {"completed": 2, "errored": 2}
    assert (output["metric"], output["mode"]) == (["loss"], ["min"])
    assert [trial["trial"] for trial in output["trials"][:2]] == ["00003", "00001"]
    assert output["trials"][0]["config"] == {"fails": "not", "x": 0.25, "always": "[bold]"}
    assert output["settings"]["stop"] == {"step": 3}


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


@pytest.mark.parametrize("columns", [80, 140])
def test_no_line_is_wider_than_the_terminal(run: Run, moods: Path, columns: int) -> None:
    for command in (["ls", moods], ["show", moods, "moods"], ["checkpoints", moods, "moods"], ["gc", moods, "moods"]):
        assert max(map(len, run(*command, columns=columns).out.splitlines())) <= columns


def test_one_trial_of_a_search_is_shown_with_all_that_is_known(run: Run, moods: Path) -> None:
    output = json.loads(run("show", moods, "moods", "--trial", "00002", "--json").out)
    assert (output["trial"], output["status"], output["step"]) == ("00002", "errored", 1)
    assert "in a mood" in output["reason"]
    assert "[bold]" in run("show", moods, "moods", "--trial", "00002").out


def test_where_the_best_trial_has_errored_it_says_so_wherever_it_is_named(run: Run, tmp_path: Path) -> None:
    write_search(tmp_path / "target", "rates", {"00000": 0.5, "00001": 0.25}, errored="00001")
    assert pt.load_results(tmp_path / "target", "rates").best.id == "00001"
    assert "(00001, errored)" in run("ls", tmp_path / "target").out
    assert json.loads(run("ls", tmp_path / "target", "--json").out)[0]["best_status"] == "errored"
    page = run("report", tmp_path / "target", "rates").out
    assert "(trial 00001, errored)" in page
    assert "## Best trial: 00001, errored" in page
    exported = run("export", tmp_path / "target", "rates", tmp_path / "out")
    assert "trial '00001', which has errored: there is no checkpoint" in exported.err


@pytest.mark.parametrize(
    ("command", "named"),
    [
        *(("show", "3"), ("show", "00003"), ("show", "003")),
        *(("checkpoints", "3"), ("verify", "3"), ("gc", "3"), ("stop --wait-seconds 1", "3")),
    ],
)
def test_a_trial_is_found_by_its_number_alone(run: Run, moods: Path, command: str, named: str) -> None:
    verb, *options = command.split()
    result = run(verb, moods, "moods", "--trial", named, *options, "--json")
    assert (result.code, result.err) == (0, "")
    assert "00003" in result.out
    assert "00001" not in result.out


def test_the_experiments_of_a_target_are_listed(run: Run, moods: Path) -> None:
    write_experiment(moods, "alone", [2])
    (moods / "alone" / "a file").touch()
    (moods / "another tool's").mkdir(exist_ok=True)
    listed = json.loads(run("ls", moods, "--json").out)
    assert [(row["experiment"], row["kind"]) for row in listed] == [("alone", "training"), ("moods", "search")]
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
    assert [(row["experiment"], row["damage"] is None) for row in listed] == [("torn", False), ("whole", True)]


def test_an_altered_entry_before_a_snapshot_is_a_warning_of_show_and_an_error_of_audit_with_what_to_do(
    run: Run, tmp_path: Path
) -> None:
    for name in ("whole", "torn"):
        write_experiment(tmp_path, name, list(range(1, 10)))
        state, _ = load_at(PosixStore(tmp_path), first_generation(name), 10)
        write_snapshot(PosixStore(tmp_path), state)
    entry = sorted(tmp_path.glob("torn/1/journal/*.json"))[1]
    entry.chmod(0o644)
    entry.write_bytes(entry.read_bytes().replace(b'"trial"', b'"Trial"'))
    assert run("show", tmp_path, "whole").err == ""
    show_result, audit_result = run("show", tmp_path, "torn"), run("audit", tmp_path, "torn")
    assert (show_result.code, audit_result.code) == (0, 1)
    for err in (show_result.err, audit_result.err):
        assert "incomplete, or altered since it was written" in err
        assert "; restore this object from a backup" in err
        assert "'A damaged journal' in docs/maintain.md" in err
    assert show_result.err.startswith("warning: ")


@pytest.mark.parametrize(
    "command",
    [("ls",), ("show", "digits"), ("report", "digits"), ("maintain",), ("stop", "e"), ("delete", "--yes", "e")],
)
def test_a_folder_that_does_not_exist_is_named_and_not_created(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    verb, *experiment = command
    result = run(verb, tmp_path / "runs", *experiment)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"prefect-tune: {tmp_path / 'runs'}: there is no such folder\n"
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").touch()
    assert run(verb, tmp_path / "runs", *experiment) == result, "a file is no folder"


REFUSALS = [
    ("show MOODS moods --trial 9", 2, "experiment 'moods': there is no trial '9' among its 4 (00000 to 00003)"),
    ("report MOODS moods --output TMP/no/page.md", 2, "TMP/no/page.md: No such file or directory"),
    ("report MOODS moods --output TMP/page.pdf", 2, "expected a file ending in .html or .md"),
    ("report MOODS moods --output TMP/page.json", 2, "--json prints to stdout"),
    ("report MOODS moods --output TMP/page.html --json", 2, "--json prints to stdout"),
    ("export MOODS moods TMP/file/out", 1, "[Errno 17] File exists: 'TMP/file'"),
    ("stop MOODS gone", 2, "there is no experiment 'gone'"),
    ("stop MOODS moods --trial 00009", 2, "there is no trial '00009' among its 4"),
    ("stop TARGET digits", 2, "is not a search: cancel its flow run"),
    (f"ls TMP/{'long' * 100}", 1, "(File name too long)"),
    (f"show TMP/{'long' * 100} digits", 1, "(File name too long)"),
    ("blocks check s4://bucket", 2, "'s4://bucket': unknown scheme 's4'"),
    ("blocks check TMP/file", 1, "TMP/file"),
]


@pytest.mark.parametrize(("command", "code", "message"), REFUSALS)
def test_what_cannot_be_done_is_one_line_and_nothing_is_written(
    command: str, code: int, message: str, run: Run, moods: Path, target: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    paths = {"MOODS": str(moods), "TARGET": str(target), "TMP": str(tmp_path)}
    for name, path in paths.items():
        command, message = command.replace(name, path), message.replace(name, path)
    result = run(*command.split())
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)
    assert message in result.err
    assert sorted(tmp_path.rglob("*")) == before


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
    for picture, text in differ:
        image = re.match(r"!\[(.*)\]\(data:image/svg", picture)
        assert image is not None
        assert text == f"[{image[1]}: a picture, see --output]"


def test_a_report_is_one_html_file_or_json_of_the_same_facts(run: Run, moods: Path, tmp_path: Path) -> None:
    result = run("report", moods, "moods", "--output", tmp_path / "page.HTML")
    assert (result.out, result.err) == ("", f"the report of moods is in {tmp_path / 'page.HTML'}\n")
    html = (tmp_path / "page.HTML").read_text()
    assert html.startswith("<!doctype html>")
    assert "<h2>Best trial: 00003</h2>" in html
    assert not re.search(r'(src|href)="(?!data:|http://[^"]*/runs/)', html)
    report = json.loads(run("report", moods, "moods", "--json").out)
    assert (report["best"][0]["trial"], report["trials_by_status"]) == ("00003", {"completed": 2, "errored": 2})
    assert [error["trial"] for error in report["errors"]] == ["00000", "00002"]
    assert report["cost"]["sent_bytes"] > 0
    assert report["runs"][0]["attempts"] == 4


# Commands on an experiment of one training.


def list_blobs(target: Path) -> list[Path]:
    return sorted(target.glob("digits/1/trials/trial/blobs/*"), key=lambda path: path.name.rpartition("-")[2])


def test_checkpoints_are_listed_with_step_size_and_metrics(run: Run, target: Path) -> None:
    result = run("checkpoints", target, "digits", "--json")
    rows = json.loads(result.out)
    expected = [(step, "live", 5_000_001) for step in (2, 4, 6)]
    assert [(row["step"], row["status"], row["size_bytes"]) for row in rows] == expected
    assert rows[1]["metrics"] == {"loss": 0.25}
    assert (target / rows[1]["path"] / "manifest.json").is_file()
    assert result.code == 0


def test_a_checkpoint_that_was_put_aside_is_listed_as_quarantined(run: Run, tmp_path: Path) -> None:
    write_experiment(tmp_path / "target", "digits", [2, 4], quarantined=(4,))
    rows = json.loads(run("checkpoints", tmp_path / "target", "digits", "--json").out)
    assert [(row["step"], row["status"]) for row in rows] == [(2, "live"), (4, "quarantined")]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9])])
def test_a_manifest_that_is_gone_or_torn_does_not_hide_the_others(
    run: Run, target: Path, damage: Callable[[Path], object]
) -> None:
    damage(sorted(target.glob("digits/1/trials/trial/checkpoints/*/manifest.json"))[1])
    rows = json.loads(run("checkpoints", target, "digits", "--json").out)
    assert [(row["step"], row["status"]) for row in rows] == [(2, "live"), (4, "damaged"), (6, "live")]


def test_verify_finds_a_single_flipped_bit_and_says_where(run: Run, target: Path) -> None:
    blob = list_blobs(target)[1]
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    data[12345] ^= 1
    blob.write_bytes(data)
    result = run("verify", target, "digits")
    assert result.code == 1
    assert result.err.startswith("step 4: DAMAGED: 'model/weights.bin' in ")
    assert result.out == "steps 2, 6: 9.54 MiB in 4 files, intact\n"
    json_result = run("verify", target, "digits", "--json")
    assert (json_result.code, json_result.err) == (1, "")
    assert [row["damage"] is None for row in json.loads(json_result.out)] == [True, False, True]


def test_verify_prints_damage_also_if_the_target_fails_later(
    run: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_the_last(store: ObjectStore, key: CheckpointKey, **options: Any) -> Sequence[object]:
        if key.step == 6:
            raise StoreUnavailable("the network is down")
        return inspect_live_checkpoint(store, key, **options)

    list_blobs(target)[0].unlink()
    monkeypatch.setattr("prefect_tune.cli.storage.inspect_live_checkpoint", fail_at_the_last)
    result = run("verify", target, "digits")
    assert result.code == 1
    damage, error = result.err.splitlines()
    assert damage.startswith("step 2: DAMAGED: ")
    assert error == "prefect-tune: the network is down"


def test_asking_for_a_step_that_has_no_checkpoint_tells_which_there_are(run: Run, target: Path, tmp_path: Path) -> None:
    result = run("export", target, "digits", "--step", 3, tmp_path / "plain")
    assert (result.code, result.out) == (2, "")
    problem = "there is no checkpoint of step 3; available steps: 2, 4, 6"
    assert result.err == f"prefect-tune: experiment 'digits': {problem}\n"


@pytest.mark.parametrize("command", ["checkpoints", "show", "verify"])
def test_an_experiment_that_is_not_there_is_one_line_and_exit_code_2(run: Run, target: Path, command: str) -> None:
    result = run(command, target, "digit")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"prefect-tune: there is no experiment 'digit' at {target.as_uri()}; did you mean 'digits'?\n"


def test_an_argument_that_is_missing_is_a_usage_error(run: Run, target: Path) -> None:
    result = run("show", target)
    assert result.code == 2
    assert "EXPERIMENT" in result.err


# The output about an experiment that a user's own flow wrote.


def test_a_training_time_that_was_not_measured_is_left_out_and_never_0(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "runs"
    for experiment, seconds, expected in (("unmeasured", 0.0, None), ("measured", 12.5, 12.5)):
        directory = write_files(tmp_path / experiment, {"w": b"1"})
        pt.save_checkpoint.fn(directory, target=target, experiment=experiment, step=1, trained_seconds=seconds)
        output = json.loads(run("show", target, experiment, "--json").out)
        facts = json.loads(run("report", target, experiment, "--json").out)
        times = (output["trained_seconds"], facts["trials"][0]["trained_seconds"], facts["cost"]["trained_seconds"])
        assert times == (expected,) * 3
        assert ("trained_seconds" in run("show", target, experiment).out) is bool(expected)
        assert ("time not measured" in run("report", target, experiment).out) is not bool(expected)
        assert pt.load_results(target, experiment).to_arrow()["trained_seconds"].to_pylist() == [expected]


# The output of read-only commands for a forged journal, and for a search that has fallen silent.


def write_forged_search(folder: Path, metric: Any) -> str:
    """Write a search whose entries carry no times; return where."""
    make_root(folder)
    with LocalTarget(path=str(folder)).open(timeout=timedelta(seconds=60)) as store:
        stamps = (WriteStamp(write_id=name, at="some day") for name in ("first", "second"))
        state = acquire_ownership(store, first_generation("e"), Owner(name="they", host="there", pid=1), next(stamps))
        append_events(store, state, [ExperimentConfigured(settings={"metric": metric})], next(stamps))
    return str(folder)


def test_a_report_is_made_where_the_times_are_none(run: Run, tmp_path: Path) -> None:
    result = run("report", write_forged_search(tmp_path / "runs", "loss"), "e")
    assert result.code == 0
    assert result.out.startswith("# e\n")


@pytest.mark.parametrize("metric", [3, [["loss"]], {"a": 1}])
def test_a_metric_that_is_no_name_is_one_line(metric: Any, run: Run, tmp_path: Path) -> None:
    for command in ("report", "show"):
        result = run(command, write_forged_search(tmp_path / command, metric), "e")
        assert result.code == 2
        assert result.err.strip() == f"prefect-tune: metric: expected a name, or a list of names, found {metric!r}"


@pytest.mark.parametrize(("age", "is_stale"), [(timedelta(minutes=-1), False), (timedelta(minutes=1), True)])
def test_a_running_trial_without_updates_is_stale_and_has_no_reason(
    age: timedelta, is_stale: bool, run: Run, tmp_path: Path
) -> None:
    make_root(tmp_path / "runs")
    store, key = PosixStore(tmp_path / "runs"), JournalKey(experiment="e", generation=1)
    stamps = (WriteStamp(write_id=str(number), at="2026-11-21T08:00:00+00:00") for number in count())
    state = acquire_ownership(store, first_generation("e"), Owner(name="they", host="there", pid=1), next(stamps))
    first, second = (AttemptStarted(trial="first", attempt=number, from_step=0) for number in (1, 2))
    lost = AttemptEnded(trial="first", cause=Cause.MACHINE, reason="its owner vanished")
    settings, added = ExperimentConfigured(settings={"seed": 1}), TrialAdded(trial="first", config={})
    for event in (settings, added, first, lost, second):
        state = append_events(store, state, [event], next(stamps))
    updated_at = (datetime.now(UTC) - age).isoformat()
    running = RunningAttempt(trial="first", attempt=2)
    document = {"term": state.term, "owner": state.owner, "number": 1, "at": updated_at, "period_seconds": 5}
    write_live_status(store, key, LiveStatus(**document, trials=(running,)))
    output = json.loads(run("show", tmp_path / "runs", "e", "--json").out)
    assert (output["is_stale"], output["trials"][0]["reason"]) == (is_stale, "")


# The width of tables: a pipe gets every column, and a narrow terminal names the columns that it has no room for.


PARAMETERS = [f"parameter_{letter}" for letter in "abcdefgh"]
NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
STARTED_AT = (NOW - timedelta(seconds=90)).isoformat()


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search with more parameters than a terminal has room for."""
    target = tmp_path_factory.mktemp("wide") / "runs"
    write_search(target, "wide", {"00000": 0.5, "00001": 0.25}, parameters=PARAMETERS)
    return target


def columns_of(output: str) -> list[str]:
    return next(line for line in output.splitlines() if line.startswith("trial  ")).split()


ALL_COLUMNS = ["trial", "status", "step", "loss", *PARAMETERS, "rate"]


def test_a_pipe_gets_every_column_and_whole_cells(wide_target: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [*PROGRAM, "show", str(wide_target), "wide"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert columns_of(process.stdout) == ALL_COLUMNS
    assert "hidden" not in process.stdout
    (row,) = [line for line in process.stdout.splitlines() if line.startswith("00001")]
    assert row.count(" of 00001") == len(PARAMETERS)


@pytest.mark.parametrize("columns", [60, 120, 240])
def test_a_terminal_shows_the_columns_that_fit_and_names_the_others(columns: int, wide_target: Path, run: Run) -> None:
    output = run("show", wide_target, "wide", columns=columns).out
    visible = columns_of(output)
    hidden = [name for name in ALL_COLUMNS if name not in visible]
    note = re.search("(?m)^hidden, for lack of room: (.*); a wider terminal or a pipe shows all columns$", output)
    assert (note[1].split(", ") if note else []) == hidden
    table = output[output.index("trial  ") :].splitlines()[:3]
    assert max(map(len, table)) <= columns
    assert "of 00001" not in output or "…" not in output


def test_the_trials_of_results_are_printed_in_the_same_way(
    wide_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = pt.load_results(wide_target, "wide").trials
    monkeypatch.delenv("COLUMNS", raising=False)
    assert columns_of(repr(trials)) == ALL_COLUMNS
    monkeypatch.setenv("COLUMNS", "80")
    assert "hidden, for lack of room: parameter_" in repr(trials)
    assert "hidden, for lack of room: parameter_" in trials._repr_html_()
    assert capsys.readouterr().out == ""


def test_the_time_of_the_last_report_or_else_of_the_start_is_shown() -> None:
    attempt = RunningAttempt(trial="t", attempt=1)
    assert format_last_report_age(attempt, NOW) == "none known"
    started = attempt.model_copy(update={"began_at": STARTED_AT})
    assert format_last_report_age(started, NOW) == "none known; began 1 min 30 s ago"
    assert format_last_report_age(started.model_copy(update={"reported_at": STARTED_AT}), NOW) == "1 min 30 s ago"
