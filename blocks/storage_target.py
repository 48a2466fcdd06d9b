"""The base classes of the storage target blocks, of all and of those in a bucket, and the check of a target."""

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

from prefect_tune.blocks.credentials import import_named_blocks
from prefect_tune.core.errors import (
    AlreadyExists,
    CommitUnknown,
    InvalidInput,
    StoreRefused,
    StoreUnavailable,
    TuneError,
)
from prefect_tune.core.shown_text import did_you_mean_or_has, shorten
from prefect_tune.core.storage.layout import CheckpointKey
from prefect_tune.core.storage.object_store import ObjectStore, create_or_recognize, is_inside
from prefect_tune.core.values import Number, leaves
from prefect_tune.runtime.checkpoint import Checkpoint
from prefect_tune.stores.deadline import Deadline
from prefect_tune.stores.open_location import ENDPOINT_OPTIONS, Client, Location

# The base class of the blocks: immutable, and strict about unknown fields.


def block_logo(name: str) -> HttpUrl:
    """Return the address of a logo that Prefect's own blocks refer to."""
    revision = "420d0d6a78bb6df1fc18bcf188fdad43c1d22ea9"
    return HttpUrl(f"https://raw.githubusercontent.com/PrefectHQ/prefect/{revision}/assets/block-logos/{name}.png")


FILES_LOGO = block_logo("filesystem")
"""As the other blocks' logos one that the Prefect UI shows for the same service."""

# Prefect adds these keys to the fields, in block documents and in dumps.
_MASK = re.compile(r"\*{8,}")
_BOOKKEEPING = frozenset({"block_type_slug", "_block_document_id", "_block_document_name", "_is_anonymous"})


def _required_first(schema: dict[str, Any], model: type[Block]) -> None:
    import_named_blocks(model)
    schema_extra(schema, model)
    required = schema.get("required", ())
    last = getattr(model, "_shown_last", ())
    # sorted() is stable, and the UI shows the fields in this order
    place = {name: (name not in required, name in last) for name in schema["properties"]}
    schema["properties"] = dict(sorted(schema["properties"].items(), key=lambda item: place[item[0]]))


class StrictBlock(Block, ABC):
    """A frozen Prefect block that refuses unknown fields.

    Invalid fields raise one `InvalidInput` of one line. It contains no values of fields, since they may be secrets.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, json_schema_extra=_required_first)
    _documentation_url: ClassVar[HttpUrl | None] = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            # from None: the cause would print the input, secrets included
            complaints = map(_complaint, error.errors(include_url=False))
            raise InvalidInput(f"{type(self).__name__}: {'; '.join(complaints)}") from None

    @classmethod
    def __dispatch_key__(cls) -> str:
        """Return what Prefect computes from the whole schema, which would import every block that a field names."""
        return cls.get_block_type_slug()

    @classmethod
    def register_type_and_schema(cls, *args: Any, **options: Any) -> Any:
        import_named_blocks(cls)  # Prefect registers them first
        return super().register_type_and_schema(*args, **options)

    @classmethod
    async def aregister_type_and_schema(cls, *args: Any, **options: Any) -> None:
        import_named_blocks(cls)
        await super().aregister_type_and_schema(*args, **options)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        slug = values.get("block_type_slug")
        if slug not in (None, cls.get_block_type_slug()):
            raise ValueError(f"expected a block of type {cls.get_block_type_slug()!r}, found {slug!r}")
        fields = {name: value for name, value in values.items() if name not in _BOOKKEEPING}
        if masked := [name for name, value in leaves(fields) if isinstance(value, str) and _MASK.fullmatch(value)]:
            name = values.get("_block_document_name") or "NAME"
            message = (
                f"{', '.join(masked)}: expected the secret, found asterisks: Prefect's client sends a block to a "
                "deployment without its secrets. Save the block, and pass its reference, "
                f"'{cls.get_block_type_slug()}/{name}'"
            )
            raise PydanticCustomError("masked_secret", "{message}", {"message": message})
        for name in fields:
            if name not in cls.model_fields:
                raise PydanticCustomError("unknown_field", "{message}", {"message": unknown_field(cls, name)})
        return {name: value for name, value in fields.items() if not cls._left_empty(name, value)}

    @classmethod
    def _left_empty(cls, name: str, value: object) -> bool:
        """Whether an optional text field was left empty in a form: Prefect then sends "", which here means None."""
        return isinstance(value, str) and not value and cls.model_fields[name].default is None

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return list(BaseModel.__repr_args__(self))  # Prefect draws the block's form here, to leave out unknown fields

    @property
    def saved_name(self) -> str | None:
        """The name under which this block is saved on the Prefect server; None if it is not."""
        return self._block_document_name

    def secret_values(self) -> Iterator[str]:
        """Yield every secret value in this block's own fields, so that messages can mask it."""
        for name in type(self).model_fields:
            yield from _secrets_in(getattr(self, name))


def _secrets_in(value: object) -> Iterator[str]:
    match value:
        case SecretStr():
            yield value.get_secret_value()
        case StrictBlock():
            yield from value.secret_values()
        case _ if hasattr(value, "get_secret_value"):  # SecretDict
            yield from (str(secret) for secret in value.get_secret_value().values())


def unknown_field(cls: type[StrictBlock], name: str) -> str:
    """Return the error for an unknown field name, with the nearest field or the list of fields."""
    fields = sorted(cls.model_fields, key=lambda field: field in getattr(cls, "_shown_last", ()))
    return f"no field {name!r}: {did_you_mean_or_has(name, fields)}"


def _complaint(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{where!r} is missing"
    return f"{where}: {message}" if where else message


_LEAST_KEY = 16


def _opened(target: StorageTarget, timeout: timedelta) -> AbstractContextManager[ObjectStore]:
    return target.open(timeout=timeout)  # a checkpoint may be pickled


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
    def argument(self) -> str:
        """What to type for it in a command: `type/name` of a saved block, else the URI, quoted for a shell."""
        return shlex.quote(f"{self.get_block_type_slug()}/{self.saved_name}" if self.saved_name else self.uri)

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


class ObjectTarget(StorageTarget, ABC):
    """A prefix in a bucket (or container) that is reached over HTTP."""

    _ways_to_sign: ClassVar[tuple[str, ...]] = ()
    """The fields of which one at most may be set."""

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
    request_timeout_seconds: Number = Field(
        default=60,
        gt=0,
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

    @model_validator(mode="after")
    def _one_way_to_sign(self) -> Self:
        given = [name for name in self._ways_to_sign if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} contradict each other: keep one")
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


def bare_name(kind: str, pattern: str) -> AfterValidator:
    """Return the validator of the name of a bucket or container: no URI, no path, and it matches `pattern`."""

    def validated(name: str) -> str:
        if "://" in name:
            raise ValueError(f"expected the {kind}'s name alone, found the URI {name!r}: use resolve_target for URIs")
        if "/" in name:
            raise ValueError(
                f"expected the {kind}'s name alone, found {name!r}: put the part after the '/' into prefix"
            )
        if not re.fullmatch(pattern, name):
            raise ValueError(f"{name!r} is not a valid name of a {kind}")
        return name

    return AfterValidator(validated)


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


# ---------------------------------------------------------------------- whether a target can store checkpoints

_HINTS = {
    "write": "read-only: listing is permitted, writing is not",
    "write again": "read-only: listing is permitted, writing is not",
    "delete": "old checkpoints could never be removed",
}
"""What it means that a step was refused."""
_FOLDER = ".check"  # not a valid experiment name, so a probe is never read as a checkpoint
_RACERS = 4
_SHORTEST_SECRET = 6  # a secret such as "s" would mask half of the message


@dataclass(frozen=True, slots=True)
class TargetCheck:
    """The result of `check()`.

    `ok` is whether checkpoints can be committed there. `message` describes in one line the error, or the probes that
    succeeded. Without `conditional_create` two runners could both commit, so the target serves one runner only.
    """

    ok: bool
    message: str
    conditional_create: bool
    may_pass: bool = False
    """Whether the error may be temporary: the target did not answer, or not in time."""


class _ProbeFailed(Exception):
    def __init__(self, step: str, error: TuneError) -> None:
        super().__init__(step)
        self.step, self.error = step, error


def check_target(target: StorageTarget, *, timeout: timedelta) -> TargetCheck:
    """Try every operation that checkpoints need, in a folder with a unique name, and return the result."""
    try:
        with _step("open"), target.open(timeout=timeout) as store:
            claims, refuses = store.conditional_create, _refuses_a_second_create(store)
    except _ProbeFailed as failure:
        step, error = failure.step, failure.error
        hint = _HINTS.get(step) if isinstance(error, StoreRefused) else None
        message = f"{'' if hint is None else f'{hint}; '}could not {step}: {error}"
        may_pass = isinstance(error, StoreUnavailable | CommitUnknown)
        return TargetCheck(ok=False, message=_line(target, message), conditional_create=False, may_pass=may_pass)
    return _verdict(target, claims=claims, refuses=refuses)


def _verdict(target: StorageTarget, *, claims: bool, refuses: bool) -> TargetCheck:
    if claims and refuses:
        done = "a probe was written, read back, listed and deleted, and a second create was refused"
        return TargetCheck(ok=True, message=_line(target, done), conditional_create=True)
    if claims:
        wrong = (
            "NO CONDITIONAL WRITES: a second create of the same object was accepted, so two runners could "
            "both commit; to use it with ONE RUNNER ONLY, set conditional_writes=False"
        )
        return TargetCheck(ok=False, message=_line(target, wrong), conditional_create=False)
    loud = (
        "ONE RUNNER ONLY: a probe was written, read back, listed and deleted, but there is no atomic "
        "create-if-absent, so nothing stops a second runner of the same experiment from committing too"
    )
    return TargetCheck(ok=True, message=_line(target, loud), conditional_create=False)


def _line(target: StorageTarget, message: str) -> str:
    for secret in target.secret_values():
        if len(secret) >= _SHORTEST_SECRET:
            message = message.replace(secret, "********")
    return f"{target.uri}: {shorten(' '.join(message.split()), 600)}"


def _refuses_a_second_create(store: ObjectStore) -> bool:
    folder = f"{_FOLDER}/{uuid.uuid4().hex}"
    written = [f"{folder}/probe", f"{folder}/race"]
    try:
        refuses = _round_trip(store, folder, written[0]) and _race(store, written[1])
    except _ProbeFailed:
        with suppress(TuneError):  # the first error is the one to report
            store.delete(written)
        raise
    with _step("delete"):
        store.delete(written)
        _same([found.path for found in store.list(folder)], [], "deleted, then listed")
    return refuses


def _round_trip(store: ObjectStore, folder: str, path: str) -> bool:
    data = os.urandom(64)
    with _step("list"):  # before any write, so that an error here is not one of the permission to write
        _same([found.path for found in store.list(folder)], [], "listed, before writing")
    with _step("write"):
        create_or_recognize(store, path, data)
    with _step("read back"):
        _same(bytes(store.read(path)), data, "read back")
        _same(store.size(path), len(data), "asked for the size of")
    with _step("list"):
        _same([found.path for found in store.list(folder)], [path], "listed")
    with _step("write again"):
        return not _creates(store, path, os.urandom(64))


def _race(store: ObjectStore, path: str) -> bool:
    """Return whether exactly one of several simultaneous creates succeeded."""
    start = Barrier(_RACERS)

    def create(data: bytes) -> bool:
        start.wait()
        return _creates(store, path, data)

    with _step("write at once"), ThreadPoolExecutor(_RACERS) as racers:
        return sum(racers.map(create, [os.urandom(64) for _ in range(_RACERS)])) == 1


def _creates(store: ObjectStore, path: str, data: bytes) -> bool:
    try:
        create_or_recognize(store, path, data)
    except AlreadyExists:
        return False
    return True


def _same(found: object, wanted: object, act: str) -> None:
    if found != wanted:
        raise TuneError(f"{act} a probe: expected {wanted!r}, found {found!r}")


@contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except TuneError as error:
        raise _ProbeFailed(name, error) from error
