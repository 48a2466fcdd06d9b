"""Sanitize text from outside, such as an exception's message, for JSON, the journal and Prefect's database."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, PlainSerializer, ValidationInfo

__all__ = ["Message", "PathName", "is_unicode", "readable"]

_LONGEST = 100_000
_HALF = _LONGEST // 2 - 50


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode `text`; it cannot encode a lone surrogate, as in some file names."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(text: str) -> str:
    r"""Return `text` in a form that every JSON reader reads back, in at most 100,000 characters.

    Surrogates, and NULs, which PostgreSQL does not store, are escaped as `\udcff` and `\x00`. The middle of a long
    text is left out. Other characters stay as they are.
    """
    if len(text) > _LONGEST:
        text = f"{text[:_HALF]}\n[{len(text) - 2 * _HALF} characters left out]\n{text[-_HALF:]}"
    escaped = text if is_unicode(text) else text.encode(errors="backslashreplace").decode()
    escaped = escaped.replace("\0", "\\x00")
    return escaped if len(escaped) <= _LONGEST else readable(escaped)


def _readable(value: object) -> object:
    return readable(value) if isinstance(value, str) else value


Message: TypeAlias = Annotated[str, BeforeValidator(_readable)]
"""A text for people, possibly from the user's code, of any content and length: it is made `readable`."""


def _from_json(value: object, info: ValidationInfo) -> object:
    if info.mode == "json" and isinstance(value, str):
        return value.encode("latin-1").decode(errors="surrogateescape")
    return value


def _to_json(path: str) -> str:
    return path.encode(errors="surrogateescape").decode("latin-1")


PathName: TypeAlias = Annotated[str, BeforeValidator(_from_json), PlainSerializer(_to_json, when_used="json")]
"""A path of this machine, which need not be UTF-8. In JSON each character is one byte of it (Latin-1)."""
