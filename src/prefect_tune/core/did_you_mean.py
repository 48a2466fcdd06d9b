"""Suggest the nearest known name for an unknown one, at the end of an error message."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean", "did_you_mean_or_has", "nearest"]

_SIMILAR = 0.5
"""The least similarity of a suggestion: that of `num_gpus` to `gpu`."""


def nearest(given: str, known: Iterable[str], least: float = _SIMILAR) -> str | None:
    """Return the known name most similar to `given`, ignoring case; None if none is similar, or `given` is known.

    Args:
        least: the least similarity, from 0 to 1.
    """
    by_small = {each.casefold(): each for each in known}
    near = get_close_matches(given.casefold(), by_small, n=1, cutoff=least)
    return by_small[near[0]] if near and by_small[near[0]] != given else None


def did_you_mean(given: str, known: Iterable[str], least: float = _SIMILAR) -> str:
    """Return `; did you mean 'name'?`, or an empty text where no known name is as similar as `least`."""
    near = nearest(given, known, least)
    return f"; did you mean {near!r}?" if near else ""


def did_you_mean_or_has(given: str, known: Iterable[str]) -> str:
    """Return `did you mean 'name'?`, or, where no known name is similar, `it has` and all known names."""
    there = list(known)
    near = nearest(given, there)
    return f"did you mean {near!r}?" if near else f"it has {', '.join(there) or 'nothing'}"
