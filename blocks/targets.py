"""The storage targets of this package, and their list."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from prefect.types import SecretDict
from pydantic import Field, HttpUrl, SecretStr, field_validator, model_validator

from prefect_tune.blocks.credentials import (
    AwsBlock,
    AzureBlock,
    GcpBlock,
    get_block_endpoint,
    make_azure_options,
    make_s3_access,
    make_static_key_provider,
    parse_connection_string,
    read_gcp_key,
)
from prefect_tune.blocks.storage_target import (
    FILES_LOGO,
    ObjectTarget,
    StorageTarget,
    make_block_logo_url,
    make_name_validator,
)
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.storage.object_store import ObjectStore
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.open_location import (
    Client,
    Location,
    S3Access,
    environment_allows_http,
    find_ambient_access,
    find_ambient_endpoint,
    open_fsspec_store,
)
from prefect_tune.stores.posix_store import open_posix_store
from prefect_tune.stores.subprocess_store import SubprocessStore

__all__ = ["AzureTarget", "FsspecTarget", "GcsTarget", "LocalTarget", "S3Target"]


class LocalTarget(StorageTarget):
    """A folder on this machine, or on a file system that every machine mounts at the same path.

    The first use creates the folder. The folder's file system must support hard links, for atomic create-if-absent.

    Example:
        ```python
        from prefect_tune.blocks import LocalTarget

        target = LocalTarget.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str | None] = "Local Target"
    _block_type_slug: ClassVar[str | None] = "local-target"
    _logo_url: ClassVar[HttpUrl | None] = FILES_LOGO
    _client: ClassVar[Client | None] = Client.FILES

    path: str = Field(description="The folder's path: absolute, or starting with '~'.")

    must_exist: bool = Field(
        default=False,
        description="Whether a missing folder is an error; if not, it is created. Set this for a folder on a "
        "mount, because the folder is missing if nothing is mounted.",
    )

    may_hang: bool = Field(
        default=False,
        description="Whether the folder is on a network mount that may hang. If True, all operations run in child "
        "processes, which are killed at the deadline. This costs an additional copy of the bytes.",
    )

    @field_validator("path", mode="before")
    @classmethod
    def _normalize_path(cls, path: object) -> object:
        if not isinstance(path, str | os.PathLike):
            return path
        text = os.fspath(path)
        if not isinstance(text, str) or "\0" in text:
            raise ValueError("expected text without NUL characters")
        try:
            expanded = Path(text).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{text!r}: this user has no home folder") from error
        if not expanded.is_absolute():
            raise ValueError(
                f"expected an absolute path or one that starts with '~', found {text!r}: "
                "a relative path would be another folder in each process"
            )
        return os.path.normpath(expanded)

    @classmethod
    def _from_location(cls, uri: str, location: Location) -> Self:  # noqa: ARG003  other targets use it
        return cls(path=location.path)

    @property
    def uri(self) -> str:
        return Path(self.path).as_uri()

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        deadline = Deadline.after(timeout)
        if self.may_hang:
            factory = partial(open_posix_store, Path(self.path), must_exist=self.must_exist)
            with SubprocessStore(factory, deadline=deadline) as store:
                yield store
        else:
            yield open_posix_store(Path(self.path), must_exist=self.must_exist, deadline=deadline)


_LOCAL_SCHEMES = frozenset({"file", "local"})
_IN_PROCESS_SCHEMES = frozenset({"memory"})  # opened in this process, since a child's memory ends with the child


class FsspecTarget(StorageTarget):
    """Any URI that fsspec can open: hdfs (by pyarrow), sftp, ftp, webdav, smb, memory and more.

    Except for `memory`, the client runs in a child process, which is killed at the deadline. There is no atomic
    create-if-absent, so only one runner can use the target: trials on other machines and second writers are rejected.

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
        description="The location, e.g. 'sftp://host/folder'. Put passwords and tokens into the secret options.",
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the fsspec implementation, e.g. {'port': 2222}."
    )
    secret_options: SecretDict | None = Field(
        default=None, description="Secret options of the fsspec implementation, e.g. {'password': '...'}."
    )

    @field_validator("location")
    @classmethod
    def _validate_location(cls, uri: str) -> str:
        import fsspec

        scheme, separator, rest = uri.partition("://")
        if not separator:
            raise ValueError("expected 'scheme://...'")
        parts = urlsplit(uri)
        if parts.password:
            raise ValueError("it contains a password in plain text: use secret_options={'password': ...}")
        if parts.query or parts.fragment:
            raise ValueError(
                "expected a location without '?' and '#', because a URI is plain text: put options into "
                "storage_options, and keys and tokens into secret_options"
            )
        if scheme in _LOCAL_SCHEMES and not rest.startswith("/"):
            raise ValueError(
                f"expected an absolute path, like {scheme}:///folder: a relative path depends on the process"
            )
        if scheme not in fsspec.available_protocols():  # a scheme is in this list even if its package is missing
            raise ValueError(f"fsspec does not know the scheme {scheme!r}")
        return uri.rstrip("/") if not uri.endswith("://") else uri

    @classmethod
    def _from_location(cls, uri: str, location: Location) -> Self:
        load_fsspec_class(location.scheme)  # report a missing package now, not in the middle of a run
        return cls(location=uri)

    @property
    def uri(self) -> str:
        return self.location

    def merge_options(self) -> Mapping[str, Any]:
        """Return all options, including secret ones."""
        secrets = {} if self.secret_options is None else self.secret_options.get_secret_value()
        if both := self.storage_options.keys() & secrets.keys():
            raise InvalidInput(f"{self.uri}: {min(both)!r} is both a plain and a secret option: keep one")
        return {**self.storage_options, **secrets}

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        deadline = Deadline.after(timeout)
        scheme = self.location.partition("://")[0]
        kind = load_fsspec_class(scheme)
        root = kind._strip_protocol(self.location)  # noqa: SLF001  fsspec's own way to read a URI
        url_options = kind._get_kwargs_from_urls(self.location)  # noqa: SLF001  as above
        factory = partial(open_fsspec_store, scheme, root, {**url_options, **self.merge_options()})
        if scheme in _IN_PROCESS_SCHEMES:
            yield factory()
        else:
            with SubprocessStore(factory, deadline=deadline) as store:
                yield store


def load_fsspec_class(scheme: str) -> Any:
    """Import and return fsspec's class for `scheme`, without opening a connection.

    Raises:
        InvalidInput: a package is missing; the message names it.
    """
    import fsspec

    try:
        return fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise InvalidInput(f"{scheme}:// needs a package that is not installed: {error}") from error


class S3Target(ObjectTarget):
    """A bucket of Amazon S3, MinIO, Ceph, R2 or another S3-compatible server.

    If the block has no credentials, they come from the environment, a profile in ~/.aws (with boto3 installed), a web
    identity, the container or the instance.

    Example:
        ```python
        from prefect_tune.blocks import S3Target

        target = S3Target.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str | None] = "S3 Target"
    _block_type_slug: ClassVar[str | None] = "s3-target"
    _logo_url: ClassVar[HttpUrl | None] = make_block_logo_url("aws")
    _client: ClassVar[Client | None] = Client.S3

    _credential_fields: ClassVar[tuple[str, ...]] = ("access_key_id", "credentials", "anonymous")

    bucket: Annotated[str, make_name_validator("bucket", r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")] = Field(
        description="The bucket's name, without 's3://'."
    )
    region: str | None = Field(
        default=None, description="The bucket's region. Empty: from the credentials or the environment, else us-east-1."
    )
    access_key_id: str | None = Field(default=None, description="The access key id; needs secret_access_key.")
    secret_access_key: SecretStr | None = Field(default=None, description="The secret of the access key.")
    session_token: SecretStr | None = Field(default=None, description="The session token of temporary credentials.")
    credentials: AwsBlock = Field(
        default=None,
        description="An AwsCredentials or MinIOCredentials block of prefect-aws, instead of the keys above.",
    )
    addressing_style: Literal["path", "virtual-hosted"] = Field(
        default="path", description="Whether the bucket's name is in the URL's path or in the host name."
    )
    payload_signing: Literal["without-tls", "always", "never"] = Field(
        default="without-tls",
        description="In which cases the signature of a request includes its payload. Signing a payload takes more CPU "
        "than uploading it, and TLS already protects it.",
    )

    @model_validator(mode="after")
    def _require_complete_keys(self) -> Self:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key require each other: set both, or neither")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token needs access_key_id and secret_access_key: set both, or remove the token")
        return self

    @property
    def uri(self) -> str:
        endpoint = self.endpoint_url or get_block_endpoint(self.credentials)
        region = self.region or getattr(self.credentials, "region_name", None)
        return self._format_uri(f"s3://{self.bucket}/{self._quoted_prefix}", endpoint=endpoint, region=region)

    def _make_connector(self) -> Callable[..., Any]:
        from obstore.store import S3Store

        access = self._resolve_access()
        endpoint = self.endpoint_url or access.endpoint_url or find_ambient_endpoint(os.environ)
        has_tls = not (endpoint or "").startswith("http:")
        if not has_tls and not self._is_http_allowed():
            raise InvalidInput(
                f"{self.uri}: its endpoint {endpoint!r} has no TLS: set allow_http=True if that is intended"
            )
        signs_payload = self.payload_signing == "always" or (self.payload_signing == "without-tls" and not has_tls)
        config = {
            "region": self.region or access.region,
            "endpoint": endpoint,
            "virtual_hosted_style_request": self.addressing_style == "virtual-hosted",
            "skip_signature": self.anonymous,
            "unsigned_payload": not signs_payload,
        }
        settings: Any = {name: value for name, value in config.items() if value is not None}
        keys: Any = access.key_provider
        return partial(S3Store, self.bucket, prefix=self.prefix or None, config=settings, credential_provider=keys)

    def _make_client_options(self) -> dict[str, Any]:
        return {**super()._make_client_options(), "allow_http": self._is_http_allowed()}

    def _is_http_allowed(self) -> bool:
        return self.allow_http or environment_allows_http(os.environ)

    def _resolve_access(self) -> S3Access:
        if self.credentials is not None:
            return make_s3_access(self.credentials)
        if self.access_key_id is not None and self.secret_access_key is not None:
            token = self.session_token.get_secret_value() if self.session_token else None
            keys = make_static_key_provider(self.access_key_id, self.secret_access_key.get_secret_value(), token)
            return S3Access(keys)
        return find_ambient_access(os.environ, anonymous=self.anonymous)


# The key for anonymous access. disable_oauth leaves all requests unsigned; skip_signature would still sign writes.
_ANONYMOUS_KEY = json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""})


class GcsTarget(ObjectTarget):
    """A bucket of Google Cloud Storage.

    If the block has no credentials, the machine's application default credentials are used.

    Example:
        ```python
        from prefect_tune.blocks import GcsTarget

        target = GcsTarget.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str | None] = "GCS Target"
    _block_type_slug: ClassVar[str | None] = "gcs-target"
    _logo_url: ClassVar[HttpUrl | None] = make_block_logo_url("googlecloud")
    _client: ClassVar[Client | None] = Client.GCS
    _credential_fields: ClassVar[tuple[str, ...]] = ("service_account_json", "credentials", "anonymous")

    bucket: Annotated[str, make_name_validator("bucket", r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")] = Field(
        description="The bucket's name, without 'gs://'."
    )
    service_account_json: SecretStr | None = Field(
        default=None, description="The content of a service account's key file."
    )
    credentials: GcpBlock = Field(
        default=None, description="A GcpCredentials block of prefect-gcp, instead of service_account_json."
    )

    @field_validator("service_account_json")
    @classmethod
    def _validate_service_account_json(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is None:
            return None
        try:
            key = json.loads(secret.get_secret_value())
        except ValueError:
            key = None
        if not isinstance(key, dict) or not {"client_email", "private_key"} <= key.keys():
            raise ValueError("expected the JSON of a service account's key, with client_email and private_key")
        return secret

    @property
    def uri(self) -> str:
        return self._format_uri(f"gs://{self.bucket}/{self._quoted_prefix}", endpoint=self.endpoint_url)

    def _make_connector(self) -> Callable[..., Any]:
        from obstore.store import GCSStore

        settings = {"service_account_key": self._read_service_account_key(), "base_url": self.endpoint_url}
        config: Any = {name: value for name, value in settings.items() if value is not None}
        return partial(GCSStore, self.bucket, prefix=self.prefix or None, config=config)

    def _read_service_account_key(self) -> str | None:
        if self.anonymous:
            return _ANONYMOUS_KEY
        if self.credentials is not None:
            return read_gcp_key(self.credentials)
        return self.service_account_json.get_secret_value() if self.service_account_json else None


class AzureTarget(ObjectTarget):
    """A container of Azure Blob Storage, or of its emulator.

    If the block has no credentials, they come from environment variables, a workload identity or a managed identity.

    Example:
        ```python
        from prefect_tune.blocks import AzureTarget

        target = AzureTarget.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str | None] = "Azure Target"
    _block_type_slug: ClassVar[str | None] = "azure-target"
    _logo_url: ClassVar[HttpUrl | None] = make_block_logo_url("microsoft-azure")
    _client: ClassVar[Client | None] = Client.AZURE
    _credential_fields: ClassVar[tuple[str, ...]] = (
        "account_key",
        "sas_token",
        "connection_string",
        "credentials",
        "anonymous",
    )

    container: Annotated[str, make_name_validator("container", r"\$web|(?=.{3,63}$)[a-z0-9](-?[a-z0-9])*")] = Field(
        description="The container's name."
    )
    account_name: str | None = Field(
        default=None, description="The storage account. Empty: from the connection string or the environment."
    )
    account_key: SecretStr | None = Field(default=None, description="An access key of the storage account.")
    sas_token: SecretStr | None = Field(default=None, description="A shared access signature.")
    connection_string: SecretStr | None = Field(
        default=None, description="A connection string, which includes the account's name."
    )
    credentials: AzureBlock = Field(
        default=None, description="An AzureBlobStorageCredentials block of prefect-azure, instead of other credentials."
    )

    @field_validator("connection_string")
    @classmethod
    def _validate_connection_string(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            parse_connection_string(secret.get_secret_value())
        return secret

    @classmethod
    def _from_location(cls, uri: str, location: Location) -> Self:  # noqa: ARG003  other targets use it
        account = location.account.partition(".")[0] or None
        return cls(container=location.container, prefix=location.path, account_name=account)

    @property
    def uri(self) -> str:
        account = self.account_name or self._make_credential_options().get("account_name")
        if account is None:
            return f"az://{self.container}/{self._quoted_prefix}".rstrip("/")
        return f"abfss://{self.container}@{account}.dfs.core.windows.net/{self._quoted_prefix}".rstrip("/")

    def _make_connector(self) -> Callable[..., Any]:
        from obstore.store import AzureStore

        settings = {"account_name": self.account_name, "endpoint": self.endpoint_url}
        config: Any = {**self._make_credential_options(), **{name: value for name, value in settings.items() if value}}
        config |= {"skip_signature": True} if self.anonymous else {}
        return partial(AzureStore, self.container, prefix=self.prefix or None, config=config)

    def _make_credential_options(self) -> Mapping[str, str]:
        if self.credentials is not None:
            return make_azure_options(self.credentials)
        if self.connection_string is not None:
            return parse_connection_string(self.connection_string.get_secret_value())
        secrets = {"account_key": self.account_key, "sas_key": self.sas_token}
        return {option: secret.get_secret_value() for option, secret in secrets.items() if secret is not None}


TARGET_TYPES: Sequence[type[StorageTarget]] = (LocalTarget, S3Target, GcsTarget, AzureTarget, FsspecTarget)
"""All target types, in the order in which the form of `SyncConfig` offers them."""

if TYPE_CHECKING:
    AnyTarget: TypeAlias = StorageTarget
else:
    AnyTarget = reduce(operator.or_, TARGET_TYPES)  # a union, because Prefect's forms offer the members of a union
