"""Random numbers as pure functions of a seed and a purpose, independent of the order of the calls.

There is no generator state that a resume would have to restore.
"""

from __future__ import annotations

from statistics import NormalDist

from blake3 import blake3

from prefect_tune.core.values import canonical_json, digest_of

_MANTISSA_BITS = 53  # the precision of a float
_STANDARD_NORMAL = NormalDist()


def seed_from_name(name: str) -> int:
    """Return the seed for `name`, used if the user passes no seed."""
    return int(digest_of(name.encode())[:8], 16)


def uniform(seed: int, *purpose: str | int) -> float:
    """Return a number in [0, 1): each multiple of 2^-53 is equally likely."""
    return integer(1 << _MANTISSA_BITS, seed, *purpose) / (1 << _MANTISSA_BITS)


def integer(below: int, seed: int, *purpose: str | int) -> int:
    """Return an integer in [0, below): a 256-bit hash modulo `below`; the bias is below 2^-190 for `below` < 2^64."""
    digest = blake3(canonical_json([seed, *purpose])).digest()
    return int.from_bytes(digest) % below


def normal(seed: int, *purpose: str | int) -> float:
    """Return a draw from the standard normal distribution, by the inverse of its cumulative function."""
    middle = (integer(1 << _MANTISSA_BITS, seed, *purpose) + 0.5) / (1 << _MANTISSA_BITS)  # never 0 or 1
    return _STANDARD_NORMAL.inv_cdf(middle)
