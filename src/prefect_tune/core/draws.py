"""Chance as a function: the same seed and the same purpose give the same draw, in whatever order they are asked.

Nothing runs on from draw to draw, so a resume has no generator to restore.
"""

from __future__ import annotations

from statistics import NormalDist

from blake3 import blake3

from prefect_tune.core.values import canonical_json, digest_of

__all__ = ["integer", "normal", "seed_named", "uniform"]

_BITS = 53  # of a float's mantissa
_STANDARD = NormalDist()


def seed_named(name: str) -> int:
    """Return the seed of whoever was given a name and no seed."""
    return int(digest_of(name.encode())[:8], 16)


def uniform(seed: int, *purpose: str | int) -> float:
    """Return a number in [0, 1), all multiples of 2^-53 alike."""
    return integer(1 << _BITS, seed, *purpose) / (1 << _BITS)


def integer(below: int, seed: int, *purpose: str | int) -> int:
    """Return a whole number in [0, below). Of 256 bits the remainder is taken: the bias is below 2^-190 here."""
    digest = blake3(canonical_json([seed, *purpose])).digest()
    return int.from_bytes(digest) % below


def normal(seed: int, *purpose: str | int) -> float:
    """Return a draw from the standard normal distribution, by the inverse of its cumulative function."""
    middle = (integer(1 << _BITS, seed, *purpose) + 0.5) / (1 << _BITS)  # never 0 or 1
    return _STANDARD.inv_cdf(middle)
