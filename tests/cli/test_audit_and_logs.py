"""What is shown of decisions and attempts: `audit`, `logs`, exploits, and the ends of ranks."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.stores import obstore_store
from tests.fakes.command_line import Run
from tests.fakes.searches.planned_search import STEPS, PlannedSearch
from tests.fakes.untrusted import require_visible
from tests.trainables.grouped import Talkative
from tests.trainables.printing import print_and_end
from tests.tuner.altered_journals import iter_alterations, load_entries, write_altered_journal

KEY = JournalKey(experiment="e", generation=1)
ASHA = pt.ASHA(STEPS, variant="stopping")


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a search of nine trials, which tests only read."""
    folder = tmp_path_factory.mktemp("search")
    PlannedSearch(LocalTarget(path=str(folder))).run(scheduler=ASHA)
    return folder


def test_the_first_line_is_the_result_and_a_table_counts_the_events(run: Run, search: Path) -> None:
    result = run("audit", search, "e")
    assert (result.code, result.err) == (0, "")
    first, *rest = result.out.splitlines()
    derived, _, total, *words = first.split()
    assert (derived, " ".join(words)) == (total, "proposals and decisions derived again")
    assert [line.split()[:2] for line in rest if line.startswith("derived")] == [["derived", derived]]
    assert "9 trial-added" in result.out
    assert json.loads(run("audit", search, "e", "--json").out)["derived"]["trial-added"] == 9


def test_a_difference_is_named_with_its_entry_and_exits_with_1(run: Run, search: Path, tmp_path: Path) -> None:
    entries = load_entries(search, KEY)
    altered = next(altered for altered in iter_alterations(entries) if altered.kind == "stop for continue")
    write_altered_journal(tmp_path / "altered", KEY, entries, altered)
    result = run("audit", tmp_path / "altered", "e")
    assert (result.code, result.err) == (1, "")
    head = f"entry {altered.entry}, trial {altered.events[0].model_dump()['trial']}: expected decision-made: decision"
    assert result.out.startswith(f'{head} {{"type": "continue"}}; found decision-made: decision {{"type": "stop"')
    report = json.loads(run("audit", tmp_path / "altered", "e", "--json").out)
    assert report["difference"]["entry"] == altered.entry


def test_what_a_person_passes_is_a_name_and_a_wrong_one_is_one_line(run: Run, search: Path) -> None:
    result = run("audit", search, "e", "--scheduler", "tests.cli.test_audit_and_logs:ASHA")
    assert (result.code, result.err) == (0, "")
    for name, message in (("ASHA", "expected MODULE:NAME"), ("no.such:THING", "module 'no.such' cannot be imported")):
        refused = run("audit", search, "e", "--search", name)
        assert (refused.code, refused.out) == (2, "")
        assert message in refused.err
        assert refused.err.count("\n") == 1
    assert run("audit", search, "other").code == 2
    assert run("audit", search / "nowhere", "e").code == 2


def test_a_target_that_does_not_answer_is_no_finding(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_store, "_REQUEST_PAUSES_SECONDS", (0.0,))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    result = run("audit", "s3://bucket?endpoint_url=http://127.0.0.1:9", "e")
    assert (result.code, result.out) == (2, "")
    assert "127.0.0.1:9" in result.err
    assert result.err.count("\n") == 1


# What a trial printed last is in its journal, is shown when it fails, and is printed by `logs`.


pytestmark = pytest.mark.usefixtures("no_prefect_server")


def test_the_last_output_is_shown_where_a_trial_fails_and_logs_prints_that_of_each_attempt(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    target = str(tmp_path / "target")
    space = {"how": pt.grid_search(["work", "raise", "exit", "killed", "silent", "hostile"])}
    policy = pt.FailurePolicy(max_failures=0, max_machine_failures=0)
    pt.tune(print_and_end, space, target=target, experiment="e", metric="loss", failures=policy, fail_fast=False)
    failed = [record.getMessage() for record in caplog.records if " failed: " in record.getMessage()]
    for trial, how in (("1", "raise"), ("2", "exit"), ("3", "killed")):
        (message,) = [text for text in failed if f" of {how}" in text]
        assert message.count(f"last output:\nline 11 of {how}\nline 12 of {how}\n") == 1
        assert message.endswith(f"line 29 of {how}\nbar 50% of {how}")
        for output in (run("show", target, "e", "--trial", trial).out, run("logs", target, "e", trial).out):
            assert output.count(f"\nline 29 of {how}\nbar 50% of {how}\n") == 1
            assert f"line 10 of {how}" not in output
    assert "line 29" not in run("show", target, "e", "--trial", "0").out
    assert "line 29" not in run("show", target, "e").out
    output = run("logs", target, "e", "00000").out
    assert output.startswith("attempt 1: the trainable returned\nlast output:\nline 11 of work\n")
    assert output.endswith("bar 50% of work\n")
    silent = run("logs", target, "e", "4").out
    assert silent.startswith("attempt 1: ValueError: no word\nTraceback")
    assert silent.endswith("\nlast output:\n(none is stored)\n")
    assert "last output" not in run("show", target, "e", "--trial", "4").out
    for output in (run("show", target, "e", "--trial", "5").out, run("logs", target, "e", "5").out):
        require_visible(output)
        assert "y" * 8_000 in output
        assert "y" * 8_193 not in output
    (attempt,) = json.loads(run("logs", target, "e", "1", "--json").out)
    assert attempt["attempt"] == 1
    assert "ValueError: no data" in attempt["reason"]
    assert attempt["last_output"].splitlines()[-1] == "bar 50% of raise"
    assert json.loads(run("show", target, "e", "--trial", "1", "--json").out)["last_output"] == attempt["last_output"]
    for arguments, problem in ((["e"], "name one"), (["e", "9"], "no trial '9'"), (["x", "1"], "no experiment 'x'")):
        refused = run("logs", target, *arguments)
        assert (refused.code, problem in refused.err) == (2, True)


# `show --trial` of population based training: what a trial went on from, and how its configuration changed.


def test_a_trial_is_shown_with_each_checkpoint_that_it_exploited(run: Run, tmp_path: Path) -> None:
    search = PlannedSearch(LocalTarget(path=str(tmp_path)), slots=1)
    state = search.run(space={"x": pt.uniform(0, 1)}, scheduler=pt.PBT(2, {"x": pt.uniform(0, 1)}))
    clones = [trial for trial in state.trials.values() if trial.last_clone_sequence is not None]
    assert clones
    for trial in clones[:2]:
        exploits = json.loads(run("show", tmp_path, "e", "--trial", trial.id, "--json").out)["exploited"]
        last = exploits[-1]
        assert last["source"] != trial.id
        assert (last["changed"].keys(), last["changed"]["x"][1]) == ({"x"}, trial.config["x"])
        assert run("show", tmp_path, "e", "--trial", trial.id).out.count(" of trial ") == len(exploits)


# What people see of a trial's ranks: in the log, in `show --trial`, in the report and in the cost.


def test_log_show_and_report_name_the_rank_that_was_killed(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one trial, rank 1 writes slowly, and is killed in the first attempt."""
    with caplog.at_level("INFO"):
        pt.tune(
            Talkative,
            {"rank": 1, "at": 5, "does": "die"},
            target=str(tmp_path),
            experiment="e",
            metric="loss",
            stop={"step": 6},
            num_samples=1,
            checkpoint=pt.Cadence(every_steps=2),
            processes_per_trial=2,
        )
    assert "trial 00000: rank 0 is here" in caplog.text
    assert "trial 00000/rank 1: rank 1 is here" in caplog.text
    output = run("show", tmp_path, "e", "--trial", "00000", columns=200).out
    table = output[output.index("attempt  in all") :].splitlines()
    assert table[1].rstrip().endswith("rank 1: ended by SIGKILL, the cause")
    assert "rank 1" not in table[2]
    first, second = json.loads(run("show", tmp_path, "e", "--trial", "00000", "--json").out)["cost"]
    assert first["ends"] == [{"ranks": [1], "how": "ended by SIGKILL", "is_cause": True}]
    assert "ends" not in second
    assert run("report", tmp_path, "e", "--output", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    pictures = [b64decode(picture).decode() for picture in re.findall(r'svg\+xml;base64,([^"]*)"', page)]
    assert any("interrupted; rank 1: ended by SIGKILL, the cause" in picture for picture in pictures)
