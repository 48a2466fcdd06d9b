"""Fields added after the first release: read back where set, and not written where unset."""

from __future__ import annotations

import pytest

from prefect_tune.core.journal_events.experiment_events import (
    Absorbed,
    CheckpointRef,
    Committed,
    Learned,
    Owner,
    Requeued,
)
from prefect_tune.core.models import Value

_CHECKPOINT = CheckpointRef(step=1, sequence=1)


@pytest.mark.parametrize(
    ("without", "known"),
    [
        (Committed(trial="t", checkpoint=_CHECKPOINT), {"sent_bytes": 0, "upload_seconds": 0.5}),
        (Owner(name="n", host="h", pid=1), {"task_run": "1b7e3c1e-0000-4000-8000-000000000001"}),
        (Owner(name="n", host="h", pid=1), {"search_epoch": 2, "attempt": 3}),
        (Absorbed(trial="t", number=1, events=(Requeued(trial="t", reason="x"),)), {"at": "2026-11-21T08:00:00+00:00"}),
        (Learned(source="first", lessons=()), {"place": "s3://bucket/runs/first"}),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_is_not_known_is_not_written_and_what_is_known_is_read_back(
    without: Value, known: dict[str, object]
) -> None:
    assert not known.keys() & without.model_dump(mode="json").keys()
    full = without.model_copy(update=known)
    assert known.items() <= full.model_dump(mode="json").items()
    assert type(full).model_validate_json(full.model_dump_json()) == full
    assert type(without).model_validate_json(without.model_dump_json()) == without


@pytest.mark.parametrize(
    ("mine", "theirs", "behind"),
    [
        ((1, 2), (1, 2), False),
        ((1, 2), (1, 3), True),
        ((1, 3), (1, 2), False),
        ((1, 3), (2, 1), True),
        ((2, 1), (1, 3), False),
        ((1, 1), (0, 0), False),  # an owner without a request
        ((0, 0), (1, 1), False),
    ],
)
def test_whose_orders_are_older_is_behind_where_both_had_any(
    mine: tuple[int, int], theirs: tuple[int, int], *, behind: bool
) -> None:
    one, other = (
        Owner(name="n", host="h", pid=1, search_epoch=epoch, attempt=attempt) for epoch, attempt in (mine, theirs)
    )
    assert one.is_behind(other) is behind
