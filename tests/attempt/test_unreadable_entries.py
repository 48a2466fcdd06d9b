"""An entry of a checkpoint that cannot be saved is an error of the trainable, at its first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import prefect_tune as pt
from tests.long_cases import long_after
from tests.trainables.unreadable import Unreadable, reports_unreadable

KINDS = ["a link to itself", "a long path", "many levels", "a name that is not UTF-8", "a pipe", "a device"]


pytestmark = pytest.mark.usefixtures("no_prefect_server")


@pytest.mark.parametrize("kind", long_after(1, KINDS))
@pytest.mark.parametrize("trainable", [Unreadable, reports_unreadable])
def test_an_entry_that_cannot_be_saved_fails_the_first_attempt_with_its_path(
    trainable: Any, kind: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"stop": {"step": 2}, "checkpoint": pt.Cadence(every_steps=1)}
    with pytest.raises(pt.TrialFailed, match=r"failure 1 of the trainable.*/bad"):
        pt.durable_trainable(trainable, {"kind": kind}, target=str(tmp_path), experiment="e", **options)
    [trial] = pt.load_results(str(tmp_path), "e").trials.values()
    assert trial.attempt == 1
