from __future__ import annotations

import random
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from prefect_tune.core.errors import (
    DeadlineExceeded,
    ObjectNotFound,
    StoreRefused,
    TuneError,
)
from prefect_tune.stores.object_store.buffer_pool import SpareMemory
from tests.fakes.object_stores import Once, object_store, until
from tests.fakes.s3_sink import Fault, S3Sink, SinkRequest


@pytest.fixture
def sink() -> Iterator[S3Sink]:
    with S3Sink() as started:
        yield started


_MIB = 1 << 20


def _blob(sink: S3Sink) -> bytes:
    data = random.Random(7).randbytes(3 * _MIB + 5)
    object_store(sink.endpoint).put("blob", data)
    sink.reset()
    return data


def _signed(sink: S3Sink) -> list[SinkRequest]:
    return [request for request in sink.log if "X-Amz-Signature" in request.query]


def test_a_large_range_is_read_by_a_signed_url_over_one_connection(sink: S3Sink) -> None:
    data = _blob(sink)
    store = object_store(sink.endpoint)
    for offset in (0, 1, 4097, len(data) - 2 * _MIB):
        assert store.read("blob", offset=offset, length=2 * _MIB) == data[offset : offset + 2 * _MIB]
    assert len(_signed(sink)) == len(sink.log) == 4


def test_a_range_beyond_the_end_is_read_by_the_client(sink: S3Sink) -> None:
    data = _blob(sink)
    store = object_store(sink.endpoint)
    assert store.read("blob", offset=_MIB, length=64 * _MIB) == data[_MIB:]
    assert store.read("blob", length=2 * _MIB) == data[: 2 * _MIB]
    assert (len(_signed(sink)), len(sink.log)) == (2, 3)


def test_where_a_signed_url_is_refused_it_is_not_tried_again(sink: S3Sink) -> None:
    data = _blob(sink)
    store = object_store(sink.endpoint)
    sink.fault = Once(Fault.REFUSE_403)
    for _ in range(3):
        assert store.read("blob", length=2 * _MIB) == data[: 2 * _MIB]
    assert (len(_signed(sink)), len(sink.log)) == (1, 4)


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.HALF_BODY, Fault.STALL_BODY, Fault.STALL])
def test_a_signed_read_that_breaks_is_repeated_by_the_client(sink: S3Sink, fault: Fault) -> None:
    data = _blob(sink)
    store = object_store(sink.endpoint, request_limit=timedelta(seconds=1))
    sink.fault = Once(fault)
    assert store.read("blob", offset=5, length=2 * _MIB) == data[5 : 5 + 2 * _MIB]
    assert store.read("blob", offset=6, length=2 * _MIB) == data[6 : 6 + 2 * _MIB]
    assert len(_signed(sink)) == 2


def test_a_signed_read_of_what_trickles_ends_at_the_deadline(sink: S3Sink) -> None:
    _blob(sink)
    sink.fault = lambda _request: Fault.STALL_BODY
    store = object_store(sink.endpoint, seconds=1)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        store.read("blob", length=2 * _MIB)
    assert time.monotonic() - started < 1.3
    store.close()
    assert until(lambda: not sink.connections)


def test_a_large_object_that_is_missing_is_said_to_be_missing(sink: S3Sink) -> None:
    with pytest.raises(ObjectNotFound):
        object_store(sink.endpoint).read("blob", length=2 * _MIB)


def test_what_was_read_stays_as_it_is_while_others_read(sink: S3Sink) -> None:
    data = _blob(sink)
    store = object_store(sink.endpoint)
    offsets = range(0, _MIB, 65536)
    with ThreadPoolExecutor(8) as pool:
        views = list(pool.map(lambda offset: store.read("blob", offset=offset, length=2 * _MIB), offsets))
    slices = [memoryview(view)[10:] for view in views]
    del views
    for offset, tail in zip(offsets, slices, strict=True):
        assert tail == data[offset + 10 : offset + 2 * _MIB]


def test_a_proxy_is_left_to_the_client(sink: S3Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _blob(sink)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with S3Sink() as proxy:  # it takes a URL for a path, and finds nothing there
        monkeypatch.setenv("http_proxy", proxy.endpoint)
        with suppress(TuneError):
            object_store(sink.endpoint).read("blob", length=2 * _MIB)
        assert proxy.log
        assert not sink.log
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert object_store(sink.endpoint).read("blob", length=2 * _MIB) == data[: 2 * _MIB]
        assert _signed(sink)


def test_memory_is_handed_out_again_once_nobody_looks_at_it() -> None:
    memory = SpareMemory()
    first = memory.view(100)
    first[:] = b"x" * 100
    other = memory.view(100)
    other[:] = b"y" * 100
    tail = first[50:]
    del first
    third = memory.view(100)
    third[:] = b"z" * 100
    assert bytes(tail) == b"x" * 50
    del tail
    again = memory.view(100)
    assert bytes(again[:1]) == b"x"
    del again
    assert memory.view(17 << 20).nbytes == 17 << 20


def test_closing_lets_go_of_the_connections_of_signed_reads(sink: S3Sink) -> None:
    _blob(sink)
    store = object_store(sink.endpoint)
    store.read("blob", length=2 * _MIB)
    store._clients.clear()  # the client's own connections are not meant
    assert until(lambda: len(sink.connections) == 1)
    store.close()
    assert until(lambda: not sink.connections)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a certificate for 127.0.0.1 that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sink")])
    now = datetime.now(tz=UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    path = tmp_path_factory.mktemp("tls") / "key-and-certificate.pem"
    path.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + signed.public_bytes(pem))
    return path


@pytest.fixture
def tls_sink(certificate: Path) -> Iterator[S3Sink]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with S3Sink(tls=context) as started:
        yield started


def test_over_tls_a_server_that_proves_who_it_is_is_read_by_signed_urls(tls_sink: S3Sink, certificate: Path) -> None:
    authority = certificate.read_text().partition("-----END PRIVATE KEY-----\n")[2]
    for trust in ({"root_certificate": authority}, {"allow_invalid_certificates": True}):
        tls_sink.reset()
        store = object_store(tls_sink.endpoint, **trust)
        data = random.Random(7).randbytes(3 * _MIB)
        store.put("blob", data)
        assert store.read("blob", offset=9, length=2 * _MIB) == data[9 : 9 + 2 * _MIB]
        assert len(_signed(tls_sink)) == 1


def test_over_tls_a_server_that_does_not_prove_who_it_is_is_never_asked(tls_sink: S3Sink) -> None:
    store = object_store(tls_sink.endpoint, seconds=5)
    with pytest.raises(StoreRefused, match="not trusted"):
        store.read("blob", length=2 * _MIB)
    assert not tls_sink.log
