"""Which of the flows that are offered for deployment are there."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from prefect_tune.flows.deployments import OFFERS

__all__ = ["MERGED", "there"]


def there() -> Sequence[str]:
    """Return the names of those whose modules exist."""
    return [offer.name for offer in OFFERS if find_spec(offer.module)]


MERGED = len(there()) == len(OFFERS) and find_spec("prefect_tune.flows.automations") is not None
