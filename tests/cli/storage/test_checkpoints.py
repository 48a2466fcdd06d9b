"""The checkpoints of a search from the command line: listed, verified, exported, garbage-collected."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.cli.storage import _print_garbage
from prefect_tune.core.experiment.summary import config_at
from prefect_tune.core.journal_events import CheckpointOrigin, CheckpointRef, Cloned, Event, TrialAdded
from prefect_tune.core.operations.trial_gc import Collected, Garbage
from prefect_tune.core.storage.documents import DOCUMENT_BYTES
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.checkpoints import files_in
from tests.fakes.command_line import Run
from tests.fakes.searches.experiments import write_experiment
from tests.long_cases import long_after


@pytest.fixture
def own_moods(moods: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(moods, tmp_path / "copy")


def test_the_checkpoints_of_all_trials_are_listed_and_those_of_one(run: Run, moods: Path) -> None:
    rows = json.loads(run("checkpoints", moods, "moods", "--json").out)
    assert [(row["trial"], row["step"]) for row in rows] == [
        ("00000", 1),
        ("00001", 2),
        ("00001", 3),
        ("00002", 1),
        ("00003", 2),
        ("00003", 3),
    ]
    one = json.loads(run("checkpoints", moods, "moods", "--trial", "00001", "--json").out)
    assert [row["step"] for row in one] == [2, 3]
    assert run("checkpoints", moods, "moods").out.splitlines()[0].split()[:2] == ["trial", "step"]


def test_every_checkpoint_of_a_search_is_verified(run: Run, own_moods: Path) -> None:
    done = run("verify", own_moods, "moods")
    assert (done.code, done.out.count("whole")) == (0, 4)
    for blob in own_moods.glob("moods/1/trials/00001/blobs/*"):
        blob.chmod(0o644)
        blob.write_bytes(b"x")
    broken = run("verify", own_moods, "moods")
    assert (broken.code, broken.out.count("whole")) == (1, 3)
    assert broken.err.count("00001 step") == 2


def test_where_no_checkpoint_is_there_is_nothing_to_verify_and_that_is_said(run: Run, tmp_path: Path) -> None:
    write_experiment(tmp_path / "target", "e", [])
    assert run("verify", tmp_path / "target", "e").out == "e: no checkpoint is live, so there is nothing to verify\n"
    assert json.loads(run("verify", tmp_path / "target", "e", "--json").out) == []


def test_export_writes_the_newest_checkpoint_of_the_best_trial(run: Run, moods: Path, tmp_path: Path) -> None:
    done = run("export", moods, "moods", tmp_path / "best", "--json")
    assert json.loads(done.out) == {"trial": "00003", "step": 3, "directory": str(tmp_path / "best")}
    exported = files_in(tmp_path / "best")
    assert (set(exported), exported["count"]) == ({"count", "config.json", "metrics.json"}, b"3")
    results = pt.load_results(str(moods), "moods")
    assert json.loads(exported["config.json"]) == results.best.config
    assert json.loads(exported["metrics.json"]) == results.best.metrics
    again = run("export", moods, "moods", tmp_path / "best")
    assert (again.code, files_in(tmp_path / "best")) == (0, exported), "an export is completed by another one"
    (tmp_path / "best" / "config.json").write_bytes(exported["config.json"][:9])  # as an interrupted one
    assert run("export", moods, "moods", tmp_path / "best").code == 0
    assert files_in(tmp_path / "best") == exported
    assert results.export(tmp_path / "in python") == str(tmp_path / "in python")
    assert files_in(tmp_path / "in python") == exported


def test_a_plain_export_has_only_the_files_of_the_checkpoint(run: Run, moods: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("export", moods, "moods", tmp_path / "out").code == 0
        assert run("export", moods, "moods", tmp_path / "out", "--plain").code == 0
        assert files_in(tmp_path / "out") == {"count": b"3"}
    pt.load_results(str(moods), "moods").export(tmp_path / "more", "00001", step=2, plain=True)
    assert files_in(tmp_path / "more") == {"count": b"2"}
    with pytest.raises(pt.CheckpointNotFound, match="there is no checkpoint of step 7; there are: 2, 3"):
        pt.load_results(str(moods), "moods").export(tmp_path / "none", "00001", step=7)


def test_what_a_user_has_put_into_the_directory_is_not_overwritten(run: Run, moods: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    done = run("export", moods, "moods", tmp_path / "out")
    assert done.code == 2
    assert files_in(tmp_path / "out") == {"config.json": b"mine"}


@pytest.mark.parametrize(
    "own", [["config.json"], ["config.json", "metrics.json"], ["config.json", "trial-config.json"]]
)
def test_a_file_of_the_checkpoint_with_one_of_these_names_stays_as_it_is(
    own: list[str], run: Run, tmp_path: Path
) -> None:
    write_experiment(tmp_path / "target", "e", [2], files=dict.fromkeys(own, b"of the model"))
    done = run("export", tmp_path / "target", "e", tmp_path / "out")
    exported = files_in(tmp_path / "out")
    assert [exported[name] for name in own] == [b"of the model"] * len(own)
    name = "trial-2-config.json" if "trial-config.json" in own else "trial-config.json"
    assert json.loads(exported[name]) == {"rate": 0.5}
    assert f"config.json is the checkpoint's own file; that of the trial is {name}" in done.err
    metrics = "trial-metrics.json" if "metrics.json" in own else "metrics.json"
    assert json.loads(exported[metrics]) == {"loss": 0.5}
    assert run("export", tmp_path / "target", "e", tmp_path / "out").code == 0
    assert files_in(tmp_path / "out") == exported


def test_a_checkpoint_from_before_an_exploit_has_the_configuration_of_that_time() -> None:
    clone = CheckpointRef(step=4, sequence=7, origin=CheckpointOrigin(trial="u", step=4, sequence=2))
    events: list[Event] = [
        TrialAdded(trial="t", config={"lr": 1}),
        Cloned(trial="t", checkpoint=clone, source="u", config={"lr": 2}),
    ]
    entries: list[Any] = [SimpleNamespace(events=[event]) for event in events]
    assert [config_at(entries, "t", sequence)["lr"] for sequence in (6, 7, 8)] == [1, 2, 2]


def test_export_writes_a_named_trials_checkpoint_of_a_step(run: Run, moods: Path, tmp_path: Path) -> None:
    done = run("export", moods, "moods", tmp_path / "other", "--trial", "00001", "--step", 2)
    assert done.out == f"00001 step 2 is in {tmp_path / 'other'}\n"
    assert files_in(tmp_path / "other")["count"] == b"2"
    assert json.loads(files_in(tmp_path / "other")["metrics.json"])["loss"] is not None


def test_a_directory_that_cannot_be_made_is_one_line(run: Run, moods: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("export", moods, "moods", tmp_path / "file" / "out")
    assert (done.code, done.out) == (1, "")
    assert done.err == f"prefect-tune: [Errno 17] File exists: '{tmp_path / 'file'}'\n"


_HUGE_BYTES = 60 * 1024**3


@pytest.fixture
def _memory_for_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading more than a document may have is a `MemoryError`, as on a machine with little memory."""
    read = PosixStore.read

    def within_memory(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if min(store.size(path) or 0, _HUGE_BYTES if length is None else length) > DOCUMENT_BYTES:
            raise MemoryError
        return read(store, path, offset=offset, length=length)

    monkeypatch.setattr(PosixStore, "read", within_memory)


@pytest.mark.usefixtures("_memory_for_documents")
@pytest.mark.parametrize("document", ["trials/trial/checkpoints/*/manifest.json", "journal/*2.json", "segments/*"])
@pytest.mark.parametrize("verb", long_after(2, ["verify", "export", "checkpoints", "gc", "show", "delete"]))
def test_a_document_of_60_gib_is_not_read(run: Run, target: Path, tmp_path: Path, verb: str, document: str) -> None:
    (target / "digits" / "1" / "segments").mkdir(exist_ok=True)
    (target / "digits" / "1" / "segments" / "0000000010.jsonl").touch()
    for path in (target / "digits" / "1").glob(document):
        path.chmod(0o644)
        os.truncate(path, _HUGE_BYTES)
    more = {"export": [tmp_path / "out"], "delete": ["--yes"]}.get(verb, [])
    done = run(verb, target, "digits", *more)
    assert "Traceback" not in done.out + done.err
    if "segments" in document or (verb == "delete" and "manifest" in document):
        assert done.code == 0, done
    elif "journal" in document or verb in ("verify", "export"):
        assert done.code == 1
        assert "expected a document of at most 512 MiB, found 60 GiB; it was not read" in done.out + done.err


def test_nothing_is_collected_where_everything_is_needed(run: Run, moods: Path) -> None:
    done = run("gc", moods, "moods", "--delete")
    assert (done.code, done.out) == (0, "nothing to collect in 4 trials\n")


def test_the_table_of_gc_counts_objects_and_says_why_some_stay(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Collected("a", checkpoints=(1, 2), orphan_count=3, orphan_bytes=5, answer_count=4, kept="it runs")
    _print_garbage(Garbage([kept, Collected("b", damage="torn"), Collected("c")], 0, ()), deleted=False)
    header, first, second, _, total = capsys.readouterr().out.splitlines()
    assert header.split() == ["trial", "checkpoints", "objects", "size"]
    assert first.split() == ["a", "1,", "2", "9", "5", "B", "it", "runs"]
    assert (second.split()[0], second.split()[-1]) == ("b", "torn")
    assert total == "9 objects, 5 B; to delete them: --delete"


def test_a_blob_that_nobody_needs_is_listed_first_and_deleted_when_that_is_asked_for(run: Run, own_moods: Path) -> None:
    blob = next(own_moods.glob("moods/1/trials/00003/blobs/*"))
    stray = blob.with_name(f"{'0' * 64}-{blob.name.partition('-')[2]}")
    stray.write_bytes(b"stray")
    listed = json.loads(run("gc", own_moods, "moods", "--json").out)
    found = {each["trial"]: each for each in listed["trials"]}
    assert (listed["deleted"], found["00003"]["orphan_count"], found["00003"]["orphan_bytes"]) == (False, 1, 5)
    assert stray.exists()
    done = run("gc", own_moods, "moods", "--delete")
    assert done.out.endswith("deleted: 1 object, 5 B\n")
    assert not stray.exists()
    assert run("verify", own_moods, "moods").code == 0
