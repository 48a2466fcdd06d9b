"""A target that hangs, is away or refuses, and a Prefect server that is away."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter

import prefect_tune as pt
from prefect_tune import storage_retries
from prefect_tune.blocks import LocalTarget, S3Target, SyncConfig
from prefect_tune.core.checkpoints.manifest import CheckpointMetadata
from prefect_tune.core.errors import StoreRefused, StoreUnavailable
from prefect_tune.core.experiment.retention import Cadence
from prefect_tune.core.experiment.trial_transitions import Status
from prefect_tune.core.journal_events import Owner
from prefect_tune.core.search.domains import grid_search
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import Buffer, ObjectStore
from prefect_tune.tasks.checkpoints import publish_checkpoint
from tests.fakes.servers.rotating_s3 import RotatingS3, write_profile
from tests.fakes.servers.tcp_proxy import TcpProxy
from tests.fakes.stores.memory_store import StoreWrapper
from tests.fakes.trial_processes import wait_until
from tests.flows.conftest import s3_at
from tests.flows.driver import Drivers
from tests.flows.interruptions.mlp_training import MlpTraining
from tests.flows.training import owners_at, state_of_flow_run, trial_at
from tests.trainables.witness import acts_of

_HUNG = "hung"
_STEPS = 40
_DEADLINE_SECONDS = 3.0


def _training_on_s3(drivers: Drivers, target: S3Target, folder: Path) -> MlpTraining:
    sync = SyncConfig(sync_timeout_seconds=_DEADLINE_SECONDS, sync_artifacts=False, live_period_seconds=None)
    return MlpTraining(drivers, target, folder, _HUNG, _STEPS, sync=sync)


@pytest.mark.long
def test_a_hung_store_ends_the_save_at_its_deadline_and_leaves_no_writer(
    drivers: Drivers, s3_port: int, tmp_path: Path
) -> None:
    with TcpProxy(s3_port) as proxy:
        training = _training_on_s3(drivers, target := s3_at(proxy.port), tmp_path)
        driver = training.start()
        training.wait_until(lambda: max(training.steps_of("saving"), default=0) >= 10)
        proxy.swallow()
        driver.wait_until(lambda: "Retry 1/" in driver.log, seconds=_DEADLINE_SECONDS + 8)
        # No connection is open between two tries; a leaked writer would keep its own for a minute.
        wait_until(lambda: proxy.connection_count == 0, seconds=8, what=lambda: f"{proxy.connection_count} connections")
        assert "DeadlineExceeded" in driver.log
        proxy.restore()
        training.require_identical_end(driver.wait(seconds=120), redirect_target(target, s3_port))
        driver.require_no_leftovers()


def redirect_target(target: S3Target, port: int) -> S3Target:
    return S3Target(**{**target.model_dump(), "endpoint_url": f"http://127.0.0.1:{port}"})


@pytest.mark.deep
def test_a_store_that_is_gone_for_a_while_is_tried_again_until_it_is_back(
    drivers: Drivers, s3_port: int, tmp_path: Path
) -> None:
    with TcpProxy(s3_port) as proxy:
        training = _training_on_s3(drivers, target := s3_at(proxy.port), tmp_path)
        driver = training.start()
        training.wait_until(lambda: max(training.steps_of("saving"), default=0) >= 10)
        proxy.refuse()
        time.sleep(5)
        assert driver.is_alive()
        proxy.restore()
        training.require_identical_end(driver.wait(seconds=120), redirect_target(target, s3_port))


# --------------------------------------------------------------------------------- stores with false replies


class _Liar(StoreWrapper):
    """A store whose client reports success for writes of no byte, or of half of them."""

    def __init__(self, store: ObjectStore, kept_share: float) -> None:
        super().__init__(store)
        self._kept_share = kept_share

    def put(self, path: str, data: Buffer) -> None:
        if self._kept_share:
            super().put(path, memoryview(data)[: int(len(data) * self._kept_share)])


class LyingTarget(LocalTarget):
    """A local target whose client reports success for lost writes, like `pyarrow.fs.copy_files`."""

    _block_type_slug = "lying-target"
    kept_share: float = 0

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        with super().open(timeout=timeout) as store:
            yield _Liar(store, self.kept_share)


@pytest.mark.parametrize("kept_share", [0.0, 0.5])
def test_bytes_that_a_client_only_claims_to_have_written_never_yield_a_manifest(
    prefect_server: str, tmp_path: Path, kept_share: float
) -> None:
    assert prefect_server
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "weights").write_bytes(b"w" * 10_000)
    key = CheckpointKey(trial=TrialKey(experiment=_HUNG, generation=1, trial="trial"), step=1, sequence=1)
    target = LyingTarget(path=str(tmp_path / "target"), kept_share=kept_share)
    metadata = CheckpointMetadata(attempt=1, term=1, write_id=uuid4().hex, created_at="2026-01-01T00:00:00Z")
    with pytest.raises(StoreUnavailable, match="client reported success"):
        publish_checkpoint.with_options(retries=0)(target, key, tmp_path / "staged", metadata)
    assert list((tmp_path / "target").rglob("manifest.json")) == []


# Credentials that expire during trials: no trial fails, and the next run resumes what had to stop.


TRIALS = 4
EXPIRED = ("403 Forbidden", "ExpiredToken")


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the credentials, which are rotated."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    write_profile(path, "KEY1")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return path


def make_server(
    profile: Path, refusal: tuple[str, str], seconds: float, *, trials: int = TRIALS, renews_key: bool = True
) -> RotatingS3:
    return RotatingS3(
        refusal,
        trials=trials,
        count_waiting=lambda: len(list(profile.parent.glob("expired.waits-*"))),
        outage=timedelta(seconds=seconds),
        expired=lambda: profile.with_name("expired").touch(),
        renew=lambda key: write_profile(profile, key),
        renews_key=renews_key,
    )


def make_options(server: RotatingS3) -> dict[str, Any]:
    return {
        "target": S3Target(bucket="bucket", region="us-east-1", endpoint_url=server.endpoint, allow_http=True),
        "experiment": "e",
        "stop": {"step": 5},
        "checkpoint": pt.Cadence(every_steps=1),
        "sync": pt.SyncConfig(sync_artifacts=False),
    }


def run_search(server: RotatingS3, profile: Path) -> pt.Results:
    space = {"until": str(profile.with_name("expired")), "x": pt.uniform(0, 1)}
    options = {"metric": "loss", "num_samples": TRIALS, "max_concurrent_trials": TRIALS, **make_options(server)}
    return pt.tune("tests.trainables.counting:Patient", space, **options)


_DEEP_REFUSALS = [
    (EXPIRED, 30, True),
    (("400 Bad Request", "ExpiredToken"), 3, True),
    (("400 Bad Request", "RequestTimeout"), 3, False),
    (("401 Unauthorized", "Unauthorized"), 3, True),
    (("403 Forbidden", "AccessDenied"), 3, False),
    (("403 Forbidden", "InvalidAccessKeyId"), 3, True),
]


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.long
@pytest.mark.parametrize(
    ("refusal", "seconds", "renews_key"),
    [(EXPIRED, 1, True), *(pytest.param(*case, marks=pytest.mark.deep) for case in _DEEP_REFUSALS)],
)
def test_no_trial_ends_whatever_a_search_is_refused_with_for_a_while(
    profile: Path, refusal: tuple[str, str], seconds: float, *, renews_key: bool
) -> None:
    with make_server(profile, refusal, seconds, renews_key=renews_key) as server:
        trials = run_search(server, profile).trials
    assert server.refused >= set(trials), "each trial has met a refusal"
    assert [(t.status, t.attempt, t.step) for t in trials.values()] == [(Status.COMPLETED, 1, 5)] * TRIALS


@pytest.mark.usefixtures("no_prefect_server")
def test_a_target_that_refuses_from_the_start_is_one_error_and_nothing_is_begun(profile: Path) -> None:
    config = {"until": str(profile.with_name("expired"))}
    with make_server(profile, EXPIRED, seconds=3600, trials=0) as server, pytest.raises(StoreRefused, match="expired"):
        pt.durable_trainable("tests.trainables.counting:Patient", config, **make_options(server))
    assert server.names() == []
    assert server.refusals < 20, "it is not retried"


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.long
def test_a_search_that_was_refused_for_too_long_goes_on_with_every_trial_when_it_is_run_again(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_retries, "_PAUSES_SECONDS", (0.05, 0.05))
    monkeypatch.setattr(publish_checkpoint, "retry_delay_seconds", [0.05] * 7)
    with make_server(profile, EXPIRED, seconds=3600) as server:
        with pytest.raises(StoreRefused, match="expired"):
            run_search(server, profile)
        server.accept("KEY2")
        results = run_search(server, profile)
    assert {trial.status for trial in results.trials.values()} == {Status.COMPLETED}
    assert results.errors == {}
    assert all(trial.attempt >= 2 for trial in results.trials.values()), "each resumes from its last commit"


# The Prefect API goes away: training continues, commits stay valid, and the flow completes once the API is back.


_NAME = "api"


@pytest.fixture
def proxy(prefect_server: str) -> Iterator[TcpProxy]:
    port = urlsplit(prefect_server).port
    assert port is not None
    with TcpProxy(port) as proxy:
        yield proxy


def _training_through_proxy(
    drivers: Drivers, proxy: TcpProxy, target: LocalTarget, folder: Path, *, gate_step: int
) -> MlpTraining:
    """Return a training that reaches its server through the proxy and waits before step `gate_step`."""
    training = MlpTraining(drivers, target, folder, _NAME, _STEPS, api_url=f"{proxy.url}/api")
    training.hold_at(gate_step)
    return training


_OUTAGES: dict[str, Callable[[TcpProxy], None]] = {
    "down": TcpProxy.refuse,
    "hung": TcpProxy.swallow,
    "failing": TcpProxy.answer_503,
}


@pytest.mark.long
@pytest.mark.parametrize("outage", ["down", pytest.param("hung", marks=pytest.mark.deep), "failing"])
def test_training_goes_on_while_the_server_is_away_and_the_run_completes_when_it_is_back(
    drivers: Drivers, proxy: TcpProxy, local_target: LocalTarget, tmp_path: Path, outage: str
) -> None:
    training = _training_through_proxy(drivers, proxy, local_target, tmp_path, gate_step=38)
    driver = training.start()
    training.wait_until(lambda: training.newest_step() >= 5)
    _OUTAGES[outage](proxy)
    training.wait_until(lambda: training.newest_step() == 35)
    proxy.restore()
    training.gate.touch()
    training.require_identical_end(driver.wait())
    assert training.steps_of("begin") == list(range(1, _STEPS + 1))
    assert state_of_flow_run(owners_at(local_target, _NAME)[driver.pid])[0] == "Completed"
    assert "Exception in thread" not in driver.log


def test_a_server_that_is_away_at_the_end_costs_no_step(
    drivers: Drivers, proxy: TcpProxy, local_target: LocalTarget, tmp_path: Path
) -> None:
    training = _training_through_proxy(drivers, proxy, local_target, tmp_path, gate_step=30)
    driver = training.start()
    training.wait_until(lambda: training.newest_step() == 25)
    proxy.refuse()
    training.gate.touch()
    training.wait_until(lambda: trial_at(local_target, _NAME).status is Status.COMPLETED)
    proxy.restore()
    driver.wait()
    training.require_identical_end()
    again = training.start().wait()
    assert (again["status"], again["attempts"]) == ("completed", 1)


@pytest.mark.deep
@pytest.mark.parametrize("seconds", [6, 60])
def test_a_search_goes_on_while_the_server_is_away_and_the_ui_is_complete_afterwards(
    drivers: Drivers, proxy: TcpProxy, local_target: LocalTarget, tmp_path: Path, seconds: float
) -> None:
    witness, rows, steps = tmp_path / "witness", [3, 5, 8, 13, 21, 34], 6
    driver = drivers.start(
        "tests.trainables.digits_table:DigitsTable",
        {"row": grid_search(rows), "witness": str(witness), "step_seconds": seconds / 10},
        flow="tune",
        target=local_target,
        experiment=_NAME,
        metric="error",
        num_samples=1,
        stop={"step": steps},
        max_concurrent_trials=2,
        checkpoint=Cadence(every_steps=2),
        api_url=f"{proxy.url}/api",
    )

    def count_steps() -> int:
        return sum(act.act == "trained" for act in acts_of(witness))

    driver.wait_until(lambda: count_steps() >= 3)
    start, before = time.monotonic(), count_steps()
    proxy.refuse()
    wait_until(lambda: time.monotonic() - start >= seconds, seconds=seconds + 30)
    during = count_steps() - before
    proxy.restore()
    outcome = driver.wait(seconds=240)
    assert outcome.get("trials") == {f"{number:05d}": "completed" for number in range(len(rows))}, outcome
    assert during >= steps, driver.log[-3000:]  # a trial began and ended during the outage
    assert count_steps() == len(rows) * steps  # none twice
    state, _ = state_of_flow_run(owner := owners_at(local_target, _NAME)[driver.pid])
    assert state == "Completed"
    expected = (len(rows), {"Completed"})
    wait_until(lambda: _read_task_runs(owner) == expected, seconds=60, what=lambda: str(_read_task_runs(owner)))


def _read_task_runs(owner: Owner) -> tuple[int, set[str]]:
    """Return the number of completed trials on the server, and the states of all task runs."""
    run_filter = FlowRunFilter.model_validate({"id": {"any_": [str(owner.flow_run)]}})
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=run_filter, limit=200)
    completed = sum(run.name.startswith("train ") and run.state_name == "Completed" for run in runs)
    return completed, {str(run.state_name) for run in runs}
