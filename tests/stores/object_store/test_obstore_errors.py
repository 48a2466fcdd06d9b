from __future__ import annotations

import pytest
from obstore.exceptions import GenericError

from prefect_tune.core.errors import StoreRefused
from prefect_tune.stores.object_store.obstore_errors import Fault

_TEXT = """Generic S3 error: Error performing list request: Error performing GET {url} in 1ms - HTTP error: {said}

Debug source:
Generic {{ inner: Http( HttpError {{
                        kind: {kind},
                        source: reqwest::Error {{ {source} }}, }}, ), }}"""


@pytest.mark.parametrize(
    ("kind", "source", "advice"),
    [
        ("Connect", "kind: InvalidData, error: InvalidCertificate( UnknownIssuer )", "certificate is not trusted"),
        ("Unknown", "kind: Builder, source: BadScheme", "has no TLS"),
    ],
)
def test_what_the_client_would_not_even_ask_is_refused_at_once(kind: str, source: str, advice: str) -> None:
    text = _TEXT.format(url="https://host/bucket", said="error sending request", kind=kind, source=source)
    fault = Fault.of(GenericError(text))
    assert not fault.transient
    assert not fault.perhaps_done
    error = fault.error("list")
    assert isinstance(error, StoreRefused)
    assert advice in str(error)
