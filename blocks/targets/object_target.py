"""The base class of the S3, Google Cloud Storage and Azure blocks: prefix, endpoint, TLS, and the obstore client."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

from pydantic import Field, field_validator, model_validator

from prefect_tune.blocks.storage_target import StorageTarget
from prefect_tune.core.errors import StoreRefused
from prefect_tune.core.storage.object_store import ObjectStore, is_inside
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.open_location import ENDPOINT_OPTIONS, Location


class ObjectTarget(StorageTarget, ABC):
    """A prefix in a bucket (or container) that is reached over HTTP."""

    prefix: str = Field(default="", description="The folder within the bucket or container. Empty: its root.")
    endpoint_url: str | None = Field(
        default=None,
        description="The server's URL, if it is not the cloud's own, e.g. 'https://minio:9000'.",
    )
    allow_http: bool = Field(
        default=False, description="Whether an endpoint without TLS is allowed; data is then sent unencrypted."
    )
    verify_tls: bool = Field(
        default=True,
        description="Whether the server's certificate is verified; without it another server could answer.",
    )
    ca_certificate: str | None = Field(
        default=None, description="A certificate authority to trust in addition to the system's, as PEM text."
    )
    request_timeout_seconds: float = Field(
        default=60,
        gt=0,
        allow_inf_nan=False,
        description="Most time in seconds for one request and its response.",
    )

    anonymous: bool = Field(
        default=False, description="Whether requests are not signed, for public buckets and emulators."
    )
    conditional_writes: bool = Field(
        default=True,
        description="Whether the server refuses a second create of the same object; check() tests this. "
        "If not, the target serves one runner only.",
    )

    @field_validator("prefix")
    @classmethod
    def _relative_folder(cls, prefix: str) -> str:
        folder = prefix.strip("/")
        if folder and not is_inside(folder):
            raise ValueError(f"expected a folder without empty parts, '.' and '..', found {prefix!r}")
        return folder

    @field_validator("endpoint_url")
    @classmethod
    def _http_endpoint(cls, url: str | None) -> str | None:
        return None if url is None else http_endpoint(url)

    @model_validator(mode="after")
    def _plain_http_is_said_aloud(self) -> Self:
        if (self.endpoint_url or "").startswith("http:") and not self.allow_http:
            raise ValueError(f"endpoint_url {self.endpoint_url!r} has no TLS: set allow_http=True if that is intended")
        return self

    @classmethod
    def _at(cls, uri: str, location: Location) -> Self:  # noqa: ARG003  of use to others
        """Return the bucket that a URI names; an option of the URI has the name of a field."""
        options = {name: text for name, text in location.options.items() if name not in ENDPOINT_OPTIONS}
        fields: dict[str, Any] = {"bucket": location.container, "prefix": location.path, **options}
        if endpoint := location.endpoint:
            fields = {"allow_http": endpoint.startswith("http:"), **fields, "endpoint_url": endpoint}  # it says so
        return cls(**fields)

    @property
    def _prefix_in_uri(self) -> str:
        """The prefix with those characters quoted that would end the path of a URI, or begin a quoted one."""
        return re.sub("[%?#]", lambda found: quote(found[0]), self.prefix)

    def _uri(self, place: str, *, endpoint: str | None, region: str | None = None) -> str:
        """Return `place` with endpoint, region and `anonymous` as query options; credentials are left out."""
        said = {"endpoint_url": endpoint, "region": region, "anonymous": "true" if self.anonymous else None}
        options = urlencode({name: value for name, value in said.items() if value}, safe=":/")
        return f"{place.rstrip('/')}{'?' if options else ''}{options}"

    @abstractmethod
    def _connector(self) -> Callable[..., Any]:
        """Find the credentials, and return the client's constructor, which still needs its timeouts and TLS options."""

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        from prefect_tune.stores.obstore_store import ObstoreStore

        deadline = Deadline.after(timeout)
        connector = self._connector()
        store = ObstoreStore(
            lambda limit: self._connected(connector, limit),
            deadline=deadline,
            request_limit=timedelta(seconds=self.request_timeout_seconds),
            conditional_create=self.conditional_writes,
        )
        try:
            yield store
        finally:
            store.close()

    def _connected(self, connector: Callable[..., Any], limit: timedelta) -> Any:
        from prefect_tune.stores.obstore_store import connected

        try:
            return connected(connector, limit, self._transport())
        except ValueError as error:
            raise StoreRefused(f"{self.uri}: the storage client refuses these settings: {error}") from error

    def _transport(self) -> dict[str, Any]:
        options: dict[str, Any] = {"allow_http": self.allow_http}
        if not self.verify_tls:
            options["allow_invalid_certificates"] = True
        if self.ca_certificate is not None:
            options["root_certificate"] = self.ca_certificate
        return options


def one_at_most(ways: Mapping[str, object]) -> None:
    """Refuse more than one of several alternative fields.

    Raises:
        ValueError: more than one is set.
    """
    given = [name for name, value in ways.items() if value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} contradict each other: keep one")


def bare_name(kind: str, name: str, pattern: str) -> str:
    """Return `name` if it is a valid name of a bucket or container.

    Raises:
        ValueError: it is a URI, a path, or does not match `pattern`.
    """
    if "://" in name:
        raise ValueError(f"expected the {kind}'s name alone, found the URI {name!r}: use resolve_target for URIs")
    if "/" in name:
        raise ValueError(f"expected the {kind}'s name alone, found {name!r}: put the part after the '/' into prefix")
    if not re.fullmatch(pattern, name):
        raise ValueError(f"{name!r} is not a valid name of a {kind}")
    return name


def http_endpoint(url: str) -> str:
    """Return `url` without a trailing slash.

    Raises:
        ValueError: it is not an http or https URL of a host alone.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("expected 'https://host' or 'https://host:port'")
    if parts.username or parts.password:
        raise ValueError("it contains a user name or password: use the credential fields instead")
    if parts.query or parts.fragment:
        raise ValueError("expected 'https://host' or 'https://host:port', without '?' and '#'")
    return url.rstrip("/")
