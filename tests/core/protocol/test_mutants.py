"""Mutation tests: the package is broken on purpose, one line at a time, and the matrix must detect it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from prefect_tune.core import adoption
from prefect_tune.core.checkpoints import commit, verified_reads
from prefect_tune.core.errors import CheckpointCorrupt, StoreUnavailable, TuneError
from prefect_tune.core.experiment import experiment, trial_transitions
from prefect_tune.core.experiment.experiment import TrialMap
from prefect_tune.core.experiment.trial_transitions import newest_checkpoint
from prefect_tune.core.journal import journal, segments
from prefect_tune.core.operations import checkpoint_gc
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage import object_store
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.stores.posix_files import Publisher
from prefect_tune.stores.posix_store import PosixStore
from tests.core.driver import JOURNAL, KEY, NAME, Session, Witness
from tests.core.histories import base, fold, next_state, opened
from tests.core.protocol.invariants import after_recovery
from tests.core.protocol.matrix import (
    STEPS,
    attempt_after_an_unknown_save,
    explore,
    explore_delays,
    fresh_run,
    killed_before_its_entry,
    longer_run,
    resumed_run,
)
from tests.core.protocol.mutate import Mutant
from tests.core.protocol.owners import (
    after_a_late_upload,
    meet_at_random,
    old_owner,
    save,
    takes_over_and_saves,
    takes_over_carelessly,
    takes_over_untidily_and_saves,
)
from tests.core.protocol.worlds import ObjectWorld, PosixWorld
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import Way
from tests.fakes.stores.memory_files import restored
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")

Finder = Callable[[], Sequence[str]]


def every_death() -> Sequence[str]:
    fresh = explore(ObjectWorld, fresh_run, enough=1).broken
    return fresh or explore(ObjectWorld, resumed_run, before=killed_before_its_entry, enough=1).broken


def every_crash_of_a_second_attempt() -> Sequence[str]:
    return explore(ObjectWorld, resumed_run, before=attempt_after_an_unknown_save, enough=1).broken


def every_power_cut() -> Sequence[str]:
    return explore(PosixWorld, fresh_run, ways=[Way.CRASH_AFTER], enough=1).broken


def every_late_write() -> Sequence[str]:
    return explore_delays(fresh_run, [None, 0, 2, 10], enough=1).broken


def meeting_owners() -> Sequence[str]:
    return meet_at_random(old_owner(), [save, takes_over_and_saves, takes_over_and_saves], range(60), enough=1).broken


def every_late_deletion() -> Sequence[str]:
    return explore_delays(longer_run, [2, 8, 20], enough=1).broken


def a_careless_cleaner() -> Sequence[str]:
    """An owner that deletes leftovers without journaling it first, while the next owner reuses them."""
    acts = [takes_over_carelessly, takes_over_untidily_and_saves]
    return meet_at_random(after_a_late_upload(), acts, range(100), enough=1).broken


class LyingStore(MemoryStore):
    """A store that acknowledges a put without writing, like `pyarrow.fs.copy_files`; `forgets` is the put's number."""

    def __init__(self, forgets: int) -> None:
        super().__init__()
        self._forgets = forgets

    def put(self, path: str, data: Buffer) -> None:
        self._forgets -= 1
        if self._forgets != 0:
            super().put(path, data)


def every_lie() -> Sequence[str]:
    for forgets in range(1, 9):
        store, witness = LyingStore(forgets), Witness()
        try:
            fresh_run(store, witness)
        except StoreUnavailable:
            continue
        if broken := after_recovery(store, witness, STEPS):
            return broken
    return []


def every_flipped_blob() -> Sequence[str]:
    session = old_owner()
    newest = newest_checkpoint(session.trial)
    assert newest
    assert isinstance(session.store, MemoryStore)
    manifest = read_manifest(session.store, CheckpointKey(trial=KEY, step=newest.step, sequence=newest.sequence))
    for path in manifest.blob_paths():
        whole = session.store.objects[path]
        session.store.objects[path] = bytes([whole[0] ^ 1, *whole[1:]])
        try:
            restored(session.store, manifest)
        except CheckpointCorrupt:
            session.store.objects[path] = whole
        else:
            return [f"I2: {path} was altered, and was restored"]
    return []


def some_segments(entries: int, *trials: str, lost: int = 0) -> MemoryStore:
    """A history with this number of entries, and all segments except the one at entry `lost`."""
    store = MemoryStore()
    state = opened(store)
    while state.number < entries:
        state = next_state(store, state, [trials[state.number // 4 % len(trials)]])
        if state.number != lost:
            segments.write_due_segment(store, state)
    return store


def differs(store: MemoryStore) -> list[str]:
    try:
        found = journal.load(store, first_generation(NAME), side_by_side=map)
    except TuneError as error:
        return [f"I4: {error}"]
    return [] if (found, list(found.trials)) == (fold(store), list(fold(store).trials)) else [f"I6: {found}"]


def every_lost_segment() -> Sequence[str]:
    with base(3):
        runs = [(entries, lost) for entries in (28, 40) for lost in range(0, entries, 3)]
        return [each for run, lost in runs for each in differs(some_segments(run, *"acbed", lost=lost))]


def segments_of_a_journal_that_was_deleted() -> Sequence[str]:
    with base(3):
        store, old = some_segments(27, "new"), some_segments(27, "old")
        store.objects[JOURNAL.segment_path(27)] = old.objects[JOURNAL.segment_path(27)]
        return differs(store)


def every_torn_segment() -> Sequence[str]:
    store = some_segments(23, "b", "a")
    path = JOURNAL.segment_path(20)
    store.objects[path] = store.objects[path].replace(b'"attempt":1', b'"attempt":2')
    return differs(store)


def segments_of_two_histories() -> Sequence[str]:
    with base(3):
        store, old = some_segments(31, "new"), some_segments(27, "old")
        store.objects[JOURNAL.segment_path(27)] = old.objects[JOURNAL.segment_path(27)]
        return differs(store)


LATER: list[tuple[MemoryStore, str, bytes]] = []

MUTANTS = {
    "the manifest first": Mutant(
        every_death,
        {
            commit._place: {"store.put(path, buffer[:end])": "LATER.append((store, path, bytes(buffer[:end])))"},
            commit.require_stored: {"if not written:": "if True:"},
            commit.commit: {
                "work =": "LATER.clear(); work =",
                "return CommitResult(": "[at.put(path, of) for at, path, of in LATER]; return CommitResult(",
            },
        },
    ),
    "no digest check": Mutant(
        every_flipped_blob, {verified_reads._verified: {"if found != wanted.chunk.digest:": "if False:"}}
    ),
    "overwrite instead of create": Mutant(
        meeting_owners, {object_store.create_or_recognize: {"store.create(path, data)": "store.put(path, data)"}}
    ),
    "unknown means success": Mutant(
        every_late_write,
        {object_store.create_or_recognize: {"if _is_there": "if isinstance(outcome, AlreadyExists) and _is_there"}},
    ),
    "unknown means conflict": Mutant(
        every_death,
        {object_store.create_or_recognize: {"if _is_there(store, path, data, outcome) != data:": "if True:"}},
    ),
    "no fsync of the bytes": Mutant(every_power_cut, {PosixStore._write: {"self._calls.fsync(file)": "pass"}}),
    "no fsync of the name": Mutant(every_power_cut, {Publisher.link: {"self._calls.fsync_folder(folder)": "pass"}}),
    "no term check": Mutant(
        meeting_owners,
        {
            journal._after_guest: {
                "raise _superseded(experiment, entry) from exists": "return load("
                "store, experiment.key, side_by_side=map)"
            }
        },
    ),
    "collect before the entry": Mutant(
        every_death,
        {Session.acknowledge: {"self.append([*reports": "self.collect_early(new, going); self.append([*reports"}},
    ),
    "reuse any orphan": Mutant(
        every_late_deletion, {commit.reusable: {"blob_sequence(path) >= collected_up_to": "True"}}
    ),
    "no look at what was sent": Mutant(every_lie, {commit.require_stored: {"if not written:": "if True:"}}),
    "adopt everything": Mutant(
        every_death,
        {trial_transitions.is_acceptable: {"sequence > known and sequence >= trial.collected_up_to": "True"}},
    ),
    "adopt what an attempt before left": Mutant(
        every_crash_of_a_second_attempt, {adoption._find: {"manifest.about.attempt == trial.attempt": "True"}}
    ),
    "collect what no retirement protects": Mutant(
        a_careless_cleaner, {trial_transitions.is_collectable: {" and key.sequence < state.collected_up_to": ""}}
    ),
    "collect what live ones share": Mutant(
        every_death, {checkpoint_gc._collected: {" - _reachable(store, trial, state, side_by_side)": ""}}
    ),
    "collect the manifest first": Mutant(
        every_death,
        {
            checkpoint_gc._collected: {
                "store.delete(ours)": "store.delete([key.manifest_path for key in keys]); store.delete(ours)"
            }
        },
    ),
    "forget at a boundary what changed before it": Mutant(
        every_lost_segment, {TrialMap.at_boundary: {"changed[level + 1].update(changed[level])": "changed[level]"}}
    ),
    "count a new trial as no change": Mutant(
        every_lost_segment, {TrialMap.with_trial: {"if number in lately": "if number == len(numbers) - 1"}}
    ),
    "keep a segment's trials in the order of their names": Mutant(
        every_lost_segment, {TrialMap.with_segment: {"for trial in changed:": "for trial in sorted(changed, key=str):"}}
    ),
    "believe a segment without a look at the journal": Mutant(
        segments_of_a_journal_that_was_deleted, {journal._require_last: {"if data is None or": "if False and"}}
    ),
    "believe segments of two histories": Mutant(
        segments_of_two_histories, {segments.after_segment: {"if known.get": "if False and known.get"}}
    ),
    "believe a segment that is torn": Mutant(
        every_torn_segment,
        {segments.decode_segment: {'if digest_of(lines) != body.get("digest_of_trials"):': "if False:"}},
    ),
    "settle on opening": Mutant(
        every_death,
        {experiment._opened: {'"opened_at": number': '"opened_at": number, "settled_from": number'}},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setattr(commit, "LATER", LATER, raising=False)
    MUTANTS[name].require_noticed(monkeypatch, record_property)


FINDERS = [
    every_late_deletion,
    a_careless_cleaner,
    every_lie,
    every_flipped_blob,
    every_lost_segment,
    every_torn_segment,
    segments_of_a_journal_that_was_deleted,
    segments_of_two_histories,
]


@pytest.mark.long
@pytest.mark.parametrize("finder", FINDERS)
def test_what_notices_the_mutants_finds_nothing_wrong_with_the_package(finder: Finder) -> None:
    assert list(finder()) == []
