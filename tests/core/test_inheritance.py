"""Later checkpoints do not inherit damage that maintenance found, even if their owner does not know of it yet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefect_tune.core.errors import CheckpointCorrupt
from prefect_tune.core.experiment import trial_transitions
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.trial_transitions import newest_checkpoint_key, parent_of_next_save
from prefect_tune.core.journal_events import CheckpointCommitted, CheckpointQuarantined, CheckpointRef, StepReported
from prefect_tune.core.operations.scrub import inspect_checkpoint, quarantine_in_journal, reinstate_in_journal
from prefect_tune.core.reasons import make_reason
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.values import StepReport
from tests.core.protocol.mutate import break_lines
from tests.core.protocol.population import Chronicle, Search
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")


@pytest.fixture
def search() -> Search:
    """An owner that saved three checkpoints with a shared backbone; two are live."""
    owner = Search(MemoryStore(), Chronicle(), retention=Retention(last=2))
    owner.open()
    owner.add("s", "c")
    owner.start("s")
    for _ in range(3):
        owner.save("s")
    return owner


def live_keys(search: Search) -> list[CheckpointKey]:
    return [search.key("s").checkpoint_key(ref) for ref in search.trial("s").checkpoints]


def find_damage(search: Search, key: CheckpointKey) -> str | None:
    return inspect_checkpoint(search.store, key).damage


def corrupt_shared_blob(search: Search) -> None:
    """Alter a blob that all checkpoints share."""
    manifest = read_manifest(search.store, live_keys(search)[-1])
    backbone = next(file for file in manifest.files if file.path == "backbone")
    path = manifest.blob_path(backbone.chunks[0].blob)
    assert isinstance(search.store, MemoryStore)
    search.store.objects[path] = b"X" * len(search.store.objects[path])


def quarantine_keys(search: Search, *damaged: CheckpointKey) -> None:
    """Quarantine checkpoints, like maintenance that found them damaged."""
    quarantine_in_journal(search.store, search.journal, dict.fromkeys(damaged, "damaged"), search.chronicle.stamp())


@pytest.mark.parametrize("indexes", [[0, 1], [0], [1]], ids=["all of them", "the older", "the newer"])
def test_what_is_saved_after_damage_was_found_is_whole_though_the_owner_has_not_heard_of_it(
    search: Search, indexes: list[int]
) -> None:
    corrupt_shared_blob(search)
    live = live_keys(search)
    quarantine_keys(search, *(live[index] for index in indexes))
    for _ in range(3):
        search.save("s")
        assert find_damage(search, live_keys(search)[-1]) is None
    assert [find_damage(search, key) for key in live_keys(search)] == [None, None]
    assert [key.step for key in live_keys(search)] == [5, 6]


def test_what_was_committed_just_before_damage_was_found_is_not_saved_upon(search: Search) -> None:
    corrupt_shared_blob(search)
    bad = live_keys(search)
    search.save("s")  # committed with the same damaged backbone, before the damage was found
    quarantine_keys(search, *(key for key in bad if key in live_keys(search)))
    search.save("s")
    search.save("s")
    assert [find_damage(search, key) for key in live_keys(search)] == [None, None]


def commit_overtaken_save(search: Search, *retired: int) -> None:
    """Journal a save that was begun before a checkpoint was quarantined."""
    checkpoint = CheckpointRef(step=4, sequence=search.trial("s").next_sequence)
    quarantine_keys(search, live_keys(search)[0])
    report = StepReported(trial="s", report=StepReport(step=4, metrics={}))
    search.append(report, CheckpointCommitted(trial="s", checkpoint=checkpoint, retired_sequences=retired))


def test_a_save_that_a_guest_has_overtaken_is_quarantined_and_retires_nothing(search: Search) -> None:
    live = live_keys(search)
    commit_overtaken_save(search, live[1].sequence)
    assert live_keys(search) == live[1:]
    records = [(record.checkpoint.step, str(record.reason)) for record in search.trial("s").quarantined_checkpoints]
    assert records == [(2, "damaged"), (4, str(make_reason("save-overtaken")))]
    search.save("s")
    assert find_damage(search, live_keys(search)[-1]) is None


def test_the_suite_notices_when_a_save_that_was_overtaken_is_committed(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_lines(monkeypatch, trial_transitions._apply_commit, {"if predates_quarantine(trial, sequence):": "if False:"})
    commit_overtaken_save(search)
    assert live_keys(search)[-1].step == 4


def test_a_damaged_checkpoint_is_quarantined_in_every_trial_that_has_it(search: Search) -> None:
    search.clone("c", "s")
    bad = live_keys(search)[-1]
    quarantine_keys(search, bad)
    assert [len(search.trial(name).checkpoints) for name in ("s", "c")] == [2, 1]
    search.open()
    assert [len(search.trial(name).checkpoints) for name in ("s", "c")] == [1, 0]
    assert reinstate_in_journal(search.store, search.journal, [bad], search.chronicle.stamp()) == [bad]
    search.open()
    assert [len(search.trial(name).checkpoints) for name in ("s", "c")] == [2, 1]


@pytest.mark.parametrize("prepare", [corrupt_shared_blob, lambda _: None], ids=["rotten", "whole"])
def test_what_is_older_than_one_that_was_quarantined_is_not_saved_upon(
    search: Search, prepare: Callable[[Search], None]
) -> None:
    prepare(search)
    bad, before = live_keys(search)[-1], live_keys(search)[0]
    search.append(CheckpointQuarantined(trial="s", sequence=bad.sequence, reason="damaged"))
    assert newest_checkpoint_key(search.key("s"), search.trial("s")) == before
    assert parent_of_next_save(search.key("s"), search.trial("s")) is None
    search.save("s")
    assert parent_of_next_save(search.key("s"), search.trial("s")) == live_keys(search)[-1]
    assert find_damage(search, live_keys(search)[-1]) is None


def test_what_is_reinstated_is_saved_upon_again(search: Search) -> None:
    quarantine_keys(search, *live_keys(search))
    search.append(StepReported(trial="s", report=StepReport(step=4, metrics={})))
    assert parent_of_next_save(search.key("s"), search.trial("s")) is None
    keys = [search.key("s").checkpoint_key(record.checkpoint) for record in search.trial("s").quarantined_checkpoints]
    reinstate_in_journal(search.store, search.journal, keys, search.chronicle.stamp())
    search.append(StepReported(trial="s", report=StepReport(step=5, metrics={})))
    assert parent_of_next_save(search.key("s"), search.trial("s")) == keys[-1]


def test_a_damaged_checkpoint_is_what_these_tests_see(search: Search) -> None:
    corrupt_shared_blob(search)
    search.end("s")
    with pytest.raises(CheckpointCorrupt):
        search.start("s")
