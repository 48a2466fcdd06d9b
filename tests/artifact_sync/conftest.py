from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefect_tune.artifact_sync import TargetSyncer
from tests.fakes.artifacts import BUCKETS, FILES, Bucket, BucketTarget
from tests.fakes.checkpoints import write_files


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> Bucket:
    bucket = BUCKETS[request.node.name] = Bucket()
    return bucket


@pytest.fixture
def syncer(request: pytest.FixtureRequest, bucket: Bucket) -> Iterator[TargetSyncer]:
    syncer = TargetSyncer(BucketTarget(name=request.node.name), sync_timeout=20)
    yield syncer
    bucket.gate.set()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write_files(tmp_path / "trial", FILES)
