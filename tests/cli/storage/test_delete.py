"""`prefect-tune delete` and `pt.delete_experiment`: what is asked, what goes, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.core.journal.journal import append, load, take_over
from prefect_tune.core.journal_events import Deletion, Owner, Started, TrialAdded
from prefect_tune.core.messages.target_messages import LiveStatus, RunningTrial, write_live_status
from prefect_tune.core.storage.generations import end_generation
from prefect_tune.core.storage.layout import JournalKey
from prefect_tune.core.values import Stamp
from prefect_tune.stores.posix_store import PosixStore
from tests.core.operations.test_fork_experiment import forked
from tests.core.small_search import search_of_three
from tests.fakes.checkpoints import files_in, first_generation
from tests.fakes.command_line import Run
from tests.fakes.searches.experiments import write_experiment

OWNER = Owner(name="lively lynx", host="node-7", pid=4242)
PERIOD_SECONDS = 5.0


def is_gone(experiment: Path) -> bool:
    """Return whether a deletion has left nothing but the marker of the next generation."""
    return [str(each) for each in files_in(experiment)] == ["generations/0000000002.json"]


def train(_config: object) -> None:
    pt.report({"loss": 1.0})


class _Terminal(io.StringIO):
    """A terminal on which a person has typed an answer."""

    def isatty(self) -> bool:
        return True


def running(root: Path, name: str, *, updated: timedelta | None, runs: bool = True) -> None:
    """Write an experiment whose one trial runs or waits, with a live status of that age; None for none."""
    root.mkdir(exist_ok=True)
    store = PosixStore(root)
    state = take_over(
        store, first_generation(name), OWNER, Stamp(write_id="1", at="2026-11-21T08:00:00+00:00"), side_by_side=map
    )
    events = [TrialAdded(trial="trial", config={}), *[Started(trial="trial", attempt=1, from_step=0)] * runs]
    state = append(store, state, events, Stamp(write_id="2", at="2026-11-21T08:00:00+00:00"))
    if updated is not None:
        at = (datetime.now(UTC) - updated).isoformat()
        trials = (RunningTrial(trial="trial", attempt=1),) * runs
        live = LiveStatus(term=state.term, owner=OWNER, number=1, at=at, period_seconds=PERIOD_SECONDS, trials=trials)
        write_live_status(store, JournalKey(experiment=name, generation=1), live)


def test_a_script_deletes_with_yes_and_is_told_what_went(target: Path, run: Run) -> None:
    write_experiment(target, "kept", [2])
    before = files_in(target / "kept")
    done = run("delete", target, "digits", "--yes")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("deleted: digits: 1 trial, 3 checkpoints, ")
    assert is_gone(target / "digits")
    assert files_in(target / "kept") == before
    assert "there is no experiment 'digits'" in run("delete", target, "digits", "--yes").err


def test_json_says_what_went(target: Path, run: Run) -> None:
    size_bytes = sum(each.stat().st_size for each in (target / "digits").rglob("*") if each.is_file())
    done = run("delete", target, "digits", "--yes", "--json")
    said = json.loads(done.out)
    assert said.pop("object_count") > 3
    assert said == {"experiment": "digits", "trial_count": 1, "checkpoint_count": 3, "size_bytes": size_bytes}


def test_without_a_terminal_and_without_yes_nothing_is_deleted(target: Path, run: Run) -> None:
    before = files_in(target)
    done = run("delete", target, "digits")
    assert (done.code, done.out) == (2, "")
    assert "there is no terminal to confirm it on: add --yes" in done.err
    assert files_in(target) == before


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_on_a_terminal_it_asks_first(
    answer: str, code: int, target: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", _Terminal(answer))
    done = run("delete", target, "digits")
    assert done.code == code
    assert f"Delete experiment 'digits' at {target} for good: 1 trial, 3 checkpoints, " in done.out
    assert is_gone(target / "digits") != bool(code)
    assert ("nothing was deleted" in done.err) == bool(code)


def test_what_a_run_owns_is_refused_with_its_name_and_the_next_move(tmp_path: Path, run: Run) -> None:
    running(tmp_path / "target", "runs", updated=timedelta(0))
    before = files_in(tmp_path / "target")
    done = run("delete", tmp_path / "target", "runs", "--yes")
    assert done.code == 2
    assert "lively lynx (pid 4242 on node-7): 1 trial was running as of " in done.err
    assert "End that run first (cancel its flow run)" in done.err
    assert files_in(tmp_path / "target") == before
    with pytest.raises(pt.InvalidInput, match="a run may own it"):
        pt.delete_experiment("runs", target=str(tmp_path / "target"))
    assert run("delete", tmp_path / "target", "runs", "--yes", "--even-if-running").code == 0
    assert is_gone(tmp_path / "target" / "runs")


def test_a_search_whose_process_lives_is_refused_also_between_two_trials(tmp_path: Path, run: Run) -> None:
    running(tmp_path / "target", "between", updated=timedelta(0), runs=False)
    before = files_in(tmp_path / "target")
    done = run("delete", tmp_path / "target", "between", "--yes")
    assert "a run may own it, lively lynx (pid 4242 on node-7): its process was alive as of " in done.err
    assert files_in(tmp_path / "target") == before
    assert run("delete", tmp_path / "target", "between", "--yes", "--even-if-running").code == 0
    running(tmp_path / "target", "later", updated=timedelta(0), runs=False)  # another run owns it now
    take_over(
        PosixStore(tmp_path / "target"),
        first_generation("later"),
        OWNER,
        Stamp(write_id="3", at="2026-11-21"),
        side_by_side=map,
    )
    assert run("delete", tmp_path / "target", "later", "--yes").code == 0


@pytest.mark.usefixtures("no_prefect_server")
def test_a_search_is_refused_while_it_trains_and_before_and_deleted_when_it_has_ended(tmp_path: Path) -> None:
    refused: list[str] = []
    target = str(tmp_path / "target")

    def proposes(config: object) -> object:
        """Wait, while the first trial is proposed, until a deletion would be refused."""
        until = time.monotonic() + 300
        while Path(target, "e", "1", "journal").exists() and not refused and time.monotonic() < until:
            if list(Path(target, "e", "1").glob("live/*")):
                with pytest.raises(pt.InvalidInput, match="its process was alive as of ") as error:
                    pt.delete_experiment("e", target=target)
                refused.append(str(error.value))
            time.sleep(0.1)
        return config is None

    space = {"x": pt.sample_from(proposes)}
    rarely = pt.SyncConfig(live_period_seconds=600)  # not stale before half an hour, however slow the machine
    pt.tune(train, space, target=target, experiment="e", num_samples=1, isolation="thread", sync=rarely)
    assert len(refused) == 1
    assert pt.delete_experiment("e", target=target).object_count > 0


@pytest.mark.parametrize("runs", [True, False])
def test_what_a_killed_run_has_left_is_deleted(tmp_path: Path, runs: bool) -> None:
    running(tmp_path / "target", "killed", updated=timedelta(minutes=9), runs=runs)
    assert pt.delete_experiment("killed", target=str(tmp_path / "target")).object_count > 0
    assert is_gone(tmp_path / "target" / "killed")


def test_without_updates_a_run_may_be_alive(tmp_path: Path) -> None:
    running(tmp_path / "target", "silent", updated=None)
    with pytest.raises(pt.InvalidInput, match="the last journal entry"):
        pt.delete_experiment("silent", target=str(tmp_path / "target"))


def test_a_fork_outlives_its_origin(tmp_path: Path, run: Run) -> None:
    (tmp_path / "target").mkdir()
    store = PosixStore(tmp_path / "target")
    search_of_three(store)
    forked(store)
    assert run("delete", tmp_path / "target", "old", "--yes", "--even-if-running").code == 0
    assert is_gone(tmp_path / "target" / "old")
    assert run("verify", tmp_path / "target", "new").code == 0


def test_an_interrupted_deletion_is_finished(target: Path, run: Run) -> None:
    store = PosixStore(target)
    state = take_over(
        store,
        first_generation("digits"),
        OWNER,
        Stamp(write_id="gone", at=""),
        side_by_side=map,
        also=lambda _: [Deletion()],
    )
    assert "digits" in run("ls", target).out  # killed here: it is still there, and cannot be resumed
    end_generation(store, state.key, at="", by="a script")
    store.delete([state.key.entry_path(number) for number in range(1, state.number)])  # or here
    assert "no experiments" in run("ls", target).out
    assert run("delete", target, "digits", "--yes").code == 0
    assert is_gone(target / "digits")


def test_a_folder_that_is_no_experiment_stays(target: Path, run: Run) -> None:
    (target / "images").mkdir()
    (target / "images" / "cat.png").write_bytes(b"a cat")
    done = run("delete", target, "images", "--yes")
    assert (done.code, "there is no experiment 'images'" in done.err) == (2, True)
    assert (target / "images" / "cat.png").read_bytes() == b"a cat"


def test_a_corrupt_journal_is_no_deletion(target: Path) -> None:
    PosixStore(target).delete([JournalKey(experiment="digits", generation=1).entry_path(2)])
    before = files_in(target)
    with pytest.raises(pt.JournalCorrupt):
        pt.delete_experiment("digits", target=str(target))
    assert files_in(target) == before


def test_a_search_is_deleted_with_the_journals_of_its_trials(moods: Path, tmp_path: Path) -> None:
    shutil.copytree(moods, tmp_path / "copy")
    assert load(PosixStore(tmp_path / "copy"), first_generation("moods"), side_by_side=map).number
    assert pt.delete_experiment("moods", target=str(tmp_path / "copy")).object_count > 0
    assert is_gone(tmp_path / "copy" / "moods")
