"""The common face of every place where bytes can live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial

from prefect_tune.blocks.check import TargetCheck, check_target
from prefect_tune.blocks.form import Form
from prefect_tune.checkpoint import Checkpoint
from prefect_tune.core.layout import CheckpointKey
from prefect_tune.core.store import ObjectStore

__all__ = ["StorageTarget"]


def _opened(target: StorageTarget, timeout: timedelta) -> AbstractContextManager[ObjectStore]:
    return target.open(timeout=timeout)


class StorageTarget(Form, ABC):
    """Where experiments and checkpoints live: a configuration, which decides nothing and keeps nothing open.

    Making one, loading one and printing one neither connects nor reads; `open` and `check` do.
    """

    @property
    @abstractmethod
    def uri(self) -> str:
        """Where it is, as a URI without secrets: for people, for logs, and for `resolve_target`."""

    @abstractmethod
    def open(self, *, timeout: timedelta) -> AbstractContextManager[ObjectStore]:
        """Return the store, for a `with` block; all its operations together end within `timeout`.

        Raises:
            InvalidInput: the configuration cannot work, whatever the target says.
            StoreRefused: the credentials could not be had.
        """

    def checkpoint(self, key: CheckpointKey) -> Checkpoint:
        """Return the committed checkpoint `key` as `pt.Checkpoint`, read with this target's credentials."""
        return Checkpoint._of(partial(_opened, self), self.uri, key)  # noqa: SLF001 - the constructor made for this

    def check(self, *, timeout: timedelta = timedelta(seconds=30)) -> TargetCheck:
        """Write, read back, list and delete a probe, and test create-if-absent by a small race.

        Never raises for what is wrong with the target: the answer says it in one line.
        """
        return check_target(self, timeout=timeout)
