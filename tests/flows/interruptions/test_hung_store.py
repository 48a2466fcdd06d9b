"""Targets that hang or report false results: a save ends at its deadline, and no manifest lists missing bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from pydantic import SecretStr

from prefect_tune.blocks import LocalTarget, S3Target, SyncConfig
from prefect_tune.core.checkpoints.manifest import About
from prefect_tune.core.errors import StoreUnavailable
from prefect_tune.core.storage.layout import CheckpointKey, TrialKey
from prefect_tune.core.storage.object_store import Buffer, Listed, ObjectStore
from prefect_tune.tasks.checkpoints import publish_checkpoint
from tests.fakes.servers.s3_sink import Fault, S3Sink, SinkRequest
from tests.fakes.servers.tcp_proxy import TcpProxy
from tests.flows.conftest import s3_at
from tests.flows.driver import Drivers, until
from tests.flows.interruptions.mlp_training import MlpTraining
from tests.flows.training import trial_at

_NAME = "hung"
_STEPS = 40
_DEADLINE_SECONDS = 3.0


def _training(drivers: Drivers, target: S3Target, folder: Path) -> MlpTraining:
    sync = SyncConfig(sync_timeout_seconds=_DEADLINE_SECONDS, sync_artifacts=False, live_period_seconds=None)
    return MlpTraining(drivers, target, folder, _NAME, _STEPS, sync=sync)


@pytest.mark.long
def test_a_hung_store_ends_the_save_at_its_deadline_and_leaves_no_writer(
    drivers: Drivers, s3_port: int, tmp_path: Path
) -> None:
    with TcpProxy(s3_port) as proxy:
        training = _training(drivers, target := s3_at(proxy.port), tmp_path)
        driver = training.start()
        training.until(lambda: max(training.acts("saving"), default=0) >= 10)
        proxy.swallow()
        until(lambda: "Retry 1/" in driver.log, seconds=_DEADLINE_SECONDS + 8, what=lambda: driver.log[-3000:])
        # No connection is open between two tries; a leaked writer would keep its own for a minute.
        until(lambda: proxy.established == 0, seconds=8, what=lambda: f"{proxy.established} connections")
        assert "DeadlineExceeded" in driver.log
        proxy.restore()
        training.require_identical_end(driver.wait(seconds=120), s3_at_same(target, s3_port))
        driver.require_no_leftovers()


def s3_at_same(target: S3Target, port: int) -> S3Target:
    return S3Target(**{**target.model_dump(), "endpoint_url": f"http://127.0.0.1:{port}"})


@pytest.mark.deep
def test_a_store_that_is_gone_for_a_while_is_tried_again_until_it_is_back(
    drivers: Drivers, s3_port: int, tmp_path: Path
) -> None:
    with TcpProxy(s3_port) as proxy:
        training = _training(drivers, target := s3_at(proxy.port), tmp_path)
        driver = training.start()
        training.until(lambda: max(training.acts("saving"), default=0) >= 10)
        proxy.refuse()
        time.sleep(5)
        assert driver.is_alive()
        proxy.restore()
        training.require_identical_end(driver.wait(seconds=120), s3_at_same(target, s3_port))


# --------------------------------------------------------------------------------- stores with false replies


class _Liar:
    """A store whose client reports success for writes that stored nothing, or half of the bytes."""

    def __init__(self, honest: ObjectStore, kept: float) -> None:
        self._honest = honest
        self._kept = kept

    @property
    def conditional_create(self) -> bool:
        return self._honest.conditional_create

    def put(self, path: str, data: Buffer) -> None:
        if self._kept:
            self._honest.put(path, memoryview(data)[: int(len(data) * self._kept)])

    def copy(self, source: str, path: str) -> None:
        self._honest.copy(source, path)

    def replace(self, path: str, pieces: Iterable[Buffer]) -> None:
        self._honest.replace(path, pieces)

    def create(self, path: str, data: Buffer) -> None:
        self._honest.create(path, data)

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Buffer:
        return self._honest.read(path, offset=offset, length=length)

    def size(self, path: str) -> int | None:
        return self._honest.size(path)

    def list(self, prefix: str, *, after: str = "") -> Sequence[Listed]:
        return self._honest.list(prefix, after=after)

    def delete(self, paths: Sequence[str]) -> None:
        self._honest.delete(paths)


class LyingTarget(LocalTarget):
    """A local target whose client reports success for lost writes, as `pyarrow.fs.copy_files` does."""

    _block_type_slug = "lying-target"
    kept: float = 0

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        with super().open(timeout=timeout) as honest:
            yield _Liar(honest, self.kept)


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_bytes_that_a_client_only_claims_to_have_written_never_yield_a_manifest(
    prefect_server: str, tmp_path: Path, kept: float
) -> None:
    assert prefect_server
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / "weights").write_bytes(b"w" * 10_000)
    key = CheckpointKey(trial=TrialKey(experiment=_NAME, generation=1, trial="trial"), step=1, sequence=1)
    target = LyingTarget(path=str(tmp_path / "target"), kept=kept)
    save = publish_checkpoint.with_options(retries=0)
    with pytest.raises(StoreUnavailable, match="client reported success"):
        save(target, key, tmp_path / "staged", _about())
    assert list((tmp_path / "target").rglob("manifest.json")) == []


def _about() -> About:
    return About(attempt=1, term=1, write_id=uuid4().hex, created_at="2026-01-01T00:00:00Z")


class _Pretender:
    """Answers "200" to every second blob and stores nothing; records the stored blobs when a manifest comes."""

    def __init__(self, sink: S3Sink) -> None:
        self._sink = sink
        self._blobs = 0
        self.pretended: set[str] = set()

    def __call__(self, request: SinkRequest) -> Fault | None:
        if request.method != "PUT" or "/blobs/" not in request.path:
            return None
        self._blobs += 1
        if self._blobs % 2:
            self.pretended.add(request.path)
            return Fault.PRETEND
        return None


@pytest.mark.long
def test_a_server_that_acknowledges_writes_it_drops_costs_only_time(drivers: Drivers, tmp_path: Path) -> None:
    with S3Sink() as sink:
        sink.fault = pretender = _Pretender(sink)
        target = S3Target(
            bucket="bucket",
            prefix="lied-to",
            region="us-east-1",
            endpoint_url=sink.endpoint,
            allow_http=True,
            access_key_id="test",
            secret_access_key=SecretStr("test"),
        )
        training = _training(drivers, target, tmp_path)
        driver = training.start()
        training.require_identical_end(driver.wait(seconds=120))
        assert len(pretender.pretended) >= 4
        assert "client reported success" in driver.log
        assert len(trial_at(target, _NAME).checkpoints) == _STEPS // 5
