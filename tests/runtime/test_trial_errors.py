"""The messages of errors that a trainable raises."""

from __future__ import annotations

from typing import Any

import pytest

from prefect_tune.core.shown_text import first_line
from prefect_tune.runtime.trial_errors import failure_message
from tests.fakes.outcomes import require_failure


@pytest.mark.parametrize(("name", "is_hinted"), [("lr", True), ("momentum", False)])
def test_a_field_that_is_read_from_the_dict_of_a_dataclass_is_shown_as_its_key(name: str, *, is_hinted: bool) -> None:
    config: Any = {"lr": 0.1}
    with pytest.raises(AttributeError) as raised:
        getattr(config, name)
    hint = f". A configuration is a dict, that of a dataclass too: config[{name!r}]" if is_hinted else ""
    failure = require_failure(failure_message(raised.value, "t"))
    assert first_line(failure.reason) == f"AttributeError: 'dict' object has no attribute {name!r}{hint}"
