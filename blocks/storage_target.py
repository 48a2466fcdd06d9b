"""The base class of the storage target blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import ClassVar, Self

from pydantic import Field, SecretStr, field_validator

from prefect_tune.blocks.strict_block import StrictBlock
from prefect_tune.blocks.target_check import TargetCheck, check_target
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.runtime.checkpoint import Checkpoint
from prefect_tune.stores.locations.open_location import Client, Location

_LEAST_KEY = 16


def _opened(target: StorageTarget, timeout: timedelta) -> AbstractContextManager[ObjectStore]:
    return target.open(timeout=timeout)


class StorageTarget(StrictBlock, ABC):
    """A place where experiments and checkpoints are stored: a configuration without open connections.

    Creating, loading and printing one does not connect to the storage; only `open` and `check` do.
    """

    _client: ClassVar[Client | None] = None
    """The client of the URIs that `_at` takes."""
    _shown_last: ClassVar[frozenset[str]] = frozenset({"signing_key"})

    signing_key: SecretStr | None = Field(
        default=None,
        description="Signs the settings of searches on this target. A resume by name then accepts only settings signed "
        "with this key, so write access to the target is not enough to run other code. At least 16 characters.",
    )

    @field_validator("signing_key")
    @classmethod
    def _hard_to_guess(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and len(key.get_secret_value()) < _LEAST_KEY:
            raise ValueError(f"expected at least {_LEAST_KEY} characters, such as those of `openssl rand -hex 32`")
        return key

    @property
    @abstractmethod
    def uri(self) -> str:
        """The location as a URI without secrets, for messages and for `resolve_target`."""

    @property
    def signing_secret(self) -> bytes | None:
        """The signing key as bytes; None if the target has none."""
        return None if self.signing_key is None else self.signing_key.get_secret_value().encode()

    @abstractmethod
    def open(self, *, timeout: timedelta) -> AbstractContextManager[ObjectStore]:
        """Return the store as a context manager; all its operations together end within `timeout`.

        Raises:
            InvalidInput: the configuration is invalid, independent of the target's answers.
            StoreRefused: the credentials cannot be read.
        """

    @classmethod
    def _at(cls, uri: str, location: Location) -> Self:
        """Return the target at `location`, which is the parsed `uri`."""
        raise NotImplementedError

    def checkpoint(self, key: CheckpointKey) -> Checkpoint:
        """Return the committed checkpoint `key` as `pt.Checkpoint`, read with this target's credentials."""
        return Checkpoint._of(partial(_opened, self), self.uri, key)  # noqa: SLF001 - the constructor made for this

    def check(self, *, timeout: timedelta = timedelta(seconds=30)) -> TargetCheck:
        """Write, read back, list and delete a probe, and test create-if-absent by a small race.

        Errors of the target do not raise: the returned `message` describes them in one line.
        """
        return check_target(self, timeout=timeout)
