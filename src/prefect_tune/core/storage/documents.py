"""Documents that contain their own digest, by which a reader detects any change of the stored bytes.

Each kind of document has its own version. If a document has an older version, a reader checks the digest first, and
then upgrades the document in memory; the stored document is not rewritten.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

from prefect_tune.core.display_text import format_size
from prefect_tune.core.errors import InvalidInput, ObjectNotFound, UnknownVersion
from prefect_tune.core.storage.layout import list_document_paths
from prefect_tune.core.storage.object_store import Buffer, ObjectStore
from prefect_tune.core.values import Value, canonical_json, hash_bytes, parse_json

MAX_DOCUMENT_BYTES = 512 * 1024 * 1024
"""Larger documents are never written, so a larger object is damaged or foreign, and is not read."""
_FIRST_READ_BYTES = 4 * 1024 * 1024
_MAX_LISTINGS = 10
_DIGEST_KEY = "digest_of_document"

Upgrade: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""Converts a document's JSON from one version to the next. May change its argument; the caller sets `version`."""


class Document(Value):
    """A value that is stored. The defaults of `format` and `version` are the format's name and its current version."""

    format: str
    version: int
    upgrades: ClassVar[Mapping[int, Upgrade]] = {}
    """For each older version that can still be read, the upgrade from this version to the next."""
    oldest_version: ClassVar[int]
    current_version: ClassVar[int]

    @classmethod
    def __pydantic_init_subclass__(cls, **options: object) -> None:
        super().__pydantic_init_subclass__(**options)
        cls.current_version = cls.model_fields["version"].default
        cls.oldest_version = min((*cls.upgrades, cls.current_version))
        expected = list(range(cls.oldest_version, cls.current_version))
        if sorted(cls.upgrades) != expected:
            raise TypeError(f"{cls.__name__}: expected upgrades of versions {expected}, found {sorted(cls.upgrades)}")


_Value = TypeVar("_Value", bound=Value)
_Model = TypeVar("_Model", bound=Document)


def seal(value: Document) -> bytes:
    """Return `value` as canonical JSON with its own digest.

    Raises:
        InvalidInput: `value` contains something that JSON cannot represent (a NaN, a Python object, infinite
            nesting), or its JSON is larger than `MAX_DOCUMENT_BYTES`.
    """
    return _encode_value(value)[1]


def seal_and_read_back(value: _Value) -> tuple[bytes, _Value]:
    """Return `seal(value)` and the value that a reader will see; faster than `seal` followed by `unseal`.

    Raises:
        InvalidInput: `value` cannot be written, or a reader would reject it.
    """
    bare, sealed = _encode_value(value)
    return sealed, parse_json(type(value), bare, InvalidInput, type(value).__name__)


def read_document(store: ObjectStore, path: str, error: type[Exception]) -> Buffer:
    """Return the complete object at `path`; raise `error`, without a full read, if it exceeds `MAX_DOCUMENT_BYTES`.

    Raises:
        ObjectNotFound: there is no object.
    """
    data = store.read(path, length=_FIRST_READ_BYTES)
    if len(data) < _FIRST_READ_BYTES:
        return data
    size_bytes = store.size(path)
    if size_bytes is None:
        raise ObjectNotFound(f"{path}: no such object")
    if size_bytes > MAX_DOCUMENT_BYTES:
        limit = format_size(MAX_DOCUMENT_BYTES)
        raise error(f"{path}: expected a document of at most {limit}, found {format_size(size_bytes)}; it was not read")
    return store.read(path, length=size_bytes)


def read_sealed(store: ObjectStore, model: type[_Model], path: str, error: type[Exception]) -> _Model | None:
    """Read and `unseal` the object at `path`; None if there is no object. Raises like `unseal`."""
    try:
        data = read_document(store, path, error)
    except ObjectNotFound:
        return None
    return unseal(model, data, path, error)


def read_newest_document(store: ObjectStore, model: type[_Model], folder: str, error: type[Exception]) -> _Model | None:
    """Read the last numbered document in `folder`; None if the folder has no document. Raises like `unseal`.

    If the folder's writer has deleted the listed document before the read, a newer one exists, so list again.
    """
    for _ in range(_MAX_LISTINGS):
        if not (paths := list_document_paths(store, folder)):
            return None
        if (document := read_sealed(store, model, paths[-1], error)) is not None:
            return document
    raise error(f"{folder}: {_MAX_LISTINGS} times in a row, the newest listed document did not exist; try again")


def unseal(model: type[_Model], data: Buffer, where: str, error: type[Exception]) -> _Model:
    """Read a sealed `model` from `data`, and verify every byte, the version and every field.

    Raises:
        UnknownVersion: the release that wrote the document is too new or too old.
    Any other problem is raised as `error`.
    """
    body, bare = verify_document(model, data, where, error)
    if body["version"] != model.current_version:
        bare = canonical_json(upgrade_document(model, body, where, error))
    return parse_json(model, bare, error, where)


def verify_document(
    model: type[Document], data: Buffer, where: str, error: type[Exception]
) -> tuple[dict[str, Any], bytes]:
    """Verify a sealed `model`; return its JSON in the stored version, without the digest, as a dict and as bytes.

    The fields are not checked. A newer version is reported before the digest is checked, because a newer release may
    seal documents differently, and such a document must not be reported as damaged.

    Raises:
        UnknownVersion: see `unseal`.
    Any other problem is raised as `error`.
    """
    try:
        body = json.loads(bytes(data))
    except (ValueError, RecursionError) as unreadable:
        raise error(f"{where}: not JSON ({len(data)} bytes): {unreadable}") from unreadable
    if not isinstance(body, dict):
        raise error(f"{where}: expected a JSON object, found {type(body).__name__}")
    name, oldest, current = model.model_fields["format"].default, model.oldest_version, model.current_version
    if (format_found := body.get("format", name)) != name:
        raise error(f"{where}: expected a document of the format {name!r}, found {format_found!r}")
    version = body.get("version")
    readable_versions = f"version {current} only" if oldest == current else f"versions {oldest} to {current}"
    other_version = f"{where}: {name} of version {version}; this prefect-tune reads {readable_versions}"
    if isinstance(version, int) and version > current:
        raise UnknownVersion(f"{other_version}. A newer prefect-tune wrote it: upgrade prefect-tune")
    stored_digest = body.pop(_DIGEST_KEY, None)
    try:
        bare, sealed = _encode_body(body)
    except (ValueError, RecursionError):
        bare, sealed = b"", b""  # `seal` rejects such a value, so it did not write these bytes: no match
    if sealed != data:
        mismatch = f"expected digest {str(stored_digest)[:12]}…, found {hash_bytes(bare)[:12]}… ({len(data)} bytes)"
        raise error(f"{where}: incomplete, or altered since it was written: {mismatch}")
    if type(version) is not int or version < 1:
        raise error(f"{where}: version: expected a number from 1 to {current}, found {version!r}")
    if version < oldest:
        raise UnknownVersion(f"{other_version}. Read it with the older prefect-tune that wrote it")
    return body, bare


def upgrade_document(model: type[Document], body: dict[str, Any], where: str, error: type[Exception]) -> dict[str, Any]:
    """Upgrade the verified JSON of a `model` without checking its fields. Raises `error` if an upgrade fails."""
    for version in range(body["version"], model.current_version):
        try:
            body = {**model.upgrades[version](body), "version": version + 1}
        except (LookupError, TypeError, ValueError, AttributeError) as failure:
            problem = f"{type(failure).__name__}: {failure}"
            raise error(f"{where}: cannot be upgraded from version {version} to {version + 1}: {problem}") from failure
    return body


def _encode_value(value: Value) -> tuple[bytes, bytes]:
    try:
        bare, sealed = _encode_body(value.model_dump(mode="json"))
    except (ValueError, TypeError, RecursionError) as invalid:
        raise InvalidInput(f"{type(value).__name__}: cannot be stored as JSON: {invalid}") from invalid
    if len(sealed) > MAX_DOCUMENT_BYTES:
        limit, size = format_size(MAX_DOCUMENT_BYTES), format_size(len(sealed))
        raise InvalidInput(
            f"{type(value).__name__}: expected at most {limit} of JSON, found {size}: put large values into files, "
            "and pack very many small files into an archive"
        )
    return bare, sealed


def _encode_body(body: dict[str, object]) -> tuple[bytes, bytes]:
    """Return a document as canonical JSON twice, without and with its digest; the keys are sorted in both."""

    def join_members(*parts: bytes) -> bytes:
        return b"{" + b",".join(filter(None, parts)) + b"}"

    before = canonical_json({key: value for key, value in body.items() if key < _DIGEST_KEY})[1:-1]
    after = canonical_json({key: value for key, value in body.items() if key > _DIGEST_KEY})[1:-1]
    bare = join_members(before, after)
    return bare, join_members(before, f'"{_DIGEST_KEY}":"{hash_bytes(bare)}"'.encode(), after)


# Sign and verify settings. A valid signature proves that a process with the key wrote the settings.
#
# Write access to the target is not enough to sign. The signature is an HMAC over all settings and the experiment's
# name, so settings that were signed for one experiment are invalid for another. Settings contain their signature.

_SIGNATURE_KEY = "signature"
_SIGNATURE_FORMAT = "hmac-sha256-v1"


def add_signature(settings: Mapping[str, object], experiment: str, key: bytes) -> dict[str, object]:
    """Return `settings` with the signature that `key` makes for `experiment`, in place of an earlier signature."""
    return {**strip_signature(settings), _SIGNATURE_KEY: _compute_signature(settings, experiment, key)}


def strip_signature(settings: Mapping[str, object]) -> dict[str, object]:
    """Return `settings` without a signature."""
    return {name: value for name, value in settings.items() if name != _SIGNATURE_KEY}


def has_signature(settings: Mapping[str, object]) -> bool:
    """Return whether `settings` have a signature, valid or not."""
    return _SIGNATURE_KEY in settings


def has_valid_signature(settings: Mapping[str, object], experiment: str, key: bytes) -> bool:
    """Return whether `settings` have the signature that `key` makes for `experiment`."""
    signature = settings.get(_SIGNATURE_KEY)
    expected = _compute_signature(settings, experiment, key).encode()
    return isinstance(signature, str) and hmac.compare_digest(signature.encode(), expected)


def _compute_signature(settings: Mapping[str, object], experiment: str, key: bytes) -> str:
    signed = {"format": _SIGNATURE_FORMAT, "experiment": experiment, "settings": strip_signature(settings)}
    return f"{_SIGNATURE_FORMAT}:{hmac.digest(key, canonical_json(signed), 'sha256').hex()}"
