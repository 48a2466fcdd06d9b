"""Deleting a quarantined checkpoint: killed at each operation, then repeated by a later run."""

from __future__ import annotations

from contextlib import suppress

import pytest

from prefect_tune.core.errors import TuneError
from tests.fakes.checkpoints import files_in
from tests.fakes.stores.dying_store import Crash, DyingStore, Way
from tests.long_cases import long_after
from tests.tasks.public.conftest import Caller
from tests.tasks.public.test_checkpoints import spoil


@pytest.mark.parametrize("way", long_after(2, Way))
def test_a_killed_deletion_of_a_quarantined_checkpoint_loses_no_other_and_is_completed_by_the_next(
    caller: Caller, way: Way
) -> None:
    for step in (1, 2, 3):
        caller.save(step)
    spoil(caller, 2)
    with pytest.raises(TuneError):
        caller.restore(2)
    assert [each.checkpoint.step for each in caller.state().trial("trial").quarantined_checkpoints] == [2]
    bucket, before = caller.bucket, dict(caller.bucket.objects)
    nth, left = 0, set[str]()
    while True:
        bucket.objects = dict(before)
        nth += 1
        caller.begin("first").on(store := DyingStore(bucket, nth, way))
        with suppress(Crash, TuneError):
            caller.delete(2)
        caller.on(bucket).begin("later")
        caller.delete(2)
        blobs = {path for path in bucket.objects if "/blobs/" in path}
        left = left or blobs
        assert blobs == left, f"at operation {nth}: {store.failed_at}"
        assert sum("manifest" in path for path in bucket.objects) == 2
        for step in (1, 3):
            restored = caller.restore(step)
            assert restored is not None
            assert files_in(restored.directory) == files_in(caller.directory(step))
        if store.failed_at is None:
            break
    assert nth > 5
