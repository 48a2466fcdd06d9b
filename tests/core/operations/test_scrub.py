"""Scrubbing: reading checkpoints to find damage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from itertools import count
from typing import Any

import pytest

from prefect_tune.core.errors import (
    CheckpointNotFound,
    DeadlineExceeded,
    InvalidInput,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.experiment.summary import find_best_trial, settings_for_display, sort_trials
from prefect_tune.core.journal_events import CheckpointCloned, CheckpointOrigin, CheckpointsRetired, DeletionStarted
from prefect_tune.core.operations.scrub import (
    FULL_SHARE,
    DailyShare,
    inspect_checkpoints,
    inspect_live_checkpoint,
    parse_share,
)
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.generations import list_experiment_names
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
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


def only(key: CheckpointKey, session: Session) -> DailyShare:
    """A share that has this checkpoint and none of the others."""
    return next(part for day in range(9**6) if (part := DailyShare(50, day)).select_keys(keys(session)) == [key])


def flip(session: Session, path: str) -> None:
    data = bytearray(objects(session)[path])
    data[len(data) // 2] ^= 1
    objects(session)[path] = bytes(data)


# ------------------------------------------------------------------------------------------------- reading order


def many(trial: str, count: int) -> set[CheckpointKey]:
    folder = TrialKey(experiment="e", generation=1, trial=trial)
    return {CheckpointKey(trial=folder, step=step, sequence=step) for step in range(count)}


@pytest.mark.parametrize("parts", [1, 3, 24])
def test_within_as_many_days_as_parts_everything_that_was_there_all_the_while_is_chosen_once(parts: int) -> None:
    always, read = many("always", 200), list[CheckpointKey]()
    begin = date(2026, 11, 23).toordinal() // parts * parts
    for day in range(begin, begin + parts):
        comes_and_goes = many(f"t{day}", 50 * (day % 3))
        read += set(DailyShare(parts, day).select_keys(always | comes_and_goes)) & always
    assert sorted(read, key=lambda key: key.step) == sorted(always, key=lambda key: key.step)


def test_a_run_once_a_week_does_not_choose_the_same_seventh_each_time() -> None:
    every, monday = many("t", 700), date(2026, 11, 23)
    chosen = [parse_share("1/7", monday + timedelta(weeks=week)).select_keys(every) for week in range(20)]
    assert all(50 < len(each) < 150 for each in chosen)
    assert len(set().union(*chosen)) > 600


def test_a_share_is_one_part_of_several() -> None:
    today = date(2026, 11, 23)
    assert parse_share("1/7", today) == DailyShare(7, today.toordinal())
    assert set(parse_share("1", today).select_keys(many("t", 9))) == many("t", 9)
    for wrong in ("2/7", "1/0", "0.1", "", "1/7 ", "1/1000000000"):
        with pytest.raises(InvalidInput, match="share: expected one part of several, such as '1/7'"):
            parse_share(wrong, today)


def test_a_run_reads_all_of_its_share_within_its_limits(trained: Session) -> None:
    found = inspect_checkpoints(trained.store, trained.experiment)
    assert {each.key for each in found.inspected} == set(keys(trained)) == set(found.live)
    assert (found.unread_count, found.corrupt_checkpoints) == (0, [])
    assert all(each.size_bytes and each.file_count for each in found.inspected)
    for part in (DailyShare(3, 3), DailyShare(3, 4), DailyShare(3, 5)):
        found = inspect_checkpoints(trained.store, trained.experiment, part)
        assert [each.key for each in found.inspected] == part.select_keys(keys(trained))


@pytest.mark.parametrize("limits", [{"max_bytes": 1}, {"has_time": lambda: False}])
def test_a_run_that_is_cut_short_reads_something_and_another_day_something_else(
    trained: Session, limits: Mapping[str, Any]
) -> None:
    read = set[CheckpointKey]()
    for day in range(60):
        found = inspect_checkpoints(trained.store, trained.experiment, DailyShare(1, day), **limits)
        assert (len(found.inspected), found.unread_count) == (1, 7)
        read.add(found.inspected[0].key)
    assert read == set(keys(trained))


# ------------------------------------------------------------------------------------------- damage


def test_where_one_is_damaged_all_others_of_its_trial_are_read_too(trained: Session) -> None:
    shared = set.intersection(*(set(read_manifest(trained.store, key).blob_paths()) for key in keys(trained)))
    flip(trained, min(shared))
    found = inspect_checkpoints(trained.store, trained.experiment, only(keys(trained)[0], trained))
    assert {each.key for each in found.corrupt_checkpoints} == set(keys(trained))


def test_what_is_retired_while_it_is_read_is_not_damaged(trained: Session) -> None:
    (oldest, *_), before = keys(trained), trained.experiment
    trained.append([CheckpointsRetired(trial=KEY.trial, retired_sequences=(oldest.sequence,))])
    trained.collect([oldest])
    assert inspect_live_checkpoint(trained.store, oldest) == []
    found = inspect_checkpoints(trained.store, before)
    assert found.corrupt_checkpoints == []


def test_what_is_deleted_with_its_experiment_is_not_damaged(trained: Session) -> None:
    (oldest, *_) = keys(trained)
    trained.append([DeletionStarted()])
    trained.store.delete([oldest.manifest_path])
    assert inspect_live_checkpoint(trained.store, oldest) == []
    assert inspect_checkpoints(trained.store, trained.experiment).live == ()


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


def test_a_checkpoint_that_a_newer_version_wrote_is_reported_and_all_others_are_read(trained: Session) -> None:
    new = keys(trained)[3]
    document = json.loads(objects(trained)[new.manifest_path])
    objects(trained)[new.manifest_path] = json.dumps({**document, "version": document["version"] + 1}).encode()
    found = inspect_checkpoints(trained.store, trained.experiment)
    assert [(each.folder, each.trial) for each in found.unreadable] == [(new.folder, KEY.trial)]
    assert (len(found.inspected), found.corrupt_checkpoints) == (7, [])


def test_what_a_clone_shares_with_its_origin_is_read_once() -> None:
    search = SmallSearch(MemoryStore(), "e")
    for name in "ab":
        search.add(name)
    search.begin("a")
    search.step("a")
    (ref,) = search.state.trial("a").checkpoints
    origin = CheckpointOrigin(trial="a", step=ref.step, sequence=ref.sequence)
    search.append(CheckpointCloned(trial="b", checkpoint=ref.model_copy(update={"origin": origin}), source="a"))
    found = inspect_checkpoints(search.store, search.state)
    assert [each.key for each in found.inspected] == [search.key("a").checkpoint_key(ref)]


@pytest.mark.parametrize("error", [StoreUnavailable("EIO"), StoreRefused("403: archived")])
def test_a_checkpoint_that_cannot_be_read_is_reported_each_time_and_all_others_are_read(
    trained: Session, error: TuneError
) -> None:
    bad = keys(trained)[3]
    store = Spoilt(trained.store, error, lambda path: path == bad.manifest_path)
    for _ in range(2):
        found = inspect_checkpoints(store, trained.experiment)
        assert ([each.folder for each in found.unreadable], found.corrupt_checkpoints) == ([bad.folder], [])
        assert str(error) in found.unreadable[0].reason
        assert len(found.inspected) == 7


def test_what_is_read_at_the_second_try_was_readable(trained: Session) -> None:
    times = count()
    bad = keys(trained)[3].manifest_path
    store = Spoilt(trained.store, StoreUnavailable("blip"), lambda path: path == bad and next(times) == 0)
    found = inspect_checkpoints(store, trained.experiment)
    assert (len(found.inspected), found.unreadable) == (8, ())


def test_a_target_that_is_away_is_no_checkpoint_that_cannot_be_read(trained: Session) -> None:
    bad = keys(trained)[3].manifest_path
    store = Spoilt(trained.store, StoreUnavailable("away"), lambda path: path == bad)
    store.is_gone = True
    with pytest.raises(StoreUnavailable):
        inspect_checkpoints(store, trained.experiment)


def test_what_takes_all_the_time_ends_the_run_and_is_reported_if_it_was_the_first(trained: Session) -> None:
    in_order = FULL_SHARE.select_keys(keys(trained))
    store = Spoilt(trained.store, DeadlineExceeded("late"), lambda path: path == in_order[0].manifest_path)
    store.is_gone = True
    found = inspect_checkpoints(store, trained.experiment)
    assert [each.folder for each in found.unreadable] == [in_order[0].folder]
    assert (found.inspected, found.unread_count) == ((), 7)

    store = Spoilt(trained.store, DeadlineExceeded("late"), lambda path: path == in_order[2].manifest_path)
    store.is_gone = True
    found = inspect_checkpoints(store, trained.experiment)
    assert (len(found.inspected), found.unreadable) == (2, ())
    assert found.unread_count == 6


def test_a_neighbour_of_a_damaged_checkpoint_that_cannot_be_read_is_reported(trained: Session) -> None:
    first, other = keys(trained)[:2]
    del objects(trained)[first.manifest_path]
    store = Spoilt(trained.store, StoreUnavailable("EIO"), lambda path: path == other.manifest_path)
    found = inspect_checkpoints(store, trained.experiment, only(first, trained))
    assert {each.key for each in found.corrupt_checkpoints} == {first}
    assert [each.folder for each in found.unreadable] == [other.folder]


# ----------------------------------------------------------------------------------------------- other rules


def test_an_experiment_is_what_has_a_first_entry(trained: Session) -> None:
    objects(trained).update({"no name!/journal/0000000001.json": b"", "folder/a": b"", "file": b""})
    assert list_experiment_names(trained.store) == [NAME]


def test_nothing_is_the_best_where_nothing_is_compared(trained: Session) -> None:
    trials = list(trained.experiment.trials.values())
    assert sort_trials(trials, None) == trials
    assert find_best_trial(trained.experiment) is None
    with pytest.raises(CheckpointNotFound):
        read_manifest(trained.store, CheckpointKey(trial=KEY, step=99, sequence=99))


def test_the_values_of_a_jobs_variables_are_not_shown_but_for_numbers_and_references() -> None:
    reference = "{{ prefect.blocks.secret.wandb }}"
    env = {"WANDB_API_KEY": "topsecret", "OTHER": reference, "BOTH": f"{reference} topsecret {reference}"}
    given = {"env": env, "args": ["--key", "topsecret"], "gpu_limit": 1}
    settings = {"stop": {"step": 3}, "mode": "min", "trial_job_variables": given}
    env = {"WANDB_API_KEY": "********", "OTHER": reference, "BOTH": "********"}
    shown = {"env": env, "args": ["********", "********"], "gpu_limit": 1}
    assert settings_for_display(settings) == {**settings, "trial_job_variables": shown}
    assert settings_for_display({"mode": "min"}) == {"mode": "min"}
