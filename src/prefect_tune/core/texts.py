"""Sanitize text from outside, such as an exception's message.

`readable` is for what is stored: JSON, the journal, Prefect's database. `visible` is for what is shown: each terminal,
page, notebook, artifact, log line and error message passes text of a target through it.
"""

from __future__ import annotations

import re

__all__ = ["is_unicode", "readable", "visible", "visible_line"]

_LONGEST = 100_000
_HALF = _LONGEST // 2 - 50
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (C0 but for tab and newline, C1), bidirectional marks, line separators, and surrogates."""


def visible(text: str) -> str:
    r"""Return `text` with control characters written as `\x1b` or `\u202e`; tabs and newlines stay.

    Text from a target can then neither control a terminal nor reorder the characters around it.
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def visible_line(text: str) -> str:
    """Return `text` as `visible` does, on one line."""
    return visible(" ".join(text.splitlines()))


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
