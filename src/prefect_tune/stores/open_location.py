"""Parse a path or URI, and open its store without a block and without Prefect.

Credentials come from where each cloud's tools look for them: environment variables, a profile, the machine's role.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never, cast
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from prefect_tune.core.errors import InvalidInput, StoreRefused
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.posix_store import open_folder

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


# A folder of this machine as a target for reading, without a block: importing Prefect takes a second.

BLOCK_SLUG = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)/([^/\s]+)")
"""The 'block-type/name' of a saved block."""


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """An existing folder; `path` is absolute."""

    path: Path

    @property
    def uri(self) -> str:
        return self.path.as_uri()

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        yield open_folder(self.path, must_exist=True, deadline=Deadline.after(timeout))


def local_folder(target: str) -> LocalFolder | None:
    """Return the folder whose path is `target`; None if it is a URI or a saved block, or if there is no such folder."""
    if "://" in target or BLOCK_SLUG.fullmatch(target) or not target.strip():
        return None
    try:
        path = Path(os.path.normpath(Path.cwd() / Path(target).expanduser()))
        return LocalFolder(path) if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # the block says what is wrong with it
        return None


class Client(Enum):
    """The client for a scheme."""

    FILES = "the operating system"
    S3 = "obstore, S3"
    GCS = "obstore, Google Cloud Storage"
    AZURE = "obstore, Azure"
    OTHER = "pyarrow or fsspec"


_CLIENTS: Mapping[str, Client] = {
    "file": Client.FILES,
    **dict.fromkeys(("s3", "s3a", "s3n"), Client.S3),
    **dict.fromkeys(("gs", "gcs"), Client.GCS),
    **dict.fromkeys(("az", "azure", "abfs", "abfss", "wasb", "wasbs"), Client.AZURE),
}
ENDPOINT_OPTIONS = frozenset({"endpoint_url", "endpoint_override", "scheme"})
"""Those of `Location.endpoint`; pyarrow's URIs have host:port in `endpoint_override`, and the scheme apart."""
_OPTIONS: Mapping[Client, frozenset[str]] = {
    Client.S3: ENDPOINT_OPTIONS | {"region", "allow_http", "anonymous"},
    Client.GCS: frozenset({"endpoint_url", "anonymous"}),
}
_ARROW_SCHEMES = frozenset({"hdfs", "viewfs"})
_IN_PROCESS = frozenset({"local", "subtree", "memory", "mock", "s3", "gcs", "abfs", "file"})
"""Kinds of pyarrow file systems that need no child process: their calls end, or they exist only in this process."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed path or URI. `container` is a bucket, or for `OTHER` clients the host; empty for files.

    `path` has no slash at its ends; for files it is absolute.
    """

    client: Client
    scheme: str
    container: str
    path: str
    account: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        """The location as a URI, options included."""
        at = f"@{self.account}" if self.account else ""
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{self.scheme}://{self.container}{at}/{quote(self.path.lstrip('/'))}{query}"

    @property
    def arrow_path(self) -> str:
        """The path as pyarrow's file systems expect it: with the bucket in front, if there is one."""
        match self.client:
            case Client.FILES:
                return self.path
            case Client.OTHER if self.scheme in _ARROW_SCHEMES:
                return f"/{self.path}"
            case Client.OTHER:
                import fsspec

                try:
                    kind = fsspec.get_filesystem_class(self.scheme)
                except (ImportError, ValueError):
                    return f"{self.container}/{self.path}"  # opening it raises the error; this only formats the path
                return str(kind._strip_protocol(self.uri))  # noqa: SLF001  how fsspec turns a URI into a path
            case _:
                return f"{self.container}/{self.path}".rstrip("/")

    @property
    def endpoint(self) -> str | None:
        """The URL of the server, if the options name one."""
        endpoint = self.options.get("endpoint_url") or self.options.get("endpoint_override")
        return f"{self.options.get('scheme', 'https')}://{endpoint}" if endpoint and "://" not in endpoint else endpoint

    @property
    def is_anonymous(self) -> bool:
        """Whether requests are not signed."""
        return _is_true(self.options.get("anonymous", ""))

    def at(self, path: str) -> Location:
        """Return this location with another path."""
        return replace(self, path=path)


def read_uri(uri: str | os.PathLike[str]) -> Location:
    """Parse a URI or a local path. Opens and requests nothing.

    Raises:
        InvalidInput: `uri` is not valid; the message says why.
    """
    text = os.fspath(uri)
    scheme = _SCHEME.match(text)
    if not scheme:
        if not text or "\0" in text:
            raise InvalidInput(f"{text!r}: expected a path or a URI such as s3://bucket/folder")
        return Location(Client.FILES, "file", "", os.path.abspath(Path(text).expanduser()))  # noqa: PTH100  links are kept
    name = scheme[1].lower()
    client = _CLIENTS.get(name, Client.OTHER)
    if _CONTROL.search(text):  # messages do not repeat the URI, since it may hold a password
        raise InvalidInput(f"{name}://…: expected no control characters, such as a line break, in a URI")
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise InvalidInput(f"{name}://…: not a valid URI: {error}") from error
    if parts.password or (parts.username and client in _OPTIONS):
        raise InvalidInput(
            f"{name}://…@{parts.hostname}{parts.path}: expected no credentials in a URI: use a block or the environment"
        )
    if client is Client.FILES:
        return _file(parts)
    if client is Client.OTHER:
        return _other(text, name)
    container, _, account = parts.netloc.partition("@")
    if not container:
        raise InvalidInput(f"{text!r}: expected a bucket after {name}://, found none")
    if parts.fragment:
        raise InvalidInput(f"{name}://{container}{parts.path}: expected no '#' in a URI: write one in a name as %23")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := options.keys() - _OPTIONS.get(client, frozenset()):
        known = ", ".join(sorted(_OPTIONS.get(client, ()))) or "none"
        raise InvalidInput(f"{name}://{container}{parts.path}: unknown option {min(unknown)!r}; known are {known}")
    return Location(client, name, container, unquote(parts.path).strip("/"), account, options)


def _file(parts: SplitResult) -> Location:
    if parts.netloc not in ("", "localhost"):
        meant = f"file:///{parts.netloc}{parts.path}"
        raise InvalidInput(f"{parts.geturl()!r}: expected no host in a file URI; did you mean {meant}?")
    if parts.query or parts.fragment:
        raise InvalidInput(f"{parts.geturl()!r}: expected neither '#' nor '?': write them in a name as %23 and %3F")
    return Location(Client.FILES, "file", "", os.path.normpath(unquote(parts.path)))


def _other(uri: str, scheme: str) -> Location:
    import fsspec

    if scheme not in _ARROW_SCHEMES and scheme not in fsspec.available_protocols():
        known = ", ".join(sorted(_CLIENTS))
        place = uri.partition("?")[0]  # the query may have a token
        raise InvalidInput(f"{place!r}: unknown scheme {scheme!r}; known are {known}, and fsspec's and pyarrow's")
    host, _, path = uri.partition("://")[2].partition("/")
    return Location(Client.OTHER, scheme, host, path.rstrip("/"))


@contextmanager
def open_location(location: Location, *, timeout: timedelta) -> Iterator[ObjectStore]:
    """Open the store with the root `location`; all its operations together end within `timeout`.

    Raises:
        InvalidInput: the client does not accept these settings, or is not installed.
    """
    deadline = Deadline.after(timeout)
    match location.client:
        case Client.FILES:
            from prefect_tune.stores.posix_store import PosixStore

            yield PosixStore(Path(location.path), deadline=deadline)
        case Client.OTHER:
            with open_arrow(
                partial(arrow_filesystem, location), location.arrow_path, location.scheme, timeout=timeout
            ) as store:
                yield store
        case Client.S3 | Client.GCS | Client.AZURE:
            from prefect_tune.stores.obstore_store import ObstoreStore

            clouds = ObstoreStore(_connector(location), deadline=deadline)
            try:
                yield clouds
            finally:
                clouds.close()
        case _:
            assert_never(location.client)


@contextmanager
def open_arrow(
    filesystem: Callable[[], FileSystem], root: str, kind: str, *, timeout: timedelta
) -> Iterator[ObjectStore]:
    """Open the folder `root` of a pyarrow file system; `kind` is its scheme or its pyarrow type name.

    Kinds whose calls may hang run in a child process, which is killed at the timeout.
    """
    deadline = Deadline.after(timeout)
    if kind.removeprefix("py::fsspec+") in _IN_PROCESS:
        yield _arrow_store(filesystem, root, deadline)
        return
    from prefect_tune.stores.subprocess_store import IsolatedStore

    with IsolatedStore(partial(_arrow_store, filesystem, root), deadline=deadline) as store:
        yield store


def _arrow_store(filesystem: Callable[[], FileSystem], root: str, deadline: Deadline | None = None) -> ObjectStore:
    from prefect_tune.stores.arrow_store import ArrowStore

    return ArrowStore(filesystem(), root, deadline=deadline)


def fsspec_store(scheme: str, root: str, options: Mapping[str, Any]) -> ObjectStore:
    """Open the folder `root` by fsspec, as `open_fsspec` does; imports its client when it is called, in a child."""
    from prefect_tune.stores.arrow_store import open_fsspec

    return open_fsspec(scheme, root, options)


def _connector(location: Location) -> Callable[[timedelta], Any]:
    """Return what makes an obstore client that ends every request within a time."""
    from obstore.store import AzureStore, GCSStore, S3Store

    from prefect_tune.stores.obstore_store import connected

    endpoint = location.endpoint
    kind: Any
    config: Any
    match location.client:
        case Client.S3:
            access = _access(location)
            endpoint = _s3_endpoint(location)
            kind = partial(S3Store, credential_provider=cast("Any", access.keys))
            config = {"endpoint": endpoint, "region": access.region}
        case Client.GCS:
            kind, config = GCSStore, {"base_url": endpoint}
        case Client.AZURE:
            kind, config = AzureStore, {"account_name": location.account.partition(".")[0]}
        case _:
            raise AssertionError(location.client)
    given: Any = {name: value for name, value in config.items() if value}
    given |= {"skip_signature": True} if location.is_anonymous else {}
    constructor = partial(kind, location.container, prefix=location.path or None, config=given)
    asked = location.options.get("allow_http")
    may_use_http = ambient_http(os.environ) if asked is None else _is_true(asked)
    options = {"allow_http": may_use_http or (endpoint or "").startswith("http://")}

    def connect(limit: timedelta) -> Any:
        try:
            return connected(constructor, limit, options)
        except ValueError as error:
            raise InvalidInput(f"{location.uri}: obstore does not accept this location: {error}") from error

    return connect


def _s3_endpoint(location: Location) -> str | None:
    return location.endpoint or ambient_endpoint(os.environ)


def _is_true(text: str) -> bool:
    return text.lower() in ("1", "true", "yes")


def _access(location: Location) -> S3Access:
    """Return credentials and region: the URI's region, the rest from the environment or a profile."""
    found = ambient_access(os.environ, anonymous=location.is_anonymous)
    return replace(found, region=location.options.get("region") or found.region)


def arrow_filesystem(location: Location) -> FileSystem:
    """Return the pyarrow file system for `location`; use it with `location.arrow_path`.

    Raises:
        InvalidInput: a package that the scheme needs is not installed.
    """
    import fsspec
    import pyarrow.fs as arrow

    if location.client is Client.FILES:
        return arrow.LocalFileSystem()
    if location.client is Client.S3:
        endpoint = _s3_endpoint(location)
        return arrow.S3FileSystem(
            anonymous=location.is_anonymous,
            region=_access(location).region,
            endpoint_override=endpoint.partition("://")[2] if endpoint else None,
            scheme="http" if (endpoint or "").startswith("http://") else "https",
        )
    if location.client is Client.GCS:
        return arrow.GcsFileSystem(anonymous=location.is_anonymous)
    if location.scheme in _ARROW_SCHEMES:
        return arrow.FileSystem.from_uri(location.uri)[0]
    options = {"account_name": location.account.partition(".")[0]} if location.account else {}
    try:
        found, _ = fsspec.core.url_to_fs(location.uri, **options)
    except (ImportError, ValueError) as missing:
        raise InvalidInput(f"{location.uri}: needs a package that is not installed: {missing}") from missing
    return arrow.PyFileSystem(arrow.FSSpecHandler(found))


# S3 settings from environment variables and AWS profiles, for what neither a block nor a URI sets.


S3Keys: TypeAlias = Mapping[str, Any]
_COME_FIRST = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}


@dataclass(frozen=True, slots=True)
class S3Access:
    """Credentials, region and endpoint of S3; None for what is not set, or what the client finds by itself."""

    keys: Callable[[], S3Keys] | None = None
    region: str | None = None
    endpoint_url: str | None = None


def ambient_endpoint(environment: Mapping[str, str]) -> str | None:
    """Return the endpoint URL from the environment; None for Amazon's own."""
    return environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")


def ambient_http(environment: Mapping[str, str]) -> bool:
    """Whether the environment allows a server without TLS."""
    return _is_true(environment.get("AWS_ALLOW_HTTP", ""))


def ambient_access(environment: Mapping[str, str], *, anonymous: bool = False) -> S3Access:
    """Return the environment's region, and a profile's credentials unless the environment has others.

    The client itself finds all other credentials (variables, web identity, container, instance).

    Args:
        environment: of this process, because boto3, which reads the profile, uses no other.
        anonymous: requests are not signed, so no profile is read.

    Raises:
        StoreRefused: the profile does not exist or cannot be read.
    """
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    others = anonymous or any(name in environment for name in _COME_FIRST)
    has_profile = "AWS_PROFILE" in environment or any(
        Path(environment.get(variable, usual)).expanduser().is_file() for variable, usual in _FILES.items()
    )
    if others or not has_profile or not find_spec("boto3"):
        return S3Access(region=region)
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        session = boto3.Session()
        keys = session_keys(session) if session.get_credentials() else None  # a profile may set only a region
        return S3Access(keys, region or session.region_name)
    except BotoCoreError as error:
        raise StoreRefused(f"the AWS profile of this machine cannot be used: {error}") from error


def session_keys(session: Any) -> Callable[[], S3Keys]:
    """Return a provider of a boto3 session's credentials, which boto3 renews (profiles, SSO, roles)."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(session)
    except ValueError as error:
        raise StoreRefused(f"no AWS credentials in the profile {session.profile_name!r}") from error
