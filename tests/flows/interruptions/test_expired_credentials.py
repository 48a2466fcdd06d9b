"""Credentials that expire during trials: no trial fails, and the next run resumes what had to stop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune import storage_retries
from prefect_tune.blocks import S3Target
from prefect_tune.core.errors import StoreRefused
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.flows.durable_trainable import TrialResult
from prefect_tune.tasks.checkpoints import publish_checkpoint
from prefect_tune.tasks.experiments import write_stamped_entry
from prefect_tune.tasks.trials import run_attempt
from tests.fakes.servers.rotating_s3 import RotatingS3, write_profile

pytestmark = pytest.mark.usefixtures("no_prefect_server")

TRIALS = 4
EXPIRED = ("403 Forbidden", "ExpiredToken")


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that credentials are rotated in."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    write_profile(path, "KEY1")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return path


@contextmanager
def rotating(
    profile: Path, refusal: tuple[str, str], seconds: float, *, trials: int = TRIALS, renews_key: bool = True
) -> Iterator[RotatingS3]:
    with RotatingS3(
        refusal,
        trials=trials,
        outage=timedelta(seconds=seconds),
        expired=lambda: profile.with_name("expired").touch(),
        renew=lambda key: write_profile(profile, key),
        renews_key=renews_key,
    ) as server:
        yield server


def at(server: RotatingS3) -> S3Target:
    return S3Target(bucket="bucket", region="us-east-1", endpoint_url=server.endpoint, allow_http=True)


def searched(server: RotatingS3, profile: Path) -> pt.Results:
    return pt.tune(
        "tests.trainables.counting:Patient",
        {"until": str(profile.with_name("expired")), "x": pt.uniform(0, 1)},
        target=at(server),
        experiment="e",
        metric="loss",
        num_samples=TRIALS,
        max_concurrent_trials=TRIALS,
        stop={"step": 5},
        checkpoint=pt.Cadence(every_steps=1),
        sync=pt.SyncConfig(sync_artifacts=False),
    )


def trained(server: RotatingS3, profile: Path) -> TrialResult:
    return pt.durable_trainable(
        "tests.trainables.counting:Patient",
        {"until": str(profile.with_name("expired"))},
        target=at(server),
        experiment="e",
        stop={"step": 5},
        checkpoint=pt.Cadence(every_steps=1),
        sync=pt.SyncConfig(sync_artifacts=False),
    )


_FOR_LONGER_OR_OTHERWISE = [
    (EXPIRED, 30, True),
    (("400 Bad Request", "ExpiredToken"), 3, True),
    (("400 Bad Request", "RequestTimeout"), 3, False),
    (("401 Unauthorized", "Unauthorized"), 3, True),
    (("403 Forbidden", "AccessDenied"), 3, False),
    (("403 Forbidden", "InvalidAccessKeyId"), 3, True),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("refusal", "seconds", "renews_key"),
    [(EXPIRED, 1, True), *(pytest.param(*each, marks=pytest.mark.deep) for each in _FOR_LONGER_OR_OTHERWISE)],
)
def test_no_trial_ends_whatever_a_search_is_refused_with_for_a_while(
    profile: Path, refusal: tuple[str, str], seconds: float, *, renews_key: bool
) -> None:
    with rotating(profile, refusal, seconds, renews_key=renews_key) as server:
        trials = searched(server, profile).trials
    assert server.refused >= set(trials), "each trial has met a refusal"
    assert [(each.status, each.attempt, each.step) for each in trials.values()] == [(Status.COMPLETED, 1, 5)] * TRIALS


def test_a_target_that_refuses_from_the_start_is_one_error_and_nothing_is_begun(profile: Path) -> None:
    with rotating(profile, EXPIRED, seconds=3600, trials=0) as server, pytest.raises(StoreRefused, match="expired"):
        trained(server, profile)
    assert server.names() == []
    assert server.refusals < 20, "it is not retried"


@pytest.mark.long
def test_a_search_that_was_refused_for_too_long_goes_on_with_every_trial_when_it_is_run_again(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_retries, "_PAUSES_SECONDS", (0.05, 0.05))
    monkeypatch.setattr(publish_checkpoint, "retry_delay_seconds", [0.05] * 7)
    with rotating(profile, EXPIRED, seconds=3600) as server:
        with pytest.raises(StoreRefused, match="expired"):
            searched(server, profile)
        server.accept("KEY2")
        results = searched(server, profile)
    assert {each.status for each in results.trials.values()} == {Status.COMPLETED}
    assert results.errors == {}
    assert all(each.attempt >= 2 for each in results.trials.values()), "each resumes from its last commit"


@pytest.mark.long
def test_a_training_that_was_refused_for_too_long_goes_on_when_it_is_run_again(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_retries, "_PAUSES_SECONDS", (0.05, 0.05))
    for task in (publish_checkpoint, run_attempt, write_stamped_entry):
        monkeypatch.setattr(task, "retry_delay_seconds", [0.05] * 7)
    with rotating(profile, EXPIRED, seconds=3600, trials=1) as server:
        with pytest.raises(StoreRefused, match="expired"):
            trained(server, profile)
        server.accept("KEY2")
        result = trained(server, profile)
    assert (result.status, result.step) == (Status.COMPLETED, 5)
