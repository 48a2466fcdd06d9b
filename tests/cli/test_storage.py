"""Checkpoints listed, verified, exported, collected; maintenance; deleted experiments, and their names used again."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import prefect_tune as pt
from prefect_tune.core.experiment.summary import find_checkpoint_config
from prefect_tune.core.journal.journal import acquire_ownership, append_events
from prefect_tune.core.journal_events import (
    AttemptStarted,
    CheckpointCloned,
    CheckpointOrigin,
    CheckpointRef,
    DeletionStarted,
    Event,
    Owner,
    TrialAdded,
)
from prefect_tune.core.messages.target_messages import LiveStatus, RunningAttempt, write_live_status
from prefect_tune.core.storage.documents import MAX_DOCUMENT_BYTES
from prefect_tune.core.storage.generations import end_generation
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import WriteStamp
from prefect_tune.stores.posix_store import PosixStore
from tests.fakes.checkpoints import first_generation, read_files
from tests.fakes.command_line import Run
from tests.fakes.searches.experiments import write_experiment
from tests.long_cases import long_after


@pytest.fixture
def copy(moods: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(moods, tmp_path / "copy")


def test_the_checkpoints_of_all_trials_are_listed_and_those_of_one(run: Run, moods: Path) -> None:
    rows = json.loads(run("checkpoints", moods, "moods", "--json").out)
    assert [(row["trial"], row["step"]) for row in rows] == [
        *(("00000", 1), ("00001", 2), ("00001", 3), ("00002", 1), ("00003", 2), ("00003", 3))
    ]
    one = json.loads(run("checkpoints", moods, "moods", "--trial", "00001", "--json").out)
    assert [row["step"] for row in one] == [2, 3]
    assert run("checkpoints", moods, "moods").out.splitlines()[0].split()[:2] == ["trial", "step"]


def test_every_checkpoint_of_a_search_is_verified(run: Run, copy: Path) -> None:
    result = run("verify", copy, "moods")
    assert (result.code, result.out.count("intact")) == (0, 4)
    for blob in copy.glob("moods/1/trials/00001/blobs/*"):
        blob.chmod(0o644)
        blob.write_bytes(b"x")
    broken = run("verify", copy, "moods")
    assert (broken.code, broken.out.count("intact")) == (1, 3)
    assert broken.err.count("00001 step") == 2


def test_where_no_checkpoint_is_there_is_nothing_to_verify_and_that_is_said(run: Run, tmp_path: Path) -> None:
    write_experiment(tmp_path / "target", "e", [])
    assert run("verify", tmp_path / "target", "e").out == "e: there is no live checkpoint to verify\n"
    assert json.loads(run("verify", tmp_path / "target", "e", "--json").out) == []


def test_export_writes_the_newest_checkpoint_of_the_best_trial(run: Run, moods: Path, tmp_path: Path) -> None:
    result = run("export", moods, "moods", tmp_path / "best", "--json")
    assert json.loads(result.out) == {"trial": "00003", "step": 3, "directory": str(tmp_path / "best")}
    exported = read_files(tmp_path / "best")
    assert (set(exported), exported["count"]) == ({"count", "config.json", "metrics.json"}, b"3")
    results = pt.load_results(str(moods), "moods")
    assert json.loads(exported["config.json"]) == results.best.config
    assert json.loads(exported["metrics.json"]) == results.best.metrics
    again = run("export", moods, "moods", tmp_path / "best")
    assert (again.code, read_files(tmp_path / "best")) == (0, exported), "an export is completed by another one"
    (tmp_path / "best" / "config.json").write_bytes(exported["config.json"][:9])  # as an interrupted one
    assert run("export", moods, "moods", tmp_path / "best").code == 0
    assert read_files(tmp_path / "best") == exported
    assert results.export(tmp_path / "in python") == str(tmp_path / "in python")
    assert read_files(tmp_path / "in python") == exported


def test_a_plain_export_has_only_the_files_of_the_checkpoint(run: Run, moods: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert run("export", moods, "moods", tmp_path / "out").code == 0
        assert run("export", moods, "moods", tmp_path / "out", "--plain").code == 0
        assert read_files(tmp_path / "out") == {"count": b"3"}
    pt.load_results(str(moods), "moods").export(tmp_path / "more", "00001", step=2, plain=True)
    assert read_files(tmp_path / "more") == {"count": b"2"}
    with pytest.raises(pt.CheckpointNotFound, match="there is no checkpoint of step 7; steps with one: 2, 3"):
        pt.load_results(str(moods), "moods").export(tmp_path / "none", "00001", step=7)


def test_what_a_user_has_put_into_the_directory_is_not_overwritten(run: Run, moods: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    result = run("export", moods, "moods", tmp_path / "out")
    assert result.code == 2
    assert read_files(tmp_path / "out") == {"config.json": b"mine"}


@pytest.mark.parametrize(
    "own", [["config.json"], ["config.json", "metrics.json"], ["config.json", "trial-config.json"]]
)
def test_a_file_of_the_checkpoint_with_one_of_these_names_stays_as_it_is(
    own: list[str], run: Run, tmp_path: Path
) -> None:
    write_experiment(tmp_path / "target", "e", [2], files=dict.fromkeys(own, b"of the model"))
    result = run("export", tmp_path / "target", "e", tmp_path / "out")
    exported = read_files(tmp_path / "out")
    assert [exported[name] for name in own] == [b"of the model"] * len(own)
    name = "trial-2-config.json" if "trial-config.json" in own else "trial-config.json"
    assert json.loads(exported[name]) == {"rate": 0.5}
    assert f"the checkpoint has its own config.json; the trial's is in {name}" in result.err
    metrics = "trial-metrics.json" if "metrics.json" in own else "metrics.json"
    assert json.loads(exported[metrics]) == {"loss": 0.5}
    assert run("export", tmp_path / "target", "e", tmp_path / "out").code == 0
    assert read_files(tmp_path / "out") == exported


def test_a_checkpoint_from_before_an_exploit_has_the_configuration_of_that_time() -> None:
    clone = CheckpointRef(step=4, sequence=7, origin=CheckpointOrigin(trial="u", step=4, sequence=2))
    events: list[Event] = [
        TrialAdded(trial="t", config={"lr": 1}),
        CheckpointCloned(trial="t", checkpoint=clone, source="u", config={"lr": 2}),
    ]
    entries: list[Any] = [SimpleNamespace(events=[event]) for event in events]
    assert [find_checkpoint_config(entries, "t", sequence)["lr"] for sequence in (6, 7, 8)] == [1, 2, 2]


def test_export_writes_a_named_trials_checkpoint_of_a_step(run: Run, moods: Path, tmp_path: Path) -> None:
    result = run("export", moods, "moods", tmp_path / "other", "--trial", "00001", "--step", 2)
    assert result.out == f"00001 step 2 is in {tmp_path / 'other'}\n"
    assert read_files(tmp_path / "other")["count"] == b"2"
    assert json.loads(read_files(tmp_path / "other")["metrics.json"])["loss"] is not None


_HUGE_BYTES = 60 * 1024**3


@pytest.fixture
def _memory_for_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading more than a document may have is a `MemoryError`, as on a machine with little memory."""
    read = PosixStore.read

    def read_within_memory(store: PosixStore, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if min(store.size(path) or 0, _HUGE_BYTES if length is None else length) > MAX_DOCUMENT_BYTES:
            raise MemoryError
        return read(store, path, offset=offset, length=length)

    monkeypatch.setattr(PosixStore, "read", read_within_memory)


@pytest.mark.usefixtures("_memory_for_documents")
@pytest.mark.parametrize("document", ["trials/trial/checkpoints/*/manifest.json", "journal/*2.json", "segments/*"])
@pytest.mark.parametrize("verb", long_after(2, ["verify", "export", "checkpoints", "gc", "show", "delete"]))
def test_a_document_of_60_gib_is_not_read(run: Run, target: Path, tmp_path: Path, verb: str, document: str) -> None:
    (target / "digits" / "1" / "segments").mkdir(exist_ok=True)
    (target / "digits" / "1" / "segments" / "0000000010.jsonl").touch()
    for path in (target / "digits" / "1").glob(document):
        path.chmod(0o644)
        os.truncate(path, _HUGE_BYTES)
    options = {"export": [tmp_path / "out"], "delete": ["--yes"]}.get(verb, [])
    result = run(verb, target, "digits", *options)
    assert "Traceback" not in result.out + result.err
    if "segments" in document or (verb == "delete" and "manifest" in document):
        assert result.code == 0, result
    elif "journal" in document or verb in ("verify", "export"):
        assert result.code == 1
        assert "expected a document of at most 512 MiB, found 60 GiB; it was not read" in result.out + result.err


def test_nothing_is_collected_where_everything_is_needed(run: Run, moods: Path) -> None:
    result = run("gc", moods, "moods", "--delete")
    assert (result.code, result.out) == (0, "nothing to collect in 4 trials\n")


def test_a_blob_that_nobody_needs_is_listed_first_and_deleted_when_that_is_asked_for(run: Run, copy: Path) -> None:
    blob = next(copy.glob("moods/1/trials/00003/blobs/*"))
    stray = blob.with_name(f"{'0' * 64}-{blob.name.partition('-')[2]}")
    stray.write_bytes(b"stray")
    listed = json.loads(run("gc", copy, "moods", "--json").out)
    trials = {trial["trial"]: trial for trial in listed["trials"]}
    assert (listed["deleted"], trials["00003"]["orphan_count"], trials["00003"]["orphan_bytes"]) == (False, 1, 5)
    assert stray.exists()
    result = run("gc", copy, "moods", "--delete")
    assert result.out.endswith("deleted: 1 object, 5 B\n")
    assert not stray.exists()
    assert run("verify", copy, "moods").code == 0


DEVELOPMENT = Path(__file__).parents[1] / "data" / "development_layout"
REFUSAL = (
    "experiment '{}' was written by a development version of prefect-tune, before its first release, and "
    "cannot be read: finish it with that version, delete its folder {}/, or choose another name"
)
NAMES = sorted(path.name for path in DEVELOPMENT.iterdir())
VERBS: Sequence[Sequence[str]] = (
    *(["show"], ["audit"], ["checkpoints"], ["verify"], ["gc"], ["report"]),
    *(["export", "DIRECTORY"], ["stop"], ["delete", "--yes"], ["resume"]),
)


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize("name", long_after(1, NAMES))
def test_every_command_that_names_one_refuses_it_in_one_sentence(run: Run, tmp_path: Path, name: str) -> None:
    for verb, *options in VERBS:
        arguments = [str(tmp_path) if option == "DIRECTORY" else option for option in options]
        result = run(verb, DEVELOPMENT, name, *arguments)
        assert REFUSAL.format(name, name) in " ".join(result.err.split()), (verb, result.err)
        assert result.code != 0


def test_ls_lists_them_with_that_sentence(run: Run) -> None:
    listed = json.loads(run("ls", DEVELOPMENT, "--json").out)
    expected = [(name, "not read", REFUSAL.format(name, name)) for name in NAMES]
    assert [(row["experiment"], row["kind"], row["damage"]) for row in listed] == expected


def test_a_deleted_name_is_used_again_and_what_its_deletion_left_is_collected(run: Run, tmp_path: Path) -> None:
    write_experiment(tmp_path, "first", [1])
    assert run("delete", tmp_path, "first", "--yes").code == 0
    (marker,) = [path for path in tmp_path.rglob("*.json") if "first" in path.parts]
    assert marker.relative_to(tmp_path).as_posix() == "first/generations/0000000002.json"
    assert "no experiments" in run("ls", tmp_path).out
    again = run("delete", tmp_path, "first", "--yes")
    assert "there is no experiment 'first'" in again.err
    late = tmp_path / "first" / "1" / "trials" / "trial" / "blobs" / "late"
    late.parent.mkdir(parents=True)
    late.write_bytes(b"late")
    write_experiment(tmp_path, "first", [1])
    assert (tmp_path / "first" / "2" / "journal").is_dir()
    assert json.loads(run("gc", tmp_path, "first", "--json").out)["deleted_experiments"]["object_count"] == 1
    assert late.exists()
    assert "1 object of deleted experiments of this name" in run("gc", tmp_path, "first", "--delete").out
    assert not late.exists()
    assert run("show", tmp_path, "first").code == 0
    late.parent.mkdir(parents=True, exist_ok=True)
    late.write_bytes(b"late")
    assert run("delete", tmp_path, "first", "--yes").code == 0
    assert not late.exists()
    late.parent.mkdir(parents=True, exist_ok=True)
    late.write_bytes(b"late")
    assert run("delete", tmp_path, "first", "--yes").code == 0  # what is left of it, after an interruption
    assert not late.exists()


# `maintain`, and the release of a quarantined checkpoint.


def truncate_manifest(target: Path, step: int) -> tuple[Path, bytes]:
    """Truncate the manifest of a step, and return its former bytes."""
    (path,) = target.rglob(f"{step:010d}-*/manifest.json")
    original = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(original[:-1])
    return path, original


@pytest.mark.usefixtures("no_prefect_server")
def test_maintain_ends_with_4_where_it_finds_damage_and_what_is_whole_again_is_released(run: Run, target: Path) -> None:
    path, original = truncate_manifest(target, 6)
    result = run("maintain", target, "--verify", "all", "--json")
    assert result.code == 4
    assert json.loads(result.out)["experiments"][0]["damaged"][0]["step"] == 6
    assert "damaged, and quarantined: " in result.err
    again = run("maintain", target, "digits", "--verify", "all", "--keep-last", "1", "--dry-run")
    assert (again.code, "1 would be pruned" in again.out) == (0, True)

    refused = run("verify", target, "digits", "--release", 6)
    assert (refused.code, "DAMAGED" in refused.err) == (1, True)
    path.write_bytes(original)
    released = run("verify", target, "digits", "--release", 6)
    assert (released.code, "intact" in released.out) == (0, True)
    rows = json.loads(run("checkpoints", target, "digits", "--json").out)
    assert [(row["step"], row["status"]) for row in rows] == [(2, "live"), (4, "live"), (6, "live")]


def test_what_its_owner_quarantined_is_released_too(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_experiment(target, "digits", [2, 4], quarantined=(4,))
    assert run("gc", target, "digits", "--delete").code == 0
    assert run("verify", target, "digits", "--release", 4).code == 0
    assert run("verify", target, "digits").out.startswith("steps 2, 4: ")


def test_what_is_not_put_aside_cannot_be_released(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_experiment(target, "digits", [2, 4], quarantined=(4,))
    result = run("verify", target, "digits", "--release", 2)
    assert (result.code, "step 2 is not quarantined; quarantined: 4" in result.err) == (2, True)


# `prefect-tune delete` and `pt.delete_experiment`: what is asked, what goes, and what is refused.


OWNER = Owner(name="lively lynx", host="node-7", pid=4242)


def is_deleted(experiment: Path) -> bool:
    """Return whether a deletion has left nothing but the marker of the next generation."""
    return [str(path) for path in read_files(experiment)] == ["generations/0000000002.json"]


class _Terminal(io.StringIO):
    """A terminal on which a person has typed an answer."""

    def isatty(self) -> bool:
        return True


def write_running(root: Path, name: str, *, status_age: timedelta | None, is_running: bool = True) -> None:
    """Write an experiment whose one trial runs or waits, with a live status of that age; None for none."""
    root.mkdir(exist_ok=True)
    store = PosixStore(root)
    first, second = (WriteStamp(write_id=write_id, at="2026-11-21T08:00:00+00:00") for write_id in "12")
    state = acquire_ownership(store, first_generation(name), OWNER, first)
    started = AttemptStarted(trial="trial", attempt=1, from_step=0)
    events = [TrialAdded(trial="trial", config={}), *[started] * is_running]
    state = append_events(store, state, events, second)
    if status_age is not None:
        updated_at = (datetime.now(UTC) - status_age).isoformat()
        trials = (RunningAttempt(trial="trial", attempt=1),) * is_running
        status = LiveStatus(term=state.term, owner=OWNER, number=1, at=updated_at, period_seconds=5.0, trials=trials)
        write_live_status(store, JournalKey(experiment=name, generation=1), status)


def test_a_script_deletes_with_yes_and_is_told_what_went(target: Path, run: Run) -> None:
    write_experiment(target, "kept", [2])
    before = read_files(target / "kept")
    result = run("delete", target, "digits", "--yes")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("deleted: digits: 1 trial, 3 checkpoints, ")
    assert is_deleted(target / "digits")
    assert read_files(target / "kept") == before
    assert "there is no experiment 'digits'" in run("delete", target, "digits", "--yes").err


def test_without_a_terminal_and_without_yes_nothing_is_deleted(target: Path, run: Run) -> None:
    before = read_files(target)
    result = run("delete", target, "digits")
    assert (result.code, result.out) == (2, "")
    assert "confirmation needs a terminal; without one, add --yes" in result.err
    assert read_files(target) == before


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_on_a_terminal_it_asks_first(
    answer: str, code: int, target: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", _Terminal(answer))
    result = run("delete", target, "digits")
    assert result.code == code
    assert f"Delete experiment 'digits' at {target} permanently: 1 trial, 3 checkpoints, " in result.out
    assert is_deleted(target / "digits") != bool(code)
    assert ("nothing was deleted" in result.err) == bool(code)


def test_what_a_run_owns_is_refused_with_its_name_and_the_next_move(tmp_path: Path, run: Run) -> None:
    write_running(tmp_path / "target", "runs", status_age=timedelta(0))
    before = read_files(tmp_path / "target")
    result = run("delete", tmp_path / "target", "runs", "--yes")
    assert result.code == 2
    assert "lively lynx (pid 4242 on node-7) may still own it: 1 trial was running as of " in result.err
    assert "End that run first (cancel its flow run)" in result.err
    assert read_files(tmp_path / "target") == before
    with pytest.raises(pt.InvalidInput, match="may still own it"):
        pt.delete_experiment("runs", target=str(tmp_path / "target"))
    assert run("delete", tmp_path / "target", "runs", "--yes", "--even-if-running").code == 0
    assert is_deleted(tmp_path / "target" / "runs")


def test_a_search_whose_process_lives_is_refused_also_between_two_trials(tmp_path: Path, run: Run) -> None:
    write_running(tmp_path / "target", "between", status_age=timedelta(0), is_running=False)
    before = read_files(tmp_path / "target")
    result = run("delete", tmp_path / "target", "between", "--yes")
    assert "lively lynx (pid 4242 on node-7) may still own it: its process was alive as of " in result.err
    assert read_files(tmp_path / "target") == before
    assert run("delete", tmp_path / "target", "between", "--yes", "--even-if-running").code == 0
    write_running(tmp_path / "target", "later", status_age=timedelta(0), is_running=False)  # another run owns it now
    stamp = WriteStamp(write_id="3", at="2026-11-21")
    acquire_ownership(PosixStore(tmp_path / "target"), first_generation("later"), OWNER, stamp)
    assert run("delete", tmp_path / "target", "later", "--yes").code == 0


@pytest.mark.parametrize("is_running", [True, False])
def test_what_a_killed_run_has_left_is_deleted(tmp_path: Path, is_running: bool) -> None:
    write_running(tmp_path / "target", "killed", status_age=timedelta(minutes=9), is_running=is_running)
    assert pt.delete_experiment("killed", target=str(tmp_path / "target")).object_count > 0
    assert is_deleted(tmp_path / "target" / "killed")


def test_without_updates_a_run_may_be_alive(tmp_path: Path) -> None:
    write_running(tmp_path / "target", "silent", status_age=None)
    with pytest.raises(pt.InvalidInput, match="the last journal entry"):
        pt.delete_experiment("silent", target=str(tmp_path / "target"))


def test_an_interrupted_deletion_is_finished(target: Path, run: Run) -> None:
    store = PosixStore(target)
    key, stamp = first_generation("digits"), WriteStamp(write_id="gone", at="")
    state = acquire_ownership(store, key, OWNER, stamp, events_for=lambda _: [DeletionStarted()])
    assert "digits" in run("ls", target).out  # killed here: it is still there, and cannot be resumed
    end_generation(store, state.key, at="", by="a script")
    store.delete([state.key.entry_path(number) for number in range(1, state.entry_count)])  # or here
    assert "no experiments" in run("ls", target).out
    assert run("delete", target, "digits", "--yes").code == 0
    assert is_deleted(target / "digits")


def test_a_folder_that_is_no_experiment_stays(target: Path, run: Run) -> None:
    (target / "images").mkdir()
    (target / "images" / "cat.png").write_bytes(b"a cat")
    result = run("delete", target, "images", "--yes")
    assert (result.code, "there is no experiment 'images'" in result.err) == (2, True)
    assert (target / "images" / "cat.png").read_bytes() == b"a cat"
