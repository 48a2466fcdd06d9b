"""Sign settings and verify them: a valid signature proves that a holder of the key wrote them.

Write access to the target is not enough for that. The signature is an HMAC over all settings and the experiment's
name, so that settings signed for one experiment are not valid for another. It is stored among the settings it signs.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from prefect_tune.core.models import canonical_json

__all__ = ["has_signature", "is_signed", "signed", "unsigned"]

_SIGNATURE = "signature"
_FORMAT = "hmac-sha256-v1"


def signed(settings: Mapping[str, object], experiment: str, key: bytes) -> dict[str, object]:
    """Return `settings` with their signature by `key` for `experiment`."""
    return {**unsigned(settings), _SIGNATURE: _signature(settings, experiment, key)}


def unsigned(settings: Mapping[str, object]) -> dict[str, object]:
    """Return `settings` without a signature."""
    return {name: value for name, value in settings.items() if name != _SIGNATURE}


def has_signature(settings: Mapping[str, object]) -> bool:
    """Return whether `settings` have a signature, valid or not."""
    return _SIGNATURE in settings


def is_signed(settings: Mapping[str, object], experiment: str, key: bytes) -> bool:
    """Return whether `settings` have a valid signature by `key` for `experiment`."""
    found = settings.get(_SIGNATURE)
    expected = _signature(settings, experiment, key).encode()
    return isinstance(found, str) and hmac.compare_digest(found.encode(), expected)


def _signature(settings: Mapping[str, object], experiment: str, key: bytes) -> str:
    document = canonical_json({"format": _FORMAT, "experiment": experiment, "settings": unsigned(settings)})
    return f"{_FORMAT}:{hmac.digest(key, document, 'sha256').hex()}"
