"""Text for display: escape unsafe characters, format counts, durations and sizes, suggest similar names.

`make_storable` is for stored text: JSON, the journal, Prefect's database. `make_visible` is for displayed text: it
escapes each text from a target before it is shown in a terminal, page, notebook, artifact, log line or error message.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from difflib import get_close_matches

_MAX_LENGTH = 100_000
_HALF_LENGTH = _MAX_LENGTH // 2 - 50
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (C0 except tab and newline, C1), bidirectional marks, line separators, and surrogates."""


def make_visible(text: object) -> str:
    r"""Return a text, or the text of a `Reason`, with control characters escaped like `\x1b`; tabs and newlines stay.

    So a text from a target can neither control a terminal nor reorder the characters around it.
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], str(text))


def make_visible_line(text: str) -> str:
    """Return `text` like `make_visible`, but on one line."""
    return make_visible(" ".join(text.splitlines()))


def shorten(text: str, max_length: int) -> str:
    """Truncate `text` to at most `max_length` characters, including the ellipsis."""
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def first_line(text: object) -> str:
    """Return the first non-blank line of a text, or of the text of a `Reason`, escaped by `make_visible`."""
    return make_visible(str(text).strip().partition("\n")[0])


def is_utf8_encodable(text: str) -> bool:
    """Return whether UTF-8 can encode `text`; False if it contains a lone surrogate, as some file names do."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def make_storable(text: str) -> str:
    r"""Return `text` in a form that every JSON reader accepts, with at most 100,000 characters.

    Surrogates are escaped like `\udcff`, and NULs like `\x00`, because PostgreSQL stores neither. The middle of a long
    text is omitted. Other characters stay unchanged.
    """
    if len(text) > _MAX_LENGTH:
        text = f"{text[:_HALF_LENGTH]}\n[{len(text) - 2 * _HALF_LENGTH} characters left out]\n{text[-_HALF_LENGTH:]}"
    escaped = text if is_utf8_encodable(text) else text.encode(errors="backslashreplace").decode()
    escaped = escaped.replace("\0", "\\x00")
    return escaped if len(escaped) <= _MAX_LENGTH else make_storable(escaped)


# Counts, durations and sizes.


def pluralize(count: int, one: str, many: str) -> str:
    """Return the count and a word, such as `3 trials`: the word `one` if the count is 1, and otherwise `many`."""
    return f"{count:,} {one if count == 1 else many}"


def format_duration(span: timedelta) -> str:
    """Format a duration: `8 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    return format_seconds(span.total_seconds())


def format_seconds(number: float) -> str:
    """Format a number of seconds like `format_duration`, even a number that is too large for a `timedelta`."""
    seconds = max(0, round(number))
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            remainder = seconds % size // smaller
            return f"{seconds // size} {unit}" + (f" {remainder} {smaller_unit}" if remainder else "")
    return f"{seconds} s"


def format_elapsed(seconds: float) -> str:
    """Format a duration with decimals below 10 s: `0.53 s`, `8.2 s`, `3 min 20 s`."""
    if seconds >= 10:
        return format_seconds(seconds)
    return f"{seconds:.3g} s" if seconds >= 0.001 else "0 s"


def format_size(size_bytes: int) -> str:
    """Format a size in binary units: `12.5 MiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{format_amount(size)} {unit}"


def format_amount(amount: float, digits: int = 3) -> str:
    """Format an amount >= 0.0001 with `digits` digits (`0.531`), or, from 10**digits on, as an integer (`1,023`)."""
    return f"{amount:.{digits}g}" if amount < 10**digits - 0.5 else f"{amount:,.0f}"


# Suggestions for the end of an error message: the known name that is most similar to an unknown one.


def find_nearest_name(name: str, names: Iterable[str], min_similarity: float = 0.5) -> str | None:
    """Return the name most similar to `name`, ignoring case; None if no name is similar, or if `name` is in `names`.

    `min_similarity` is from 0 to 1; the similarity of `num_gpus` and `gpu` is 0.55.
    """
    by_lower_case = {candidate.casefold(): candidate for candidate in names}
    matches = get_close_matches(name.casefold(), by_lower_case, n=1, cutoff=min_similarity)
    return by_lower_case[matches[0]] if matches and by_lower_case[matches[0]] != name else None


def did_you_mean(name: str, names: Iterable[str], min_similarity: float = 0.5) -> str:
    """Return `; did you mean 'name'?`, or "" if no name in `names` is similar enough."""
    match = find_nearest_name(name, names, min_similarity)
    return f"; did you mean {match!r}?" if match else ""


def did_you_mean_or_list(name: str, names: Iterable[str]) -> str:
    """Return `did you mean 'name'?`, or, if no name is similar, `it has` and all `names`."""
    known_names = list(names)
    match = find_nearest_name(name, known_names)
    return f"did you mean {match!r}?" if match else f"it has {', '.join(known_names) or 'nothing'}"


def describe_signature_mismatch(function: Callable[..., object], argument_count: int) -> str:
    """Return the name and parameters of a function that does not accept `argument_count` positional arguments.

    Return "" if the function accepts them, or if its parameters are unknown, like those of some C functions. A wrapper
    is checked by its own parameters, not by the parameters of the wrapped function.
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
