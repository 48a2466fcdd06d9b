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
def session() -> Session:
    """A trial with eight live checkpoints."""
    session = Session(MemoryStore(), Witness(), retention=Retention())
    session.open()
    session.start()
    for _ in range(8):
        session.train()
        session.save()
    return session


def share_of(key: CheckpointKey, session: Session) -> DailyShare:
    """Return a share that has this checkpoint and no other."""
    return next(part for day in range(9**6) if (part := DailyShare(50, day)).select_keys(session.live_keys()) == [key])


def flip_byte(session: Session, path: str) -> None:
    data = bytearray(session.objects[path])
    data[len(data) // 2] ^= 1
    session.objects[path] = bytes(data)


# ------------------------------------------------------------------------------------------------- reading order


def make_keys(trial: str, count: int) -> set[CheckpointKey]:
    folder = TrialKey(experiment="e", generation=1, trial=trial)
    return {CheckpointKey(trial=folder, step=step, sequence=step) for step in range(count)}


@pytest.mark.parametrize("parts", [1, 3, 24])
def test_within_as_many_days_as_parts_everything_that_was_there_all_the_while_is_chosen_once(parts: int) -> None:
    always, chosen = make_keys("always", 200), list[CheckpointKey]()
    begin = date(2026, 11, 23).toordinal() // parts * parts
    for day in range(begin, begin + parts):
        comes_and_goes = make_keys(f"t{day}", 50 * (day % 3))
        chosen += set(DailyShare(parts, day).select_keys(always | comes_and_goes)) & always
    assert sorted(chosen, key=lambda key: key.step) == sorted(always, key=lambda key: key.step)


def test_a_run_once_a_week_does_not_choose_the_same_seventh_each_time() -> None:
    every, monday = make_keys("t", 700), date(2026, 11, 23)
    chosen = [parse_share("1/7", monday + timedelta(weeks=week)).select_keys(every) for week in range(20)]
    assert all(50 < len(keys) < 150 for keys in chosen)
    assert len(set().union(*chosen)) > 600


def test_a_share_is_one_part_of_several() -> None:
    today = date(2026, 11, 23)
    assert parse_share("1/7", today) == DailyShare(7, today.toordinal())
    assert set(parse_share("1", today).select_keys(make_keys("t", 9))) == make_keys("t", 9)
    for text in ("2/7", "1/0", "0.1", "", "1/7 ", "1/1000000000"):
        with pytest.raises(InvalidInput, match="share: expected one part of several, such as '1/7'"):
            parse_share(text, today)


def test_a_run_reads_all_of_its_share_within_its_limits(session: Session) -> None:
    report = inspect_checkpoints(session.store, session.experiment)
    assert {inspection.key for inspection in report.inspected} == set(session.live_keys()) == set(report.live)
    assert (report.unread_count, report.corrupt_checkpoints) == (0, [])
    assert all(inspection.size_bytes and inspection.file_count for inspection in report.inspected)
    for part in (DailyShare(3, 3), DailyShare(3, 4), DailyShare(3, 5)):
        report = inspect_checkpoints(session.store, session.experiment, part)
        assert [inspection.key for inspection in report.inspected] == part.select_keys(session.live_keys())


@pytest.mark.parametrize("limits", [{"max_bytes": 1}, {"has_time": lambda: False}])
def test_a_run_that_is_cut_short_reads_something_and_another_day_something_else(
    session: Session, limits: Mapping[str, Any]
) -> None:
    read = set[CheckpointKey]()
    for day in range(60):
        report = inspect_checkpoints(session.store, session.experiment, DailyShare(1, day), **limits)
        assert (len(report.inspected), report.unread_count) == (1, 7)
        read.add(report.inspected[0].key)
    assert read == set(session.live_keys())


# ------------------------------------------------------------------------------------------- damage


def test_where_one_is_damaged_all_others_of_its_trial_are_read_too(session: Session) -> None:
    shared = set.intersection(*(set(read_manifest(session.store, key).blob_paths()) for key in session.live_keys()))
    flip_byte(session, min(shared))
    report = inspect_checkpoints(session.store, session.experiment, share_of(session.live_keys()[0], session))
    assert {inspection.key for inspection in report.corrupt_checkpoints} == set(session.live_keys())


def test_what_is_retired_while_it_is_read_is_not_damaged(session: Session) -> None:
    (oldest, *_), before = session.live_keys(), session.experiment
    session.append([CheckpointsRetired(trial=KEY.trial, retired_sequences=(oldest.sequence,))])
    session.delete_checkpoints([oldest])
    assert inspect_live_checkpoint(session.store, oldest) == []
    assert inspect_checkpoints(session.store, before).corrupt_checkpoints == []


def test_what_is_deleted_with_its_experiment_is_not_damaged(session: Session) -> None:
    (oldest, *_) = session.live_keys()
    session.append([DeletionStarted()])
    session.store.delete([oldest.manifest_path])
    assert inspect_live_checkpoint(session.store, oldest) == []
    assert inspect_checkpoints(session.store, session.experiment).live == ()


# ----------------------------------------------------------------------------------------- failing reads


class FailingStore(MemoryStore):
    """A store on which reads of certain paths fail, and optionally all reads after that."""

    def __init__(self, store: ObjectStore, error: TuneError, fails: Callable[[str], bool]) -> None:
        super().__init__()
        assert isinstance(store, MemoryStore)
        self.objects = store.objects
        self._error = error
        self._fails = fails
        self.stays_failed = False
        """Whether every read after the first failure fails too."""
        self._has_failed = False

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self._fail_if_due(path)
        return super().read(path, offset=offset, length=length)

    def size(self, path: str) -> int | None:
        self._fail_if_due("")
        return super().size(path)

    def _fail_if_due(self, path: str) -> None:
        self._has_failed = self._has_failed or (self.stays_failed and self._fails(path))
        if self._has_failed or self._fails(path):
            raise self._error


def test_a_checkpoint_that_a_newer_version_wrote_is_reported_and_all_others_are_read(session: Session) -> None:
    new = session.live_keys()[3]
    document = json.loads(session.objects[new.manifest_path])
    session.objects[new.manifest_path] = json.dumps({**document, "version": document["version"] + 1}).encode()
    report = inspect_checkpoints(session.store, session.experiment)
    assert [(failure.folder, failure.trial) for failure in report.unreadable] == [(new.folder, KEY.trial)]
    assert (len(report.inspected), report.corrupt_checkpoints) == (7, [])


def test_what_a_clone_shares_with_its_origin_is_read_once() -> None:
    search = SmallSearch(MemoryStore(), "e")
    for name in "ab":
        search.add(name)
    search.start_attempt("a")
    search.train_step("a")
    (ref,) = search.state.trial("a").checkpoints
    origin = CheckpointOrigin(trial="a", step=ref.step, sequence=ref.sequence)
    search.append(CheckpointCloned(trial="b", checkpoint=ref.model_copy(update={"origin": origin}), source="a"))
    report = inspect_checkpoints(search.store, search.state)
    assert [inspection.key for inspection in report.inspected] == [search.key("a").checkpoint_key(ref)]


@pytest.mark.parametrize("error", [StoreUnavailable("EIO"), StoreRefused("403: archived")])
def test_a_checkpoint_that_cannot_be_read_is_reported_each_time_and_all_others_are_read(
    session: Session, error: TuneError
) -> None:
    bad = session.live_keys()[3]
    store = FailingStore(session.store, error, lambda path: path == bad.manifest_path)
    for _ in range(2):
        report = inspect_checkpoints(store, session.experiment)
        assert ([failure.folder for failure in report.unreadable], report.corrupt_checkpoints) == ([bad.folder], [])
        assert str(error) in report.unreadable[0].reason
        assert len(report.inspected) == 7


def test_what_is_read_at_the_second_try_was_readable(session: Session) -> None:
    times = count()
    bad = session.live_keys()[3].manifest_path
    store = FailingStore(session.store, StoreUnavailable("blip"), lambda path: path == bad and next(times) == 0)
    report = inspect_checkpoints(store, session.experiment)
    assert (len(report.inspected), report.unreadable) == (8, ())


def test_a_target_that_is_away_is_no_checkpoint_that_cannot_be_read(session: Session) -> None:
    bad = session.live_keys()[3].manifest_path
    store = FailingStore(session.store, StoreUnavailable("away"), lambda path: path == bad)
    store.stays_failed = True
    with pytest.raises(StoreUnavailable):
        inspect_checkpoints(store, session.experiment)


def test_what_takes_all_the_time_ends_the_run_and_is_reported_if_it_was_the_first(session: Session) -> None:
    in_order = FULL_SHARE.select_keys(session.live_keys())
    store = FailingStore(session.store, DeadlineExceeded("late"), lambda path: path == in_order[0].manifest_path)
    store.stays_failed = True
    report = inspect_checkpoints(store, session.experiment)
    assert [failure.folder for failure in report.unreadable] == [in_order[0].folder]
    assert (report.inspected, report.unread_count) == ((), 7)

    store = FailingStore(session.store, DeadlineExceeded("late"), lambda path: path == in_order[2].manifest_path)
    store.stays_failed = True
    report = inspect_checkpoints(store, session.experiment)
    assert (len(report.inspected), report.unreadable) == (2, ())
    assert report.unread_count == 6


def test_a_neighbour_of_a_damaged_checkpoint_that_cannot_be_read_is_reported(session: Session) -> None:
    first, other = session.live_keys()[:2]
    del session.objects[first.manifest_path]
    store = FailingStore(session.store, StoreUnavailable("EIO"), lambda path: path == other.manifest_path)
    report = inspect_checkpoints(store, session.experiment, share_of(first, session))
    assert {inspection.key for inspection in report.corrupt_checkpoints} == {first}
    assert [failure.folder for failure in report.unreadable] == [other.folder]


# ----------------------------------------------------------------------------------------------- other rules


def test_an_experiment_is_what_has_a_first_entry(session: Session) -> None:
    session.objects.update({"no name!/journal/0000000001.json": b"", "folder/a": b"", "file": b""})
    assert list_experiment_names(session.store) == [NAME]


def test_nothing_is_the_best_where_nothing_is_compared(session: Session) -> None:
    trials = list(session.experiment.trials.values())
    assert sort_trials(trials, None) == trials
    assert find_best_trial(session.experiment) is None
    with pytest.raises(CheckpointNotFound):
        read_manifest(session.store, CheckpointKey(trial=KEY, step=99, sequence=99))


def test_the_values_of_a_jobs_variables_are_not_shown_but_for_numbers_and_references() -> None:
    reference = "{{ prefect.blocks.secret.wandb }}"
    env = {"WANDB_API_KEY": "topsecret", "OTHER": reference, "BOTH": f"{reference} topsecret {reference}"}
    variables = {"env": env, "args": ["--key", "topsecret"], "gpu_limit": 1}
    settings = {"stop": {"step": 3}, "mode": "min", "trial_job_variables": variables}
    env = {"WANDB_API_KEY": "********", "OTHER": reference, "BOTH": "********"}
    shown = {"env": env, "args": ["********", "********"], "gpu_limit": 1}
    assert settings_for_display(settings) == {**settings, "trial_job_variables": shown}
    assert settings_for_display({"mode": "min"}) == {"mode": "min"}
