"""One line for an error that several trials share."""

from __future__ import annotations

import pytest

from prefect_tune.terminal.error_groups import error_of

FRAME = 'File "/home/me/train.py", line 9, in train'
OURS = 'File "/lib/python3.12/site-packages/prefect_tune/core/metrics.py", line 70, in _finite'


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        (
            f"KeyError: 'lr'\nTraceback (most recent call last):\n  {FRAME}\n    config['lr']",
            "KeyError: 'lr' (train.py:9)",
        ),
        (
            f"BadMetric: loss: found nan\nTraceback (most recent call last):\n  {FRAME}\n    report()\n  {OURS}\n",
            "BadMetric: loss: found nan (train.py:9)",
        ),
        (f"BadMetric: loss: found nan\nTraceback (most recent call last):\n  {OURS}\n", "BadMetric: loss: found nan"),
        ("failure 3 of the trainable (max_failures=2): ValueError: no", "ValueError: no"),
        ("its process was killed", "its process was killed"),
        ("the last output:" + "\n" * 300_000, "the last output:"),  # in linear time
    ],
    ids=[
        "with its line",
        "raised in this package",
        "raised in this package only",
        "after retries",
        "without a traceback",
        "blank lines",
    ],
)
def test_an_error_in_one_line(reason: str, line: str) -> None:
    assert error_of(reason) == line
