"""The base classes of all blocks, of all targets, and of targets in a bucket; and the check of a target."""

from __future__ import annotations

import os
import re
import shlex
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Barrier
from typing import Any, ClassVar, Self
from urllib.parse import quote, urlencode, urlsplit

from prefect.blocks.core import Block, schema_extra
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from prefect_tune.blocks.credentials import import_lazy_block_types
from prefect_tune.core.display_text import did_you_mean_or_list, shorten
from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    InvalidInput,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore, create_idempotently, is_normalized_path
from prefect_tune.core.values import Number, iter_leaves
from prefect_tune.runtime.checkpoint import Checkpoint
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.open_location import ENDPOINT_OPTIONS, Client, Location

# What the blocks of this package have in common: logos, and the base class `StrictBlock`.


def make_block_logo_url(name: str) -> HttpUrl:
    """Return the URL of a logo that Prefect's own blocks use."""
    revision = "420d0d6a78bb6df1fc18bcf188fdad43c1d22ea9"
    return HttpUrl(f"https://raw.githubusercontent.com/PrefectHQ/prefect/{revision}/assets/block-logos/{name}.png")


FILES_LOGO = make_block_logo_url("filesystem")
"""The logo of Prefect's own file system block."""

# The text that Prefect shows instead of a secret, and the keys that Prefect adds to block documents and dumps.
_MASK = re.compile(r"\*{8,}")
_BLOCK_DOCUMENT_KEYS = frozenset({"block_type_slug", "_block_document_id", "_block_document_name", "_is_anonymous"})


def _extend_schema(schema: dict[str, Any], model: type[Block]) -> None:
    import_lazy_block_types(model)
    schema_extra(schema, model)
    required = schema.get("required", ())
    last_fields = getattr(model, "_last_form_fields", ())
    # The UI shows required fields, then optional ones, then `last_fields`, each of them in the order of the class.
    sort_keys = {name: (name not in required, name in last_fields) for name in schema["properties"]}
    schema["properties"] = dict(sorted(schema["properties"].items(), key=lambda item: sort_keys[item[0]]))


class StrictBlock(Block, ABC):
    """A frozen Prefect block that rejects unknown fields.

    One `InvalidInput` lists all invalid fields in one line. It omits the rest of the input, which may contain secrets.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, json_schema_extra=_extend_schema)
    _documentation_url: ClassVar[HttpUrl | None] = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            # `from None`, because a traceback with the cause would print the input and its secrets.
            messages = map(_format_validation_error, error.errors(include_url=False))
            raise InvalidInput(f"{type(self).__name__}: {'; '.join(messages)}") from None

    @classmethod
    def __dispatch_key__(cls) -> str:
        """Return the slug. Prefect's method would compute the schema, and so import the fields' credential blocks."""
        return cls.get_block_type_slug()

    @classmethod
    def register_type_and_schema(cls, *args: Any, **options: Any) -> Any:
        import_lazy_block_types(cls)  # so that Prefect registers the fields' blocks before this block
        return super().register_type_and_schema(*args, **options)

    @classmethod
    async def aregister_type_and_schema(cls, *args: Any, **options: Any) -> None:
        import_lazy_block_types(cls)
        await super().aregister_type_and_schema(*args, **options)

    @model_validator(mode="before")
    @classmethod
    def _validate_field_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        slug = values.get("block_type_slug")
        if slug not in (None, cls.get_block_type_slug()):
            raise ValueError(f"expected a block of type {cls.get_block_type_slug()!r}, found {slug!r}")
        fields = {name: value for name, value in values.items() if name not in _BLOCK_DOCUMENT_KEYS}
        if masked := [name for name, value in iter_leaves(fields) if isinstance(value, str) and _MASK.fullmatch(value)]:
            name = values.get("_block_document_name") or "NAME"
            message = (
                f"{', '.join(masked)}: expected the secret, found asterisks: Prefect's client sends a block to a "
                "deployment without its secrets. Save the block, and pass its reference, "
                f"'{cls.get_block_type_slug()}/{name}'"
            )
            raise PydanticCustomError("masked_secret", "{message}", {"message": message})
        for name in fields:
            if name not in cls.model_fields:
                raise PydanticCustomError("unknown_field", "{message}", {"message": unknown_field_message(cls, name)})
        return {name: value for name, value in fields.items() if not cls._is_empty_optional_text(name, value)}

    @classmethod
    def _is_empty_optional_text(cls, name: str, value: object) -> bool:
        """Return whether an optional text field is "", which Prefect sends for an empty field of a form."""
        return isinstance(value, str) and not value and cls.model_fields[name].default is None

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return list(BaseModel.__repr_args__(self))  # Prefect's own method would compute the whole schema

    @property
    def saved_name(self) -> str | None:
        """The name of this block on the Prefect server; None if it is not saved."""
        return self._block_document_name

    def iter_secret_values(self) -> Iterator[str]:
        """Yield every secret value in this block's fields, so that messages can mask it."""
        for name in type(self).model_fields:
            match getattr(self, name):
                case SecretStr() as secret:
                    yield secret.get_secret_value()
                case StrictBlock() as block:
                    yield from block.iter_secret_values()
                case secrets if hasattr(secrets, "get_secret_value"):  # SecretDict
                    yield from map(str, secrets.get_secret_value().values())


def unknown_field_message(cls: type[StrictBlock], name: str) -> str:
    """Return the message for an unknown field name, with the nearest field or the list of fields."""
    fields = sorted(cls.model_fields, key=lambda field: field in getattr(cls, "_last_form_fields", ()))
    return f"no field {name!r}: {did_you_mean_or_list(name, fields)}"


def _format_validation_error(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{where!r} is missing"
    return f"{where}: {message}" if where else message


_MIN_KEY_CHARACTERS = 16


def _open_target(target: StorageTarget, timeout: timedelta) -> AbstractContextManager[ObjectStore]:
    return target.open(timeout=timeout)  # a module-level function, because a pickled checkpoint refers to it


class StorageTarget(StrictBlock, ABC):
    """A location where experiments and checkpoints are stored: a configuration without open connections.

    Only `open` and `check` connect to the storage.
    """

    _client: ClassVar[Client | None] = None
    """The storage client whose URIs become targets of this class (`_from_location`); None if no URIs do."""
    _last_form_fields: ClassVar[frozenset[str]] = frozenset({"signing_key"})

    signing_key: SecretStr | None = Field(
        default=None,
        description="Signs the settings of searches on this target. A resume by name then accepts only settings signed "
        "with this key, so write access to the target alone cannot change which code runs. At least 16 characters.",
    )

    @field_validator("signing_key")
    @classmethod
    def _require_long_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and len(key.get_secret_value()) < _MIN_KEY_CHARACTERS:
            raise ValueError(f"expected at least {_MIN_KEY_CHARACTERS} characters, e.g. from `openssl rand -hex 32`")
        return key

    @property
    @abstractmethod
    def uri(self) -> str:
        """The location as a URI without secrets, for messages and for `resolve_target`."""

    @property
    def cli_argument(self) -> str:
        """The text that names this target in a shell command: `type/name` of a saved block, otherwise the URI."""
        return shlex.quote(f"{self.get_block_type_slug()}/{self.saved_name}" if self.saved_name else self.uri)

    @property
    def signing_secret(self) -> bytes | None:
        """The signing key as bytes; None if the target has none."""
        return None if self.signing_key is None else self.signing_key.get_secret_value().encode()

    @abstractmethod
    def open(self, *, timeout: timedelta) -> AbstractContextManager[ObjectStore]:
        """Return a context manager that yields the store. All operations together must end within `timeout`.

        Raises:
            InvalidInput: the configuration of this block is invalid.
            StoreRefused: the credentials cannot be read.
        """

    @classmethod
    def _from_location(cls, uri: str, location: Location) -> Self:
        """Return the target at `location`, the parsed `uri`."""
        raise NotImplementedError

    def checkpoint(self, key: CheckpointKey) -> Checkpoint:
        """Return the committed checkpoint `key` as a `pt.Checkpoint`, which uses this target's credentials."""
        return Checkpoint._from_target(partial(_open_target, self), self.uri, key)  # noqa: SLF001 - the constructor made for this

    def check(self, *, timeout: timedelta = timedelta(seconds=30)) -> TargetCheck:
        """Write, read back, list and delete a probe object, and test create-if-absent by simultaneous creates.

        Errors of the target are not raised; the result's `message` describes them in one line.
        """
        return probe_target(self, timeout=timeout)


class ObjectTarget(StorageTarget, ABC):
    """A prefix in a bucket (or container), reached over HTTP."""

    _credential_fields: ClassVar[tuple[str, ...]] = ()
    """The fields with credentials; at most one of them may be set."""

    prefix: str = Field(default="", description="The folder within the bucket or container. Empty: its root.")
    endpoint_url: str | None = Field(
        default=None, description="The server's URL, if it is not the cloud's own, e.g. 'https://minio:9000'."
    )
    allow_http: bool = Field(
        default=False, description="Whether an endpoint without TLS is allowed; data is then sent unencrypted."
    )
    verify_tls: bool = Field(
        default=True,
        description="Whether the server's certificate is verified. If not, another server could answer in its place.",
    )
    ca_certificate: str | None = Field(
        default=None, description="A certificate authority to trust in addition to the system's, as PEM text."
    )
    request_timeout_seconds: Number = Field(
        default=60, gt=0, description="Maximum time in seconds for one request and its response."
    )

    anonymous: bool = Field(
        default=False, description="Whether requests are sent without a signature, for public buckets and emulators."
    )
    conditional_writes: bool = Field(
        default=True,
        description="Whether the server refuses a second create of the same object; check() tests this. "
        "If False, only one runner can use the target.",
    )

    @field_validator("prefix")
    @classmethod
    def _normalize_prefix(cls, prefix: str) -> str:
        folder = prefix.strip("/")
        if folder and not is_normalized_path(folder):
            raise ValueError(f"expected a folder without empty parts, '.' and '..', found {prefix!r}")
        return folder

    @field_validator("endpoint_url")
    @classmethod
    def _normalize_endpoint(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_usable = False
        if not is_usable:
            raise ValueError("expected 'https://host' or 'https://host:port'")
        if parts.username or parts.password:
            raise ValueError("it contains a user name or password: use the credential fields instead")
        if parts.query or parts.fragment:
            raise ValueError("expected 'https://host' or 'https://host:port', without '?' and '#'")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _require_explicit_http(self) -> Self:
        if (self.endpoint_url or "").startswith("http:") and not self.allow_http:
            raise ValueError(f"endpoint_url {self.endpoint_url!r} has no TLS: set allow_http=True if that is intended")
        return self

    @model_validator(mode="after")
    def _require_single_credential(self) -> Self:
        fields = [name for name in self._credential_fields if getattr(self, name)]
        if len(fields) > 1:
            raise ValueError(f"{' and '.join(fields)} contradict each other: keep one")
        return self

    @classmethod
    def _from_location(cls, uri: str, location: Location) -> Self:  # noqa: ARG003  other targets use `uri`
        """Return the target of a bucket's URI; each option in the URI sets the field of the same name."""
        options = {name: text for name, text in location.options.items() if name not in ENDPOINT_OPTIONS}
        fields: dict[str, Any] = {"bucket": location.container, "prefix": location.path, **options}
        if endpoint := location.endpoint:
            # An endpoint that begins with http: also sets `allow_http`, unless the URI sets this option itself.
            fields = {"allow_http": endpoint.startswith("http:"), **fields, "endpoint_url": endpoint}
        return cls(**fields)

    @property
    def _quoted_prefix(self) -> str:
        """The prefix as part of a URI: '%', '?' and '#' are percent-encoded."""
        return re.sub("[%?#]", lambda match: quote(match[0]), self.prefix)

    def _format_uri(self, base: str, *, endpoint: str | None, region: str | None = None) -> str:
        """Return `base` with endpoint, region and `anonymous` as query options, without credentials."""
        fields = {"endpoint_url": endpoint, "region": region, "anonymous": "true" if self.anonymous else None}
        options = urlencode({name: value for name, value in fields.items() if value}, safe=":/")
        return f"{base.rstrip('/')}{'?' if options else ''}{options}"

    @abstractmethod
    def _make_connector(self) -> Callable[..., Any]:
        """Find the credentials, and return the client's constructor, which still needs timeouts and TLS options."""

    @contextmanager
    def open(self, *, timeout: timedelta) -> Iterator[ObjectStore]:
        from prefect_tune.stores.obstore_store import ObstoreStore, make_client

        deadline = Deadline.after(timeout)
        connector = self._make_connector()

        def make_client_with_timeout(limit: timedelta) -> Any:
            try:
                return make_client(connector, limit, self._make_client_options())
            except ValueError as error:
                raise StoreRefused(f"{self.uri}: the storage client refuses these settings: {error}") from error

        store = ObstoreStore(
            make_client_with_timeout,
            deadline=deadline,
            request_timeout=timedelta(seconds=self.request_timeout_seconds),
            conditional_create=self.conditional_writes,
        )
        try:
            yield store
        finally:
            store.close()

    def _make_client_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"allow_http": self.allow_http}
        if not self.verify_tls:
            options["allow_invalid_certificates"] = True
        if self.ca_certificate is not None:
            options["root_certificate"] = self.ca_certificate
        return options


def make_name_validator(kind: str, pattern: str) -> AfterValidator:
    """Return a validator of bucket or container names: a name must match `pattern`, and be neither a URI nor a path."""

    def validate_name(name: str) -> str:
        if "://" in name:
            raise ValueError(f"expected the {kind}'s name alone, found the URI {name!r}: use resolve_target for URIs")
        if "/" in name:
            raise ValueError(
                f"expected the {kind}'s name alone, found {name!r}: put the part after the '/' into prefix"
            )
        if not re.fullmatch(pattern, name):
            raise ValueError(f"{name!r} is not a valid name of a {kind}")
        return name

    return AfterValidator(validate_name)


# Check whether a target can store checkpoints.

_REFUSAL_HINTS = {
    "write": "read-only: listing is permitted, writing is not",
    "write again": "read-only: listing is permitted, writing is not",
    "delete": "old checkpoints could never be removed",
}
"""Maps a step of the check to what it means for the user if the target refuses this step."""
_PROBE_FOLDER = ".check"  # not a valid experiment name, so no probe is ever read as a checkpoint
_RACING_WRITER_COUNT = 4
_MIN_SECRET_CHARACTERS = 6  # shorter secrets are not masked, because masking every "s" would garble the message


@dataclass(frozen=True, slots=True)
class TargetCheck:
    """The result of `check()`.

    `ok` says whether checkpoints can be committed on the target. `message` describes the error, or the successful
    probes, in one line. If `conditional_create` is False, two runners could both commit, so use only one runner.
    """

    ok: bool
    message: str
    conditional_create: bool
    may_be_temporary: bool = False
    """Whether the error may be temporary, for example because the target did not answer in time."""


class _ProbeError(Exception):
    def __init__(self, step: str, error: TuneError) -> None:
        super().__init__(step)
        self.step, self.error = step, error


def probe_target(target: StorageTarget, *, timeout: timedelta) -> TargetCheck:
    """Try every operation that checkpoints need, in a folder with a unique name, and return the result."""
    try:
        with _raising_probe_error("open"), target.open(timeout=timeout) as store:
            is_conditional, refuses_duplicate = store.has_conditional_create, _run_probes(store)
    except _ProbeError as failure:
        step, error = failure.step, failure.error
        hint = _REFUSAL_HINTS.get(step) if isinstance(error, StoreRefused) else None
        message = _format_check_message(target, f"{'' if hint is None else f'{hint}; '}could not {step}: {error}")
        may_pass = isinstance(error, StoreUnavailable | CommitUnknown)
        return TargetCheck(ok=False, message=message, conditional_create=False, may_be_temporary=may_pass)
    if not is_conditional:
        message = (
            "ONE RUNNER ONLY: a probe was written, read back, listed and deleted, but there is no atomic "
            "create-if-absent, so nothing stops a second runner of the same experiment from committing too"
        )
    elif refuses_duplicate:
        message = "a probe was written, read back, listed and deleted, and a second create was refused"
    else:
        message = (
            "NO CONDITIONAL WRITES: a second create of the same object was accepted, so two runners could "
            "both commit; to use the target with ONE RUNNER ONLY, set conditional_writes=False"
        )
    ok, is_atomic = refuses_duplicate or not is_conditional, is_conditional and refuses_duplicate
    return TargetCheck(ok=ok, message=_format_check_message(target, message), conditional_create=is_atomic)


def _format_check_message(target: StorageTarget, message: str) -> str:
    for secret in target.iter_secret_values():
        if len(secret) >= _MIN_SECRET_CHARACTERS:
            message = message.replace(secret, "********")
    return f"{target.uri}: {shorten(' '.join(message.split()), 600)}"


def _run_probes(store: ObjectStore) -> bool:
    """Try all operations; return whether exactly one create of each object succeeded, even of simultaneous creates."""
    folder = f"{_PROBE_FOLDER}/{uuid.uuid4().hex}"
    written = [f"{folder}/probe", f"{folder}/race"]
    try:
        refuses_duplicate = _probe_round_trip(store, folder, written[0]) and _probe_race(store, written[1])
    except _ProbeError:
        with suppress(TuneError):  # an error of this cleanup must not replace the first error
            store.delete(written)
        raise
    with _raising_probe_error("delete"):
        store.delete(written)
        _require_equal([entry.path for entry in store.list(folder)], [], "deleted, then listed")
    return refuses_duplicate


def _probe_round_trip(store: ObjectStore, folder: str, path: str) -> bool:
    """Write, read back and list an object; return whether a second create of the object was refused."""
    data = os.urandom(64)
    with _raising_probe_error("list"):  # first, because the hint for a refused write says that listing is permitted
        _require_equal([entry.path for entry in store.list(folder)], [], "listed, before writing")
    with _raising_probe_error("write"):
        create_idempotently(store, path, data)
    with _raising_probe_error("read back"):
        _require_equal(bytes(store.read(path)), data, "read back")
        _require_equal(store.size(path), len(data), "read the size of")
    with _raising_probe_error("list"):
        _require_equal([entry.path for entry in store.list(folder)], [path], "listed")
    with _raising_probe_error("write again"):
        return not _try_create(store, path, os.urandom(64))


def _probe_race(store: ObjectStore, path: str) -> bool:
    """Return whether exactly one of several simultaneous creates succeeded."""
    start = Barrier(_RACING_WRITER_COUNT)

    def create(data: bytes) -> bool:
        start.wait()
        return _try_create(store, path, data)

    with _raising_probe_error("write concurrently"), ThreadPoolExecutor(_RACING_WRITER_COUNT) as racers:
        return sum(racers.map(create, [os.urandom(64) for _ in range(_RACING_WRITER_COUNT)])) == 1


def _try_create(store: ObjectStore, path: str, data: bytes) -> bool:
    try:
        create_idempotently(store, path, data)
    except AlreadyExists:
        return False
    return True


def _require_equal(actual: object, expected: object, action: str) -> None:
    if actual != expected:
        raise TuneError(f"{action} a probe: expected {expected!r}, found {actual!r}")


@contextmanager
def _raising_probe_error(step: str) -> Iterator[None]:
    try:
        yield
    except TuneError as error:
        raise _ProbeError(step, error) from error
