"""State that released versions wrote: the current code reads it, restores it, and resumes from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefect_tune.core.errors import UnknownVersion
from prefect_tune.core.experiment.summary import LearningCurves
from prefect_tune.core.experiment.trial_transitions import Phase
from prefect_tune.core.journal import journal
from prefect_tune.core.restore import read_manifest
from tests.core.documents.write_golden import golden_run
from tests.core.driver import JOURNAL, KEY, Session, Witness
from tests.fakes.stores.memory_files import load_files
from tests.fakes.stores.memory_store import MemoryStore

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = [GOLDEN / "version-5"]
REJECTED = [GOLDEN / "version-1", GOLDEN / "version-2", GOLDEN / "version-3", GOLDEN / "version-4"]
BACKBONE = b"never changed, and shared by every checkpoint..."
HEADS = {2: "0a754341bb102ada", 4: "387431e3211fe770", 5: "6cdff9cbacdab7b7"}


def load_version(version: Path) -> MemoryStore:
    files = (path for path in version.rglob("*") if path.is_file())
    return MemoryStore({path.relative_to(version).as_posix(): path.read_bytes() for path in files})


@pytest.mark.parametrize("version", REJECTED, ids=lambda path: path.name)
def test_what_an_unreleased_version_wrote_is_rejected_with_one_sentence(version: Path) -> None:
    with pytest.raises(UnknownVersion) as rejected:
        journal.load_experiment(load_version(version), JOURNAL)
    number = version.name.removeprefix("version-")
    message = f"of version {number}; this prefect-tune reads version 5 only. Read it with the older prefect-tune"
    assert str(rejected.value).endswith(f"{message} that wrote it")


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_todays_code_reads_what_was_written_then(version: Path) -> None:
    experiment = journal.load_experiment(load_version(version), JOURNAL)
    trial = experiment.trial("t")

    assert (experiment.entry_count, experiment.term, str(experiment.owner)) == (18, 2, "second (pid 1 on here)")
    assert (trial.phase, trial.attempt, trial.step, trial.recomputed_steps) == (Phase.RUNNING, 4, 5, 1)
    assert trial.config == {"width": 3}
    assert trial.metrics == {"head": HEADS[5]}
    assert [checkpoint.step for checkpoint in trial.checkpoints] == [4, 5]
    assert (trial.quarantined_sequences, trial.collected_up_to) == ((7,), 9)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_what_was_saved_then_is_restored_today(version: Path) -> None:
    store = load_version(version)
    for checkpoint in journal.load_experiment(store, JOURNAL).trial("t").checkpoints:
        manifest = read_manifest(store, KEY.checkpoint_key(checkpoint))
        assert load_files(store, manifest) == {
            "backbone": BACKBONE,
            "cycle": (b"A" if checkpoint.step == 4 else b"B") * 24,
            "empty": b"",
            "head": bytes.fromhex(HEADS[checkpoint.step]),
            "logs/steps": b"." * checkpoint.step,
        }
        assert manifest.empty_directories == ("none",)
        assert manifest.metadata.metrics == {"head": HEADS[checkpoint.step]}


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_the_history_of_then_is_whole(version: Path) -> None:
    store = load_version(version)
    entries = journal.read_entries(store, JOURNAL)
    assert [entry.number for entry in entries] == list(range(1, 19))
    assert [report.step for report in LearningCurves(entries).get_curve("t")] == [1, 2, 3, 4, 5]
    store.delete([path for path in store.objects if "/snapshots/" in path])
    assert journal.load_experiment(store, JOURNAL) == journal.load_experiment(load_version(version), JOURNAL)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_who_goes_on_today_goes_on_from_then(version: Path) -> None:
    session = Session(load_version(version), Witness(stamps=1000), owner="today")
    session.open()
    session.start()
    assert (session.trial.step, session.head.hex()) == (5, HEADS[5])
    session.train()
    session.save()
    assert session.trial.checkpoints[-1].step == 6


def test_the_newest_of_them_is_what_todays_code_writes() -> None:
    """From the first release on, a changed format needs a new version beside the old one."""
    assert load_version(VERSIONS[-1]).objects == golden_run().objects
