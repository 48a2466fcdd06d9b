"""What somebody may have meant by a name that is not there, for the end of a message."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean", "did_you_mean_or_has", "nearest"]

_SIMILAR = 0.5
"""As near as `num_gpus` is to `gpu`."""


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `given`, in any case; None where none is, or it is one itself."""
    by_small = {each.casefold(): each for each in known}
    near = get_close_matches(given.casefold(), by_small, n=1, cutoff=_SIMILAR)
    return by_small[near[0]] if near and by_small[near[0]] != given else None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'name'?`, or nothing where no known name is near."""
    near = nearest(given, known)
    return f"; did you mean {near!r}?" if near else ""


def did_you_mean_or_has(given: str, known: Iterable[str]) -> str:
    """Return `did you mean 'name'?`, or what it has where no known name is near."""
    there = list(known)
    near = nearest(given, there)
    return f"did you mean {near!r}?" if near else f"it has {', '.join(there) or 'nothing'}"
