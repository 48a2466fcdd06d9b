"""Where nobody may write beside whoever owns a journal: on a target that cannot tell which of two came first."""

from __future__ import annotations

from prefect_tune.core.errors import StoreRefused
from prefect_tune.core.store import ObjectStore

__all__ = ["ONE_WRITER", "require_room_for_guests"]

ONE_WRITER = (
    "expected a target with atomic create-if-absent, found one without: of two writers one destroys what the other "
    "wrote, and nothing on the target tells whether another lives. Copy all of it, while nothing runs there, to a "
    "target that has it (prefect-tune blocks check TARGET), and do it there"
)


def require_room_for_guests(store: ObjectStore, where: object) -> None:
    """Return if something may be written at `where` beside others who may live and write there, too.

    Raises:
        StoreRefused: the target serves one writer only. Nothing was written.
    """
    if not store.conditional_create:
        raise StoreRefused(f"{where}: nothing is written there beside its owner: {ONE_WRITER}")
