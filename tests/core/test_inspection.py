"""Reading checkpoints for no other reason than to see whether they are whole."""

from __future__ import annotations

import pytest

from prefect_tune.core.errors import CheckpointNotFound
from prefect_tune.core.events import Finished, RemovalBegun, Retired
from prefect_tune.core.experiment_names import experiment_names
from prefect_tune.core.inspection import (
    Limits,
    Round,
    inspect,
    inspect_one,
    last_round,
    leave_round,
    next_round,
    on_arc,
    place_of,
    told_before,
)
from prefect_tune.core.layout import CheckpointKey, TrialKey, maintenance_path
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.retention import Retention
from prefect_tune.core.standing import best_first, best_of, shown_settings
from prefect_tune.core.values import Stamp
from tests.core.driver import KEY, NAME, Session, Witness
from tests.fakes.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("tiny_blobs")

STAMP = Stamp(write_id="m", at="2026-11-21T08:00:00Z")


@pytest.fixture
def trained() -> Session:
    """Eight checkpoints, all live."""
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


# ------------------------------------------------------------------------------------------------- the ring


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
    found = inspect(trained.store, trained.experiment, 5, Limits(), side_by_side=map)
    assert {each.key for each in found.inspected} == set(keys(trained)) == set(found.live)
    assert [place_of(each.key) for each in found.inspected] == sorted(place_of(each.key) for each in found.inspected)
    assert (found.unread_count, found.ends_at, found.damaged) == (0, 5, [])
    assert all(each.size_bytes and each.file_count for each in found.inspected)


@pytest.mark.parametrize("limits", [Limits(max_bytes=1), Limits(has_time=lambda: False)])
def test_a_round_that_is_cut_short_reads_something_and_the_next_goes_on_there(trained: Session, limits: Limits) -> None:
    begins_at, read = 0, list[CheckpointKey]()
    for _ in range(8):
        found = inspect(trained.store, trained.experiment, begins_at, limits, side_by_side=map)
        assert (len(found.inspected), found.unread_count) == (1, 7)
        read.append(found.inspected[0].key)
        begins_at = found.ends_at
    assert len(set(read)) == 8


# ------------------------------------------------------------------------------------------- what is damaged


def test_where_one_is_damaged_all_others_of_its_trial_are_read_too(trained: Session) -> None:
    shared = set.intersection(*(set(read_manifest(trained.store, key).blob_paths()) for key in keys(trained)))
    flip(trained, min(shared))
    found = inspect(trained.store, trained.experiment, 0, Limits(share=1e-9, max_bytes=1), side_by_side=map)
    begins_at = place_of(keys(trained)[0])
    found = inspect(trained.store, trained.experiment, begins_at, Limits(share=1e-9), side_by_side=map)
    assert {each.key for each in found.damaged} == set(keys(trained))


def test_what_is_retired_while_it_is_read_is_not_damaged(trained: Session) -> None:
    (oldest, *_), before = keys(trained), trained.experiment
    trained.append([Retired(trial=KEY.trial, retires=(oldest.sequence,))])
    trained.collect([oldest])
    assert inspect_one(trained.store, oldest, side_by_side=map) == []
    found = inspect(trained.store, before, 0, Limits(), side_by_side=map)
    assert found.damaged == []


def test_what_is_deleted_with_its_experiment_is_not_damaged(trained: Session) -> None:
    (oldest, *_) = keys(trained)
    trained.append([RemovalBegun()])
    trained.store.delete([oldest.manifest_path])
    assert inspect_one(trained.store, oldest, side_by_side=map) == []
    assert inspect(trained.store, trained.experiment, 0, Limits(), side_by_side=map).live == ()


def test_of_a_trial_that_has_ended_only_what_is_to_be_read_is_asked_after(trained: Session) -> None:
    trained.append([Finished(trial=KEY.trial, reason="enough")])
    found = inspect(trained.store, trained.experiment, 0, Limits(), side_by_side=map)
    assert len(found.inspected) == 8


# --------------------------------------------------------------------------------- from one round to the next


def test_what_a_round_leaves_the_next_one_finds_and_earlier_ones_are_deleted(trained: Session) -> None:
    assert last_round(trained.store, NAME) == (0, None)
    for number in (1, 2, 3):
        leave_round(trained.store, NAME, number, Round(write_id=f"w{number}", at="now", begins_at=number))
    assert last_round(trained.store, NAME) == (3, Round(write_id="w3", at="now", begins_at=3))
    assert [path for path in objects(trained) if "/maintenance/" in path] == [maintenance_path(NAME, 3)]


def test_of_two_that_are_the_same_round_the_first_stands(trained: Session) -> None:
    for name in ("first", "second"):
        leave_round(trained.store, NAME, 1, Round(write_id=name, at="now"))
    assert last_round(trained.store, NAME)[1] == Round(write_id="first", at="now")


def test_a_round_that_cannot_be_read_is_none_and_its_number_is_taken(trained: Session) -> None:
    objects(trained)[maintenance_path(NAME, 7)] = b"torn"
    assert last_round(trained.store, NAME) == (7, None)


def test_nothing_is_left_beside_an_experiment_that_is_gone() -> None:
    store = MemoryStore()
    leave_round(store, NAME, 1, Round(write_id="w", at="now"))
    assert store.objects == {}


def test_damage_that_was_told_of_is_known_until_it_is_mended_or_put_aside(trained: Session) -> None:
    bad, worse = keys(trained)[:2]
    for key in (bad, worse):
        del objects(trained)[key.manifest_path]
    found = inspect(trained.store, trained.experiment, 0, Limits(), side_by_side=map)
    first = next_round(None, STAMP, found, [worse])
    assert told_before(first) == {bad.folder}
    assert told_before(None) == frozenset()

    nothing_read = inspect(trained.store, trained.experiment, place_of(bad) + 1, Limits(1e-12), side_by_side=map)
    assert nothing_read.inspected == ()
    assert told_before(next_round(first, STAMP, nothing_read, ())) == {bad.folder}


# ----------------------------------------------------------------------------------------------- small things


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
