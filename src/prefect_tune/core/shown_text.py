"""Text that people read: made safe to show, counts and sizes, the name that was meant.

`readable` is for what is stored: JSON, the journal, Prefect's database. `visible` is for what is shown: each terminal,
page, notebook, artifact, log line and error message passes text of a target through it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from difflib import get_close_matches

_LONGEST = 100_000
_HALF = _LONGEST // 2 - 50
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (C0 but for tab and newline, C1), bidirectional marks, line separators, and surrogates."""


def visible(text: object) -> str:
    r"""Return a text, or the sentence of a reason, with control characters written as `\x1b`; tabs and newlines stay.

    Text from a target can then neither control a terminal nor reorder the characters around it.
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], str(text))


def visible_line(text: str) -> str:
    """Return `text` as `visible` does, on one line."""
    return visible(" ".join(text.splitlines()))


def shorten(text: str, max_length: int) -> str:
    """Return `text` if it has at most `max_length` characters; else its beginning and an ellipsis, of that length."""
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def first_line(text: object) -> str:
    """Return the first line of a text or of a reason that is not blank, for people: `visible`."""
    return visible(str(text).strip().partition("\n")[0])


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


# Counts, durations and sizes.


def plural(count: int, one: str, many: str) -> str:
    """Return `count` followed by `one` if it is 1, else by `many`: `"3 trials are"`."""
    return f"{count:,} {one if count == 1 else many}"


def format_duration(span: timedelta) -> str:
    """Format a duration: `8 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    return format_seconds(span.total_seconds())


def format_seconds(number: float) -> str:
    """Format a number of seconds as `format_duration` does, also if it is more than a `timedelta` can hold."""
    seconds = max(0, round(number))
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = seconds % size // smaller
            return f"{seconds // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{seconds} s"


def format_span(seconds: float) -> str:
    """Return a duration: `0.53 s`, `8.2 s`, `3 min 20 s`."""
    if seconds >= 10:
        return format_seconds(seconds)
    return f"{seconds:.3g} s" if seconds >= 0.001 else "0 s"


def shown_size(size_bytes: int) -> str:
    """Return a size as people read it, in binary units."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{shown_amount(size)} {unit}"


def shown_amount(amount: float, digits: int = 3) -> str:
    """Return an amount of at least 0.0001, to `digits` digits or all of its whole part: `0.531`, `12.5`, `1,023`."""
    return f"{amount:.{digits}g}" if amount < 10**digits - 0.5 else f"{amount:,.0f}"


# The nearest known name for an unknown one, at the end of an error message.


def nearest(given: str, known: Iterable[str], least: float = 0.5) -> str | None:
    """Return the known name most similar to `given`, ignoring case; None if none is similar, or `given` is known.

    Args:
        least: the least similarity, from 0 to 1. That of `num_gpus` to `gpu` is 0.5.
    """
    by_small = {each.casefold(): each for each in known}
    near = get_close_matches(given.casefold(), by_small, n=1, cutoff=least)
    return by_small[near[0]] if near and by_small[near[0]] != given else None


def did_you_mean(given: str, known: Iterable[str], least: float = 0.5) -> str:
    """Return `; did you mean 'name'?`, or an empty text where no known name is as similar as `least`."""
    near = nearest(given, known, least)
    return f"; did you mean {near!r}?" if near else ""


def did_you_mean_or_has(given: str, known: Iterable[str]) -> str:
    """Return `did you mean 'name'?`, or, where no known name is similar, `it has` and all known names."""
    there = list(known)
    near = nearest(given, there)
    return f"did you mean {near!r}?" if near else f"it has {', '.join(there) or 'nothing'}"


def other_signature(function: Callable[..., object], argument_count: int) -> str:
    """Return the name and parameters of a function that does not take this many positional arguments.

    Empty if it takes them, or if that is not known, as of some functions in C. A wrapper is judged by its own
    parameters, whatever it calls.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*range(argument_count))
    except TypeError:
        return f"{getattr(function, '__qualname__', function)}{signature}"
    return ""
