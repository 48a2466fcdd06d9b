"""An object store on the server that a test chooses, and ways to observe it."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from obstore.store import S3Store

from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.obstore_store import ObstoreStore, make_client

KEYS = {"access_key_id": "AKIAIOSFODNN7EXAMPLE", "secret_access_key": "x" * 40}


def object_store(
    endpoint: str,
    *,
    seconds: float = 60,
    request_timeout: timedelta = timedelta(seconds=60),
    bucket: str = "bucket",
    prefix: str = "below/a prefix",
    **options: object,
) -> ObstoreStore:
    common: dict[str, Any] = {"prefix": prefix, "endpoint": endpoint, "region": "us-east-1", **KEYS}

    def connect(request_timeout: timedelta) -> Any:
        constructor = partial(S3Store, bucket, unsigned_payload=True, **common)
        return make_client(constructor, request_timeout, {"allow_http": True, **options})

    deadline = Deadline.after(timedelta(seconds=seconds))
    return ObstoreStore(connect, deadline=deadline, request_timeout=request_timeout)
