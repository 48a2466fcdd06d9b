"""Documents that carry their own digest: what reads back is what was written, to the byte."""

from __future__ import annotations

import json
from typing import Final, TypeVar

from prefect_tune.core.errors import InvalidInput, UnknownVersion
from prefect_tune.core.store import Buffer
from prefect_tune.core.values import Value, canonical_json, digest_of, parse

__all__ = ["VERSION", "as_read_back", "seal", "unseal"]

VERSION: Final = 1
"""The newest version of every document that this prefect-tune reads, and the one it writes."""
_SEAL = "digest_of_document"

_Sealed = TypeVar("_Sealed", bound=Value)


def seal(value: Value) -> bytes:
    """Return `value` as canonical JSON with its own digest.

    Raises:
        InvalidInput: it holds what JSON cannot say: a NaN, an object, nesting without end.
    """
    try:
        body = value.model_dump(mode="json")
        return canonical_json({**body, _SEAL: digest_of(canonical_json(body))})
    except (ValueError, TypeError, RecursionError) as unsayable:
        raise InvalidInput(f"{type(value).__name__}: cannot be stored as JSON: {unsayable}") from unsayable


def unseal(model: type[_Sealed], data: Buffer, where: str, error: type[Exception]) -> _Sealed:
    """Read a sealed `model` back, believing nothing: every byte, the version and every field are checked.

    Raises:
        UnknownVersion: a newer prefect-tune wrote it.
    What else is wrong with it is raised as `error`.
    """
    body = _object(data, where, error)
    if isinstance(found := body.get("version"), int) and found > VERSION:
        raise UnknownVersion(f"{where}: version {found}, and this prefect-tune reads up to {VERSION}: upgrade it")
    if _canonical(body) != data:
        raise error(f"{where}: not as it was written ({len(data)} bytes): torn or altered")
    claimed = body.pop(_SEAL, None)
    bare = canonical_json(body)
    if claimed != (actual := digest_of(bare)):
        raise error(f"{where}: expected digest {str(claimed)[:12]}…, found {actual[:12]}… ({len(data)} bytes)")
    return parse(model, bare, error, where)


def as_read_back(value: _Sealed) -> _Sealed:
    """Return `value` as whoever reads it will see it, before anything is written.

    Raises:
        InvalidInput: it could be written, or not even that, and never be read again.
    """
    return unseal(type(value), seal(value), type(value).__name__, InvalidInput)


def _object(data: Buffer, where: str, error: type[Exception]) -> dict[str, object]:
    try:
        body = json.loads(bytes(data))
    except (ValueError, RecursionError) as unreadable:
        raise error(f"{where}: not JSON ({len(data)} bytes): {unreadable}") from unreadable
    if not isinstance(body, dict):
        raise error(f"{where}: expected a JSON object, found {type(body).__name__}")
    return body


def _canonical(body: dict[str, object]) -> bytes | None:
    try:
        return canonical_json(body)
    except (ValueError, RecursionError):
        return None  # a NaN or nesting without end: nothing that `seal` writes
