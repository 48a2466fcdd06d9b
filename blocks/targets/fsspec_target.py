"""The block of any other location that fsspec can open: hdfs, sftp, ftp, webdav, smb, memory and more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from prefect.types import SecretDict
from pydantic import Field, HttpUrl, field_validator

from prefect_tune.blocks.storage_target import FILES_LOGO, StorageTarget
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.open_location import Client, Location, fsspec_store
from prefect_tune.stores.subprocess_store import IsolatedStore

_ON_THIS_MACHINE = frozenset({"file", "local"})
_IN_PROCESS = frozenset({"memory"})  # in a child process it would be lost when that is killed


class FsspecTarget(StorageTarget):
    """Any URI that fsspec can open: hdfs (by pyarrow), sftp, ftp, webdav, smb, memory and more.

    Its client runs in a child process, which is killed at the deadline. There is no atomic create-if-absent, so the
    target serves one runner only: PBT, forks, trials on other machines and every other second writer of a journal are
    refused.

    Example:
        ```python
        from prefect_tune.blocks import FsspecTarget

        target = FsspecTarget.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str | None] = "Fsspec Target"
    _block_type_slug: ClassVar[str | None] = "fsspec-target"
    _logo_url: ClassVar[HttpUrl | None] = FILES_LOGO
    _client: ClassVar[Client | None] = Client.OTHER

    location: str = Field(
        title="URI",
        description="The location, e.g. 'sftp://host/folder', without a password or token: those are secret options.",
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the fsspec implementation, e.g. {'port': 2222}."
    )
    secret_options: SecretDict | None = Field(
        default=None, description="Secret options of the fsspec implementation, e.g. {'password': '...'}."
    )

    @field_validator("location")
    @classmethod
    def _known_and_without_password(cls, uri: str) -> str:
        import fsspec

        scheme, separator, _ = uri.partition("://")
        if not separator:
            raise ValueError("expected 'scheme://...'")
        parts = urlsplit(uri)
        if parts.password:
            raise ValueError("it contains a password in plain text: use secret_options={'password': ...}")
        if parts.query or parts.fragment:
            raise ValueError(
                "expected a location without '?' and '#', whose options would be in plain text: put options into "
                "storage_options, and keys and tokens into secret_options"
            )
        if scheme in _ON_THIS_MACHINE and not uri.partition("://")[2].startswith("/"):
            raise ValueError(
                f"expected an absolute path, as in {scheme}:///folder: a relative one depends on the process"
            )
        if scheme not in fsspec.available_protocols():  # also those whose package is not installed
            raise ValueError(f"fsspec does not know the scheme {scheme!r}")
        return uri.rstrip("/") if not uri.endswith("://") else uri

    @classmethod
    def _at(cls, uri: str, location: Location) -> Self:
        implementation(location.scheme)  # to report a missing package now, not in the middle of a run
        return cls(location=uri)

    @property
    def uri(self) -> str:
        return self.location

    def options(self) -> Mapping[str, Any]:
        """Return all options, secret ones included."""
        secrets = {} if self.secret_options is None else self.secret_options.get_secret_value()
        if both := self.storage_options.keys() & secrets.keys():
            raise InvalidInput(f"{self.uri}: {min(both)!r} is both a plain and a secret option: keep one")
        return {**self.storage_options, **secrets}

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        deadline = Deadline.after(timeout)
        scheme = self.location.partition("://")[0]
        kind = implementation(scheme)
        root = kind._strip_protocol(self.location)  # noqa: SLF001  fsspec's own way to read a URI
        given = kind._get_kwargs_from_urls(self.location)  # noqa: SLF001  fsspec's own way, too
        factory = partial(fsspec_store, scheme, root, {**given, **self.options()})
        if scheme in _IN_PROCESS:
            yield factory()
        else:
            with IsolatedStore(factory, deadline=deadline) as store:
                yield store


def implementation(scheme: str) -> Any:
    """Return fsspec's class for `scheme`; importing it connects to nothing.

    Raises:
        InvalidInput: a package is missing; the message names it.
    """
    import fsspec

    try:
        return fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise InvalidInput(f"{scheme}:// needs a package that is not installed: {error}") from error
