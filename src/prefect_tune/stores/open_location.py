"""Parse a path or URI, and open its store without a block and without Prefect.

Credentials come from the sources that the cloud's own tools use: environment variables, profile, machine role.
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
from prefect_tune.stores.posix_store import open_posix_store

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


# A local folder, as a target that is only read. It is opened without a block, so that Prefect (1 s) is not imported.

BLOCK_SLUG = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)/([^/\s]+)")
"""A reference to a saved block: 'block-type/name'."""


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """An existing folder; `path` is absolute."""

    path: Path

    @property
    def uri(self) -> str:
        return self.path.as_uri()

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        yield open_posix_store(self.path, must_exist=True, deadline=Deadline.after(timeout))


def find_local_folder(target: str) -> LocalFolder | None:
    """Return the folder with the path `target`; None for a URI, a saved block or a missing folder."""
    if "://" in target or BLOCK_SLUG.fullmatch(target) or not target.strip():
        return None
    try:
        path = Path(os.path.normpath(Path.cwd() / Path(target).expanduser()))
        return LocalFolder(path) if path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # the caller then resolves `target` to a block, which raises the error
        return None


class Client(Enum):
    """The software that opens the URIs of a scheme."""

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
"""The options that `Location.endpoint` reads. In pyarrow's URIs, `endpoint_override` is host:port without a scheme."""
_URI_OPTIONS: Mapping[Client, frozenset[str]] = {
    Client.S3: ENDPOINT_OPTIONS | {"region", "allow_http", "anonymous"},
    Client.GCS: frozenset({"endpoint_url", "anonymous"}),
}
_ARROW_SCHEMES = frozenset({"hdfs", "viewfs"})
_IN_PROCESS_KINDS = frozenset({"local", "subtree", "memory", "mock", "s3", "gcs", "abfs", "file"})
"""Kinds of pyarrow file systems that need no child process: their calls do not hang, or their files are in memory."""
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed path or URI. `container` is the bucket; for `OTHER` clients, it is the host; for files, it is empty.

    For files, `path` is absolute; otherwise, it has no slash at either end.
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
        account = f"@{self.account}" if self.account else ""
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{self.scheme}://{self.container}{account}/{quote(self.path.lstrip('/'))}{query}"

    @property
    def arrow_path(self) -> str:
        """The path for pyarrow's file systems. If there is a bucket, the path begins with the bucket's name."""
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
                    return f"{self.container}/{self.path}"  # the error is raised when the location is opened
                return str(kind._strip_protocol(self.uri))  # noqa: SLF001  how fsspec turns a URI into a path
            case _:
                return f"{self.container}/{self.path}".rstrip("/")

    @property
    def endpoint(self) -> str | None:
        """The URL of the server from the options; None if the options have no URL."""
        endpoint = self.options.get("endpoint_url") or self.options.get("endpoint_override")
        return f"{self.options.get('scheme', 'https')}://{endpoint}" if endpoint and "://" not in endpoint else endpoint

    @property
    def is_anonymous(self) -> bool:
        """Whether requests are unsigned."""
        return _parse_flag(self.options.get("anonymous", ""))

    def with_path(self, path: str) -> Location:
        """Return the location of `path` on the same target."""
        return replace(self, path=path)


def parse_uri(uri: str | os.PathLike[str]) -> Location:
    """Parse a URI or a local path, without any request; raise `InvalidInput` with the reason if it is not valid."""
    text = os.fspath(uri)
    scheme = _SCHEME.match(text)
    if not scheme:
        if not text or "\0" in text:
            raise InvalidInput(f"{text!r}: expected a path or a URI such as s3://bucket/folder")
        return Location(Client.FILES, "file", "", os.path.abspath(Path(text).expanduser()))  # noqa: PTH100  links are kept
    name = scheme[1].lower()
    client = _CLIENTS.get(name, Client.OTHER)
    if _CONTROL_CHARACTER.search(text):  # the message omits the URI, which may contain a password
        raise InvalidInput(f"{name}://…: expected no control characters, such as a line break, in a URI")
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise InvalidInput(f"{name}://…: not a valid URI: {error}") from error
    if parts.password or (parts.username and client in _URI_OPTIONS):
        raise InvalidInput(
            f"{name}://…@{parts.hostname}{parts.path}: expected no credentials in a URI; use a block or the environment"
        )
    if client is Client.FILES:
        return _parse_file_uri(parts)
    if client is Client.OTHER:
        return _parse_other_uri(text, name)
    container, _, account = parts.netloc.partition("@")
    if not container:
        raise InvalidInput(f"{text!r}: expected a bucket after {name}://, found none")
    if parts.fragment:
        raise InvalidInput(f"{name}://{container}{parts.path}: expected no '#' in a URI; in a name, write %23")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := options.keys() - _URI_OPTIONS.get(client, frozenset()):
        supported = ", ".join(sorted(_URI_OPTIONS.get(client, ()))) or "none"
        raise InvalidInput(f"{name}://{container}{parts.path}: unknown option {min(unknown)!r}; known: {supported}")
    return Location(client, name, container, unquote(parts.path).strip("/"), account, options)


def _parse_file_uri(parts: SplitResult) -> Location:
    if parts.netloc not in ("", "localhost"):
        suggestion = f"file:///{parts.netloc}{parts.path}"
        raise InvalidInput(f"{parts.geturl()!r}: expected no host in a file URI; did you mean {suggestion}?")
    if parts.query or parts.fragment:
        raise InvalidInput(f"{parts.geturl()!r}: expected neither '#' nor '?'; in a name, write %23 and %3F")
    return Location(Client.FILES, "file", "", os.path.normpath(unquote(parts.path)))


def _parse_other_uri(uri: str, scheme: str) -> Location:
    import fsspec

    if scheme not in _ARROW_SCHEMES and scheme not in fsspec.available_protocols():
        schemes = ", ".join(sorted(_CLIENTS))
        bare_uri = uri.partition("?")[0]  # omit the query, which may contain a token
        raise InvalidInput(f"{bare_uri!r}: unknown scheme {scheme!r}; known: {schemes}, those of fsspec and pyarrow")
    host, _, path = uri.partition("://")[2].partition("/")
    return Location(Client.OTHER, scheme, host, path.rstrip("/"))


@contextmanager
def open_location(location: Location, *, timeout: timedelta) -> Iterator[ObjectStore]:
    """Open the store whose root is `location`. All operations of the store together must end within `timeout`.

    Raises:
        InvalidInput: the client does not accept these settings, or is not installed.
    """
    deadline = Deadline.after(timeout)
    match location.client:
        case Client.FILES:
            from prefect_tune.stores.posix_store import PosixStore

            yield PosixStore(Path(location.path), deadline=deadline)
        case Client.OTHER:
            factory = partial(arrow_filesystem, location)
            with open_arrow(factory, location.arrow_path, location.scheme, timeout=timeout) as store:
                yield store
        case Client.S3 | Client.GCS | Client.AZURE:
            from prefect_tune.stores.obstore_store import ObstoreStore

            store = ObstoreStore(_make_connector(location), deadline=deadline)
            try:
                yield store
            finally:
                store.close()
        case _:
            assert_never(location.client)


@contextmanager
def open_arrow(factory: Callable[[], FileSystem], root: str, kind: str, *, timeout: timedelta) -> Iterator[ObjectStore]:
    """Open the folder `root` of a pyarrow file system; `kind` is its scheme or its pyarrow type name.

    A file system whose calls may hang is used in a child process, which is killed after `timeout`.
    """
    deadline = Deadline.after(timeout)
    if kind.removeprefix("py::fsspec+") in _IN_PROCESS_KINDS:
        yield _make_arrow_store(factory, root, deadline)
        return
    from prefect_tune.stores.subprocess_store import SubprocessStore

    with SubprocessStore(partial(_make_arrow_store, factory, root), deadline=deadline) as store:
        yield store


def _make_arrow_store(factory: Callable[[], FileSystem], root: str, deadline: Deadline | None = None) -> ObjectStore:
    from prefect_tune.stores.arrow_store import ArrowStore

    return ArrowStore(factory(), root, deadline=deadline)


def open_fsspec_store(scheme: str, root: str, options: Mapping[str, Any]) -> ObjectStore:
    """Return `open_fsspec(…)`. The import is in this function, so that only the child process loads the client."""
    from prefect_tune.stores.arrow_store import open_fsspec

    return open_fsspec(scheme, root, options)


def _make_connector(location: Location) -> Callable[[timedelta], Any]:
    """Return a function that makes an obstore client with the given request timeout."""
    from obstore.store import AzureStore, GCSStore, S3Store

    from prefect_tune.stores.obstore_store import make_client

    endpoint = location.endpoint
    store_class: Any
    config: Any
    match location.client:
        case Client.S3:
            access = _resolve_s3_access(location)
            endpoint = _resolve_s3_endpoint(location)
            store_class = partial(S3Store, credential_provider=cast("Any", access.key_provider))
            config = {"endpoint": endpoint, "region": access.region}
        case Client.GCS:
            store_class, config = GCSStore, {"base_url": endpoint}
        case Client.AZURE:
            store_class, config = AzureStore, {"account_name": location.account.partition(".")[0]}
        case _:
            raise AssertionError(location.client)
    settings: Any = {name: value for name, value in config.items() if value}
    settings |= {"skip_signature": True} if location.is_anonymous else {}
    constructor = partial(store_class, location.container, prefix=location.path or None, config=settings)
    allow_http = location.options.get("allow_http")
    may_use_http = environment_allows_http(os.environ) if allow_http is None else _parse_flag(allow_http)
    options = {"allow_http": may_use_http or (endpoint or "").startswith("http://")}

    def connect(timeout: timedelta) -> Any:
        try:
            return make_client(constructor, timeout, options)
        except ValueError as error:
            raise InvalidInput(f"{location.uri}: obstore does not accept this location: {error}") from error

    return connect


def _resolve_s3_endpoint(location: Location) -> str | None:
    return location.endpoint or find_ambient_endpoint(os.environ)


def _parse_flag(text: str) -> bool:
    return text.lower() in ("1", "true", "yes")


def _resolve_s3_access(location: Location) -> S3Access:
    """Return credentials and region. A region in the URI takes precedence over the environment's and the profile's."""
    access = find_ambient_access(os.environ, anonymous=location.is_anonymous)
    return replace(access, region=location.options.get("region") or access.region)


def arrow_filesystem(location: Location) -> FileSystem:
    """Return the pyarrow file system for `location`, to use with `location.arrow_path`.

    Raises:
        InvalidInput: a package that the scheme needs is not installed.
    """
    import fsspec
    import pyarrow.fs as arrow

    if location.client is Client.FILES:
        return arrow.LocalFileSystem()
    if location.client is Client.S3:
        endpoint = _resolve_s3_endpoint(location)
        return arrow.S3FileSystem(
            anonymous=location.is_anonymous,
            region=_resolve_s3_access(location).region,
            endpoint_override=endpoint.partition("://")[2] if endpoint else None,
            scheme="http" if (endpoint or "").startswith("http://") else "https",
        )
    if location.client is Client.GCS:
        return arrow.GcsFileSystem(anonymous=location.is_anonymous)
    if location.scheme in _ARROW_SCHEMES:
        return arrow.FileSystem.from_uri(location.uri)[0]
    options = {"account_name": location.account.partition(".")[0]} if location.account else {}
    try:
        filesystem, _ = fsspec.core.url_to_fs(location.uri, **options)
    except (ImportError, ValueError) as error:
        raise InvalidInput(f"{location.uri}: needs a package that is not installed: {error}") from error
    return arrow.PyFileSystem(arrow.FSSpecHandler(filesystem))


# S3 settings from environment variables and AWS profiles, if neither a block nor a URI sets them.

S3Keys: TypeAlias = Mapping[str, Any]
_CREDENTIAL_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
_AWS_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}


@dataclass(frozen=True, slots=True)
class S3Access:
    """Credentials, region and endpoint of S3; None for a value that the client finds itself, or that is not set."""

    key_provider: Callable[[], S3Keys] | None = None
    region: str | None = None
    endpoint_url: str | None = None


def find_ambient_endpoint(environment: Mapping[str, str]) -> str | None:
    """Return the URL of the endpoint from the environment; None for Amazon's endpoint."""
    return environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")


def environment_allows_http(environment: Mapping[str, str]) -> bool:
    """Return whether the environment allows a server without TLS."""
    return _parse_flag(environment.get("AWS_ALLOW_HTTP", ""))


def find_ambient_access(environment: Mapping[str, str], *, anonymous: bool = False) -> S3Access:
    """Return the region, and the credentials of an AWS profile if the environment names no other credentials.

    The environment's region takes precedence over the profile's. Other credentials are found by the client itself.

    Args:
        environment: must be `os.environ` or equal to it, since boto3 itself reads `os.environ` to find the profile.
        anonymous: whether requests are unsigned; if so, no profile is read.

    Raises:
        StoreRefused: the profile does not exist or cannot be read.
    """
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    has_other_credentials = anonymous or any(name in environment for name in _CREDENTIAL_VARIABLES)
    has_profile = "AWS_PROFILE" in environment or any(
        Path(environment.get(variable, default)).expanduser().is_file() for variable, default in _AWS_FILES.items()
    )
    if has_other_credentials or not has_profile or not find_spec("boto3"):
        return S3Access(region=region)
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        session = boto3.Session()
        keys = make_key_provider(session) if session.get_credentials() else None  # some profiles set only a region
        return S3Access(keys, region or session.region_name)
    except BotoCoreError as error:
        raise StoreRefused(f"the AWS profile of this machine cannot be used: {error}") from error


def make_key_provider(session: Any) -> Callable[[], S3Keys]:
    """Return a provider for the session's credentials, which boto3 renews when they expire (profiles, SSO, roles)."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(session)
    except ValueError as error:
        raise StoreRefused(f"no AWS credentials in the profile {session.profile_name!r}") from error
