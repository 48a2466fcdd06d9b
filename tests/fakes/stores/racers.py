"""Threads that create the same objects at the same moments."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from prefect_tune.core.errors import AlreadyExists
from prefect_tune.core.storage.object_store import ObjectStore


def race_to_create(stores: Sequence[ObjectStore], objects: int) -> list[int]:
    """Race the stores for each object; return for each object how many stores report that they created it."""
    barrier = Barrier(len(stores))

    def try_create(number: int, name: str) -> bool:
        barrier.wait()
        try:
            stores[number].create(name, b"%d" % number)
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(len(stores)) as pool:
        wins = pool.map(lambda number: [try_create(number, f"{name}") for name in range(objects)], range(len(stores)))
        return [sum(wins_of_object) for wins_of_object in zip(*wins, strict=True)]
