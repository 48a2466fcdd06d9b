"""A document just sealed equals the same document read from the target, without the cost of the read."""

from __future__ import annotations

import json
import math
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefect_tune.core.errors import CheckpointCorrupt, InvalidInput
from prefect_tune.core.storage import documents
from prefect_tune.core.storage.documents import Document, read_sealed, seal, seal_and_read_back, unseal
from prefect_tune.core.values import canonical_json, digest_of
from tests.fakes.stores.memory_store import MemoryStore

SAYABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800") | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.floats(), inner, max_size=3)
    ),
    max_leaves=8,
)


class Held(Document):
    """A document with keys before and after the digest's key."""

    format: Literal["test/held"] = "test/held"
    version: Literal[1] = 1
    a: object = None
    digest: object = None
    z: object = None


class Early(Document):
    format: Literal["test/early"] = "test/early"
    version: Literal[1] = 1
    a: int = 1


class Late(Document):
    """A document without a key before the digest's key."""

    format: Literal["test/late"] = "test/late"
    version: Literal[1] = 1
    z: int = 1


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@settings(max_examples=300)
@given(held=SAYABLE)
@example(10**5000)
@example(-0.0)
@example(1e22)
@example(math.nan)
@example([1, math.inf])
@example({1: 2, "1": 3})
def test_what_is_read_back_at_once_is_what_is_read_from_the_target(held: object) -> None:
    require_same(held)


@pytest.mark.parametrize("depth", [150, 190, 199, 250, 500, 1000, 3000, 100_000])
def test_what_nests_too_deep_to_be_read_is_refused_at_once(depth: int) -> None:
    require_same(nested(depth))


def require_same(held: object) -> None:
    document = Held(a=held, digest=1, z={"held": held})
    try:
        data = seal(document)
        later = unseal(Held, data, "here", InvalidInput)
    except InvalidInput:
        with pytest.raises(InvalidInput):
            seal_and_read_back(document)
    else:
        assert seal_and_read_back(document) == (data, later)


@pytest.mark.parametrize("document", [Held(a=[1, "ä"]), Early(), Late()])
def test_a_document_is_canonical_json_with_the_digest_of_all_else(document: Document) -> None:
    data = seal(document)
    body = json.loads(data)
    assert canonical_json(body) == data
    claimed = body.pop("digest_of_document")
    assert claimed == digest_of(canonical_json(body)) == digest_of(canonical_json(document.model_dump(mode="json")))
    assert unseal(type(document), data, "here", InvalidInput) == document


@pytest.mark.parametrize(
    "altered",
    [
        pytest.param(lambda data: data.replace(b'"a":1', b'"a":2'), id="a field"),
        pytest.param(lambda data: data.replace(b'"a"', b'"b"'), id="a key"),
        pytest.param(lambda data: data.replace(b",", b", "), id="its spaces"),
        pytest.param(lambda data: json.dumps(dict(reversed(json.loads(data).items()))).encode(), id="its order"),
        pytest.param(lambda data: data.replace(b"digest_of_document", b"digest_of_documenu"), id="no digest"),
        pytest.param(lambda data: data.replace(b":1", b":NaN"), id="a NaN"),
    ],
)
def test_whatever_is_altered_is_noticed(altered: object) -> None:
    assert callable(altered)
    with pytest.raises(InvalidInput, match="torn or altered since it was written"):
        unseal(Early, altered(seal(Early())), "here", InvalidInput)


# ------------------------------------------------------------------------------------------------ sizes


def test_no_document_beyond_the_limit_is_written_or_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store, limit = MemoryStore(), len(seal(Held(a="x" * 5000)))
    monkeypatch.setattr(documents, "_FIRST_BYTES", 1000)
    monkeypatch.setattr(documents, "DOCUMENT_BYTES", limit)
    for letters in (10, 5000):
        store.put(f"{letters}", seal(Held(a="x" * letters)))
        assert read_sealed(store, Held, f"{letters}", CheckpointCorrupt) == Held(a="x" * letters)
    with pytest.raises(InvalidInput, match=r"Held: expected at most 5\S* KiB of JSON, found 5\S* KiB: put"):
        seal(Held(a="x" * 5001))

    store.put("large", b"x" * (limit + 1))
    store.bytes_out = 0
    with pytest.raises(CheckpointCorrupt, match=r"large: expected a document of at most 5.* KiB, found .*not read"):
        read_sealed(store, Held, "large", CheckpointCorrupt)
    assert store.bytes_out == 1000


def test_a_document_that_is_deleted_while_it_is_read_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Vanishing(MemoryStore):
        def size(self, path: str) -> int | None:  # noqa: ARG002  whatever is asked for
            return None

    monkeypatch.setattr(documents, "_FIRST_BYTES", 10)
    store = Vanishing()
    store.put("a", seal(Held()))
    assert read_sealed(store, Held, "a", CheckpointCorrupt) is None
