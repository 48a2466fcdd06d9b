"""Opens a mounted folder as a store inside the child of an `IsolatedStore`, because the mount may hang."""

from __future__ import annotations

from pathlib import Path

from prefect_tune.stores.posix.posix_store import PosixStore, make_root


def open_mounted(root: str, *, must_exist: bool) -> PosixStore:
    """Open the folder `root`; create it first unless it `must_exist`."""
    folder = Path(root)
    if not must_exist:
        make_root(folder)
    return PosixStore(folder)
