"""`audit`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.blocks import LocalTarget
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.stores import obstore_store
from tests.fakes.command_line import Run
from tests.fakes.searches.planned_search import STEPS, PlannedSearch
from tests.tuner.altered_journals import alterations_of, entries_of, write_altered

KEY = JournalKey(experiment="e", generation=1)
ASHA = pt.ASHA(STEPS, variant="stopping")


@pytest.fixture
def search(tmp_path: Path) -> Path:
    """A target with a search of nine trials."""
    PlannedSearch(LocalTarget(path=str(tmp_path / "search"))).run(scheduler=ASHA)
    return tmp_path / "search"


def test_the_first_line_is_the_result_and_a_table_counts_the_events(run: Run, search: Path) -> None:
    done = run("audit", search, "e")
    assert (done.code, done.err) == (0, "")
    first, *rest = done.out.splitlines()
    derived, _, total, *words = first.split()
    assert (derived, " ".join(words)) == (total, "proposals and decisions derived again")
    assert [line.split()[:2] for line in rest if line.startswith("derived")] == [["derived", derived]]
    assert "9 trial-added" in done.out
    assert json.loads(run("audit", search, "e", "--json").out)["derived"]["trial-added"] == 9


def test_a_difference_is_named_with_its_entry_and_exits_with_1(run: Run, search: Path, tmp_path: Path) -> None:
    entries = entries_of(search, KEY)
    altered = next(each for each in alterations_of(entries) if each.kind == "stop for continue")
    write_altered(tmp_path / "altered", KEY, entries, altered)
    done = run("audit", tmp_path / "altered", "e")
    assert (done.code, done.err) == (1, "")
    head = f"entry {altered.entry}, trial {altered.events[0].model_dump()['trial']}: expected decided: decision"
    assert done.out.startswith(f'{head} {{"type": "continue"}}; found decided: decision {{"type": "stop"')
    found = json.loads(run("audit", tmp_path / "altered", "e", "--json").out)
    assert found["difference"]["entry"] == altered.entry


def test_what_a_person_passes_is_a_name_and_a_wrong_one_is_one_line(run: Run, search: Path) -> None:
    done = run("audit", search, "e", "--scheduler", "tests.cli.inspect.test_audit:ASHA")
    assert (done.code, done.err) == (0, "")
    for given, said in (("ASHA", "expected MODULE:NAME"), ("no.such:THING", "module 'no.such' cannot be imported")):
        wrong = run("audit", search, "e", "--search", given)
        assert (wrong.code, wrong.out) == (2, "")
        assert said in wrong.err
        assert wrong.err.count("\n") == 1
    assert run("audit", search, "other").code == 2
    assert run("audit", search / "nowhere", "e").code == 2


def test_a_target_that_does_not_answer_is_no_finding(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obstore_store, "_REQUEST_PAUSES_SECONDS", (0.0,))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    done = run("audit", "s3://bucket?endpoint_url=http://127.0.0.1:9", "e")
    assert (done.code, done.out) == (2, "")
    assert "127.0.0.1:9" in done.err
    assert done.err.count("\n") == 1
