"""Scrubbing: reading checkpoints to find damage."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from prefect_tune.core.errors import (
    CheckpointNotFound,
    DeadlineExceeded,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.summary import best_first, best_of, shown_settings
from prefect_tune.core.journal.journal import append, load
from prefect_tune.core.journal.tolerant_read import Unreadable
from prefect_tune.core.journal_events.experiment_events import Finished, RemovalBegun, Retired
from prefect_tune.core.models import Stamp
from prefect_tune.core.operations.scrub import (
    ScrubLimits,
    inspect,
    inspect_one,
    on_arc,
    place_of,
)
from prefect_tune.core.recovery.restore import read_manifest
from prefect_tune.core.storage.experiment_listing import experiment_names
from prefect_tune.core.storage.layout import CheckpointKey, JournalKey, TrialKey
from prefect_tune.core.storage.object_store import ObjectStore
from tests.core.driver import KEY, NAME, Session, Witness
from tests.core.small_search import SmallSearch
from tests.fakes.stores.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")


@pytest.fixture
def trained() -> Session:
    """A trial with eight live checkpoints."""
    session = Session(MemoryStore(), Witness(), retention=Retention())
    session.open()
    session.start()
    for _ in range(8):
        session.train()
        session.save()
    return session


def objects(session: Session) -> dict[str, bytes]:
    assert isinstance(session.store, MemoryStore)
    return session.store.objects


def keys(session: Session) -> list[CheckpointKey]:
    return [CheckpointKey(trial=KEY, step=each.step, sequence=each.sequence) for each in session.trial.checkpoints]


def flip(session: Session, path: str) -> None:
    data = bytearray(objects(session)[path])
    data[len(data) // 2] ^= 1
    objects(session)[path] = bytes(data)


# ------------------------------------------------------------------------------------------------- reading order


@pytest.mark.parametrize("rounds", [1, 3, 24])
def test_after_as_many_rounds_everything_that_was_there_all_the_while_has_been_read(rounds: int) -> None:
    def many(trial: str, count: int) -> set[CheckpointKey]:
        folder = TrialKey(experiment="e", trial=trial)
        return {CheckpointKey(trial=folder, step=step, sequence=step) for step in range(count)}

    always, begins_at, read = many("always", 200), 123, set[CheckpointKey]()
    for number in range(rounds):
        comes_and_goes = many(f"t{number}", 50 * (number % 3))
        read |= set(on_arc(always | comes_and_goes, begins_at, 1 / rounds))
        begins_at = (begins_at + -(-(2**52) // rounds)) % 2**52
    assert always <= read


def test_a_round_reads_in_the_order_of_the_ring_and_ends_where_its_arc_does(trained: Session) -> None:
    found = inspect(trained.store, trained.experiment, 5, ScrubLimits(), side_by_side=map)
    assert {each.key for each in found.inspected} == set(keys(trained)) == set(found.live)
    assert [place_of(each.key) for each in found.inspected] == sorted(place_of(each.key) for each in found.inspected)
    assert (found.unread_count, found.ends_at, found.damaged) == (0, 5, [])
    assert all(each.size_bytes and each.file_count for each in found.inspected)


@pytest.mark.parametrize("limits", [ScrubLimits(max_bytes=1), ScrubLimits(has_time=lambda: False)])
def test_a_round_that_is_cut_short_reads_something_and_the_next_goes_on_there(
    trained: Session, limits: ScrubLimits
) -> None:
    begins_at, read = 0, list[CheckpointKey]()
    for _ in range(8):
        found = inspect(trained.store, trained.experiment, begins_at, limits, side_by_side=map)
        assert (len(found.inspected), found.unread_count) == (1, 7)
        read.append(found.inspected[0].key)
        begins_at = found.ends_at
    assert len(set(read)) == 8


# ------------------------------------------------------------------------------------------- damage


def test_where_one_is_damaged_all_others_of_its_trial_are_read_too(trained: Session) -> None:
    shared = set.intersection(*(set(read_manifest(trained.store, key).blob_paths()) for key in keys(trained)))
    flip(trained, min(shared))
    begins_at = place_of(keys(trained)[0])
    found = inspect(trained.store, trained.experiment, begins_at, ScrubLimits(share=1e-9), side_by_side=map)
    assert {each.key for each in found.damaged} == set(keys(trained))


def test_what_is_retired_while_it_is_read_is_not_damaged(trained: Session) -> None:
    (oldest, *_), before = keys(trained), trained.experiment
    trained.append([Retired(trial=KEY.trial, retires=(oldest.sequence,))])
    trained.collect([oldest])
    assert inspect_one(trained.store, oldest, side_by_side=map) == []
    found = inspect(trained.store, before, 0, ScrubLimits(), side_by_side=map)
    assert found.damaged == []


def test_what_is_deleted_with_its_experiment_is_not_damaged(trained: Session) -> None:
    (oldest, *_) = keys(trained)
    trained.append([RemovalBegun()])
    trained.store.delete([oldest.manifest_path])
    assert inspect_one(trained.store, oldest, side_by_side=map) == []
    assert inspect(trained.store, trained.experiment, 0, ScrubLimits(), side_by_side=map).live == ()


def test_of_a_trial_that_has_ended_only_what_is_to_be_read_is_asked_after(trained: Session) -> None:
    trained.append([Finished(trial=KEY.trial, reason="enough")])
    found = inspect(trained.store, trained.experiment, 0, ScrubLimits(), side_by_side=map)
    assert len(found.inspected) == 8


# ----------------------------------------------------------------------------------------- failing reads


class Spoilt(MemoryStore):
    """A store on which reads of certain paths fail, or all reads after a certain moment."""

    def __init__(self, was: ObjectStore, error: TuneError, is_spoilt: Callable[[str], bool]) -> None:
        super().__init__()
        assert isinstance(was, MemoryStore)
        self.objects = was.objects
        self._error = error
        self._is_spoilt = is_spoilt
        self.is_gone = False
        """Whether nothing can be had any more once that has happened."""
        self._is_over = False

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self._look(path)
        return super().read(path, offset=offset, length=length)

    def size(self, path: str) -> int | None:
        self._look("")
        return super().size(path)

    def _look(self, path: str) -> None:
        self._is_over = self._is_over or (self.is_gone and self._is_spoilt(path))
        if self._is_over or self._is_spoilt(path):
            raise self._error


def many_trials() -> MemoryStore:
    """Six trials that have ended and one that is running, with four checkpoints each."""
    store = MemoryStore()
    search = SmallSearch(store, "e", retention=Retention())
    for name in "abcdefg":
        search.add(name)
        search.begin(name)
        for _ in range(4):
            search.step(name)
        if name != "g":
            search.finish(name)
        else:
            search.absorb(name)
    return store


def damage_journal(store: MemoryStore, trial: str) -> str:
    """Tear an entry of a journal; return the journal's folder."""
    for path in [path for path in store.objects if path.startswith(f"e/trials/{trial}/segments")]:
        del store.objects[path]
    key = JournalKey(experiment="e", trial=trial)
    store.objects[key.entry_path(2)] = store.objects[key.entry_path(2)][:-5]
    return key.entries


@pytest.mark.parametrize("trial", ["f", "g"])
def test_one_damaged_journal_is_reported_by_its_own_name_and_all_others_are_read_and_the_ring_goes_on(
    trial: str,
) -> None:
    store = many_trials()
    folder = damage_journal(store, trial)
    state, begins_at = load(store, "e", side_by_side=map), 0
    read, unreadable = set[str](), set[Unreadable]()
    for _ in range(6):
        found = inspect(store, state, begins_at, ScrubLimits(share=1 / 6), side_by_side=map)
        begins_at = found.ends_at
        read |= {each.key.trial.trial for each in found.inspected}
        unreadable |= set(found.unreadable)
    assert read == set("abcdefg") - {trial}
    assert [(each.folder, each.trial, each.is_damage) for each in unreadable] == [(folder, trial, True)]


@pytest.mark.parametrize("error", [StoreUnavailable("EIO"), StoreRefused("403: archived")])
def test_a_checkpoint_that_cannot_be_read_is_reported_each_time_and_the_ring_goes_on(
    trained: Session, error: TuneError
) -> None:
    bad = keys(trained)[3]
    store = Spoilt(trained.store, error, lambda path: path == bad.manifest_path)
    for _ in range(2):
        found = inspect(store, trained.experiment, 5, ScrubLimits(), side_by_side=map)
        assert ([each.folder for each in found.unreadable], found.damaged, found.ends_at) == ([bad.folder], [], 5)
        assert str(error) in found.unreadable[0].why
        assert len(found.inspected) == 7


def test_what_is_read_at_the_second_try_was_readable(trained: Session) -> None:
    times = count()
    bad = keys(trained)[3].manifest_path
    store = Spoilt(trained.store, StoreUnavailable("blip"), lambda path: path == bad and next(times) == 0)
    found = inspect(store, trained.experiment, 0, ScrubLimits(), side_by_side=map)
    assert (len(found.inspected), found.unreadable) == (8, ())


def test_a_target_that_is_away_is_no_checkpoint_that_cannot_be_read(trained: Session) -> None:
    bad = keys(trained)[3].manifest_path
    store = Spoilt(trained.store, StoreUnavailable("away"), lambda path: path == bad)
    store.is_gone = True
    with pytest.raises(StoreUnavailable):
        inspect(store, trained.experiment, 0, ScrubLimits(), side_by_side=map)


def test_what_takes_longer_than_there_is_time_is_not_what_the_next_round_begins_with(trained: Session) -> None:
    in_order = on_arc(keys(trained), 0, 1)
    store = Spoilt(trained.store, DeadlineExceeded("late"), lambda path: path == in_order[0].manifest_path)
    store.is_gone = True
    found = inspect(store, trained.experiment, 0, ScrubLimits(), side_by_side=map)
    assert [each.folder for each in found.unreadable] == [in_order[0].folder]
    assert (found.inspected, found.unread_count, found.ends_at) == ((), 7, place_of(in_order[1]))

    store = Spoilt(trained.store, DeadlineExceeded("late"), lambda path: path == in_order[2].manifest_path)
    store.is_gone = True
    found = inspect(store, trained.experiment, 0, ScrubLimits(), side_by_side=map)
    assert (len(found.inspected), found.unreadable) == (2, ())
    assert (found.unread_count, found.ends_at) == (6, place_of(in_order[2]))


def test_a_neighbour_of_a_damaged_checkpoint_that_cannot_be_read_is_reported(trained: Session) -> None:
    first, other = keys(trained)[:2]
    del objects(trained)[first.manifest_path]
    store = Spoilt(trained.store, StoreUnavailable("EIO"), lambda path: path == other.manifest_path)
    found = inspect(store, trained.experiment, place_of(first), ScrubLimits(share=1e-9), side_by_side=map)
    assert {each.key for each in found.damaged} == {first}
    assert [each.folder for each in found.unreadable] == [other.folder]


@pytest.mark.parametrize("removed", ["all", "begun"])
def test_a_journal_that_does_not_hold_together_since_it_is_being_deleted_is_not_damaged(removed: str) -> None:
    store = many_trials()
    state = load(store, "e", side_by_side=map)
    damage_journal(store, "g")
    if removed == "begun":
        append(store, state, [RemovalBegun()], Stamp(write_id="r", at=""))
    else:
        del store.objects[JournalKey(experiment="e").entry_path(1)]
        for path in [path for path in store.objects if path.startswith("e/segments/")]:
            del store.objects[path]
    found = inspect(store, state, 0, ScrubLimits(share=1e-9), side_by_side=map)
    assert [each.is_damage for each in found.unreadable] == [False]


# ----------------------------------------------------------------------------------------------- other rules


def test_an_experiment_is_what_has_a_first_entry(trained: Session) -> None:
    objects(trained).update({"no name!/journal/0000000001.json": b"", "folder/a": b"", "file": b""})
    assert experiment_names(trained.store) == [NAME]


def test_nothing_is_the_best_where_nothing_is_compared(trained: Session) -> None:
    trials = list(trained.experiment.trials.values())
    assert best_first(trials, None) == trials
    assert best_of(trained.experiment) is None
    with pytest.raises(CheckpointNotFound):
        read_manifest(trained.store, CheckpointKey(trial=KEY, step=99, sequence=99))


def test_the_values_of_a_jobs_variables_are_not_shown_but_for_numbers_and_references() -> None:
    reference = "{{ prefect.blocks.secret.wandb }}"
    env = {"WANDB_API_KEY": "topsecret", "OTHER": reference, "BOTH": f"{reference} topsecret {reference}"}
    given = {"env": env, "args": ["--key", "topsecret"], "gpu_limit": 1}
    settings = {"stop": {"step": 3}, "mode": "min", "trial_job_variables": given}
    env = {"WANDB_API_KEY": "********", "OTHER": reference, "BOTH": "********"}
    shown = {"env": env, "args": ["********", "********"], "gpu_limit": 1}
    assert shown_settings(settings) == {**settings, "trial_job_variables": shown}
    assert shown_settings({"mode": "min"}) == {"mode": "min"}
