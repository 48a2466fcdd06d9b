"""Threads that create the same objects at the same moments."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from prefect_tune.core.errors import AlreadyExists
from prefect_tune.core.storage.object_store import ObjectStore


def race_to_create(stores: Sequence[ObjectStore], objects: int) -> list[int]:
    """Race the stores for each object; return for each object how many stores report that they created it."""
    together = Barrier(len(stores))

    def creates(number: int) -> list[bool]:
        return [_wins(stores[number], f"{each}", b"%d" % number, together) for each in range(objects)]

    with ThreadPoolExecutor(len(stores)) as racers:
        found = racers.map(creates, range(len(stores)))
        return [sum(each) for each in zip(*found, strict=True)]


def _wins(store: ObjectStore, name: str, body: bytes, together: Barrier) -> bool:
    together.wait()
    try:
        store.create(name, body)
    except AlreadyExists:
        return False
    return True
