"""JSON documents that carry their own digest, so that a reader detects any change."""

from __future__ import annotations

import json
from typing import Final, TypeVar

from prefect_tune.core.errors import InvalidInput, UnknownVersion
from prefect_tune.core.store import Buffer
from prefect_tune.core.values import Value, canonical_json, digest_of, parse

__all__ = ["VERSION", "as_read_back", "seal", "seal_and_read_back", "unseal"]

VERSION: Final = 1
"""The newest version of every document that this prefect-tune reads, and the one it writes."""
_SEAL = "digest_of_document"

_Sealed = TypeVar("_Sealed", bound=Value)


def seal(value: Value) -> bytes:
    """Return `value` as canonical JSON with its own digest.

    Raises:
        InvalidInput: it holds a value that JSON cannot represent: a NaN, an object, endless nesting.
    """
    return _sealed(value)[1]


def seal_and_read_back(value: _Sealed) -> tuple[bytes, _Sealed]:
    """Return `seal(value)` and the value that `unseal` would read from it, in less time than both calls.

    Raises:
        InvalidInput: `value` cannot be written, or could not be read again.
    """
    bare, sealed = _sealed(value)
    return sealed, parse(type(value), bare, InvalidInput, type(value).__name__)


def unseal(model: type[_Sealed], data: Buffer, where: str, error: type[Exception]) -> _Sealed:
    """Read a sealed `model`, and verify every byte, the version and every field.

    Raises:
        UnknownVersion: a newer prefect-tune wrote it.
    Any other fault is raised as `error`.
    """
    body = _object(data, where, error)
    if isinstance(found := body.get("version"), int) and found > VERSION:
        raise UnknownVersion(f"{where}: version {found}; this prefect-tune reads up to version {VERSION}: upgrade it")
    claimed = body.pop(_SEAL, None)
    bare, sealed = _rewritten(body)
    if sealed != data:
        what = f"expected digest {str(claimed)[:12]}…, found {digest_of(bare)[:12]}… ({len(data)} bytes)"
        raise error(f"{where}: torn or altered since it was written: {what}")
    return parse(model, bare, error, where)


def as_read_back(value: _Sealed) -> _Sealed:
    """Return `value` as a reader will see it (a tuple becomes a list); writes nothing.

    Raises:
        InvalidInput: `value` cannot be written, or could not be read again.
    """
    return seal_and_read_back(value)[1]


def _object(data: Buffer, where: str, error: type[Exception]) -> dict[str, object]:
    try:
        body = json.loads(bytes(data))
    except (ValueError, RecursionError) as unreadable:
        raise error(f"{where}: not JSON ({len(data)} bytes): {unreadable}") from unreadable
    if not isinstance(body, dict):
        raise error(f"{where}: expected a JSON object, found {type(body).__name__}")
    return body


def _sealed(value: Value) -> tuple[bytes, bytes]:
    try:
        return _written(value.model_dump(mode="json"))
    except (ValueError, TypeError, RecursionError) as unsayable:
        raise InvalidInput(f"{type(value).__name__}: cannot be stored as JSON: {unsayable}") from unsayable


def _written(body: dict[str, object]) -> tuple[bytes, bytes]:
    """Return a document as canonical JSON twice: without its digest, and with it among the sorted keys."""
    before = canonical_json({key: value for key, value in body.items() if key < _SEAL})[1:-1]
    after = canonical_json({key: value for key, value in body.items() if key > _SEAL})[1:-1]
    bare = _joined(before, after)
    return bare, _joined(before, f'"{_SEAL}":"{digest_of(bare)}"'.encode(), after)


def _rewritten(body: dict[str, object]) -> tuple[bytes, bytes]:
    try:
        return _written(body)
    except (ValueError, RecursionError):
        return b"", b""  # a NaN or endless nesting: `seal` writes neither


def _joined(*parts: bytes) -> bytes:
    return b"{" + b",".join(filter(None, parts)) + b"}"
