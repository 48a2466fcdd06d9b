"""Random numbers: each is a hash of a seed and of the number's purpose, so a resume has no generator to restore."""

from __future__ import annotations

from blake3 import blake3

from prefect_tune.core.values import canonical_json, hash_bytes

_MANTISSA_BITS = 53  # the precision of a float


def seed_from_name(name: str) -> int:
    """Return the seed that an experiment with this name uses if the user passes none."""
    return int(hash_bytes(name.encode())[:8], 16)


def draw_uniform(seed: int, *purpose: str | int) -> float:
    """Return one of the multiples of 2^-53 in [0, 1), all of which are equally likely."""
    return draw_integer(1 << _MANTISSA_BITS, seed, *purpose) / (1 << _MANTISSA_BITS)


def draw_integer(below: int, seed: int, *purpose: str | int) -> int:
    """Return a 256-bit hash of `seed` and `purpose`, modulo `below`. If `below` < 2^64, the bias is under 2^-190."""
    return int.from_bytes(blake3(canonical_json([seed, *purpose])).digest()) % below
