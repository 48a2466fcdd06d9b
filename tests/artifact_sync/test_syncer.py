"""`pt.Syncer`: the behaviour of every syncer, including a user's with only the three abstract methods."""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.artifact_sync import Syncer, TargetSyncer
from prefect_tune.attempt.trial_artifacts import syncer_for
from prefect_tune.blocks import LocalTarget, SyncConfig
from prefect_tune.core.errors import InvalidInput, StoreRefused, StoreUnavailable, TuneError


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(Syncer, "_clock", staticmethod(clock))
    monkeypatch.setattr(Syncer, "_sleep", staticmethod(clock.sleep))
    return clock


class Mine(pt.Syncer):
    """A user's syncer: its constructor does not call `super().__init__`."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.answer = True
        self.failures: list[Exception] = []

    def sync_up(self, local_dir: str, remote_dir: str, exclude: list[str] | None = None) -> bool:
        self.calls.append(("up", local_dir, remote_dir, exclude))
        return self.answer

    def sync_down(self, remote_dir: str, local_dir: str, exclude: list[str] | None = None) -> bool:
        self.calls.append(("down", remote_dir, local_dir, exclude))
        return self.answer

    def delete(self, remote_dir: str) -> bool:
        self.calls.append(("delete", remote_dir))
        return self.answer

    def retry(self) -> None:
        self.calls.append(("retry",))

    def wait(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


@pytest.mark.usefixtures("clock")
def test_a_syncer_of_the_users_needs_only_the_three_methods() -> None:
    syncer = Mine()
    assert syncer.sync_up_if_needed("here", "there", ["*.tmp"]) is True
    assert syncer.sync_down_if_needed("there", "here") is True
    assert syncer.calls == [("up", "here", "there", ["*.tmp"]), ("down", "there", "here", None)]
    syncer.wait_or_retry()
    syncer.close()


def test_a_syncer_without_the_three_methods_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (pt.Syncer,), {"sync_up": None, "sync_down": None})()


def test_the_first_sync_is_always_due_and_the_next_after_the_period(clock: Clock) -> None:
    syncer = Mine()
    syncer.sync_period = timedelta(seconds=10)
    assert syncer.last_sync_up_time == -math.inf
    assert syncer.sync_up_if_needed("a", "b") is True
    clock.now += 9.9
    assert syncer.sync_up_if_needed("a", "b") is None
    assert syncer.sync_down_if_needed("b", "a") is True  # the ways are throttled apart
    clock.now += 0.1
    assert syncer.sync_up_if_needed("a", "b") is True
    syncer.reset()
    assert syncer.sync_up_if_needed("a", "b") is True


@pytest.mark.usefixtures("clock")
def test_a_sync_that_was_refused_does_not_count() -> None:
    syncer = Mine()
    syncer.answer = False
    assert syncer.sync_up_if_needed("a", "b") is False
    assert syncer.sync_up_if_needed("a", "b") is False
    syncer.answer = True
    assert syncer.sync_up_if_needed("a", "b") is True
    assert syncer.sync_up_if_needed("a", "b") is None


@pytest.mark.usefixtures("clock")
def test_a_sync_that_is_known_to_have_failed_does_not_count() -> None:
    syncer = Mine()
    assert syncer.sync_up_if_needed("a", "b") is True
    syncer.failures = [OSError("lost")] * 9
    with pytest.raises(TuneError):
        syncer.wait_or_retry()
    assert syncer.sync_up_if_needed("a", "b") is True


def test_each_retry_is_waited_for_and_none_is_begun_for_nothing(clock: Clock) -> None:
    syncer = Mine()
    syncer.failures = [StoreUnavailable(f"failure {number}") for number in range(9)]
    with pytest.raises(TuneError, match="3 retries too: failure 3") as failed:
        syncer.wait_or_retry(max_retries=3, backoff_s=2)
    assert str(failed.value.__cause__) == "failure 3"
    assert syncer.calls == [("retry",)] * 3
    assert len(clock.pauses) == 3  # none after the last failure
    assert len(syncer.failures) == 5


def test_pauses_grow_and_are_spread(clock: Clock) -> None:
    syncer = Mine()
    for _ in range(20):
        syncer.failures = [StoreUnavailable("down")] * 6
        syncer.wait_or_retry(max_retries=6, backoff_s=5)
    for number, longest in enumerate([5, 10, 20, 40, 60, 60]):
        pauses = clock.pauses[number::6]
        assert all(longest / 2 <= pause <= longest for pause in pauses)
        assert len(set(pauses)) > 1


@pytest.mark.usefixtures("clock")
def test_a_retry_that_succeeds_ends_it() -> None:
    syncer = Mine()
    syncer.failures = [StoreUnavailable("down")]
    syncer.wait_or_retry()
    assert syncer.calls == [("retry",)]


def test_what_retrying_cannot_help_is_raised_at_once(clock: Clock) -> None:
    syncer = Mine()
    syncer.failures = [StoreRefused("no such bucket")]
    with pytest.raises(StoreRefused):
        syncer.wait_or_retry()
    assert syncer.calls == []
    assert clock.pauses == []


@pytest.mark.parametrize(("retries", "backoff"), [(0, 5), (-1, 5), (3, -1), (3, math.nan)])
def test_numbers_that_make_no_sense_are_refused(retries: int, backoff: float) -> None:
    with pytest.raises(InvalidInput, match="max_retries"):
        Mine().wait_or_retry(retries, backoff)


@pytest.mark.parametrize(
    ("period", "timeout"),
    [(-1, 10), (math.nan, 10), (math.inf, 10), (timedelta(seconds=-1), 10), (10, 0), (10, -5), (10, math.nan)],
)
def test_periods_and_timeouts_that_make_no_sense_are_refused(period: float, timeout: float) -> None:
    with pytest.raises(InvalidInput, match="sync_"):
        TargetSyncer(sync_period=period, sync_timeout=timeout)


def test_seconds_and_timedeltas_mean_the_same() -> None:
    assert TargetSyncer(sync_period=5).sync_period == TargetSyncer(sync_period=timedelta(seconds=5)).sync_period
    assert (pt.Syncer.sync_period, pt.Syncer.sync_timeout) == (timedelta(seconds=300), timedelta(seconds=1800))


@pytest.mark.parametrize(
    "good", [None, "", "file:///data", "/data", "s3://bucket/runs", "memory://runs", "gs://bucket"]
)
def test_a_directory_that_can_be_synced_to_is_answered_with_true(good: str | None) -> None:
    assert pt.Syncer.validate_upload_dir(good) is True


@pytest.mark.parametrize("bad", ["s4://bucket", "nosuch://x", "s3://"])
def test_a_directory_that_cannot_be_synced_to_is_an_error_that_says_why(bad: str) -> None:
    with pytest.raises(ValueError, match=bad.partition(":")[0]):
        pt.Syncer.validate_upload_dir(bad)


# ------------------------------------------------------------------------------------- the configured syncer


def test_the_configuration_says_who_syncs(tmp_path: Path) -> None:
    target = LocalTarget(path=str(tmp_path))
    upload_dir = str(tmp_path)
    automatic = syncer_for(SyncConfig(sync_period_seconds=7, sync_timeout_seconds=9), target)
    assert isinstance(automatic, TargetSyncer)
    assert (automatic.sync_period, automatic.sync_timeout) == (timedelta(seconds=7), timedelta(seconds=9))
    assert syncer_for(SyncConfig(syncer=None), target) is None
    mine = Mine()
    mine.answer = False
    given = syncer_for(SyncConfig(upload_dir=upload_dir, syncer=mine), target)
    assert isinstance(given, Mine)
    assert given.answer is False
    named = syncer_for(SyncConfig(upload_dir=upload_dir, syncer=f"{__name__}:Mine"), target)
    assert type(named).__name__ == "Mine"


@pytest.mark.parametrize("name", ["no.such.module:Syncer", "json:nothing", "json:dumps"])
def test_a_syncer_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    config = SyncConfig(upload_dir=str(tmp_path), syncer=name)
    with pytest.raises(InvalidInput, match=name):
        syncer_for(config, LocalTarget(path=str(tmp_path)))


def test_a_syncer_that_was_given_as_an_object_is_copied_for_each_attempt(tmp_path: Path) -> None:
    mine = Mine()
    config, target = SyncConfig(upload_dir=str(tmp_path), syncer=mine), LocalTarget(path=str(tmp_path))
    first, second = (syncer_for(config, target) for _ in range(2))
    assert len({id(each) for each in (mine, first, second)}) == 3


class Locked(Mine):
    """Holds a lock, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


THE_ONE = Locked()


@pytest.mark.parametrize("syncer", [THE_ONE, f"{__name__}:THE_ONE"])
def test_a_syncer_that_cannot_be_copied_says_so_and_what_to_do(syncer: Syncer | str, tmp_path: Path) -> None:
    config = SyncConfig(upload_dir=str(tmp_path), syncer=syncer)
    with pytest.raises(InvalidInput, match=r"Locked.*cannot be copied.*lock.*__deepcopy__"):
        syncer_for(config, LocalTarget(path=str(tmp_path)))
