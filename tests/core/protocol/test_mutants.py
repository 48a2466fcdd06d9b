"""Mutation tests: the package is broken on purpose, one line at a time, and the matrix must detect it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from prefect_tune.core import restore
from prefect_tune.core.checkpoints import commit, manifest
from prefect_tune.core.errors import CheckpointCorrupt, StoreUnavailable, TuneError
from prefect_tune.core.experiment import experiment, trial_transitions
from prefect_tune.core.experiment.trial_transitions import newest_checkpoint
from prefect_tune.core.journal import journal, outbox
from prefect_tune.core.journal.journal import write_snapshot
from prefect_tune.core.operations import trial_gc
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage import object_store
from prefect_tune.core.storage.object_store import Buffer
from prefect_tune.stores.posix_store import PosixStore
from tests.core.driver import JOURNAL, KEY, NAME, Session, Witness, check_recovery
from tests.core.histories import append_next_entry, fold_entries, open_experiment
from tests.core.protocol import test_outbox
from tests.core.protocol.exploring import run_random
from tests.core.protocol.matrix import (
    STEPS,
    ObjectWorld,
    PosixWorld,
    delay_every_write,
    die_before_entry,
    fail_everywhere,
    run_fresh,
    run_longer,
    run_resumed,
    start_after_unknown_save,
)
from tests.core.protocol.mutate import Mutant
from tests.core.protocol.owners import make_late_uploader, make_old_owner, save, take_over, take_over_and_save
from tests.fakes.checkpoints import first_generation
from tests.fakes.stores.dying_store import Failure
from tests.fakes.stores.memory_files import load_files
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")

Finder = Callable[[], Sequence[str]]


def crash_everywhere() -> Sequence[str]:
    fresh = fail_everywhere(ObjectWorld, run_fresh, enough=1).broken
    return fresh or fail_everywhere(ObjectWorld, run_resumed, before=die_before_entry, enough=1).broken


def crash_second_attempt_everywhere() -> Sequence[str]:
    return fail_everywhere(ObjectWorld, run_resumed, before=start_after_unknown_save, enough=1).broken


def cut_power_everywhere() -> Sequence[str]:
    return fail_everywhere(PosixWorld, run_fresh, failures=[Failure.CRASH_AFTER], enough=1).broken


def delay_every_save() -> Sequence[str]:
    return delay_every_write(run_fresh, [None, 0, 2, 10], enough=1).broken


def interleave_owners() -> Sequence[str]:
    return run_random(make_old_owner(), [save, take_over_and_save, take_over_and_save], range(60), enough=1).broken


def delay_every_deletion() -> Sequence[str]:
    return delay_every_write(run_longer, [2, 8, 20], enough=1).broken


def clean_carelessly() -> Sequence[str]:
    """Let an owner delete leftovers without journaling it first, while the next owner reuses them."""
    acts = [partial(take_over, cleanup="careless"), partial(take_over_and_save, cleanup="none")]
    return run_random(make_late_uploader(), acts, range(100), enough=1).broken


class LyingStore(MemoryStore):
    """A store that acknowledges a put without writing, like `pyarrow.fs.copy_files`; `forgets` is the put's number."""

    def __init__(self, forgets: int) -> None:
        super().__init__()
        self._forgets = forgets

    def put(self, path: str, data: Buffer) -> None:
        self._forgets -= 1
        if self._forgets != 0:
            super().put(path, data)


def lose_every_put() -> Sequence[str]:
    for forgets in range(1, 9):
        store, witness = LyingStore(forgets), Witness()
        try:
            run_fresh(store, witness)
        except StoreUnavailable:
            continue
        if broken := check_recovery(store, witness, STEPS):
            return broken
    return []


def flip_every_blob() -> Sequence[str]:
    session = make_old_owner()
    newest = newest_checkpoint(session.trial)
    assert newest
    manifest = read_manifest(session.store, KEY.checkpoint_key(newest))
    for path in manifest.blob_paths():
        whole = session.objects[path]
        session.objects[path] = bytes([whole[0] ^ 1, *whole[1:]])
        try:
            load_files(session.store, manifest)
        except CheckpointCorrupt:
            session.objects[path] = whole
        else:
            return [f"I2: {path} was altered, and was restored"]
    return []


def make_snapshot_store(entries: int, number: int, *trials: str) -> MemoryStore:
    """Return a journal of so many entries, with a snapshot after entry `number`."""
    store = MemoryStore()
    state = open_experiment(store)
    while state.entry_count < entries:
        state = append_next_entry(store, state, [trials[state.entry_count // 4 % len(trials)]])
        if state.entry_count == number:
            write_snapshot(store, state)
    return store


def compare_with_entries(store: MemoryStore) -> list[str]:
    try:
        loaded = journal.load_experiment(store, first_generation(NAME))
    except TuneError as error:
        return [f"I4: {error}"]
    expected = fold_entries(store)
    return [] if (loaded, list(loaded.trials)) == (expected, list(expected.trials)) else [f"I6: {loaded}"]


def compare_five_trials_snapshot() -> Sequence[str]:
    return compare_with_entries(make_snapshot_store(28, 24, *"acbed"))


def compare_torn_snapshot() -> Sequence[str]:
    store = make_snapshot_store(23, 20, "b", "a")
    path = JOURNAL.snapshot_path(20)
    store.objects[path] = store.objects[path].replace(b'"attempt":1', b'"attempt":2')
    return compare_with_entries(store)


def compare_stale_snapshots() -> Sequence[str]:
    """Put a snapshot of a deleted journal at, and before, the last entry of its namesake."""
    store, old = make_snapshot_store(27, 0, "new"), make_snapshot_store(27, 27, "old")
    store.objects[JOURNAL.snapshot_path(27)] = old.objects[JOURNAL.snapshot_path(27)]
    broken = compare_with_entries(store)
    open_experiment(store, write_id="later")
    return broken or compare_with_entries(store)


def run_test(test: Callable[[], object]) -> Sequence[str]:
    """Run a test; return its failure, if any."""
    try:
        test()
    except (AssertionError, TuneError, pytest.fail.Exception) as failure:
        return [f"{type(failure).__name__}: {failure}"]
    return []


def fail_outbox() -> Sequence[str]:
    cases = [(*request, fault) for request in test_outbox.REQUESTS for fault in test_outbox.FAULTS]
    return next(filter(None, (run_test(partial(test_outbox.fail_request, *case)) for case in cases)), [])


UNKNOWN_IS_SUCCESS = {
    "except (AlreadyExists, CommitUnknown) as outcome:": "except CommitUnknown:\n        return\n    "
    "except AlreadyExists as outcome:"
}
PUTS: list[tuple[MemoryStore, str, bytes]] = []

MUTANTS = {
    "the manifest first": Mutant(
        crash_everywhere,
        {
            commit._store_group: {"store.put(path, buffer[:end])": "PUTS.append((store, path, bytes(buffer[:end])))"},
            commit.require_blobs_stored: {"if not uploaded:": "if True:"},
            commit.commit_checkpoint: {
                "batches =": "PUTS.clear(); batches =",
                "return SaveResult(": "[at.put(path, of) for at, path, of in PUTS]; return SaveResult(",
            },
        },
    ),
    "no digest check": Mutant(
        flip_every_blob, {manifest._read_and_verify: {"if actual != placed.chunk.digest:": "if False:"}}
    ),
    "overwrite instead of create": Mutant(
        interleave_owners, {object_store.create_idempotently: {"store.create(path, data)": "store.put(path, data)"}}
    ),
    "unknown means success": Mutant(delay_every_save, {object_store.create_idempotently: UNKNOWN_IS_SUCCESS}),
    "unknown means conflict": Mutant(
        crash_everywhere, {object_store.create_idempotently: {"if stored != data:": "if True:"}}
    ),
    "no fsync of the bytes": Mutant(cut_power_everywhere, {PosixStore._temp_file: {"self._calls.fsync(file)": "pass"}}),
    "no fsync of the name": Mutant(
        cut_power_everywhere, {PosixStore._create_link: {"self._calls.fsync_folder(folder)": "pass"}}
    ),
    "no term check": Mutant(
        interleave_owners,
        {journal._apply_non_owner_entry: {"how = f": "return load_experiment(store, experiment.key)\n    how = f"}},
    ),
    "collect before the entry": Mutant(
        crash_everywhere,
        {Session.acknowledge: {"self.append(": "self.delete_early(checkpoint, retired_sequences); self.append("}},
    ),
    "reuse any orphan": Mutant(
        delay_every_deletion, {commit.find_reusable_bytes: {"blob_sequence(path) >= collected_up_to": "True"}}
    ),
    "no look at what was sent": Mutant(lose_every_put, {commit.require_blobs_stored: {"if not uploaded:": "if True:"}}),
    "adopt everything": Mutant(
        crash_everywhere, {trial_transitions.can_commit_save: {"sequence > last_sequence and": "True or"}}
    ),
    "adopt what an attempt before left": Mutant(
        crash_second_attempt_everywhere,
        {
            restore._find_unjournaled_save: {"manifest.metadata.attempt == trial.attempt": "True"},
            trial_transitions._apply_attempt_start: {
                "sequence = trial.next_sequence + (trial.attempt > 0)": "sequence = trial.next_sequence",
                "sequence if trial.attempt else trial.adopted_up_to": "trial.adopted_up_to",
            },
        },
    ),
    "collect what no retirement protects": Mutant(
        clean_carelessly, {trial_transitions.is_deletable_checkpoint: {" and key.sequence < state.collected_up_to": ""}}
    ),
    "collect what live ones share": Mutant(
        crash_everywhere, {trial_gc.delete_retired_objects: {" - _find_reachable_blobs(store, trial, state)": ""}}
    ),
    "collect the manifest first": Mutant(
        crash_everywhere,
        {
            trial_gc.delete_retired_objects: {
                "store.delete(unneeded)": "store.delete([key.manifest_path for key in keys]); store.delete(unneeded)"
            }
        },
    ),
    "keep a snapshot's trials in the order of their names": Mutant(
        compare_five_trials_snapshot,
        {
            journal.encode_snapshot: {
                "in experiment.trials.values()": "in sorted(experiment.trials.values(), key=lambda trial: trial.id)"
            }
        },
    ),
    "believe a snapshot without a look at the journal": Mutant(
        compare_stale_snapshots, {journal._apply_newer_entries: {"last is None or": "False and"}}
    ),
    "believe a snapshot of another history": Mutant(
        compare_stale_snapshots,
        {experiment.apply_entry: {"if (entry.number, entry.previous, entry.term) != expected:": "if False:"}},
    ),
    "believe a snapshot that is torn": Mutant(
        compare_torn_snapshot,
        {journal.decode_snapshot: {'if hash_bytes(lines) != body.get("digest_of_trials"):': "if False:"}},
    ),
    "delete the first post": Mutant(
        partial(
            run_test,
            test_outbox.test_a_second_process_with_the_same_request_stops_at_its_first_post_even_after_the_attempt_has_ended,
        ),
        {outbox.delete_posts: {" if number > 1": ""}},
    ),
    "end an outbox without reading the post that came first": Mutant(
        partial(
            run_test,
            test_outbox.test_each_acknowledged_post_is_journaled_in_every_order_of_an_attempt_and_an_owner_that_closes_its_outbox,
        ),
        {outbox.close_outbox: {"races += 1": "number, races = number + 1, races + 1"}},
    ),
    "acknowledge a post whose creation is unknown": Mutant(
        fail_outbox, {object_store.create_idempotently: UNKNOWN_IS_SUCCESS}
    ),
    "receive posts in any order": Mutant(
        partial(run_test, partial(test_outbox.test_a_post_is_not_journaled_twice_or_before_the_one_before_it, 1, 0)),
        {trial_transitions._apply_outbox_event: {" and post == trial.last_post + 1": ""}},
    ),
    "delete posts before their entry": Mutant(
        fail_outbox,
        {
            test_outbox.World.receive: {
                "events = make": "delete_posts(store, [(TRIAL, 1, received + n + 1) for n in range(len(posts))]); "
                "events = make"
            }
        },
    ),
    "post after the end of the outbox": Mutant(
        fail_outbox,
        {outbox.write_post: {"if stored is N": "if stored and stored.closed_by: return\n        if stored is N"}},
    ),
    "settle on opening": Mutant(
        crash_everywhere,
        {
            experiment._apply_owner_change: {
                '"owner_since_entry": number': '"owner_since_entry": number, "trials": TrialMap.from_trials('
                'each.model_copy(update={"adopted_up_to": each.next_sequence + 1}) '
                "for each in experiment.trials.values())"
            }
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_the_suite_notices(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setattr(commit, "PUTS", PUTS, raising=False)
    MUTANTS[name].require_noticed(monkeypatch, record_property)


FINDERS = [
    delay_every_deletion,
    clean_carelessly,
    lose_every_put,
    flip_every_blob,
    compare_five_trials_snapshot,
    compare_torn_snapshot,
    compare_stale_snapshots,
    fail_outbox,
]


@pytest.mark.long
@pytest.mark.parametrize("finder", FINDERS)
def test_what_notices_the_mutants_finds_nothing_wrong_with_the_package(finder: Finder) -> None:
    assert list(finder()) == []
