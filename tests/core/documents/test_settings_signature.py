"""Signed settings: the fields that the signature covers."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_tune.core.storage.documents import has_signature, is_signed, signed, unsigned
from prefect_tune.core.values import canonical_json

KEY = b"a secret key"
SETTINGS: dict[str, Any] = {"trainable": "mine:Net", "space": {"x": [1, 2.5, None]}, "stop": {"step": 3}}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _JSON, max_size=4))
def test_what_is_written_and_read_back_is_signed_still(settings: dict[str, Any]) -> None:
    read_back = json.loads(canonical_json(signed(settings, "e", KEY)))
    assert is_signed(read_back, "e", KEY)
    assert unsigned(read_back) == unsigned(settings)


def test_the_signature_is_of_these_settings_this_experiment_and_this_key() -> None:
    good = signed(SETTINGS, "e", KEY)
    assert is_signed(good, "e", KEY)
    assert signed(good, "e", KEY) == good
    assert not is_signed(good, "other", KEY)
    assert not is_signed(good, "e", KEY + b"!")
    for name in SETTINGS:
        assert not is_signed({**good, name: "another"}, "e", KEY)
        assert not is_signed({each: value for each, value in good.items() if each != name}, "e", KEY)
    assert not is_signed({**good, "trial_job_variables": {}}, "e", KEY)


def test_the_signature_is_made_as_the_page_on_the_layout_says() -> None:
    document = '{"experiment":"e","format":"hmac-sha256-v1","settings":{"a":[1,2.5],"b":null}}'
    expected = hmac.new(KEY, document.encode(), hashlib.sha256).hexdigest()
    assert signed({"b": None, "a": [1, 2.5]}, "e", KEY)["signature"] == f"hmac-sha256-v1:{expected}"


@pytest.mark.parametrize("found", [None, 3, "", "hmac-sha256-v1:", ["x"], "ü"])
def test_something_else_is_no_signature(found: object) -> None:
    assert not is_signed({**SETTINGS, "signature": found}, "e", KEY)


def test_settings_without_a_signature_are_known() -> None:
    assert not has_signature(SETTINGS)
    assert not is_signed(SETTINGS, "e", KEY)
    assert has_signature(signed(SETTINGS, "e", KEY))
