"""Text from outside, such as an exception's message: made fit for JSON, for a journal and for Prefect's database."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, PlainSerializer, ValidationInfo

__all__ = ["Message", "PathName", "is_unicode", "readable"]

_LONGEST = 100_000
_HALF = _LONGEST // 2 - 50


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode `text`: half a character (a surrogate), as in the name of some files, it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(text: str) -> str:
    r"""Return `text` as each reader of JSON reads it back, in at most 100,000 characters.

    Surrogates and NULs, which PostgreSQL does not store, are escaped as `\udcff` and `\x00`. Of a long text the
    middle is left out. What is readable stays as it is.
    """
    if len(text) > _LONGEST:
        text = f"{text[:_HALF]}\n[{len(text) - 2 * _HALF} characters left out]\n{text[-_HALF:]}"
    escaped = text if is_unicode(text) else text.encode(errors="backslashreplace").decode()
    escaped = escaped.replace("\0", "\\x00")
    return escaped if len(escaped) <= _LONGEST else readable(escaped)


def _readable(value: object) -> object:
    return readable(value) if isinstance(value, str) else value


Message: TypeAlias = Annotated[str, BeforeValidator(_readable)]
"""A text for people. It may come from the user's code, and say anything at any length: it is made `readable`."""


def _from_json(value: object, info: ValidationInfo) -> object:
    if info.mode == "json" and isinstance(value, str):
        return value.encode("latin-1").decode(errors="surrogateescape")
    return value


def _to_json(path: str) -> str:
    return path.encode(errors="surrogateescape").decode("latin-1")


PathName: TypeAlias = Annotated[str, BeforeValidator(_from_json), PlainSerializer(_to_json, when_used="json")]
"""A path of this machine, which need not be UTF-8. In JSON each character stands for a byte (Latin-1)."""
